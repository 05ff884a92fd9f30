"""Grammar cache: compiled structures by digest; LRU eviction, single-flight compiles.

In: a digest and a compile function. Out: the compiled structure. Rejections for cost are cached
too, for a limited time; timeouts are not, because they depend on load.
"""

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

CAPACITY = 64 << 20  # bytes of compiled structures, by Structure.size
REFUSAL_SECONDS = 60.0  # a rejection for cost is cached this long, then the grammar is tried again
MAX_REFUSALS = 256  # cached rejections


def digest(field: str, value: Any) -> bytes:
    """The cache key of a structure."""
    return hashlib.sha256(f"{field}\0{json.dumps(value)}".encode()).digest()


class GrammarCache:
    def __init__(self, limit: int = CAPACITY, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()  # least recently used first
        self._in_flight: dict[bytes, Future[Any]] = {}
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self.bytes = 0

    def get(self, key: bytes, deadline: float, make: Callable[[], Any]) -> Any:
        """The structure of this key: cached, or compiled by make(). Concurrent callers share the
        compile in flight (single-flight) and wait for it at most until `deadline`."""
        with self._lock:
            if key in self._compiled and not self._compiled[key].exhausted:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            if key in self._refused and self._clock() - self._refused[key][0] < REFUSAL_SECONDS:
                raise TooExpensive(self._refused[key][1])
            other = self._in_flight.get(key)
            if other is None:
                mine = self._in_flight[key] = Future()
        if other is not None:
            try:
                return other.result(max(0.0, deadline - self._clock()))
            except TimeoutError:
                raise PoolBusy from None
        try:
            compiled = make()
        except BaseException as error:
            self._finish(key, mine, error=error)
            raise
        self._finish(key, mine, compiled)
        return compiled

    def _finish(
        self,
        key: bytes,
        mine: Future[Any],
        compiled: Any = None,
        error: BaseException | None = None,
    ) -> None:
        with self._lock:
            del self._in_flight[key]
            if error is None:
                self._store(key, compiled)
            elif isinstance(error, TooExpensive):
                self._refused[key] = (self._clock(), str(error))
                while len(self._refused) > MAX_REFUSALS:
                    self._refused.popitem(last=False)
        if error is None:
            mine.set_result(compiled)
        else:
            mine.set_exception(error if isinstance(error, Exception) else PoolBusy())

    def _store(self, key: bytes, compiled: Any) -> None:
        if key in self._compiled:
            self.bytes -= self._compiled.pop(key).size
        if compiled.size > self._limit:
            return
        self._compiled[key] = compiled
        self.bytes += compiled.size
        while self.bytes > self._limit:
            _, old = self._compiled.popitem(last=False)
            self.bytes -= old.size
