"""Write src/verbatim/model/families/defaults.json from transformers' config classes:

    python tests/parity/config_defaults.py

test_config_keys.py compares the file with the installed transformers.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from verbatim.model import families

BODIES = {name for name, family in families.FAMILIES.items() if family.body}
FILE = Path(families.__file__).with_name("defaults.json")


def config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = families.FAMILIES.get(model_type)
    return CONFIG_MAPPING[family.body or model_type if family else model_type]


def document(model_types: list[str]) -> dict[str, Any]:
    import transformers

    generation = transformers.GenerationConfig._get_default_generation_params()
    return {
        "generation": sorted(generation),
        "classes": {name: _class(name) for name in sorted(model_types) if name not in BODIES},
    }


def _class(model_type: str) -> dict[str, Any]:
    kind = config_class(model_type)
    fields = [f for f in dataclasses.fields(kind) if _plain(f.default)]
    return {
        "class": kind.__name__.removesuffix("Config"),
        "defaults": {f.name: f.default for f in fields} | _rope(kind),
        "nullable": sorted(f.name for f in fields if "None" in str(f.type)),
    }


def _plain(default: Any) -> bool:
    """Whether a default is a value of JSON other than null."""
    return default is not None and isinstance(default, bool | int | float | str)


def _rope(kind: Any) -> dict[str, Any]:
    """What the class puts into a rope record that is empty, under the config's own keys."""
    try:
        made = kind(rope_parameters={}).rope_parameters
    except Exception:  # the class has no rope record, or one per layer type without a default
        return {}
    full = made.get("full_attention", made)
    found = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
    if found.get("partial_rotary_factor") == 1:
        del found["partial_rotary_factor"]
    local = made.get("sliding_attention", {}).get("rope_theta")
    return found | ({"rope_local_base_freq": local} if local else {})


def text(model_types: list[str]) -> str:
    return json.dumps(document(model_types), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(text([*families.CONFIG_KEYS]), "utf-8")
