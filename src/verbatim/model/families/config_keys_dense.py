"""Key tables of config.json: dense families with RMS norms, after llama, qwen and gemma."""

from __future__ import annotations

from verbatim.model.families.config_key_parts import (
    BIASES,
    COMMON_KEYS,
    FULL,
    FULL_ONLY,
    IMAGES,
    NO_BIAS,
    ROUTER,
    TRAINING,
    WINDOW_TYPES,
    llama_keys,
    rope_keys,
    sizes,
    theta_key,
)
from verbatim.model.keys import Table, alias, followed, must_equal, no_effect

_LAYER_WINDOWS = followed("window or none, layer by layer")
_NESTED_ROPE = {
    "rope_parameters": followed(
        "one rope record per layer type: full_attention, sliding_attention"
    ),
    "rope_scaling": followed("changes the record of full_attention"),
    "original_max_position_embeddings": must_equal(note="belongs in the rope record"),
}
_MAMBA = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    *("mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
)
_UNUSED_BY_HUNYUAN = (
    "add_classification_head",
    "attention_head_dim",
    "cla_share_factor",
    "class_num",
    "dense_list",
    "im_end_id",
    "im_newline_id",
    "im_start_id",
    "mask_init_id",
    "org_vocab_size",
    "pad_id",
    "pool_type",
    "text_end_id",
    "text_start_id",
)

