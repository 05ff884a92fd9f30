"""Defaults of transformers' config classes, read from defaults.json.

`tests/parity/config_defaults.py` writes that file from the installed transformers, and a test
compares the two. The engine itself never imports transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verbatim.model.keys import Key, Table

_FILE = Path(__file__).parents[1] / "defaults.json"
_DATA: dict[str, Any] = json.loads(_FILE.read_text("utf-8"))

GENERATION_KEYS: tuple[str, ...] = tuple(_DATA["generation"])
# Keys without a default in the tables: the class computes it, or the file alone decides.
COMPUTED = frozenset(
    ("rope_parameters", "text_config", "vision_config", "layer_types", "mlp_only_layers")
)
_NONE = COMPUTED | {"eos_token_id"}


@dataclass(frozen=True, slots=True)
class ClassDefaults:
    """What transformers' config class of a model_type says."""

    name: str  # class name without "Config"
    values: dict[str, Any]  # its keys -> their defaults
    nullable: frozenset[str]  # keys that may be null


def class_defaults(model_type: str) -> ClassDefaults:
    found = _DATA["classes"].get(model_type, {})
    return ClassDefaults(
        found.get("class", ""), found.get("defaults", {}), frozenset(found.get("nullable", ()))
    )


def with_defaults(model_type: str, table: Table) -> Table:
    """The table with the class's defaults in the rows that are followed."""
    data = class_defaults(model_type)
    return {name: _filled(name, key, data) for name, key in table.items()}


def _filled(name: str, key: Key, data: ClassDefaults) -> Key:
    if key.treatment != "followed" or key.alias or name in _NONE:
        return key
    default = data.values.get(name) if key.default is None else key.default
    nullable = name in data.nullable if key.nullable is None else key.nullable
    return replace(key, default=default, nullable=nullable)
