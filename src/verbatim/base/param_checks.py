"""The rule of one sampling parameter, and the check of one value against it.

In: a Field (kind, default, range) and a value from Python, JSON or a flag. Out: the value in the
form that SamplingParams stores, or a ParameterError that names the parameter. Rules between
parameters are in base/params.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verbatim.base.errors import ParameterError
from verbatim.base.json_io import no_key_twice
from verbatim.base.parsed import SchemaText
from verbatim.base.schema_types import is_schema_type, schema_of

Kind = Literal["int", "float", "bool", "str", "ids", "strings", "bias", "choice", "schema"]

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 1024
MOST = 2**31 - 1  # upper bound of token counts: the int32 of every backend


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter's rule. `low` and `high` are inclusive; `above` is exclusive."""

    kind: Kind
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[Any, ...] = ()
    history: bool = False  # the sampler needs the tokens so far when this differs from its default
    filter: bool = False  # enables a filter after the temperature, so it does nothing at 0
    slider: tuple[float, float, float] | None = None  # range and step on the page
    common: bool = False  # a flag that --help lists; --help-all lists the others
    trials: tuple[float, ...] = ()  # values of a filter for tests, the strongest first

    @property
    def optional(self) -> bool:
        """Whether None is allowed; it means that the parameter is not set."""
        return self.default is None


def checked(name: str, rule: Field, value: object) -> object:
    """The value as SamplingParams stores it (tuples, canonical JSON). ParameterError if invalid."""
    if value is None:
        if rule.optional:
            return None
        raise ParameterError(name, "is missing (null); leave it out for the default")
    check = _CHECKS[rule.kind]
    return check(name, rule, value)


def _number(name: str, rule: Field, value: float) -> None:
    shown = _show(value)
    if rule.low is not None and value < rule.low:
        off = "; 0 is off" if rule.help.endswith("; 0 is off") else ""  # vLLM writes top_k=-1
        if rule.default is None and "missing: " in rule.help:  # llama.cpp writes -1 for no limit
            off = f"; leave it out: {rule.help.rpartition('missing: ')[2]}"
        raise ParameterError(name, f"{shown} is below {_show(rule.low)}{off}")
    if rule.above is not None and value <= rule.above:
        raise ParameterError(name, f"{shown} must be above {_show(rule.above)}")
    if rule.high is not None and value > rule.high:
        raise ParameterError(name, f"{shown} is above {_show(rule.high)}")


def _int(name: str, rule: Field, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ParameterError(name, f"{_show(value)} is not a whole number")
    number = value.__index__()
    _number(name, rule, number)
    return int(number)


def _float(name: str, rule: Field, value: Any) -> float:
    if isinstance(value, (bool, str, bytes)) or not (
        hasattr(value, "__float__") or hasattr(value, "__index__")
    ):
        raise ParameterError(name, f"{_show(value)} is not a number")
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        raise ParameterError(name, f"{_show(value)} is not a number that fits") from None
    if not math.isfinite(number):
        raise ParameterError(name, f"{number} is not a finite number")
    _number(name, rule, number)
    return number


def _bool(name: str, rule: Field, value: object) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(name, f"{_show(value)} is not true or false")
    return value


def _str(name: str, rule: Field, value: object) -> str:
    if not isinstance(value, str):
        raise ParameterError(name, f"{_show(value)} is not a string")
    return _check_unicode(name, value)


def _strings(name: str, rule: Field, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or isinstance(items, (bytes, bytearray)):
        raise ParameterError(name, f"{_show(value)} is not a string or a list of strings")
    limit = MAX_STOP_STRINGS if name != "choice" else 10_000
    if len(items) > limit:
        raise ParameterError(name, f"{len(items)} strings are more than {limit}")
    for item in items:
        if not isinstance(item, str):
            raise ParameterError(name, f"{_show(item)} is not a string")
        if not item:
            raise ParameterError(name, "an empty string would match at once")
        if len(item) > MAX_STOP_LENGTH:
            why = f"a string of {len(item)} characters is longer than {MAX_STOP_LENGTH}"
            raise ParameterError(name, why)
        _check_unicode(name, item)
    if name == "choice" and not items:
        raise ParameterError(name, "an empty list leaves nothing to choose")
    return tuple(items)


def _check_unicode(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ParameterError(name, "has half a surrogate pair, which is not text") from None
    return text


def _ids(name: str, rule: Field, value: object) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        raise ParameterError(name, f"{_show(value)} is not a list of token ids")
    out = tuple(_int(name, _ID, item) for item in value)
    if rule.optional and not out:
        raise ParameterError(name, "an empty list would leave no token to sample")
    return out


def _bias(name: str, rule: Field, value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    out: dict[int, float] = {}
    try:
        items = [(key, number) for key, number in pairs]
    except (TypeError, ValueError):
        why = f"{_show(value)} is not a mapping from token id to number"
        raise ParameterError(name, why) from None
    for key, number in items:
        if isinstance(key, str):  # JSON has only string keys
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ParameterError(name, f"{_show(key)} is not a token id")
            key = int(key)
        token = _int(name, _ID, key)
        if token in out:
            raise ParameterError(name, f"token id {token} is given twice")
        out[token] = _float(name, rule, number)
    return tuple(sorted(out.items()))


def _choice(name: str, rule: Field, value: object) -> object:
    for option in rule.choices:
        if type(value) is type(option) and value == option:
            return option
    raise ParameterError(name, f"{_show(value)} is not one of {', '.join(map(repr, rule.choices))}")


def _schema(name: str, rule: Field, value: object) -> str:
    """Canonical JSON text: keeps the record hashable and picklable. A Python type (a pydantic
    model, a TypedDict) is replaced by its schema, which remembers the type for Choice.parsed."""
    kind = getattr(value, "kind", None) if isinstance(value, SchemaText) else None
    if is_schema_type(value):
        kind, value = value, schema_of(value)
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=no_key_twice)
        except RecursionError:
            raise ParameterError(name, "is nested too deeply") from None
        except ValueError as error:
            raise ParameterError(name, f"is not valid JSON: {error}") from None
    if not isinstance(value, (Mapping, bool)):
        raise ParameterError(name, f"{_show(value)} is not a schema (an object, true or false)")
    try:
        text = json.dumps(value, allow_nan=False)
        if re.search(r"\\ud[89a-f]", text):  # an escaped surrogate: is it half of a pair?
            _check_unicode(name, json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise ParameterError(name, "is nested too deeply") from None
    except ValueError as error:
        why = (
            "contains itself, and so has no end"
            if "ircular" in str(error)
            else "holds a number that is not finite"
        )
        raise ParameterError(name, f"{why}; it cannot be written as JSON") from None
    except TypeError as error:
        raise ParameterError(name, f"cannot be written as JSON: {error}") from None
    return text if kind is None else SchemaText(text, kind)


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 40 else text[:37] + "..."


_ID = Field("int", 0, "", low=0, high=2**31 - 1)
_CHECKS = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "str": _str,
    "strings": _strings,
    "ids": _ids,
    "bias": _bias,
    "choice": _choice,
    "schema": _schema,
}
