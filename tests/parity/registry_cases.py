"""Checkpoints and mutations that follow from the registry of families, for those that no list of
this folder names: the family's tiny config, and values of its keys by their kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from newer_mutations import ABSENT, Values
from parity_case import Case

from verbatim.model.families import CONFIG_KEYS, FAMILIES, WRAPPERS
from verbatim.model.families.common.class_defaults import class_defaults
from verbatim.model.keys import Key

# What a checkpoint or a mutation has its own values of.
_SIZES = {"vocab_size", "max_position_embeddings", "num_hidden_layers"}
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
    import transformers

    name = class_defaults(model_type).name
    if hasattr(transformers, f"{name.removesuffix('Text')}ForCausalLM") or name == "GPT2":
        return ""
    return next(
        class_defaults(wrapper).name for wrapper, w in WRAPPERS.items() if model_type in w.text
    )


def derived_cases(kinds: Iterable[str]) -> list[Case]:
    """A checkpoint of each tiny config of the families whose classes are not in `kinds`."""
    known = set(kinds)
    return [
        Case(name, kind_of(model_type), _changes(model_type, config))
        for model_type, family in FAMILIES.items()
        if class_defaults(model_type).name not in known
        for name, config in family.tiny.items()
    ]


def _changes(model_type: str, tiny: Any) -> dict[str, Any]:
    changes = {key: value for key, value in tiny.items() if key not in _SIZES}
    if wrapper_of(model_type):
        return {"text_config": {"model_type": model_type, **changes}, "vision_config": VISION}
    return changes


def derived_bases(
    common: dict[str, Any], named: Iterable[str], *, wrapped: bool = False
) -> dict[str, dict[str, Any]]:
    """model_type -> tiny config of the mutations, of families that are not `named`. `wrapped`: of
    those that transformers has only inside a multi-modal model."""
    return {
        model_type: {**common, **config, **{key: common[key] for key in _SIZES}}
        for model_type, family in FAMILIES.items()
        if model_type not in named and bool(wrapper_of(model_type)) == wrapped
        for config in [{"model_type": model_type, **next(iter(family.tiny.values()))}]
    }


def derived_values(family: str, rotary: Values, common: Values) -> Values:
    """Values of every key: those that all families have, and for the others by their default."""
    table = CONFIG_KEYS[family]
    own = {
        name: _values(key)
        for name, key in table.items()
        if name not in rotary and name not in common and not key.alias
    }
    return {**rotary, **common, **{name: choices for name, choices in own.items() if choices}}


def _values(key: Key) -> tuple[Any, ...]:
    if key.treatment == "must equal":
        return (*key.values, None, 3)
    if isinstance(key.default, bool):
        return (True, False, ABSENT)
    if isinstance(key.default, int):
        return (1, 2, ABSENT)
    if isinstance(key.default, float):
        return (0.5, 2.0, ABSENT)
    return ()
