"""The key tables against transformers' config classes.

Every key of a class is in its family's table with the same default, and every key of a table is
known to transformers, unless it is marked as private.
"""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mutations import BASE

from verbatim.model.families.config_keys import CONFIG_KEYS, ROPE_KEYS, all_rope_keys
from verbatim.model.families.families import read_config
from verbatim.model.keys import Key

pytestmark = pytest.mark.torch

CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "gemma3": "Gemma3",
    "phi3": "Phi3",
    "gpt2": "GPT2",
    "smollm3": "SmolLM3",
    "granite": "Granite",
    "granitemoehybrid": "GraniteMoeHybrid",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "seed_oss": "SeedOss",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "ministral3": "Ministral3",
    "mistral3": "Mistral3",
    "exaone4": "Exaone4",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "glm4": "Glm4",
    "ernie4_5": "Ernie4_5",
    "arcee": "Arcee",
    "gpt_neox": "GPTNeoX",
    "starcoder2": "Starcoder2",
    "stablelm": "StableLm",
    "falcon": "Falcon",
    "glm4_moe": "Glm4Moe",
    "gpt_oss": "GptOss",
    "lfm2": "Lfm2",
    "lfm2_moe": "Lfm2Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5Text",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5MoeText",
    "qwen3_5_moe": "Qwen3_5Moe",
    "gemma4_text": "Gemma4Text",
    "gemma4": "Gemma4",
}
WRAPPERS = ("gemma3", "gemma4", "mistral3", "qwen3_5", "qwen3_5_moe")
# Keys whose default the class computes. The tables have none; the parity tests compare the result.
COMPUTED = {"rope_parameters", "text_config", "vision_config", "layer_types", "mlp_only_layers"}


def config_class(family: str) -> Any:
    import transformers

    return getattr(transformers, f"{CLASSES[family]}Config")


def test_every_family_has_a_table_and_a_class() -> None:
    assert set(CONFIG_KEYS) == set(CLASSES)
    for family in CLASSES:
        assert config_class(family).model_type == family


@pytest.mark.parametrize("family", CLASSES)
def test_every_key_of_the_class_is_in_the_table(family: str) -> None:
    """Fields, aliases, keys that an instance writes, and generation settings."""
    import transformers

    kind = config_class(family)
    keys = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    keys |= set(kind().to_dict()) | set(
        transformers.GenerationConfig._get_default_generation_params()
    )
    keys -= {"_post_init_done"}
    assert sorted(keys - set(CONFIG_KEYS[family])) == []


@pytest.mark.parametrize("family", CLASSES)
def test_the_tables_have_the_defaults_of_the_classes(family: str) -> None:
    table = CONFIG_KEYS[family]
    for field in dataclasses.fields(config_class(family)):
        key = table[field.name]
        if field.name in COMPUTED or key.treatment == "no effect" or field.name == "eos_token_id":
            continue
        default = None if field.default is dataclasses.MISSING else field.default
        if key.treatment == "must equal":
            assert default is None or default in key.values, field.name
        else:
            assert key.default == default, field.name


@pytest.mark.parametrize(
    "family", [f for f in CLASSES if f not in ("gpt2", "gemma4_text", *WRAPPERS)]
)
def test_the_tables_have_the_rope_defaults_of_the_classes(family: str) -> None:
    table, kind = CONFIG_KEYS[family], config_class(family)
    made = kind(rope_parameters={}).rope_parameters
    full = made.get("full_attention", made)
    theta, fraction = (
        ("rotary_emb_base", "rotary_pct")
        if family == "gpt_neox"
        else ("rope_theta", "partial_rotary_factor")
    )
    assert table[theta].default == full["rope_theta"]
    assert (table[fraction].default or 1.0) == full.get("partial_rotary_factor", 1.0)
    if family == "gemma3_text":
        assert table["rope_local_base_freq"].default == made["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize("family", CLASSES)
def test_a_key_is_nullable_where_the_class_allows_none(family: str) -> None:
    """An explicit null of such a key replaces its default."""
    hints = {field.name: str(field.type) for field in dataclasses.fields(config_class(family))}
    for name, key in CONFIG_KEYS[family].items():
        if (
            key.treatment == "followed"
            and key.default is not None
            and name in hints
            and name not in COMPUTED
        ):
            optional = "None" in hints[name]
            assert key.nullable == optional or name in (
                "num_key_value_heads",
                "tie_word_embeddings",
            ), name


def test_the_rope_tables_have_the_keys_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

    known = all_rope_keys()
    assert sorted(set(RopeParameters.__annotations__) - set(known)) == []
    foreign = {name for name, key in known.items() if not key.private} - set(
        RopeParameters.__annotations__
    )
    # attn_factor: a published checkpoint has it; transformers has no such key
    assert foreign == {"attn_factor", "type"}
    assert set(ROPE_KEYS) - {"default"} <= set(ROPE_INIT_FUNCTIONS)


@cache
def identifiers_of_transformers() -> frozenset[str]:
    """All identifiers in the sources of transformers that read the configs of our families."""
    import transformers

    root = Path(transformers.__file__).parent
    names = (
        "configuration_utils",
        "modeling_utils",
        "modeling_layers",
        "modeling_rope_utils",
        "masking_utils",
    )
    files = [
        root / f"{name}.py"
        for name in (*names, "cache_utils", "generation/configuration_utils", "generation/utils")
    ]
    files += [
        root / "tokenization_utils_base.py",
        root / "modeling_gguf_pytorch_utils.py",
        root / "models/auto/auto_factory.py",
    ]
    files += [root / "models/auto/tokenization_auto.py", root / "dynamic_module_utils.py"]
    for family in {f.removesuffix("_text") for f in CLASSES}:
        files += sorted((root / "models" / family).glob("*.py"))
    text = "\n".join(file.read_text("utf-8") for file in files if file.exists())
    return frozenset(re.findall(r"\w+", text))


@pytest.mark.parametrize("family", CLASSES)
def test_no_table_has_a_key_that_transformers_does_not_know(family: str) -> None:
    unknown = [
        n
        for n, k in CONFIG_KEYS[family].items()
        if not k.private and n not in identifiers_of_transformers()
    ]
    assert unknown == []
    known = [n for n, k in CONFIG_KEYS[family].items() if k.private and n in fields_of(family)]
    assert known == [], "marked as private, but a key of the class"


def fields_of(family: str) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class(family))}


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
