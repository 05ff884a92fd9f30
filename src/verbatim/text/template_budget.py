"""What a chat template may spend. In: the sizes of what it makes. Out: nothing, or a BudgetError.

Time is this thread's processor time, looked at every few loops, calls and filters. Space is counted where values are made:
a string by its characters, a list by its elements and everything in them, so that neither repetition nor nesting grows unseen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2.exceptions import TemplateError

MAX_OUTPUT = 8 * 2**20  # characters of rendered text
MAX_WORK = 32 * 2**20  # characters of strings made on the way, and elements of lists
MAX_VALUE = (
    8 * 2**20
)  # weight of one value: its characters and elements, counted through shared parts
MAX_ELEMENTS = 100_000  # elements of one value, beyond a few times those of the conversation
MAX_SECONDS = (
    0.4  # of this thread's processor time, so that a busy machine does not fail an honest template
)
MAX_BITS = 4096  # of an integer

clock = time.thread_time  # seconds of processor time; the tests put their own here


class BudgetError(TemplateError):
    """The template asked for more time or space than a chat can need."""


class Budget:
    """What one rendering may still spend."""

    def __init__(self, data: Iterable[Any] = (), seconds: float = MAX_SECONDS) -> None:
        self._until = clock() + seconds
        self._ticks = 0
        self._work = MAX_WORK
        self._known: dict[
            int, tuple[int, int]
        ] = {}  # id of an input's list or dict -> (weight, elements)
        self._most = MAX_ELEMENTS + 4 * sum(self._learn(value)[1] for value in data)

    def tick(self, count: int = 1) -> None:
        self._ticks += count
        if self._ticks >= 64:
            self._ticks = 0
            if clock() > self._until:
                raise BudgetError("the chat template takes more time than a chat can need")

    def spend(self, size: int) -> None:
        self._work -= size
        if size > MAX_VALUE or self._work < 0:
            raise BudgetError("the chat template makes more text than a chat can need")

    def weigh(self, value: Any) -> Any:
        """Check a value that the template made, and count it as work. Returns the value."""
        if isinstance(value, str):
            self.spend(
                len(value) if value.isascii() else 3 * len(value)
            )  # beyond ASCII a character takes up to four bytes
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise BudgetError("the chat template computes with an absurdly large number")
        elif isinstance(value, (list, tuple, dict)) and id(value) not in self._known:
            # Its strings were counted when they were made; the list itself is only references to them.
            self.spend(self._measure(value)[1])
        return value

    def _measure(self, value: Any) -> tuple[int, int]:
        """Weight and elements of a value as a tree: a part that is used twice counts twice, as it will when printed."""
        weight = elements = 0
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                weight += len(item)
                continue
            if not isinstance(item, (list, tuple, dict)):
                continue
            known = self._known.get(id(item))
            if known is not None:
                weight, elements = weight + known[0], elements + known[1]
            else:
                elements += len(item)
                if isinstance(item, dict):
                    stack.extend(
                        dict.keys(item)
                    )  # a message that notes who looks at it (reads.py) is not looked at here
                    stack.extend(dict.values(item))
                else:
                    stack.extend(item)
            if elements > self._most or weight > MAX_VALUE:
                raise BudgetError(
                    "the chat template makes a list that is larger than a chat can need"
                )
        self.tick(1 + elements // 16)
        return weight, elements

    def _learn(self, value: Any) -> tuple[int, int]:
        """Inputs are trees of plain data: remember each part's size, so that it need not be walked again."""
        if isinstance(value, str):
            return len(value), 0
        if not isinstance(value, (list, tuple, dict)):
            return 0, 0
        parts = [*dict.keys(value), *dict.values(value)] if isinstance(value, dict) else value
        sizes = [self._learn(part) for part in parts]
        found = sum(w for w, _ in sizes), len(parts) + sum(e for _, e in sizes)
        self._known[id(value)] = found
        return found


class _Current(threading.local):
    budget: Budget | None = None


_current = _Current()


def current() -> Budget:
    return _current.budget or Budget()


@contextmanager
def spending(budget: Budget) -> Iterator[Budget]:
    before, _current.budget = _current.budget, budget
    try:
        yield budget
    finally:
        _current.budget = before
