"""The coroutine that AsyncEngine.generate() and chat() return, with an answer to `async for`.

vLLM's AsyncLLM.generate() is an async iterator, so its users write `async for` first. A plain
coroutine would answer with a TypeError that names neither the method nor what to write.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Never, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class AwaitOnly(Coroutine[Any, Any, T]):
    """A coroutine that says what to write when it is iterated."""

    def __init__(self, inner: Coroutine[Any, Any, T], name: str, streams: str) -> None:
        self._inner = inner
        self._names = (name, streams)

    def __await__(self) -> Generator[Any, Any, T]:
        return self._inner.__await__()

    def send(self, value: object) -> Any:
        return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def __aiter__(self) -> Never:
        self.close()
        name, streams = self._names
        raise TypeError(
            f"{name}() returns one whole answer: write `done = await engine.{name}(...)`; for"
            f" pieces write `async for delta in engine.{streams}(...)`"
        )


def await_only(
    streams: str,
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Decorator for an async method; `streams` is the method to iterate instead."""

    def decorate(method: Callable[P, Coroutine[Any, Any, T]]) -> Any:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
            return AwaitOnly(method(*args, **kwargs), method.__name__, streams)

        return call

    return decorate
