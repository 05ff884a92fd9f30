"""Published configs of the newer families: every key is known, and the layout has exactly the
published number of parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_model_published import LLAMA3, sizes

from verbatim.model.architecture import read_config
from verbatim.model.layout import layout

COMMON = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "transformers_version": "4.55.0",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "SmolLM3-3B": (
        {
            "model_type": "smollm3",
            **sizes(2048, 11008, 36, 16, 4, 128256, 65536),
            "rope_theta": 5e6,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "no_rope_layer_interval": 4,
            "max_window_layers": 28,
            "layer_types": [FULL] * 36,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "pretraining_tp": 2,
        },
        3_075_098_624,
    ),
    "granite-3.3-2b": (
        {
            "model_type": "granite",
            **sizes(2048, 8192, 40, 32, 8, 49159, 131072),
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "rope_theta": 1e7,
            "tie_word_embeddings": True,
        },
        2_533_539_840,
    ),
    "OLMo-2-1124-7B": (
        {"model_type": "olmo2", **sizes(4096, 11008, 32, 32, 32, 100352, 4096)},
        7_298_617_344,
    ),
    "Olmo-3-7B": (
        {
            "model_type": "olmo3",
            **sizes(4096, 11008, 32, 32, 32, 100278, 65536),
            "rope_theta": 500000,
            "rope_scaling": {
                **YARN,
                "factor": 8.0,
                "attention_factor": 1.2079441541679836,
                "original_max_position_embeddings": 8192,
            },
            "sliding_window": 4096,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8,
        },
        7_298_011_136,
    ),
    "Phi-4-mini": (
        {
            "model_type": "phi3",
            **sizes(3072, 8192, 32, 24, 8, 200064, 4096),
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": [1.0] * 48,
                "short_factor": [1.0] * 48,
            },
            "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
        3_836_021_760,
    ),
    "EXAONE-4.0-1.2B": (
        {
            "model_type": "exaone4",
            **sizes(2048, 4096, 30, 32, 8, 102400, 65536),
            "head_dim": 64,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": [FULL] * 30,
            "rope_theta": 1000000,
            "rope_scaling": {**LLAMA3, "factor": 16.0},
            "tie_word_embeddings": True,
        },
        1_279_391_488,
    ),
    "ERNIE-4.5-0.3B": (
        {
            "model_type": "ernie4_5",
            **sizes(1024, 3072, 18, 16, 2, 103424, 131072),
            "head_dim": 128,
            "rope_theta": 500000,
            "use_bias": False,
            "tie_word_embeddings": True,
        },
        360_748_032,
    ),
    "GLM-4-9B-0414": (
        {
            "model_type": "glm4",
            **sizes(4096, 13696, 40, 32, 2, 151552, 32768),
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        9_400_279_040,
    ),
    "Seed-OSS-36B": (
        {
            "model_type": "seed_oss",
            **sizes(5120, 27648, 64, 80, 8, 155136, 524288),
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "residual_dropout": 0.1,
            "rope_theta": 1e7,
            "rope_scaling": {"rope_type": "default"},
        },
        36_151_104_512,
    ),
    "gpt-oss-20b, without quantization_config": (
        {
            "model_type": "gpt_oss",
            **sizes(2880, 2880, 24, 64, 8, 201088, 131072),
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "experts_per_token": 4,
            "initial_context_length": 4096,
            "attention_bias": True,
            "layer_types": [SLIDING, FULL] * 12,
            "router_aux_loss_coef": 0.9,
            "rope_theta": 150000,
            "rope_scaling": {
                **YARN,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
        20_914_757_184,
    ),
    "Qwen3.6-27B, text part": (
        {
            "model_type": "qwen3_5_text",
            **sizes(5120, 17408, 64, 24, 4, 248320, 262144),
            "head_dim": 256,
            "layer_types": [*["linear_attention"] * 3, FULL] * 16,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "attn_output_gate": True,
            "output_gate_type": "swish",
            "mamba_ssm_dtype": "float32",
            "mlp_only_layers": [],
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
            "pad_token_id": None,
        },
        26_895_998_464,
    ),
    "pythia-70m": (
        {
            "model_type": "gpt_neox",
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000,
            "use_parallel_residual": True,
        },
        70_426_624,
    ),
    "starcoder2-3b": (
        {
            "model_type": "starcoder2",
            **sizes(3072, 12288, 30, 24, 2, 49152, 16384),
            "norm_type": "layer_norm",
            "mlp_type": "default",
            "activation_function": "gelu",
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "use_bias": True,
            "rope_theta": 999999.44,
        },
        3_030_371_328,
    ),
    "stablelm-2-1_6b": (
        {
            "model_type": "stablelm",
            **sizes(2048, 5632, 24, 32, 32, 100352, 4096),
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": True,
        },
        1_644_515_328,
    ),
    "gemma-2b": (
        {"model_type": "gemma", **sizes(2048, 16384, 18, 8, 1, 256000, 8192), "head_dim": 256},
        2_506_172_416,
    ),
    "OLMoE-1B-7B": (
        {
            "model_type": "olmoe",
            **sizes(2048, 1024, 16, 16, 16, 50304, 4096),
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "clip_qkv": None,
            "norm_topk_prob": False,
            "rope_scaling": None,
        },
        6_919_161_856,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "model_type": "qwen2_moe",
            **sizes(2048, 5632, 24, 16, 16, 151936, 8192),
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "decoder_sparse_step": 1,
            "max_window_layers": 21,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "norm_topk_prob": False,
            "rope_theta": 1e6,
        },
        14_315_784_192,
    ),
    "glm-4-9b-chat-hf": (
        {
            "model_type": "glm",
            **sizes(4096, 13696, 40, 32, 2, 151552, 131072),
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        9_399_951_360,
    ),
    "ERNIE-4.5-21B-A3B": (
        {
            "model_type": "ernie4_5_moe",
            **sizes(2560, 12288, 28, 20, 4, 103424, 131072),
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "use_bias": False,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        21_825_437_888,
    ),
    "Qwen3-VL-4B, text part": (
        {
            "model_type": "qwen3_vl_text",
            **sizes(2560, 9728, 36, 32, 8, 151936, 262144),
            "head_dim": 128,
            "rope_theta": 5e6,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
            },
            "tie_word_embeddings": True,
        },
        4_022_468_096,
    ),
    "falcon-7b": (
        {
            "model_type": "falcon",
            "alibi": False,
            "apply_residual_connection_post_layernorm": False,
            "bias": False,
            "hidden_size": 4544,
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "parallel_attn": True,
            "vocab_size": 65024,
        },
        6_921_720_704,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_load_without_warnings_and_have_their_parameters(name: str) -> None:
    config, count = PUBLISHED[name]
    spec, warnings = read_config({**COMMON, **config})
    assert warnings == ()
    assert sum(int(np.prod(shape, dtype=np.int64)) for shape in layout(spec).values()) == count


def test_a_query_scale_and_a_magnitude_of_zero_are_off() -> None:
    """Devstral 2 has zeros for both."""
    record = {**YARN, "factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
    config = {"model_type": "ministral3", **sizes(64, 96, 2, 4, 2, 100, 8192), "head_dim": 16}
    off = {"mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0, "type": "yarn"}
    spec, warnings = read_config({**config, "rope_parameters": {**record, **off}})
    assert (spec.query_scale_beta, warnings) == (0.0, ())
    assert spec.layers[0].rope is not None
    assert spec.layers[0].rope.attention_factor == pytest.approx(1 + 0.1 * np.log(64))


def test_a_string_of_exaone4_names_the_sliding_layers() -> None:
    config = {"model_type": "exaone4", **sizes(64, 96, 6, 4, 2, 100, 8192), "sliding_window": 8}
    spec, _ = read_config({**config, "sliding_window_pattern": "LLG"})
    assert [layer.window for layer in spec.layers] == [8, 8, None] * 2
    assert [layer.rope is not None for layer in spec.layers] == [True, True, False] * 2
