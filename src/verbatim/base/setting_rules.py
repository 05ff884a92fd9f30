"""The rule of one setting, and the check of a value against it.

A record of settings (EngineConfig, and the server's Settings and Limits) declares each field with
setting(): its default, help and range. Flags, checks and the tables of the documentation are made
from rules_of(record).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, SupportsIndex

from verbatim.base.errors import ParameterError


@dataclass(frozen=True, slots=True)
class SettingRule:
    """One setting's rule. The type is the field's annotation."""

    default: Any
    help: str
    low: float | None = None  # inclusive
    choices: tuple[str, ...] = ()
    size: bool = False  # in bytes, also given as text: 512M
    served: Any = None  # default of a server, where it differs
    error: str = ""  # a server's answer to a request beyond this limit
    encoders: bool = True  # whether it has an effect on an encoder, which refuses the others
    # command line
    flag: str = ""  # where it is not --NAME
    short: str = ""  # such as -v
    metavar: str = "NAME"
    hidden: bool = False  # a flag for tests
    common: bool = False  # a flag that --help lists; --help-all lists the others


def setting(default: object, help: str, **rule: Any) -> Any:
    """A field of a record with its rule. Returns Any, so that the field keeps its annotation."""
    return field(default=default, metadata={"rule": SettingRule(default, help, **rule)})


def rules_of(record: type) -> dict[str, SettingRule]:
    """The rules of a record's fields, by name."""
    return {f.name: f.metadata["rule"] for f in fields(record) if "rule" in f.metadata}


def types_of(record: type) -> dict[str, str]:
    """The annotations of a record's fields, by name: "int | None"."""
    return {f.name: str(f.type) for f in fields(record)}


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)


def parse_size(name: str, text: str) -> int:
    """Bytes from 512M, 1.5G, 2GiB or a plain number. K, M, G, T are powers of 1024.

    >>> parse_size("kv_memory", "1.5G")
    1610612736
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ParameterError(name, f"{text!r} is not a size such as 512M or 2G")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def host_and_port(name: str, address: str) -> tuple[str, int]:
    """(host, port) of an address.

    >>> host_and_port("metrics_address", "[::1]:8001")
    ('::1', 8001)
    """
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ParameterError(name, f"{address!r:.80} is not HOST:PORT, as 127.0.0.1:8001")
    return host, int(port)


# annotation -> (accepted types, name in errors); NumPy integers have __index__
_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "int": (SupportsIndex, "a whole number"),
    "str": (str, "a string"),
    "bool": (bool, "True or False"),
    "tuple[str, ...]": ((tuple, list), "a list of strings"),
}


def check_type(name: str, annotation: str, value: object) -> None:
    if value is None and annotation.endswith(" | None"):
        return
    types, words = _TYPES[annotation.removesuffix(" | None")]
    wrong = not isinstance(value, types) or (isinstance(value, bool) and types is not bool)
    if wrong or (
        isinstance(value, (tuple, list)) and not all(isinstance(item, str) for item in value)
    ):
        raise ParameterError(name, f"{value!r:.60} is not {words}")


def check_range(name: str, rule: SettingRule, value: Any) -> None:
    if value is None:
        return
    if rule.low is not None and not value >= rule.low:  # NaN too
        raise ParameterError(name, f"{value} is below {rule.low}")
    if rule.choices and value not in rule.choices:
        raise ParameterError(name, f"{value!r:.60} is not one of {', '.join(rule.choices)}")
