"""msgpack encoding of the messages between the two processes (messages.py).

On the wire a message is an array: the class name, then the values of the fields in order; a nested
record is an array of its values. Both processes run the same installation, so the positions need
no version. decode_*() checks the name, the number of fields and the type of each field, and raises
WireError for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgpack

from verbatim.base.records import Timings, Usage
from verbatim.server.process.messages import (
    FromEngine,
    Message,
    ModelFacts,
    ToEngine,
    WireChoice,
    WireFinish,
    WireLogprob,
)


class WireError(Exception):
    """A message that this version does not define: a bug in one of the two processes."""


# -------------------------------------------------------------------------------------- encoding


def encode(message: Message) -> bytes:
    body: bytes = msgpack.packb((type(message).__name__, *_row(message)), default=_row)
    return body


def _row(record: object) -> Any:
    """The values of a record in order. msgpack calls this for types it cannot pack itself."""
    row = _ROWS.get(type(record))
    if row is None:
        raise TypeError(f"{type(record).__name__} is not a record of a message")
    return row(record)


def _getter(kind: Any) -> Callable[[Any], Sequence[Any]]:
    names = [f.name for f in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)  # a tuple
    return lambda record: [getattr(record, name) for name in names]


# -------------------------------------------------------------------------------------- decoding


class _Rule(NamedTuple):
    """How one field is decoded: the types that msgpack may give, and what a list is made into."""

    types: frozenset[type]
    make: Callable[[list[Any]], Any] | None = None
    record: bool = False  # the list holds the values of a record


def decode_to_engine(body: bytes) -> ToEngine:
    return _decode(body, _TO_ENGINE)  # type: ignore[no-any-return]


def decode_from_engine(body: bytes) -> FromEngine:
    return _decode(body, _FROM_ENGINE)  # type: ignore[no-any-return]


def _decode(body: bytes, known: dict[str, Callable[[list[Any]], Any]]) -> Any:
    try:
        row = msgpack.unpackb(body, strict_map_key=False)
    except Exception as error:  # msgpack has several, and ValueError, and UnicodeDecodeError
        raise WireError(f"a message is not msgpack: {error!r}") from error
    if type(row) is not list or not row or type(row[0]) is not str:
        raise WireError("a message is not an array that begins with a name")
    decoder = known.get(row[0])
    if decoder is None:
        raise WireError(f"no such message here: {row[0]!r}")
    del row[0]
    return decoder(row)


def _decoder(kind: Any) -> Callable[[list[Any]], Any]:
    """A function from the values of a record to the record, each checked against its annotation."""
    hints = get_type_hints(kind)
    rules = [_rule(annotation) for annotation in hints.values()]
    makers = [
        (at, rule.make, rule.record) for at, rule in enumerate(rules) if rule.make is not None
    ]
    make_record = getattr(kind, "_make", None) or (lambda row: kind(*row))
    valid: set[tuple[type, ...]] = set()  # row types that passed check(): one lookup per record

    def check(types: tuple[type, ...]) -> None:
        if len(types) != len(rules):
            raise WireError(f"{kind.__name__} has {len(rules)} fields; received {len(types)}")
        for name, found, rule in zip(hints, types, rules, strict=True):
            if found not in rule.types:
                raise WireError(f"{kind.__name__}.{name} cannot be a {found.__name__}")
        valid.add(types)

    def decode(row: list[Any]) -> Any:
        types = tuple(map(type, row))
        if types not in valid:
            check(types)
        for at, make, record in makers:
            if types[at] is list and (row[at] or record):  # nothing to do for an empty list
                row[at] = make(row[at])
        return make_record(row)

    return decode


_NUMBER = frozenset((float, int))
_PLAIN: dict[Any, frozenset[type]] = {
    Any: frozenset((int, float, bool, str, bytes, list, dict, NoneType)),
    float: _NUMBER,
    **{kind: frozenset((kind,)) for kind in (int, bool, str, bytes, NoneType)},
}


def _rule(annotation: Any) -> _Rule:
    if annotation in _PLAIN:
        return _Rule(_PLAIN[annotation])
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        rules = [_rule(option) for option in inner]
        lists = [rule[1:] for rule in rules if rule.make is not None]
        assert len(lists) <= 1, f"two kinds of list in {annotation}"
        return _Rule(frozenset().union(*(rule.types for rule in rules)), *sum(lists, ()))
    if origin is dict:
        return _Rule(frozenset((dict,)))
    if origin in (list, Sequence, frozenset):
        return _Rule(frozenset((list,)), _list_of(_rule(inner[0]), inner[0]))
    assert is_dataclass(annotation) or issubclass(annotation, tuple), f"{annotation} has no code"
    return _Rule(frozenset((list,)), _decoder(annotation), record=True)


def _list_of(rule: _Rule, annotation: object) -> Callable[[list[Any]], list[Any]]:
    types, make, _ = rule

    def check(values: list[Any]) -> list[object]:
        for value in values:
            if type(value) not in types:
                raise WireError(f"a list of {annotation} holds a {type(value).__name__}")
        return values if make is None else [make(value) for value in values]

    return check


def _names(union: object) -> dict[str, Callable[[list[Any]], object]]:
    return {kind.__name__: _decoder(kind) for kind in get_args(union)}


_NESTED = (WireFinish, WireLogprob, WireChoice, ModelFacts, Usage, Timings)
_ROWS: dict[type, Callable[[Any], Any]] = {
    **{kind: _getter(kind) for kind in (*get_args(Message), *_NESTED)},
    frozenset: list,
}
_TO_ENGINE = _names(ToEngine)
_FROM_ENGINE = _names(FromEngine)
