"""The two files of a batch: requests are read and checked, answers are appended.

OUT is also the journal of the run: answers that it holds are not computed again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonObject, no_key_twice

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ANSWER_START = b'{"id":"batch_req_'  # start of a line in OUT, without its spaces
Line = JsonObject


def check_files(source: Path, target: Path) -> None:
    """Raise if the two files cannot be those of a batch, before any work is done."""
    for path in (target, journal_of(target)):
        if path.exists() and not path.is_file():  # reading a device may never end
            raise ParameterError("OUT", f"{str(path)!r} is not a regular file; choose another path")
    if target.exists() and source.samefile(target):
        raise ParameterError("OUT", f"{target} is IN itself; choose another file for the answers")


def journal_of(target: Path) -> Path:
    """The JSONL file that answers are appended to: OUT itself, or beside an OUT in Parquet, which
    cannot be appended to and is written at the end."""
    return target.with_name(target.name + ".jsonl") if is_parquet(target) else target


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def _lines_of(path: Path) -> Generator[bytes, None, None]:
    with open(path, "rb") as file:
        yield from file


def read_requests(path: Path, rows: Generator[bytes, None, None] | None = None) -> list[Line]:
    """Read and check every line before any request runs: a typo in the last line fails at once.
    `rows`: the lines of a file that is not JSONL."""
    check = RequestCheck(str(path))
    with contextlib.closing(rows or _lines_of(path)) as lines:
        return [line for n, raw in enumerate(lines, 1) if (line := check.line(n, raw)) is not None]


class RequestCheck:
    """Checks the lines of one file of requests; `numbers` are the line numbers by custom_id."""

    def __init__(self, file: str, param: str = "IN", urls: tuple[str, ...] = URLS) -> None:
        self._file, self._param, self._urls = file, param, urls
        self.numbers: dict[str, int] = {}
        self.at: int | None = None  # the line that is checked

    def wrong(self, message: str) -> ParameterError:
        return ParameterError(self._param, message)

    def line(self, number: int, raw: bytes) -> Line | None:
        """The request of a line; None: it is empty."""
        self.at = number
        if not raw.strip():
            return None
        where = f"{self._file}: line {number}"
        # editors add a BOM
        line = self._parsed(raw, where, "utf-8-sig" if number == 1 else "utf-8")
        self._check(line, where)
        name = line["custom_id"]
        if name in self.numbers:
            why = f"custom_id {name[:40]!r} appears twice; each request needs its own"
            raise self.wrong(f"{where}: {why}")
        self.numbers[name] = number
        request: Line = line
        return request

    def _parsed(self, raw: bytes, where: str, encoding: str) -> Any:
        try:
            return json.loads(raw.decode(encoding), object_pairs_hook=no_key_twice)
        except UnicodeDecodeError:
            raise self.wrong(f"{where} is not UTF-8; save the file in that encoding") from None
        except (json.JSONDecodeError, RecursionError):
            raise self.wrong(f"{where} is not JSON; a line is one object {{…}}") from None
        except ValueError as error:
            raise self.wrong(f"{where}: {error}") from None

    def _check(self, line: object, where: str) -> None:
        if (
            not isinstance(line, dict)
            or not isinstance(line.get("custom_id"), str)
            or not isinstance(line.get("body"), dict)
        ):
            raise self.wrong(f"{where} needs custom_id (a string) and body (an object)")
        if unknown := line.keys() - {"custom_id", "method", "url", "body"}:
            keys = "the keys of a request are custom_id, method, url and body"
            raise self.wrong(f"{where} has the key {min(unknown)[:40]!r}; {keys}")
        if line.get("method", "POST") != "POST" or line.get("url") not in self._urls:
            raise self.wrong(f"{where}: method must be POST and url one of {', '.join(self._urls)}")
        if any("\ud800" <= letter <= "\udfff" for letter in line["custom_id"]):
            why = "contains an unpaired surrogate, which is not text; use another id"
            raise self.wrong(f"{where}: custom_id {line['custom_id'][:40]!a} {why}")
        if line["body"].get("stream"):
            raise self.wrong(f"{where}: a batch cannot be streamed; leave out stream")


def is_retryable(status: int) -> bool:
    """Whether a retry may succeed: the status is not caused by the request itself."""
    return status == 429 or status >= 500


def read_answers(path: Path, wanted: set[str]) -> dict[str, int]:
    """The final statuses in `path` of the wanted requests, by custom_id. Retryable answers, and a
    last line that a crash cut, are removed from the file. A file with other content is an error."""
    if not path.exists():
        return {}
    raw = path.read_bytes()
    done: dict[str, int] = {}
    kept: list[bytes] = []
    *lines, cut = raw.split(b"\n")
    start = cut.replace(b" ", b"")[: len(ANSWER_START)]
    if not ANSWER_START.startswith(start):  # a file that is no batch's, and would be erased
        lines.append(cut)
    for number, text in enumerate(lines, 1):
        try:
            answer = json.loads(text)
            status = answer["response"]["status_code"]
            ours, final = answer["custom_id"] in wanted, not is_retryable(status)
        except (ValueError, KeyError, TypeError, RecursionError):
            why = f"line {number} is not an answer of a batch; choose another file"
            raise ParameterError("OUT", f"{path}: {why}") from None
        if final or not ours:
            kept.append(text + b"\n")
        if final and ours:
            done[answer["custom_id"]] = status
    shrink_file(path, raw, b"".join(kept))
    return done


def open_answers(path: Path, wanted: set[str]) -> tuple[TextIO, dict[str, int]]:
    """OUT, open for appending, and what read_answers() finds in it. The file is locked until it is
    closed: a second batch would answer every request again, and remove the line being written."""
    while True:
        out = open(path, "a", encoding="utf-8")  # noqa: SIM115  the caller closes it
        try:
            _lock(out, path)
            # Another batch may have replaced the file between open() and the lock. Its new file is
            # locked by that batch, and read_answers() would remove the line being written.
            if _is_open_file(out, path):
                statuses = read_answers(path, wanted)
                if _is_open_file(out, path):
                    return out, statuses
        except BaseException:
            out.close()
            raise
        out.close()  # read_answers() wrote a new file, which is not locked yet


def _is_open_file(file: TextIO, path: Path) -> bool:
    return os.path.samestat(os.fstat(file.fileno()), os.stat(path))


def _lock(file: TextIO, path: Path) -> None:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        why = f"another batch is writing {path}; wait for it, or choose another file"
        raise ParameterError("OUT", why) from None
    except (ImportError, OSError):  # Windows; a file system without locks
        pass


def shrink_file(path: Path, old: bytes, new: bytes) -> None:
    """Replace the content `old` of a file with `new`, a subset of its lines, atomically."""
    if old.startswith(new):
        if len(new) < len(old):
            os.truncate(path, len(new))
        return
    path = path.resolve()  # replace the target of a symlink, not the link
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    temporary.write_bytes(new)
    shutil.copymode(path, temporary)
    temporary.replace(path)
