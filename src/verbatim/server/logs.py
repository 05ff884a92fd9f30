"""The server's log: one line a request and one an event, as text or as JSON, on stderr. Never the text of a prompt, never a key.

Lines of requests do not go through the logging package, which takes as long for one as all the rest of a refusal does: they are spelled here, and those
of a twentieth of a second leave in one write.
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
from typing import Any, TextIO

from verbatim.server.settings import Settings

PLAIN = re.compile(r"[\w./:{}@+-]*", re.ASCII).fullmatch
FLUSH_SECONDS = 0.05


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        line = {
            "time": _iso(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": text,
        }
        return json.dumps(line)


def _iso(when: float) -> str:
    return (
        datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def set_up_logs(settings: Settings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines()
        if settings.log_format == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    for name in ("verbatim", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(
            logging.INFO if name == "verbatim" else logging.ERROR
        )  # what else uvicorn says, we say ourselves


def _one_word(value: Any) -> Any:
    """A label that a client chose cannot begin a line of its own, nor a field."""
    return json.dumps(value) if isinstance(value, str) and not PLAIN(value) else value


class AccessLog:
    def __init__(self, form: str, to: TextIO | None = None) -> None:
        self._json = form == "json"
        self._to = to or sys.stderr
        self._loop = asyncio.get_running_loop()
        self._lines: list[str] = []
        self._second = (0, "")  # the last second that was spelled

    def add(self, line: dict[str, Any]) -> None:
        now = time.time()
        if self._json:
            text = json.dumps({"time": _iso(now), **line})
        else:
            words = " ".join(
                [f"{name}={_one_word(value)}" for name, value in line.items() if value != ""]
            )
            text = f"{self._clock(int(now))},{int(now * 1000) % 1000:03d} INFO {words}"
        if not self._lines:
            self._loop.call_later(FLUSH_SECONDS, self.flush)
        self._lines.append(text)

    def _clock(self, second: int) -> str:
        if second != self._second[0]:
            self._second = (second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second)))
        return self._second[1]

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        with contextlib.suppress(
            OSError, ValueError
        ):  # whoever read our log is gone: no reason to stop serving
            self._to.write("\n".join([*lines, ""]))
            self._to.flush()
