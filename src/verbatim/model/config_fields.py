"""Typed, validated access to a config.json or to GGUF metadata.

In: a mapping from an untrusted file. Out: Python values of the requested type.
A missing, mistyped or out-of-range value is a ModelError that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Self

from verbatim.base.errors import ModelError

# Largest accepted count. It is far above any real model, and keeps hostile numbers from becoming
# allocations.
MAX_COUNT = 1 << 27
MAX_NUMBER = 1e300  # a larger setting overflows when it is multiplied
_MISSING: Any = object()


class Fields:
    """Typed access to an untrusted mapping. None counts as missing, as in Hugging Face configs.
    `written`: the name that the file has for a key, where it is another one; errors name it."""

    def __init__(
        self,
        values: Mapping[str, object],
        file: str,
        prefix: str = "",
        warnings: list[str] | None = None,
        written: Mapping[str, str] | None = None,
    ) -> None:
        self.values, self.file, self.prefix = values, file, prefix
        self._written = written or {}
        self.warnings = [] if warnings is None else warnings  # shown to the user at load

    def with_values(self, **changes: Any) -> Self:
        """A copy with some keys replaced. The copy shares the list of warnings."""
        other = copy(self)
        other.values = {**self.values, **changes}
        return other

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def has(self, key: str) -> bool:
        return self.values.get(self.prefix + key) is not None

    def raw(self, key: str, default: object = _MISSING) -> object:
        value = self.values.get(self.prefix + key)
        if value is not None:
            return value
        if default is _MISSING:
            raise ModelError(f"{self._name(key)} is missing", file=self.file)
        return default

    def _name(self, key: str) -> str:
        """The key as the file writes it."""
        return self._written.get(self.prefix + key, self.prefix + key)

    def fail(self, key: str, rule: str) -> ModelError:
        value = short(self.raw(key, None))
        return ModelError(f"{self._name(key)} is {value}: {rule}", file=self.file)

    def integer(
        self, key: str, default: object = _MISSING, *, low: int = 1, high: int = MAX_COUNT
    ) -> int:
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"a whole number from {low} to {high} is needed")
        return value

    def number(self, key: str, default: object = _MISSING, *, above: float = 0.0) -> float:
        value = self.raw(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not above < value < MAX_NUMBER
        ):
            raise self.fail(key, f"a number above {above} is needed")
        return float(value)

    def cap(self, key: str) -> float:
        """A positive number, or 0 if the key is absent."""
        return self.number(key) if self.has(key) else 0.0

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false is needed")
        return value

    def string(self, key: str, default: object = _MISSING) -> str:
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "a string is needed")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.raw(key, {})
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object is needed")
        return dict(value)

    def items(self, key: str) -> list[Any]:
        value = self.raw(key, [])
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise self.fail(key, "a list is needed")
        return list(value)

    def layer_numbers(self, key: str, layers: int) -> list[int]:
        """A list of layer numbers. Those of no layer have no effect, as in transformers."""
        found = self.items(key)
        for number in found:
            if type(number) is not int:
                raise self.fail(key, "a list of layer numbers is needed")
            if not 0 <= number < layers:
                self.warn(f"{key}: {number} names none of the {layers} layers; ignored")
        return found

    def by_layer(self, key: str, layers: int) -> dict[int, object]:
        """An object keyed by layer numbers, which may have leading zeros: {"05": …, "11": …}."""
        found: dict[int, object] = {}
        for name, value in self.mapping(key).items():
            number = name.isascii() and name.isdigit() and len(name) < 10  # int() has a limit
            if not number or int(name) >= layers:
                raise self.fail(key, f"{short(name)} names none of the {layers} layers")
            if int(name) in found:
                raise self.fail(key, f"layer {int(name)} has two entries")
            found[int(name)] = value
        return found


def short(value: object) -> str:
    """repr(value), cut to 80 characters for error texts."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
