"""A first compilation of every structure in a process that may be killed.

llguidance bounds most of what it does, but not all: the product of two hundred patterns, or a `multipleOf` of eight digits, takes
minutes and gigabytes. A thread cannot be stopped, and Python in a thread takes turns with the engine; so an untrusted structure is looked over, translated
and compiled once in a child process with a limit on memory and time (translate.py); what survives is compiled again here, by llguidance without Python's lock. In: a field
of a request. Out: llguidance's text for it.

A child costs some 100 ms to start, is kept for the next request, and ends by itself when this process does: at the end of its input, or
by an alarm if it is compiling then.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbatim.base.errors import ParameterError, UnsupportedError

MEMORY = 1 << 30  # bytes of address space of a child
MOST = 4  # children at once
BRISK = 0.2  # seconds at an ordinary priority: enough for nearly all. What takes longer gets only what nobody else wants

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from verbatim.sampling.translate import main
main(int(sys.argv[2]), json.loads(sys.argv[3]))
"""


class TooMuch(Exception):
    """The structure needs more time or memory than it may have."""


class Guard:
    def __init__(self, limits: Mapping[str, Any], memory: int = MEMORY) -> None:
        path = [*sys.path, str(Path(__file__).parents[2])]  # an editable install may not be on the path
        self._command = [sys.executable, "-c", _CHILD, json.dumps(path), str(memory), json.dumps(dict(limits))]
        self._free = threading.BoundedSemaphore(MOST)
        self._idle: list[subprocess.Popen[str]] = []
        atexit.register(self.close)

    def translate(self, field: str, value: Any, seconds: float) -> str:
        """llguidance's text of a structure that compiles; ParameterError or UnsupportedError where it cannot be; TooMuch after `seconds`, waiting
        for a child included (a third of them is always left to compile in)."""
        began = time.monotonic()
        if not self._free.acquire(timeout=seconds * 2 / 3):
            raise TooMuch("too many others are being compiled; try again")
        try:
            child = self._child()
            line, brisk = self._ask(child, field, value, max(seconds / 3, began + seconds - time.monotonic()), BRISK)
            if line and brisk:
                self._idle.append(child)
            elif line:
                _kill(child)  # its priority is low for good
        finally:
            self._free.release()
        if line is None:
            raise TooMuch(f"takes more than {seconds:g} seconds to compile")
        if not line:
            raise TooMuch("takes too much memory to compile")
        answer: dict[str, str] = json.loads(line)
        if "grammar" in answer:
            return answer["grammar"]
        kind = UnsupportedError if answer["error"] == "UnsupportedError" else ParameterError
        raise kind(answer["param"], answer["message"])

    def close(self) -> None:
        while self._idle:
            _kill(self._idle.pop())

    def _child(self) -> subprocess.Popen[str]:
        while self._idle:
            child = self._idle.pop()
            if child.poll() is None:
                return child
            _kill(child)
        return self._start()

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        # A group of its own: Ctrl-C in our terminal is not meant for it. Not a session of its own: to each session Linux gives the same share of the
        # processors, whatever the priorities in it, and two sessions of two cores are half an engine.
        group = 0 if os.name == "posix" else -1
        child = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, encoding="utf-8", process_group=group
        )
        self._ask(child, "choice", ["a"], 30.0, 30.0)
        return child

    def _ask(
        self, child: subprocess.Popen[str], field: str, value: Any, seconds: float, brisk: float
    ) -> tuple[str | None, bool]:
        """The child's line, None if none came in time, "" if the child died; and whether it came within `brisk` seconds, while the child had its
        ordinary priority. A child without an answer is on its way out."""
        answers: list[str] = []
        question = json.dumps([field, value, seconds])
        reader = threading.Thread(target=_talk, args=(child, question, answers), daemon=True)
        reader.start()
        reader.join(min(brisk, seconds))
        slow = not answers
        if slow and brisk < seconds:
            _stand_back(child)
            reader.join(seconds - brisk)
        line = answers[0] if answers else None
        if not line:
            child.kill()
            # A child that stood back dies, too, only when it is its turn: the refusal does not wait for that.
            threading.Thread(target=_bury, args=(child, reader), daemon=True).start()
        return line, not slow


def _bury(child: subprocess.Popen[str], reader: threading.Thread) -> None:
    reader.join()  # it hears the end of the pipe
    _kill(child)


def _stand_back(child: subprocess.Popen[str]) -> None:
    """From now on the child runs only where nobody else wants a processor: running answers keep their pace."""
    try:
        os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, child.pid, 19)


def _talk(child: subprocess.Popen[str], question: str, answers: list[str]) -> None:
    """Ask one line, hear one line; "" if the child is gone."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(question + "\n")
        child.stdin.flush()
        answers.append(child.stdout.readline())
    except (OSError, ValueError):
        answers.append("")


def _kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was still unsent has no reader any more
            pipe.close()
