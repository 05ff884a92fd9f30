"""Grammar cache: compiled structures by digest, least recently used evicted first, single-flight."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from verbatim.grammar.compile_pool import PoolBusy, TooExpensive

BYTES = 64 << 20  # of compiled structures, by their own estimate
MEMORY_OF_REFUSALS = 60.0  # seconds until a structure that was too expensive is compiled again
REFUSALS = 256


def digest(field: str, value: Any) -> bytes:
    """The cache key of a structure."""
    return hashlib.sha256(f"{field}\0{json.dumps(value)}".encode()).digest()


class Kept:
    def __init__(self, limit: int = BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._lock = threading.Lock()
        self._done: OrderedDict[bytes, Any] = OrderedDict()  # least recently used first
        self._flying: dict[bytes, Future[Any]] = {}
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self.bytes = 0

    def get(self, name: bytes, deadline: float, make: Callable[[], Any]) -> Any:
        """The structure of this name: cached, or compiled by make(). Concurrent callers share the
        compile in flight (single-flight) and wait for it at most until `deadline`."""
        with self._lock:
            if name in self._done and not self._done[name].spent:
                self._done.move_to_end(name)
                return self._done[name]
            if (
                name in self._refused
                and self._clock() - self._refused[name][0] < MEMORY_OF_REFUSALS
            ):
                raise TooExpensive(self._refused[name][1])
            other = self._flying.get(name)
            if other is None:
                mine = self._flying[name] = Future()
        if other is not None:
            try:
                return other.result(max(0.0, deadline - self._clock()))
            except TimeoutError:
                raise PoolBusy from None
        try:
            found = make()
        except BaseException as error:
            self._land(name, mine, error=error)
            raise
        self._land(name, mine, found)
        return found

    def _land(
        self, name: bytes, mine: Future[Any], found: Any = None, error: BaseException | None = None
    ) -> None:
        with self._lock:
            del self._flying[name]
            if error is None:
                self._keep(name, found)
            elif isinstance(error, TooExpensive):
                self._refused[name] = (self._clock(), str(error))
                while len(self._refused) > REFUSALS:
                    self._refused.popitem(last=False)
        if error is None:
            mine.set_result(found)
        else:
            mine.set_exception(error if isinstance(error, Exception) else PoolBusy())

    def _keep(self, name: bytes, found: Any) -> None:
        if name in self._done:
            self.bytes -= self._done.pop(name).size
        if found.size > self._limit:
            return
        self._done[name] = found
        self.bytes += found.size
        while self.bytes > self._limit:
            _, old = self._done.popitem(last=False)
            self.bytes -= old.size
