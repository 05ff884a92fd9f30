"""Published configs (data/published_configs.json, one model per line): every key is known, and the
layout has exactly the published number of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verbatim.model.architecture import read_config, spec_from_config
from verbatim.model.layout import layout

# name -> the config's keys that matter here, the parameters, and what the warning says, if any
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "published_configs.json").read_text("utf-8")
)
# Keys of every published config.
COMMON = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "transformers_version": "4.55.0",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_known_keys_and_the_published_parameters(name: str) -> None:
    published = PUBLISHED[name]
    spec, warnings = read_config({**COMMON, **published["config"]})
    assert len(warnings) == ("warning" in published)
    assert all(published["warning"] in text for text in warnings)
    count = sum(int(np.prod(shape, dtype=np.int64)) for shape in layout(spec).values())
    assert count == published["parameters"]


def test_windows_rope_and_softcaps_of_published_configs() -> None:
    specs: Any = {name: spec_from_config(found["config"]) for name, found in PUBLISHED.items()}
    assert {layer.window for layer in specs["Mistral-7B-v0.1"].layers} == {4096}
    # A window of 262144 masks nothing in a context of 131072.
    assert specs["Phi-3-mini-128k"].groups[0].window is None
    factor = specs["Phi-3-mini-128k"].layers[0].rope.attention_factor
    assert factor == pytest.approx(1.1902380714238083)
    full = {i: n for i, n in enumerate(specs["gemma-3-1b"].layers) if n.window is None}
    assert list(full) == [5, 11, 17, 23]
    assert all(round(1 / layer.rope.inv_freq[-1]) > 20000 for layer in full.values())
    assert specs["gemma-3-4b, text part"].layers[5].rope.inv_freq[0] == 1 / 8
    assert specs["gemma-3-4b, text part"].layers[0].rope.inv_freq[0] == 1.0
    assert specs["gemma-2-2b"].logit_softcap == 30.0
    assert specs["gemma-2-2b"].attention_softcap == 50.0
    assert specs["Qwen3-30B-A3B"].experts_renormalised


def test_a_query_scale_and_a_magnitude_of_zero_are_off() -> None:
    """Devstral 2 has zeros for both."""
    rope = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0}
    rope |= {"original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.0}
    rope |= {"llama_4_scaling_beta": 0.0, "type": "yarn"}
    config = {"model_type": "ministral3", **SMALL, "num_hidden_layers": 2, "head_dim": 16}
    spec, warnings = read_config({**config, "rope_parameters": rope})
    assert (spec.query_scale_beta, warnings) == (0.0, ())
    assert spec.layers[0].rope is not None
    assert spec.layers[0].rope.attention_factor == pytest.approx(1 + 0.1 * np.log(64))


def test_a_string_of_exaone4_names_the_sliding_layers() -> None:
    config = {"model_type": "exaone4", **SMALL, "num_hidden_layers": 6, "sliding_window": 8}
    spec, _ = read_config({**config, "sliding_window_pattern": "LLG"})
    assert [layer.window for layer in spec.layers] == [8, 8, None] * 2
    assert [layer.rope is not None for layer in spec.layers] == [True, True, False] * 2
