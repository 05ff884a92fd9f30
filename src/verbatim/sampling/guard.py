"""A first compilation of every structure in a process that may be killed.

llguidance bounds most of what it does, but not all: the product of two hundred patterns, or a `multipleOf` of eight digits, takes
minutes and gigabytes. A thread cannot be stopped, so an untrusted structure is compiled once in a child process with a limit on
memory and time; what survives is compiled again here. In: the grammar's text. Out: llguidance's complaint, or "".

A child costs some 50 ms to start, is kept for the next request, and ends by itself when this process does: at the end of its input, or
by an alarm if it is compiling then.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

MEMORY = 1 << 30  # bytes of address space of a child
MOST = 4  # children at once

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
try:
    import os, resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
    os.nice(5)  # a running answer goes first, but an honest schema must still make its time
except (ImportError, OSError, ValueError):
    pass
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
class Bytes:  # the smallest vocabulary that makes llguidance build its lexer
    is_tokenizer_wrapper = True
    bos_token_id, eos_token_id, special_token_ids = None, 256, [256]
    tokens = [bytes([i]) for i in range(256)] + [b"\\xff<end>"]
    def __call__(self, text):
        return list(text.encode())
tokenizer = LLTokenizer(Bytes(), n_vocab=257, eos_token=256, slices=[])
limits = LLParserLimits(**json.loads(sys.argv[3]))
alarm = getattr(__import__("signal"), "alarm", lambda seconds: None)
for line in sys.stdin:
    alarm(10)  # kills this process, whatever it is doing: nobody waits that long
    matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
    found = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
    if not found:
        matcher.compute_bitmask()
    alarm(0)
    sys.stdout.write(json.dumps("\\n".join(found)) + "\\n")
    sys.stdout.flush()
"""


class TooMuch(Exception):
    """The structure needs more time or memory than it may have."""


class Guard:
    def __init__(self, limits: Mapping[str, Any], memory: int = MEMORY) -> None:
        self._command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), str(memory), json.dumps(dict(limits))]
        self._free = threading.BoundedSemaphore(MOST)
        self._idle: list[subprocess.Popen[str]] = []
        atexit.register(self.close)

    def check(self, grammar: str, seconds: float) -> str:
        """llguidance's errors and warnings about a grammar, "" if there are none; TooMuch after `seconds`."""
        if not self._free.acquire(timeout=seconds):
            raise TooMuch("too many others are being compiled; try again")
        try:
            child = self._child()
            answer = self._ask(child, grammar, seconds)
            self._idle.append(child)
            return answer
        finally:
            self._free.release()

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
        child = subprocess.Popen(  # a session of its own: Ctrl-C in our terminal is not meant for it
            self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, encoding="utf-8", start_new_session=True
        )
        self._ask(child, 'start: "a"', 30.0)  # starting is not the request's time
        return child

    def _ask(self, child: subprocess.Popen[str], grammar: str, seconds: float) -> str:
        answers: list[str] = []
        reader = threading.Thread(target=_talk, args=(child, json.dumps(grammar), answers), daemon=True)
        reader.start()
        reader.join(seconds)
        line = answers[0] if answers else None
        if not line:
            child.kill()
            reader.join()  # it hears the end of the pipe
            _kill(child)
            raise TooMuch(
                f"takes more than {seconds:g} seconds to compile" if line is None else "takes too much memory to compile"
            )
        answer: str = json.loads(line)
        return answer


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
