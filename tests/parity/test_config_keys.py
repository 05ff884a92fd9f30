"""The key tables against transformers' config classes.

Every key of a class is in its family's table with the same default. A key of a table that is in no
class is one of published configs.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import config_defaults
import pytest
from config_defaults import config_class
from mutations import BASE

from verbatim.model.architecture import read_config
from verbatim.model.families import CONFIG_KEYS, FAMILIES
from verbatim.model.families.common.class_defaults import COMPUTED
from verbatim.model.families.common.rope_keys import ROPE_KEYS, all_rope_keys
from verbatim.model.keys import Key

pytestmark = pytest.mark.torch

FAMILY_TYPES = [*CONFIG_KEYS]


def test_the_defaults_are_those_of_the_installed_transformers() -> None:
    """python tests/parity/config_defaults.py writes the file."""
    assert config_defaults.FILE.read_text("utf-8") == config_defaults.text(FAMILY_TYPES)


@pytest.mark.parametrize("family", FAMILY_TYPES)
def test_every_key_of_the_class_is_in_the_table(family: str) -> None:
    """Fields, aliases, keys that an instance writes, and generation settings: none is dropped."""
    import transformers

    kind = config_class(family)
    keys = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    keys |= set(kind().to_dict()) | set(
        transformers.GenerationConfig._get_default_generation_params()
    )
    keys -= {"_post_init_done"}
    assert sorted(keys - set(CONFIG_KEYS[family])) == []


# A family that transformers lacks has defaults of its own, not those of the class of its layers.
OWN_CLASS = [name for name in FAMILY_TYPES if name not in FAMILIES or not FAMILIES[name].body]


@pytest.mark.parametrize("family", OWN_CLASS)
def test_the_tables_have_the_defaults_of_the_classes(family: str) -> None:
    """Also where a row states its own default, and where a default must be an accepted value."""
    for field in dataclasses.fields(config_class(family)):
        key = CONFIG_KEYS[family][field.name]
        if field.name in COMPUTED or key.treatment == "no effect" or field.name == "eos_token_id":
            continue
        default = None if field.default is dataclasses.MISSING else field.default
        if key.treatment == "must equal":
            assert default is None or default in key.values, field.name
        else:
            assert key.default == default, field.name
            optional = "None" in str(field.type)
            free = ("num_key_value_heads", "tie_word_embeddings")
            assert key.default is None or key.nullable == optional or field.name in free, field.name


@pytest.mark.parametrize("family", [*FAMILIES])
def test_the_tables_have_the_rope_defaults_of_the_classes(family: str) -> None:
    table, rules = CONFIG_KEYS[family], FAMILIES[family].rope
    if rules.theta not in table or table[rules.theta].treatment != "followed":
        return  # no rotary positions, or a record per layer type without a default
    made = config_class(family)(rope_parameters={}).rope_parameters
    full = made.get("full_attention", made)
    assert table[rules.theta].default == full["rope_theta"]
    assert (table[rules.fraction].default or 1.0) == full.get("partial_rotary_factor", 1.0)
    if "rope_local_base_freq" in table:
        assert table["rope_local_base_freq"].default == made["sliding_attention"]["rope_theta"]


def test_the_rope_tables_have_the_keys_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

    known = all_rope_keys()
    assert sorted(set(RopeParameters.__annotations__) - set(known)) == []
    # keys of published checkpoints
    assert set(known) - set(RopeParameters.__annotations__) == {"attn_factor", "finetuned", "type"}
    assert set(ROPE_KEYS) - {"default"} <= set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("layers", [10, 11, 101])
def test_a_saved_gemma_4_has_the_heads_of_its_layer_types(layers: int, tmp_path: Path) -> None:
    """transformers writes per_layer_config, with zeros before the numbers of more than 10 layers"""
    config = {**BASE["gemma4_text"], "num_hidden_layers": layers, "layer_types": None}
    config_class("gemma4_text").from_dict(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert ("05" in saved["per_layer_config"]) == (layers == 11)
    assert read_config(saved)[0] == read_config(config)[0]


def test_the_comparison_fails_if_a_key_of_the_class_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table: dict[str, Key] = {k: v for k, v in CONFIG_KEYS["llama"].items() if k != "mlp_bias"}
    monkeypatch.setitem(CONFIG_KEYS, "llama", table)
    with pytest.raises(AssertionError):
        test_every_key_of_the_class_is_in_the_table("llama")
