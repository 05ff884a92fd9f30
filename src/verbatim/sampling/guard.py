"""A first compilation of every structure in a process that may be stopped and killed.

llguidance bounds most of what it does, but not all: the product of two hundred patterns, or a `multipleOf` of eight digits, takes
minutes and gigabytes. A thread cannot be stopped, and Python in a thread takes turns with the engine; so an untrusted structure is looked over, translated
and compiled once in a child process with a limit on memory and processor time (translate.py); what survives is compiled again here, by llguidance without Python's lock. In: a field
of a request. Out: llguidance's text for it.

Beside running answers a child goes on in short slices (turns.py), stopped between them; where the account is all but empty, after the first few milliseconds at the lowest priority. It costs some 100 ms to start, and is kept for the next
request: the child is a pair, one that compiles and may be killed, and one that has everything loaded and puts a fork of itself in its place. Both end when this process does:
at the end of their input, by the hangup that the system sends to those who are stopped then, or by an alarm.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.sampling.turns import Share, Turns, alone

MEMORY = 1 << 30  # bytes of address space of a child
MOST = 4  # children at once
BRISK = 0.004  # processor seconds at an ordinary priority, enough for most structures
SLICE = 0.005  # seconds of a turn beside running answers
LOOK = 0.02  # seconds of a turn with nothing beside it: then it is seen whether that is still so
_KILLED = getattr(signal, "SIGKILL", -1)
START = 30.0  # seconds until a new child must be there

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from verbatim.sampling.translate import main
main(int(sys.argv[2]), json.loads(sys.argv[3]))
"""


class TooMuch(Exception):
    """The structure needs more processor time or memory than it may have, whoever asks and whenever."""


class Busy(Exception):
    """The time was over before the structure was compiled; at a quieter moment it may pass. `had`: the processor seconds that it did get."""

    def __init__(self, had: float = 0.0) -> None:
        super().__init__()
        self.had = had


