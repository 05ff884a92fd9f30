"""Key tables of config.json: families with recurrent layers."""

from __future__ import annotations

from verbatim.model.families.config_key_parts import (
    COMMON_KEYS,
    IMAGES,
    NO_BIAS,
    NO_WINDOW,
    ROUTER,
    llama_keys,
    rope_keys,
    sizes,
)
from verbatim.model.keys import Key, Table, alias, followed, must_equal, no_effect

_UNUSED_BY_LFM2 = (
    *("block_dim", "conv_dim", "conv_dim_out", "num_heads", "block_norm_eps"),
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
    "conv_use_xavier_init",
)
_HEAD_DIM = followed("size of a head; null: hidden_size / num_attention_heads")
_LFM2: dict[str, Key] = {
    **COMMON_KEYS,
    **rope_keys(1e6),
    "head_dim": _HEAD_DIM,
    "norm_eps": followed("epsilon of the norms", 1e-5),
    "tie_word_embeddings": followed(
        "the head is the embedding, unless the file has another head", True
    ),
    "tie_embedding": alias("tie_word_embeddings"),
    "conv_L_cache": followed("taps of the convolutions", 3),
    "conv_bias": followed("biases of the convolution layers", False),
    "layer_types": followed("full_attention or conv, layer by layer"),
    "sliding_window": NO_WINDOW,
    "attention_bias": NO_BIAS,
    "mlp_bias": NO_BIAS,
    "use_pos_enc": must_equal(True, note="positions are rotary", private=True),
    "block_use_swiglu": must_equal(True, note="the MLP is a SwiGLU", private=True),
    **dict.fromkeys(_UNUSED_BY_LFM2, no_effect("not used by transformers", private=True)),
}
_DELTA: dict[str, Key] = {
    "linear_conv_kernel_dim": followed("taps of the convolutions", 4),
    "linear_key_head_dim": followed("size of a key head of a delta net", 128),
    "linear_value_head_dim": followed("size of a value head of a delta net", 128),
    "linear_num_key_heads": followed("key heads of a delta net", 16),
    "linear_num_value_heads": followed("value heads of a delta net", 32),
    "full_attention_interval": followed(
        "layer period: every N-th layer is attention, where layer_types is absent; absent: 4"
    ),
    "layer_types": followed("full_attention or linear_attention, layer by layer"),
    "sliding_window": NO_WINDOW,
    "attention_bias": followed("biases of q, k, v and o of attention", False),
    "mlp_bias": NO_BIAS,
}
_MOE: dict[str, Key] = {
    **ROUTER,
    "num_experts_per_tok": followed("experts used per token", 10),
    "moe_intermediate_size": followed("inner width of an expert", 512),
    "shared_expert_intermediate_size": followed("inner width of the shared MLP", 512),
}
_MTP = no_effect("layers that draft tokens are not read", private=True)
_QWEN3_5: dict[str, Key] = {
    **COMMON_KEYS,
    **sizes(248320, 4096, 12288, 32, 16, 4, 32768),
    **rope_keys(10000.0, fraction=0.25),
    **llama_keys(followed("size of a head", 256)),
    **_DELTA,
    "attn_output_gate": must_equal(True, note="attention has an output gate", private=True),
    "output_gate_type": must_equal(
        "swish", "silu", note="the gate of a delta net is SiLU, as in transformers", private=True
    ),
    "mlp_only_layers": must_equal([], note="all layers have one kind of MLP", private=True),
    "mamba_ssm_dtype": no_effect("states are float32", private=True),
    "mtp_num_hidden_layers": _MTP,
    "mtp_use_dedicated_embeddings": _MTP,
}


def _wrapper(text: str) -> dict[str, Key]:
    """Keys of a language model with an image encoder."""
    return {
        **COMMON_KEYS,
        "text_config": followed(f"the language model: see {text}"),
        "vision_config": IMAGES,
        "tie_word_embeddings": followed("wins over text_config's value", False),
        "image_token_id": IMAGES,
        "video_token_id": IMAGES,
        "vision_start_token_id": IMAGES,
        "vision_end_token_id": IMAGES,
        "language_model_only": no_effect("only the language model is used", private=True),
    }


RECURRENT_KEYS: dict[str, Table] = {
    "lfm2": {
        **sizes(65536, 2560, 12288, 32, 32, 8, 128000),
        **_LFM2,
        "intermediate_size": followed(
            "inner width of the MLP, before block_auto_adjust_ff_dim", 12288
        ),
        "block_ff_dim": alias("intermediate_size"),
        "block_auto_adjust_ff_dim": followed(
            "the inner width is two thirds of intermediate_size times block_ffn_dim_multiplier, "
            "rounded up to a multiple of block_multiple_of",
            True,
        ),
        "block_multiple_of": followed("see block_auto_adjust_ff_dim", 256),
        "block_ffn_dim_multiplier": followed("see block_auto_adjust_ff_dim", 1.0),
        "full_attn_idxs": followed("attention layers, where layer_types is absent; absent: all"),
    },
    "lfm2_moe": {
        **sizes(65536, 2048, 7168, 32, 32, 8, 128000),
        **_LFM2,
        **ROUTER,
        "num_dense_layers": followed("first layers with a dense MLP", 2),
        "num_experts": followed("experts of a layer", 32),
        "num_experts_per_tok": followed("experts used per token", 4),
        "moe_intermediate_size": followed("inner width of an expert", 1792),
        "norm_topk_prob": followed(
            "weights of the chosen experts sum to 1 (transformers adds 1e-6 to their sum)", True
        ),
        "routed_scaling_factor": followed("multiplies the weights of the chosen experts", 1.0),
        "use_expert_bias": followed("the choice of experts has a bias", True),
    },
    "qwen3_next": {
        **COMMON_KEYS,
        **_MOE,
        **sizes(151936, 2048, 5632, 48, 16, 2, 32768),
        **rope_keys(10000.0, fraction=0.25),
        **llama_keys(followed("size of a head", 256)),
        **_DELTA,
        "num_experts": followed("experts of a layer; 0: dense", 512),
        "norm_topk_prob": followed("weights of the chosen experts sum to 1", True),
        "decoder_sparse_step": followed(
            "layer period: every N-th layer is a mixture of experts", 1
        ),
        "mlp_only_layers": followed("layers with a dense MLP"),
    },
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5": _wrapper("qwen3_5_text"),
    "qwen3_5_moe_text": {
        **_QWEN3_5,
        **sizes(248320, 2048, 0, 40, 16, 2, 32768),
        **_MOE,
        "intermediate_size": no_effect("every layer is a mixture", private=True),
        "num_experts": followed("experts of a layer", 256),
        "num_experts_per_tok": followed("experts used per token", 8),
        "norm_topk_prob": must_equal(
            True, note="weights of the chosen experts sum to 1", private=True
        ),
        "decoder_sparse_step": must_equal(1, note="every layer is a mixture", private=True),
    },
    "qwen3_5_moe": _wrapper("qwen3_5_moe_text"),
}
