"""Tiny random models for tests: every family, made in milliseconds, without PyTorch and without
files.

    model = tiny_model("gemma3")                       # in memory
    model = tiny_model("llama", type="q8_0", hidden_size=64)
    backend = ReferenceBackend(model)

The weights give attention far from uniform and logits that spread over several units, so a wrong
mask, rotation or block changes the tokens.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.files.safetensors import SafetensorsDir
from verbatim.formats.conversion import quantise
from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor, Weights
from verbatim.model.adapter import Adapter, LowRank, is_adapted
from verbatim.model.families.families import spec_from_config
from verbatim.model.layout import is_quantisable, layout
from verbatim.model.loading.load import Model
from verbatim.model.spec import ModelSpec

_BASE: dict[str, Any] = {
    "vocab_size": 260,  # verbatim.testing.fakes.ByteTokenizer's ids
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 12}
_GPT2 = {"vocab_size": 260, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}
_MOE = {"num_experts_per_tok": 2}
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_BASE},
    "mistral": {"model_type": "mistral", **_BASE, "sliding_window": 12},
    "qwen2": {"model_type": "qwen2", **_BASE, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_BASE, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **_BASE, **_GEMMA},
    "gemma3": {
        "model_type": "gemma3_text",
        **_BASE,
        **_GEMMA,
        "num_hidden_layers": 6,
        "rope_theta": 1e6,
    },
    "phi3": {"model_type": "phi3", **_BASE},
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "mixtral": {"model_type": "mixtral", **_BASE, **_MOE, "num_local_experts": 4},
    "qwen3moe": {
        "model_type": "qwen3_moe",
        **_BASE,
        **_MOE,
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 24,
    },
}
FIRST_FAMILIES = tuple(TINY_CONFIGS)
_LAYER_NORM = {key: value for key, value in _BASE.items() if key != "rms_norm_eps"}
_NEOX = {key: value for key, value in _LAYER_NORM.items() if key != "num_key_value_heads"}
_FALCON = {key: value for key, value in _NEOX.items() if key != "intermediate_size"}
TINY_CONFIGS |= {
    "smollm3": {"model_type": "smollm3", **_BASE, "num_hidden_layers": 4},
    "granite": {
        "model_type": "granite",
        **_BASE,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.8,
    },
    "granitehybrid": {
        "model_type": "granitemoehybrid",
        **_BASE,
        "shared_intermediate_size": 48,
        "num_local_experts": 0,
        "layer_types": ["attention"] * 3,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.4,
    },
    "olmo2": {"model_type": "olmo2", **_BASE},
    "olmo3": {
        "model_type": "olmo3",
        **_BASE,
        "num_hidden_layers": 5,
        "sliding_window": 12,
        "rope_theta": 500000.0,
    },
    "seed_oss": {"model_type": "seed_oss", **_BASE, "head_dim": 16},
    "hunyuan-dense": {"model_type": "hunyuan_v1_dense", **_BASE, "head_dim": 16},
    "ministral3": {
        "model_type": "ministral3",
        **_BASE,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.2,
        },
    },
    "exaone4": {
        "model_type": "exaone4",
        **_BASE,
        "head_dim": 16,
        "num_hidden_layers": 5,
        "sliding_window": 12,
    },
    "cohere": {"model_type": "cohere", **_LAYER_NORM, "logit_scale": 1.5},
    "cohere2": {
        "model_type": "cohere2",
        **_LAYER_NORM,
        "num_hidden_layers": 5,
        "sliding_window": 12,
        "logit_scale": 1.5,
    },
    "glm4": {"model_type": "glm4", **_BASE, "head_dim": 16},
    "ernie4_5": {"model_type": "ernie4_5", **_BASE, "head_dim": 16},
    "arcee": {"model_type": "arcee", **_BASE},
    "gpt_neox": {"model_type": "gpt_neox", **_NEOX, "rotary_pct": 0.5},
    "starcoder2": {"model_type": "starcoder2", **_LAYER_NORM},
    "stablelm": {
        "model_type": "stablelm",
        **_LAYER_NORM,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "falcon": {
        "model_type": "falcon",
        **_FALCON,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_BASE,
        **_MOE,
        "head_dim": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_BASE,
        **_MOE,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "head_dim": 16,
        "num_local_experts": 4,
        "sliding_window": 12,
    },
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_DELTA_MOE = {
    **_MOE,
    **_DELTA,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_CONV: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
TINY_CONFIGS |= {
    "lfm2": {"model_type": "lfm2", **_LAYER_NORM, **_CONV, "block_multiple_of": 16},
    "lfm2moe": {
        "model_type": "lfm2_moe",
        **_LAYER_NORM,
        **_MOE,
        **_CONV,
        "num_dense_layers": 1,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    },
    "qwen3next": {"model_type": "qwen3_next", **_BASE, **_DELTA_MOE},
    "qwen35": {"model_type": "qwen3_5_text", **_BASE, **_DELTA},
    "qwen35moe": {"model_type": "qwen3_5_moe_text", **_BASE, **_DELTA_MOE},
}
_GEMMA4: dict[str, Any] = {
    **{key: value for key, value in _BASE.items() if key != "rope_theta"},
    "model_type": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 0,
}
TINY_CONFIGS |= {
    "gemma4": {
        **_GEMMA4,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 260,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    },
    "gemma4moe": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}
RECURRENT_FAMILIES = ("lfm2", "lfm2moe", "qwen3next", "qwen35", "qwen35moe")
NEWER_FAMILIES = tuple(
    family
    for family in TINY_CONFIGS
    if family not in FIRST_FAMILIES and family not in RECURRENT_FAMILIES
)
FAMILIES = tuple(TINY_CONFIGS)


def tiny_model(
    family: str = "llama",
    *,
    seed: int = 0,
    type: str = "f32",
    context: int | None = None,
    **changes: Any,
) -> Model:
    """A small random model of one of FAMILIES. `type`: storage type of the matrices whose rows
    divide into its blocks. `changes`: Hugging Face config keys that replace the tiny defaults."""
    config = TINY_CONFIGS[family] | changes
    spec = spec_from_config(config, context=context, file=f"tiny {family}")
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in layout(spec).items():
        stored = type if is_quantisable(name) and shape[-1] % BLOCKS[type][0] == 0 else "f32"
        values = _values(random, name, shape, spec.norm_offset, spec.tied)
        tensors[name] = Tensor(name, stored, shape, quantise(stored, values))
    digest = hashlib.sha256(
        repr((sorted(config.items(), key=repr), seed, type)).encode()
    ).hexdigest()
    source = SafetensorsDir(Path(f"tiny-{family}"), config, {}, {}, digest)
    return Model(spec, Weights(tensors, f"tiny-{family}", digest), source, (1,), {})


def tiny_adapter(
    spec: ModelSpec, name: str = "adapter", *, seed: int = 0, rank: int = 4
) -> Adapter:
    """A random LoRA adapter of every weight that an adapter can change."""
    random = np.random.default_rng(seed)
    parts: dict[str, LowRank] = {}
    for weight, shape in layout(spec).items():
        if is_adapted(weight):
            a = random.standard_normal((rank, shape[1]), np.float32) / np.float32(shape[1] ** 0.5)
            b = random.standard_normal((shape[0], rank), np.float32) * np.float32(0.3)
            low, high = (
                Tensor(weight, "f32", x.shape, x.reshape(-1).view(np.uint8)) for x in (a, b)
            )
            parts[weight] = LowRank(low, high, 0.5 + seed)
    return Adapter(name, f"tiny adapter {seed} of rank {rank}", parts)


def _values(
    random: np.random.Generator, name: str, shape: tuple[int, ...], offset: float, tied: bool
) -> np.ndarray:
    values = random.standard_normal(shape, dtype=np.float32)
    if name.endswith((".bias", ".choice_bias")):
        return values * np.float32(0.1)
    if name.endswith(".sinks"):
        return values
    if name.endswith("delta.decay"):
        return -np.exp(values)
    if name.endswith(".kernel"):
        return values * np.float32(0.7)
    if name.endswith("delta.norm"):
        return np.float32(1.0) + values * np.float32(0.1)
    if name.endswith("moe.scales") or shape == (1,):  # factors of experts and of layers
        return np.float32(1.0) + values * np.float32(0.1)
    if "norm" in name:
        return np.float32(1.0 - offset) + values * np.float32(0.1)
    if name in ("embed", "positions", "layer_inputs.embed"):
        # A tied head with large embeddings would only repeat its input.
        return values * np.float32(0.25 if tied else 0.7)
    # Attention and routing far from uniform.
    sharp = 2.0 if name.endswith((".q", ".k", "router")) else 1.0
    return values * np.float32(sharp / math.sqrt(shape[-1]))