class Child:
    """The pair of processes, and a thread that hears what they say."""

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        # A group of its own: Ctrl-C in our terminal is not meant for it. Not a session of its own: then the system would send it no hangup when we are gone.
        group = 0 if os.name == "posix" else -1
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, encoding="utf-8", process_group=group
        )
        self.worker = 0  # the one that compiles; 0: the next has not reported yet
        self.low = False  # the worker runs only where nobody else wants a processor, for good
        self._spent = 0.0
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="verbatim-guard", daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self.process.stdout:
                self._lines.put(line)
        self._lines.put("")  # it is gone

    def stand_back(self) -> None:
        """From now on the worker runs only where nobody else wants a processor: its slices end at once where an answer goes on."""
        if not self.low and self.worker:
            self.low = True
            with contextlib.suppress(AttributeError, OSError):  # not Linux
                os.sched_setscheduler(self.worker, os.SCHED_IDLE, os.sched_param(0))

    def ready(self, until: float) -> bool:
        """Whether there is a worker at an ordinary priority, waiting for one to report."""
        if self.low:
            self.end_worker()
        while True:
            try:
                wait = until - time.monotonic() if not self.worker else 0
                line = self._lines.get(timeout=max(0.0, wait))
            except queue.Empty:
                return bool(self.worker)
            if not line:
                return False
            self.worker = json.loads(line).get("worker", self.worker)  # what else it says answers nobody any more

    def ask(self, field: str, value: Any, seconds: float) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # gone: hear() will say so
            self.process.stdin.write(json.dumps([field, value, seconds]) + "\n")
            self.process.stdin.flush()

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """The answer, or None if there is none yet; {"died": the signal} of a worker that is no more, 0 where the whole child is gone."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return None
        answer: dict[str, Any] = json.loads(line) if line else {"worker": 0, "last": 0}
        if "worker" in answer:
            self.worker, self.low = answer["worker"], False
            return {"died": answer["last"]}
        return answer

    def signal(self, name: str) -> None:
        """SIGSTOP, SIGCONT or SIGKILL for the worker, where there is such a thing."""
        number = getattr(signal, name, None)
        if number is not None and self.worker:
            with contextlib.suppress(OSError):
                os.kill(self.worker, number)

    def spent(self) -> float:
        """Processor seconds of the worker so far; where the system does not tell those of another process, seconds on the wall."""
        if sys.platform != "linux":
            return time.monotonic()
        with contextlib.suppress(OSError):  # it is gone: what it had spent when we last looked
            self._spent = time.clock_gettime((~self.worker << 3) | 2)  # the clock of a process, made of its number
        return self._spent

    def end_worker(self) -> None:
        self.signal("SIGKILL")
        self.worker, self.low = 0, False

    def kill(self) -> None:
        self.end_worker()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was still unsent has no reader any more
                pipe.close()


class Guard:
    def __init__(self, limits: Mapping[str, Any], memory: int = MEMORY, turns: Turns | None = None) -> None:
        path = [*sys.path, str(Path(__file__).parents[2])]  # an editable install may not be on the path
        self._command = [sys.executable, "-c", _CHILD, json.dumps(path), str(memory), json.dumps(dict(limits))]
        self._free = threading.BoundedSemaphore(MOST)
        self._idle: list[Child] = []
        self.turns = turns or Turns()
        atexit.register(self.close)

    def translate(
        self, field: str, value: Any, seconds: float, until: float | None = None, share: Share = alone
    ) -> tuple[str, float]:
        """llguidance's text of a structure that compiles, and the processor seconds it took. ParameterError or UnsupportedError where it cannot be;
        TooMuch where it takes more than `seconds` of a processor; Busy where it had not come so far by `until`, on the clock of time.monotonic."""
        until = time.monotonic() + 3600.0 if until is None else until
        if not self._free.acquire(timeout=max(0.0, until - time.monotonic())):
            raise Busy
        try:
            child = self._child()
            try:
                answer, had = self._follow(child, field, value, seconds, until, share)
                if answer.get("died") == _KILLED:  # somebody else did that, perhaps before we asked: once more
                    answer, had = self._follow(child, field, value, seconds, until, share)
            except BaseException:
                child.end_worker()
                raise
            finally:
                self._idle.append(child)
        finally:
            self._free.release()
        if "grammar" in answer:
            return answer["grammar"], had
        if answer.get("died") == 0:
            raise Busy
        if "died" in answer:
            raise TooMuch("takes too much memory to compile")
        kind = UnsupportedError if answer["error"] == "UnsupportedError" else ParameterError
        raise kind(answer["param"], answer["message"])

    def _follow(
        self, child: Child, field: str, value: Any, seconds: float, until: float, share: Share
    ) -> tuple[dict[str, Any], float]:
        """Turn by turn, to the answer; and what it cost."""
        began, had = child.spent(), 0.0
        asked = False
        while had < seconds:
            with self.turns.turn(had, until, share) as turn:
                if turn is None:
                    raise Busy(had)
                if turn.scarce and had > BRISK:
                    child.stand_back()
                if asked:
                    child.signal("SIGCONT")
                else:
                    child.ask(field, value, until - time.monotonic())
                asked = True
                answer = child.hear(SLICE if turn.metered else min(LOOK, max(0.0, until - time.monotonic())))
                if answer is None and share() is not None:
                    child.signal("SIGSTOP")
                before, had = had, max(had, child.spent() - began)
                turn.used = had - before
            if answer is not None:
                return answer, had
            if time.monotonic() >= until:
                raise Busy(had)
        raise TooMuch(f"takes more than {seconds:g} seconds of a processor to compile")

    def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()

    def _child(self) -> Child:
        while self._idle:
            child = self._idle.pop()
            if child.process.poll() is None and child.ready(time.monotonic() + START):
                return child
            child.kill()
        child = Child(self._command)
        if not child.ready(time.monotonic() + START):
            child.kill()
            raise Busy
        return child
