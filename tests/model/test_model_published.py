"""Published configs: the layout must have exactly the published number of parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verbatim.model.architecture import spec_from_config
from verbatim.model.layout import layout


def sizes(
    hidden: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, context: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SU = {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.1] * 48}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7b": (
        {"model_type": "llama", **sizes(4096, 11008, 32, 32, 32, 32000, 4096)},
        6_738_415_616,
    ),
    "Llama-3.1-8B": (
        {
            "model_type": "llama",
            **sizes(4096, 14336, 32, 32, 8, 128256, 131072),
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3,
        },
        8_030_261_248,
    ),
    "SmolLM2-135M": (
        {
            "model_type": "llama",
            **sizes(576, 1536, 30, 9, 3, 49152, 8192),
            "rope_theta": 100000,
            "tie_word_embeddings": True,
        },
        134_515_008,
    ),
    "Mistral-7B-v0.1": (
        {
            "model_type": "mistral",
            **sizes(4096, 14336, 32, 32, 8, 32000, 32768),
            "sliding_window": 4096,
        },
        7_241_732_096,
    ),
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral",
            **sizes(4096, 14336, 32, 32, 8, 32000, 32768),
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
    "Qwen2.5-0.5B": (
        {
            "model_type": "qwen2",
            **sizes(896, 4864, 24, 14, 2, 151936, 32768),
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3",
            **sizes(1024, 3072, 28, 16, 8, 151936, 40960),
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            **sizes(2048, 6144, 48, 32, 4, 151936, 40960),
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
        30_532_122_624,
    ),
    "Qwen3-Coder-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            **sizes(2048, 5472, 48, 32, 4, 151936, 262144),
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_qk_norm": True,
            "shared_expert_intermediate_size": 0,
        },
        30_532_122_624,
    ),
    "gemma-2-2b": (
        {
            "model_type": "gemma2",
            **sizes(2304, 9216, 26, 8, 4, 256000, 8192),
            "head_dim": 256,
            "sliding_window": 4096,
        },
        2_614_341_888,
    ),
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text",
            **sizes(1152, 6912, 26, 4, 1, 262144, 32768),
            "head_dim": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        999_885_952,
    ),
    # the published wrapper holds only values that differ from the defaults
    "gemma-3-4b, text part": (
        {
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
        3_880_263_168,
    ),
    "Phi-3-mini-128k": (
        {
            "model_type": "phi3",
            **sizes(3072, 8192, 32, 32, 32, 32064, 131072),
            "original_max_position_embeddings": 4096,
            "rope_scaling": SU,
            "sliding_window": 262144,
        },
        3_821_079_552,
    ),
    "gpt2": (
        {
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
        },
        124_439_808,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_layout_has_the_published_number_of_parameters(name: str) -> None:
    config, count = PUBLISHED[name]
    spec = spec_from_config(config)
    assert sum(int(np.prod(shape, dtype=np.int64)) for shape in layout(spec).values()) == count


def test_windows_rope_and_softcaps_of_published_configs() -> None:
    specs = {name: spec_from_config(config) for name, (config, _) in PUBLISHED.items()}
    assert {layer.window for layer in specs["Mistral-7B-v0.1"].layers} == {4096}
    # A window of 262144 masks nothing in a context of 131072.
    assert specs["Phi-3-mini-128k"].groups[0].window is None
    assert specs["Phi-3-mini-128k"].layers[0].rope.attention_factor == pytest.approx(
        1.1902380714238083
    )  # type: ignore[union-attr]
    gemma = specs["gemma-3-1b"]
    assert [i for i, layer in enumerate(gemma.layers) if layer.window is None] == [5, 11, 17, 23]
    assert {
        round(1 / layer.rope.inv_freq[-1]) > 20000 for layer in gemma.layers if layer.window is None
    } == {True}  # type: ignore[union-attr]
    assert specs["gemma-3-4b, text part"].layers[5].rope.inv_freq[0] == 1 / 8  # type: ignore[union-attr]
    assert specs["gemma-3-4b, text part"].layers[0].rope.inv_freq[0] == 1.0  # type: ignore[union-attr]
    assert specs["gemma-2-2b"].logit_softcap == 30.0
    assert specs["gemma-2-2b"].attention_softcap == 50.0
    assert specs["Qwen3-30B-A3B"].experts_renormalised
