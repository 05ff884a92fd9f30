"""Which modules a PEFT config targets, and the rank and alpha of each.

In: the parsed adapter_config.json. Out: PEFT's answer for a module name, by the rules of its
`check_target_module_exists` and `get_pattern_key`. Patterns are matched in bounded time.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from verbatim.base.errors import ModelError
from verbatim.base.json_io import JsonMapping
from verbatim.base.name_patterns import NamePatterns


def is_number(value: object) -> bool:
    """A finite number that a float can hold, and no bool."""
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(float(value))  # type: ignore[arg-type]
    except OverflowError:
        return False


class PeftTargets:
    def __init__(self, config: JsonMapping, file: str) -> None:
        self._config, self._file = config, file
        self._patterns = NamePatterns()
        targets = config.get("target_modules")
        self._all = isinstance(targets, str) and targets.lower() == "all-linear"
        self._targets = self._names("target_modules", targets)
        self._excluded = self._names("exclude_modules", config.get("exclude_modules") or [])
        self._layers = self._layer_numbers()
        self._layers_pattern = self._layer_names()

    def wrong(self, message: str) -> ModelError:
        return ModelError(message, file=self._file)

    def has(self, module: str) -> bool:
        """Whether PEFT gives the module an adapter."""
        if self._named("exclude_modules", self._excluded, module):
            return False
        if self._all or isinstance(self._targets, str):
            return self._all or self._named("target_modules", self._targets, module)
        if module in self._targets or not self._named("target_modules", self._targets, module):
            return module in self._targets
        return self._layers is None or self._layer(module) in self._layers

    def check_file(self, modules: Collection[str], weights: str) -> None:
        """Every module of the file is targeted, and every target is excluded or has a module."""
        for module in modules:
            if not self.has(module):
                key = self._reason(module)
                raise self.wrong(f"{module} has weights, but is {key}")
        if isinstance(self._targets, str):
            return
        for target in self._targets:
            named = [m for m in modules if self._named("target_modules", [target], m)]
            if not named and not self._named("exclude_modules", self._excluded, f"x.{target}"):
                raise self.wrong(
                    f"target_modules names {target!r:.60}, and {weights} has no weights for it"
                )

    def rank(self, module: str) -> int:
        return int(self._pattern_value("rank_pattern", module, self._config["r"]))

    def alpha(self, module: str) -> float:
        return float(self._pattern_value("alpha_pattern", module, self._config["lora_alpha"]))

    def _reason(self, module: str) -> str:
        if self._named("exclude_modules", self._excluded, module):
            return "in exclude_modules"
        if not self._named("target_modules", self._targets, module):
            return "not in target_modules"
        return "not in layers_to_transform"

    # --------------------------------------------------------------------------------- the keys

    def _names(self, key: str, value: object) -> str | list[str]:
        """A list names the ends of module names; a string is a pattern."""
        if isinstance(value, str) or (
            isinstance(value, list) and all(isinstance(name, str) for name in value)
        ):
            return value
        raise self.wrong(f"{key} is {value!r:.60}, not a list of names or a pattern")

    def _named(self, key: str, names: str | list[str], module: str) -> bool:
        if isinstance(names, str):
            return self._matches(key, names, module)
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _matches(self, key: str, pattern: str, module: str, *, end: bool = False) -> bool:
        """`end`: of the whole name, or of what follows one of its dots."""
        try:
            find = self._patterns.ends if end else self._patterns.fullmatch
            return find(pattern, module)
        except ModelError as error:
            raise self.wrong(f"{key}: {error}") from None

    def _layer_numbers(self) -> frozenset[int] | None:
        value = self._config.get("layers_to_transform")
        if value is None or value == []:
            return None
        numbers = value if isinstance(value, list) else [value]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise self.wrong(f"layers_to_transform is {value!r:.60}, not numbers of layers")
        if isinstance(self._targets, str):
            raise self.wrong("layers_to_transform needs a list in target_modules, not a pattern")
        return frozenset(numbers)

    def _layer_names(self) -> list[str]:
        value = self._config.get("layers_pattern")
        patterns = self._names("layers_pattern", value or [])
        if patterns and self._layers is None:
            raise self.wrong("layers_pattern is set, and layers_to_transform is not")
        return [patterns] if isinstance(patterns, str) else patterns

    def _layer(self, module: str) -> int | None:
        """The first number in the name, or the first one behind a name of layers_pattern."""
        parts = module.split(".")
        for i in range(1, len(parts) - 1):
            if not (parts[i].isascii() and parts[i].isdigit()):
                continue
            before = ".".join(parts[:i])
            if i > 1 and not self._layers_pattern:
                return int(parts[i][:9])
            for pattern in self._layers_pattern:
                if self._matches("layers_pattern", pattern, before, end=True):
                    return int(parts[i][:9])
        return None

    def _pattern_value(self, key: str, module: str, default: float) -> float:
        """The value of the first pattern that matches the end of the name."""
        patterns = self._config.get(key) or {}
        if not isinstance(patterns, dict):
            raise self.wrong(f"{key} is {patterns!r:.60}, not an object")
        for pattern, value in patterns.items():
            whole = key == "rank_pattern"
            if not is_number(value) or (whole and (type(value) is not int or value < 1)):
                raise self.wrong(f"{key}[{pattern!r:.60}] is {value!r:.40}, not a number")
            if self._matches(key, pattern, module, end=True):
                return float(value) if not whole else int(value)
        return default
