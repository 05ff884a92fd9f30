"""A first compilation of every structure in a process that may be killed.

llguidance bounds most of what it does, but not all: the product of two hundred patterns, or a `multipleOf` of eight digits, takes
minutes and gigabytes. A thread cannot be stopped, so an untrusted structure is compiled once in a child process with a limit on
memory and time; what survives is compiled again here. In: the grammar's text. Out: llguidance's complaint, or "".

A child costs some 50 ms to start, is kept for the next request, and ends by itself when this process does.
"""

from __future__ import annotations

import atexit
import json
import select
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
    os.nice(10)
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
for line in sys.stdin:
    matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
    found = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
    if not found:
        matcher.compute_bitmask()
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
            child = self._idle.pop() if self._idle else self._start()
            answer = self._ask(child, grammar, seconds)
            self._idle.append(child)
            return answer
        finally:
            self._free.release()

    def close(self) -> None:
        while self._idle:
            _kill(self._idle.pop())

    def _start(self) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        self._ask(child, 'start: "a"', 30.0)  # starting is not the request's time
        return child

    def _ask(self, child: subprocess.Popen[str], grammar: str, seconds: float) -> str:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(grammar) + "\n")
            child.stdin.flush()
            ready, _, _ = select.select([child.stdout], [], [], seconds)
            line = child.stdout.readline() if ready else None
        except OSError:
            line = ""
        if not line:
            _kill(child)
            raise TooMuch(
                f"takes more than {seconds:g} seconds to compile" if line is None else "takes too much memory to compile"
            )
        answer: str = json.loads(line)
        return answer


def _kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()  # closes the pipes and reaps it
