"""Checkpoints and mutations that follow from the registry of families, for those that no list of
this folder names: the family's tiny config, and values of its keys by their kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parity_case import ABSENT, VOCAB, Case
from special_values import SPECIAL, Values

from verbatim.model.families import CONFIG_KEYS, FAMILIES, WRAPPERS
from verbatim.model.families.common.class_defaults import class_defaults
from verbatim.model.keys import Key

# Tiny models whose GGUF file `verbatim convert` writes: convert.py lacks keys or names of theirs.
EXPORTED = {"ernie4_5_moe", "qwen2moe", "qwen3vl"}
# Language models that transformers has only inside a multi-modal model (test_models_doc.py). Not
# asked of transformers here, because `make docs` makes the table of parity without it.
INSIDE = {"qwen3_vl_text"}
_OPTIONAL = {"num_key_value_heads", "intermediate_size", "rms_norm_eps"}
# What a mutation has its own values of.
_SIZES = {"max_position_embeddings"}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [],
}


def kind_of(model_type: str) -> str:
    """Prefix of transformers' classes. A language model that transformers has only inside a
    multi-modal model is tested there."""
    return wrapper_of(model_type) or class_defaults(model_type).name


def wrapper_of(model_type: str) -> str:
    """The class of the multi-modal model, where the language model has none of its own."""
    if model_type not in INSIDE:
        return ""
    return next(
        class_defaults(wrapper).name for wrapper, w in WRAPPERS.items() if model_type in w.text
    )


def derived_cases(named: Iterable[str]) -> list[Case]:
    """A checkpoint of each tiny config whose name is not in `named`."""
    known = set(named)
    return [
        Case(
            name,
            kind_of(model_type),
            _changes(model_type, config),
            gguf="" if name in EXPORTED else family.gguf_architecture,
        )
        for model_type, family in FAMILIES.items()
        for name, config in family.tiny.items()
        if name not in known and not family.body  # tests/parity/test_diffusion_parity.py
    ]


def _changes(model_type: str, tiny: Any) -> dict[str, Any]:
    unstated = _OPTIONAL - tiny.keys() - {"rms_norm_eps"}
    changes = {key: value for key, value in tiny.items() if key not in ("vocab_size", "rope_theta")}
    changes |= dict.fromkeys(unstated, ABSENT)
    if wrapper_of(model_type):
        return {"text_config": {"model_type": model_type, **changes}, "vision_config": VISION}
    return changes


def derived_bases(
    common: dict[str, Any], named: Iterable[str], *, wrapped: bool = False
) -> dict[str, dict[str, Any]]:
    """model_type -> tiny config of the mutations, of families that are not `named`. `wrapped`: of
    those that transformers has only inside a multi-modal model."""
    return {
        model_type: {"model_type": model_type, **_base(common, next(iter(family.tiny.values())))}
        for model_type, family in FAMILIES.items()
        if model_type not in named and not family.body and bool(wrapper_of(model_type)) == wrapped
    }


def _base(common: dict[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
    base = {key: value for key, value in common.items() if key in tiny or key not in _OPTIONAL}
    base |= {**tiny, **{key: common[key] for key in _SIZES}}
    base |= {key: VOCAB for key in tiny if key.startswith("vocab_size")}
    if "linear_num_key_heads" in tiny:  # more layers amplify rounding errors
        base |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    base.pop("logit_scale", None)  # larger logits have larger rounding errors
    if "sliding_window" in tiny:
        base["sliding_window"] = 5  # less than the tokens that are compared
    return base


def derived_values(family: str, rotary: Values, common: Values) -> Values:
    """Values of every key: those that all families have, and for the others by their default."""
    table, tiny = CONFIG_KEYS[family], next(iter(FAMILIES[family].tiny.values()))
    rotary = {
        name: values for name, values in rotary.items() if name not in _OPTIONAL - tiny.keys()
    }
    own = {
        name: _values(key)
        for name, key in table.items()
        if name not in rotary and name not in common and not key.alias
    }
    own = {name: choices for name, choices in own.items() if choices}
    return {**rotary, **common, **own, **SPECIAL.get(family, {})}


def _values(key: Key) -> tuple[Any, ...]:
    if key.treatment == "must equal":
        return (*key.values, None, 3)
    if isinstance(key.default, bool):
        return (True, False, ABSENT)
    if isinstance(key.default, int):
        # sizes of one or two values have norms that amplify rounding errors
        return (*((3, 4, 6, 16, 40) if key.default > 16 else range(6)), ABSENT)
    if isinstance(key.default, float):
        return (0.5, 0.75, 2.0, 100 * key.default, ABSENT)
    return ()
