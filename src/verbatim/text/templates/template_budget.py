"""Time and memory budget of a chat template. In: the sizes of the values it creates. Out: nothing,
or a BudgetError.

Time is the CPU time of this thread, checked every 64 loop iterations, calls and filters. Memory is
counted where values are created: a string by its characters, a list by its elements and all their
contents, so that neither repetition nor nesting escapes the count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2.exceptions import TemplateError

MAX_OUTPUT = 8 * 2**20  # characters of rendered text
MAX_WORK = 32 * 2**20  # characters of all intermediate strings, plus elements of all lists
MAX_VALUE = 8 * 2**20  # characters in one value; a part that is shared counts every time
MAX_ELEMENTS = 100_000  # elements of one value, in addition to four times the conversation's
MAX_SECONDS = 0.4  # CPU time of this thread: a loaded machine must not fail a sound template
MAX_BITS = 4096  # size of an integer

clock = time.thread_time  # CPU seconds; tests replace it


class BudgetError(TemplateError):
    """The template exceeds its time or memory budget."""


class Budget:
    """The remaining budget of one rendering."""

    def __init__(self, data: Iterable[object] = (), seconds: float = MAX_SECONDS) -> None:
        self._deadline = clock() + seconds
        self._ticks = 0
        self._work = MAX_WORK
        # id() of a list or dict in the inputs -> (characters, elements)
        self._input_sizes: dict[int, tuple[int, int]] = {}
        self._max_elements = MAX_ELEMENTS + 4 * sum(self._measure_input(value)[1] for value in data)

    def tick(self, count: int = 1) -> None:
        self._ticks += count
        if self._ticks >= 64:
            self._ticks = 0
            if clock() > self._deadline:
                raise BudgetError("the chat template takes more time than a chat can need")

    def spend(self, size: int) -> None:
        self._work -= size
        if size > MAX_VALUE or self._work < 0:
            raise BudgetError("the chat template makes more text than a chat can need")

    def weigh(self, value: object) -> Any:
        """Check a value that the template created, and charge it. Returns the value."""
        if isinstance(value, str):
            # Beyond ASCII a character takes up to four bytes.
            self.spend(len(value) if value.isascii() else 3 * len(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise BudgetError("the chat template computes with an absurdly large number")
        elif isinstance(value, (list, tuple, dict)) and id(value) not in self._input_sizes:
            # Its strings were charged when they were created; the list only holds references.
            self.spend(self._measure(value)[1])
        return value

    def _measure(self, value: object) -> tuple[int, int]:
        """Characters and elements of a value as a tree: a shared part counts every time, as it does
        when it is printed."""
        weight = elements = 0
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                weight += len(item)
                continue
            if not isinstance(item, (list, tuple, dict)):
                continue
            known = self._input_sizes.get(id(item))
            if known is not None:
                weight, elements = weight + known[0], elements + known[1]
            else:
                elements += len(item)
                if isinstance(item, dict):
                    # dict's own methods: a TrackedMessage must not record this as a read.
                    stack.extend(dict.keys(item))
                    stack.extend(dict.values(item))
                else:
                    stack.extend(item)
            if elements > self._max_elements or weight > MAX_VALUE:
                raise BudgetError(
                    "the chat template makes a list that is larger than a chat can need"
                )
        self.tick(1 + elements // 16)
        return weight, elements

    def _measure_input(self, value: object) -> tuple[int, int]:
        """Store the size of every part of an input, so that _measure() need not walk it again."""
        if isinstance(value, str):
            return len(value), 0
        if not isinstance(value, (list, tuple, dict)):
            return 0, 0
        parts = [*dict.keys(value), *dict.values(value)] if isinstance(value, dict) else value
        sizes = [self._measure_input(part) for part in parts]
        found = sum(w for w, _ in sizes), len(parts) + sum(e for _, e in sizes)
        self._input_sizes[id(value)] = found
        return found


class _Current(threading.local):
    budget: Budget | None = None


_current = _Current()


def current() -> Budget:
    return _current.budget or Budget()


@contextmanager
def use_budget(budget: Budget) -> Iterator[Budget]:
    before, _current.budget = _current.budget, budget
    try:
        yield budget
    finally:
        _current.budget = before
