"""Mutated configs and GGUF metadata: each is accepted or raises a ModelError, nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from verbatim.base.errors import ModelError
from verbatim.formats.tensor import Tensor
from verbatim.model.architecture import spec_from_config, spec_from_gguf
from verbatim.model.families import GGUF_KEYS
from verbatim.model.layout import layout
from verbatim.testing.tiny_models import FAMILIES, TINY_CONFIGS

HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 31, 10**6, 10**12, 2**63, -(2**63), 10**400),
    *(0.0, -1.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")),
    *(
        "",
        "x",
        "silu",
        "llama",
        "gemma3",
        "\x00",
        "linear" * 100,
        [],
        [1],
        [None],
        ["sliding_attention"] * 3,
        list(range(5000)),
    ),
    *(
        {},
        {"a": 1},
        {"rope_type": "yarn"},
        {"full_attention": 3},
        {"type": {}},
        {"rope_type": ["linear"]},
    ),
]
KEYS = [
    *(
        *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "head_dim"),
    ),
    *(
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
        *("rope_scaling", "rope_parameters", "layer_types"),
    ),
    *(
        *("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern"),
        *("partial_rotary_factor", "hidden_act"),
    ),
    *(
        *("original_max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias"),
        *("query_pre_attn_scalar", "text_config"),
    ),
    *(
        *("attn_logit_softcapping", "final_logit_softcapping", "num_experts", "num_local_experts"),
        *("num_experts_per_tok", "norm_topk_prob"),
    ),
    *(
        *("moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "n_embd", "n_head"),
        *("n_layer", "n_positions", "n_inner"),
    ),
    *(
        "hidden_activation",
        "rope_local_base_freq",
        "quantization_config",
        "use_bidirectional_attention",
        "scale_attn_weights",
    ),
]
ROPE_KEYS = [
    *(
        *("rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    *(
        *("long_factor", "short_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("attention_factor", "truncate"),
    ),
    *("partial_rotary_factor", "full_attention", "sliding_attention"),
]
KINDS = ["linear", "dynamic", "llama3", "yarn", "longrope", "su"]


def accepted_by(make: Any) -> bool:
    """Whether `make` succeeds. A ModelError is a rejection; any other exception fails the test."""
    try:
        spec = make()
    except ModelError:
        return False
    assert len(layout(spec)) < 200_000
    return True


def test_mutated_configs_are_accepted_or_raise_a_model_error() -> None:
    """4,000 configs with up to four wrong values each, also inside the rope record."""
    source = random.Random(1)
    accepted = 0
    for _ in range(4000):
        config = dict(TINY_CONFIGS[source.choice(FAMILIES)])
        if source.random() < 0.5:
            rope: dict[str, Any] = {"rope_type": source.choice(KINDS), "factor": 2.0}
            for key in source.sample(ROPE_KEYS, 3):
                rope[key] = source.choice(HOSTILE)
            config[source.choice(["rope_scaling", "rope_parameters"])] = rope
        for key in source.sample(KEYS, source.randint(0, 4)):
            config[key] = source.choice(HOSTILE)
        accepted += accepted_by(lambda c=config: spec_from_config(c))
    assert 200 < accepted < 3800, "the mutations must be neither all harmless nor all fatal"


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt2"]
)
def test_mutated_gguf_metadata_is_accepted_or_raises_a_model_error(architecture: str) -> None:
    source = random.Random(2)
    good = {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "expert_feed_forward_length": 24,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": 6,
        "rope.freq_base": 1e4,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": 8,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 2.0,
        "rope.scaling.attn_factor": 1.1,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scale_linear": 2.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "expert_count": 4,
        "expert_used_count": 2,
    }
    known = {name for name, key in GGUF_KEYS[architecture].items() if key.treatment == "followed"}
    if architecture == "gpt2":
        good["attention.head_count_kv"] = 4
    embed = Tensor("token_embd.weight", "f32", (260, 32), np.zeros(260 * 32 * 4, np.uint8))
    accepted = 0
    for _ in range(500):
        metadata: dict[str, Any] = {f"{architecture}.{k}": v for k, v in good.items() if k in known}
        metadata["general.architecture"] = architecture
        for key in source.sample(sorted(metadata), source.randint(1, 4)):
            metadata[key] = source.choice(HOSTILE)
        tensors = {"token_embd.weight": embed}
        if source.random() < 0.2:
            shape = source.choice([(4,), (0,), (2, 2), (5000,)])
            tensors["rope_freqs.weight"] = Tensor(
                "rope_freqs.weight", "f32", shape, np.zeros(int(np.prod(shape)) * 4, np.uint8)
            )
        accepted += accepted_by(lambda m=metadata, t=tensors: spec_from_gguf(m, t, file="a file"))
    assert 5 < accepted < 490
