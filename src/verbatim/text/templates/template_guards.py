"""Checks that run before an operation of a chat template creates a large value.

In: the arguments of a method, filter or operator. Out: the arguments to use, or a BudgetError. Each
check charges the template's budget (template_budget.py) with the size of the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from verbatim.text.templates.template_budget import MAX_BITS, MAX_ELEMENTS, BudgetError, current

MAX_PAD = 1000  # width of a padding, indentation or format field
# Filters that are cheap on a long string; the others create a list of its characters or words.
_CHEAP_ON_STRINGS = frozenset(
    [
        *("capitalize", "count", "d", "default", "e", "escape", "first", "float", "forceescape"),
        *("format", "indent", "int", "items", "last", "length", "lower", "replace", "safe"),
        *("string", "trim", "upper"),
    ]
)
# A format field wider than 999, or with a width from an argument.
_WIDE_FORMAT = re.compile(r"\*|\d{4,}|\{[^{}]*\{")


def check_width(width: object) -> None:
    if isinstance(width, int) and width > MAX_PAD:
        raise BudgetError(
            f"the chat template pads to {width} characters; at most {MAX_PAD} are allowed"
        )


def check_format(pattern: object) -> None:
    if isinstance(pattern, str) and _WIDE_FORMAT.search(pattern):
        raise BudgetError("the chat template formats with a width that no chat needs")


def check_list_size(text: str, elements: int) -> None:
    if elements > MAX_ELEMENTS:
        raise BudgetError(
            f"the chat template makes a list out of {len(text)} characters, "
            "more than a chat can need"
        )


def charge_join(separator: Any, items: Any) -> list[Any]:
    if isinstance(items, str):
        check_list_size(items, len(items))
    parts = current().weigh(list(items))
    current().spend(len(parts) * len(str(separator)))
    return list(parts)


def charge_replace(text: str, old: str, new: str, count: object = None) -> None:
    times = text.count(old)
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    current().spend(len(text) + times * len(new))


def check_method(owner: str, name: str, args: tuple[object, ...]) -> tuple[Any, ...]:
    """Check the arguments of a string method before it runs. Returns the arguments to use."""
    if name in ("ljust", "rjust", "center", "zfill"):
        for width in args[:1]:
            check_width(width)
    elif name == "replace" and len(args) > 1:
        old, new, count = (*args[:3], None)[:3]
        if isinstance(old, str) and isinstance(new, str):
            charge_replace(owner, old, new, count)
    elif name == "join" and len(args) == 1:
        return (charge_join(owner, args[0]),)
    elif name in ("split", "rsplit", "splitlines"):
        # Without a separator only the length of the text bounds the number of parts.
        by = args[0] if args and isinstance(args[0], str) and args[0] else None
        check_list_size(owner, len(owner) // 8 if by is None else owner.count(by))
    return args


def check_filter(name: str, value: object, rest: list[object]) -> Any:
    """The same for filters: `value` is filtered, `rest` are the other arguments in order."""
    if isinstance(value, str) and name not in _CHEAP_ON_STRINGS:
        check_list_size(value, len(value))
    if name in ("indent", "batch", "slice", "round", "truncate", "center"):
        for width in rest:
            check_width(width)
        if name == "indent":
            given = [len(w) if isinstance(w, str) else w for w in rest]
            width = max([4, *(w for w in given if isinstance(w, int))])
            current().spend((str(value).count("\n") + 1) * width)
    elif name == "format":
        check_format(value)
    elif name == "replace" and len(rest) >= 2:
        charge_replace(str(value), str(rest[0]), str(rest[1]), rest[2] if len(rest) > 2 else None)
    elif name == "join":
        return charge_join(rest[0] if rest else "", value)
    elif name == "sum" and any(isinstance(r, (list, tuple)) for r in rest):
        raise BudgetError("the chat template sums lists; join them with + instead")
    return value


def guarded_filter(name: str, function: Callable[..., object]) -> Callable[..., Any]:
    """Wrap a filter: check its arguments before, charge its result after. update_wrapper() copies
    the attributes of Jinja's calling convention."""
    context_args = 1 if hasattr(function, "jinja_pass_arg") else 0

    def run(*args: object, **kwargs: Any) -> object:
        budget = current()
        budget.tick()
        context, values = args[:context_args], args[context_args:]
        if values:
            values = (check_filter(name, values[0], [*values[1:], *kwargs.values()]), *values[1:])
        return budget.weigh(function(*context, *values, **kwargs))

    return update_wrapper(run, function)


def guarded_test(function: Callable[..., object]) -> Callable[..., object]:
    def run(*args: object, **kwargs: Any) -> Any:
        current().tick()
        return function(*args, **kwargs)

    return update_wrapper(run, function)


def check_product(left: object, right: object) -> None:
    if isinstance(left, int) and not isinstance(right, int):
        left, right = right, left
    if isinstance(right, int):
        if isinstance(left, (str, list, tuple)):
            current().spend(len(left) * max(right, 0))
        elif isinstance(left, int) and left.bit_length() + right.bit_length() > MAX_BITS:
            raise BudgetError("the chat template computes with an absurdly large number")


def check_power(left: object, right: object) -> None:
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() * max(right, 1) > MAX_BITS
    ):
        raise BudgetError("the chat template computes with an absurdly large number")