DENSE_KEYS: dict[str, Table] = {
    "smollm3": {
        **COMMON_KEYS,
        **sizes(128256, 2048, 11008, 36, 16, 4, 32768),
        **rope_keys(2e6),
        **llama_keys(tied=True),
        **BIASES,
        "no_rope_layers": followed("0: the layer has no rotary positions; one entry per layer"),
        "no_rope_layer_interval": followed(
            "layer period: every N-th layer has no rotary positions, where no_rope_layers is "
            "absent",
            4,
        ),
        "use_sliding_window": followed(
            "the layers without rotary positions have a window, where layer_types is absent", False
        ),
        "sliding_window": followed("window of the sliding_attention layers; null: none"),
        "layer_types": _LAYER_WINDOWS,
        "max_window_layers": no_effect("not used by this family", private=True),
    },
    "granite": {
        **COMMON_KEYS,
        **sizes(32000, 4096, 11008, 32, 32, None, 2048),
        **rope_keys(10000.0),
        **llama_keys(),
        **BIASES,
        **FULL,
        "embedding_multiplier": followed("multiplies the embeddings", 1.0),
        "attention_multiplier": followed("multiplies the scores of attention", 1.0),
        "residual_multiplier": followed("multiplies the outputs of attention and MLP", 1.0),
        "logits_scaling": followed("divides the logits", 1.0),
    },
    "granitemoehybrid": {
        **COMMON_KEYS,
        **ROUTER,
        **sizes(32000, 4096, 11008, 32, 32, None, 2048),
        **rope_keys(10000.0),
        **llama_keys(),
        "intermediate_size": no_effect(
            "inner width of an expert; `shared_intermediate_size` decides"
        ),
        "shared_intermediate_size": followed("inner width of the MLP", 1024),
        "num_local_experts": followed(
            "checked: 0, because only dense models are supported", 8, nullable=True
        ),
        "num_experts_per_tok": no_effect("there are no experts"),
        "layer_types": followed(
            "checked: every layer is attention; Mamba layers are not supported"
        ),
        "layers_block_type": alias("layer_types"),
        "position_embedding_type": followed("rope: rotary positions; nope or absent: none"),
        "attention_bias": followed("biases of q, k, v and o", False),
        "mlp_bias": NO_BIAS,
        "sliding_window": FULL["sliding_window"],
        **{
            name: followed(f"{note}; null: 1", 1.0, nullable=True)
            for name, note in (
                ("embedding_multiplier", "multiplies the embeddings"),
                ("attention_multiplier", "multiplies the scores of attention"),
                ("residual_multiplier", "multiplies the outputs of attention and MLP"),
                ("logits_scaling", "divides the logits"),
            )
        },
        **dict.fromkeys(_MAMBA, no_effect("of Mamba layers, which are not supported")),
        "init_method": no_effect("training only", private=True),
        "normalization_function": must_equal("rmsnorm", note="RMS norms", private=True),
    },
    "olmo2": {
        **COMMON_KEYS,
        **sizes(50304, 4096, 11008, 32, 32, None, 2048),
        **rope_keys(10000.0),
        **llama_keys(eps=("rms_norm_eps", 1e-5)),
        **FULL,
        "attention_bias": followed("biases of q, k, v and o", False),
        "mlp_bias": NO_BIAS,
    },
    "olmo3": {
        **COMMON_KEYS,
        **sizes(50304, 4096, 11008, 32, 32, None, 2048),
        **rope_keys(500000.0),
        **llama_keys(eps=("rms_norm_eps", 1e-5)),
        **_NESTED_ROPE,
        "rope_theta": theta_key(
            "theta of full_attention",
            500000.0,
            "; checked: 500000 or null where the record of sliding_attention has none",
        ),
        "attention_bias": followed("biases of q, k, v and o", False),
        "mlp_bias": NO_BIAS,
        "sliding_window": followed("window of the sliding_attention layers", 4096, nullable=True),
        "layer_types": followed(
            "window or none, layer by layer; absent: every 4th layer is full_attention"
        ),
    },
    "seed_oss": {
        **COMMON_KEYS,
        **sizes(155136, 4096, 27648, 64, 80, 8, 524288),
        **rope_keys(10000.0),
        **llama_keys(followed("size of a head; null: hidden_size / heads", 128, nullable=True)),
        **FULL,
        "attention_bias": followed("biases of q, k and v", True),
        "attention_out_bias": followed("bias of o", False),
        "mlp_bias": followed("biases of the MLP", False),
        "residual_dropout": TRAINING,
    },
    "hunyuan_v1_dense": {
        **COMMON_KEYS,
        **sizes(290943, 4096, 11008, 32, 32, None, 2048),
        **rope_keys(10000.0),
        **llama_keys(eps=("rms_norm_eps", 1e-5)),
        **FULL,
        "attention_bias": followed("biases of q, k, v and o", False),
        "mlp_bias": NO_BIAS,
        "eod_token_id": no_effect("eos_token_id decides"),
        "use_qk_norm": must_equal(True, note="heads are normed, as in transformers", private=True),
        "use_cla": must_equal(False, note="every layer has its own keys", private=True),
        "use_rotary_pos_emb": must_equal(True, note="positions are rotary", private=True),
        "norm_type": must_equal("rms", note="the norms are RMS norms", private=True),
        **dict.fromkeys(_UNUSED_BY_HUNYUAN, no_effect("not used by this family", private=True)),
    },
    "ministral3": {
        **COMMON_KEYS,
        **sizes(131072, 4096, 14336, 34, 32, 8, 262144),
        **rope_keys(10000.0),
        **llama_keys(followed("size of a head", 128), eps=("rms_norm_eps", 1e-5)),
        "rope_parameters": followed(
            "rotary positions; see the rope table. Absent: yarn, factor 16, trained length 16384, "
            "theta 1e6, llama_4_scaling_beta 0.1"
        ),
        "attention_bias": NO_BIAS,
        "mlp_bias": NO_BIAS,
        "sliding_window": followed("window of every layer; null: none", nullable=True),
        "layer_types": WINDOW_TYPES,
    },
    "mistral3": {
        **COMMON_KEYS,
        "text_config": followed("the language model: see mistral and ministral3"),
        "vision_config": IMAGES,
        "tie_word_embeddings": followed("wins over text_config's value", True),
        "image_token_index": IMAGES,
        "image_token_id": alias("image_token_index"),
        "projector_hidden_act": IMAGES,
        "vision_feature_layer": IMAGES,
        "multimodal_projector_bias": IMAGES,
        "spatial_merge_size": IMAGES,
    },
    "exaone4": {
        **COMMON_KEYS,
        **sizes(102400, 4096, 16384, 32, 32, 32, 2048),
        **rope_keys(10000.0),
        **llama_keys(eps=("rms_norm_eps", 1e-5)),
        "attention_bias": NO_BIAS,
        "mlp_bias": NO_BIAS,
        "sliding_window": followed(
            "window of the sliding_attention layers; full layers then have no rotary positions",
            4096,
            nullable=True,
        ),
        "sliding_window_pattern": followed(
            "where layer_types is absent: every N-th layer is full_attention; or a string of L "
            "(sliding) and G (full), repeated",
            4,
            nullable=True,
        ),
        "layer_types": _LAYER_WINDOWS,
    },
    "glm4": {
        **COMMON_KEYS,
        **sizes(151552, 4096, 13696, 40, 32, 2, 131072),
        **rope_keys(10000.0, fraction=0.5),
        **llama_keys(followed("size of a head", 128), eps=("rms_norm_eps", 1.5625e-07)),
        **FULL,
        "attention_bias": followed("biases of q, k and v", True),
        "mlp_bias": NO_BIAS,
    },
    "ernie4_5": {
        **COMMON_KEYS,
        **sizes(103424, 1024, 3072, 18, 16, 2, 131072),
        **rope_keys(500000.0),
        **llama_keys(
            followed("size of a head; null: hidden_size / heads", 128, nullable=True),
            eps=("rms_norm_eps", 1e-5),
            tied=True,
        ),
        **FULL,
        "use_bias": followed("biases of all matrices", False, nullable=True),
        "attention_bias": NO_BIAS,
        "mlp_bias": NO_BIAS,
    },
    "arcee": {
        **COMMON_KEYS,
        **sizes(32000, 2560, 18432, 32, 32, None, 4096),
        **rope_keys(10000.0),
        **llama_keys(eps=("rms_norm_eps", 1e-5), act="relu2"),
        **BIASES,
        "sliding_window": FULL["sliding_window"],
        "layer_types": FULL_ONLY,
    },
}
