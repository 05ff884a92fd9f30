"""The server's log on stderr, as text or JSON: one line per event (logging) and one line per
request (AccessLog). It never holds prompt text, unless --log-prompts is set, and never a key.

AccessLog bypasses the logging package, because one logging call costs as much as the whole rest of
a rejected request. It formats lines itself and writes them in batches every FLUSH_SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
import time
from datetime import UTC, datetime
from typing import TextIO

from verbatim.server.settings import Settings

PLAIN = re.compile(r"[\w./:{}@+-]*", re.ASCII).fullmatch
FLUSH_SECONDS = 0.05  # one write per interval, short enough to follow the log live


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        line = {"time": _iso(record.created), "level": record.levelname.lower()}
        return json.dumps({**line, "logger": record.name, "message": text})


def _iso(when: float) -> str:
    text = datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def set_up_logs(settings: Settings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if settings.log_format == "json" else plain)
    for name in ("verbatim", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        # The server logs uvicorn's other events (start, stop) itself.
        logger.setLevel(logging.INFO if name == "verbatim" else logging.ERROR)


def _quoted(value: object) -> object:
    """Quote a label that a client chose, so that it cannot inject a line or a field."""
    return json.dumps(value) if isinstance(value, str) and not PLAIN(value) else value


class AccessLog:
    def __init__(self, form: str, to: TextIO | None = None) -> None:
        self._json = form == "json"
        self._to = to or sys.stderr
        self._loop = asyncio.get_running_loop()
        self._lines: list[str] = []
        self._second = (0, "")  # the last second formatted, and its text

    def add(self, line: dict[str, object]) -> None:
        now = time.time()
        if self._json:
            text = json.dumps({"time": _iso(now), **line})
        else:
            given = {name: value for name, value in line.items() if value != ""}
            fields = " ".join([f"{name}={_quoted(value)}" for name, value in given.items()])
            text = f"{self._format_second(int(now))},{int(now * 1000) % 1000:03d} INFO {fields}"
        if not self._lines:
            self._loop.call_later(FLUSH_SECONDS, self.flush)
        self._lines.append(text)

    def _format_second(self, second: int) -> str:
        if second != self._second[0]:
            self._second = (second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second)))
        return self._second[1]

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        # A closed stderr is no reason to stop serving.
        with contextlib.suppress(OSError, ValueError):
            self._to.write("\n".join([*lines, ""]))
            self._to.flush()
