"""Key tables of config.json, one per `model_type` (see keys.py for the three treatments).

Defaults and the set of keys are those of transformers' config classes;
tests/parity/test_config_keys.py compares them. Keys marked private occur in published configs but
in no config class. `make docs` makes docs/config-keys.md from these tables.
"""

from __future__ import annotations

from typing import Any

from verbatim.model.families.config_key_parts import (
    COMMON_KEYS,
    FULL_ONLY,
    IMAGES,
    LABELS,
    NO_BIAS,
    NO_WINDOW,
    ROUTER,
    WINDOW_TYPES,
    llama_keys,
    rope_keys,
    sizes,
    theta_key,
)
from verbatim.model.families.config_keys_dense import DENSE_KEYS
from verbatim.model.families.config_keys_gemma4 import GEMMA4_KEYS
from verbatim.model.families.config_keys_other import OTHER_KEYS
from verbatim.model.families.config_keys_recurrent import RECURRENT_KEYS
from verbatim.model.keys import Key, Table, alias, followed, must_equal, no_effect

QWEN_WINDOWS = {
    "use_sliding_window": followed("turns the windows on", False),
    "sliding_window": followed(
        "window of the layers from max_window_layers on; null: none", 4096, nullable=True
    ),
    "max_window_layers": followed("first layer with a window", 28),
    "layer_types": followed("window or none, layer by layer"),
}
GEMMA: dict[str, Key] = {
    "rms_norm_eps": followed("epsilon of the norms", 1e-6),
    "hidden_activation": followed("activation of the MLP", "gelu_pytorch_tanh"),
    "hidden_act": no_effect(
        "`hidden_activation` decides, also where it is absent, as in transformers"
    ),
    "head_dim": followed("size of a head", 256),
    "tie_word_embeddings": followed(
        "the head is the embedding, unless the file has another head", True
    ),
    "attention_bias": followed("biases of q, k, v and o", False),
    "mlp_bias": NO_BIAS,
    "query_pre_attn_scalar": followed("queries are divided by its square root", 256),
    "sliding_window": followed("window of the sliding_attention layers", 4096, nullable=True),
    "layer_types": followed("window or none, layer by layer"),
    "sliding_window_size": no_effect("older name; `sliding_window` decides", private=True),
}

CONFIG_KEYS: dict[str, Table] = {
    "llama": {
        **COMMON_KEYS,
        **sizes(32000, 4096, 11008, 32, 32, None, 2048),
        **rope_keys(10000.0),
        **llama_keys(),
        "attention_bias": followed("biases of q, k, v and o", False),
        "mlp_bias": followed("biases of the MLP", False),
        "sliding_window": NO_WINDOW,
        "layer_types": FULL_ONLY,
    },
    "mistral": {
        **COMMON_KEYS,
        **sizes(32000, 4096, 14336, 32, 32, 8, 131072),
        **rope_keys(10000.0),
        **llama_keys(),
        "attention_bias": NO_BIAS,
        "mlp_bias": NO_BIAS,
        "sliding_window": followed("window of every layer; null: none", 4096, nullable=True),
        "layer_types": WINDOW_TYPES,
    },
    "qwen2": {
        **COMMON_KEYS,
        **sizes(151936, 4096, 22016, 32, 32, 32, 32768),
        **rope_keys(10000.0),
        **llama_keys(),
        **QWEN_WINDOWS,
        "attention_bias": no_effect("q, k, v have biases always, o never, as in transformers"),
        "mlp_bias": NO_BIAS,
    },
    "qwen3": {
        **COMMON_KEYS,
        **sizes(151936, 4096, 22016, 32, 32, 32, 32768),
        **rope_keys(10000.0),
        **llama_keys(followed("size of a head", 128)),
        **QWEN_WINDOWS,
        "attention_bias": followed("biases of q, k, v and o", False),
        "mlp_bias": NO_BIAS,
    },
    "qwen3_moe": {
        **COMMON_KEYS,
        **ROUTER,
        **sizes(151936, 2048, 6144, 24, 32, 4, 32768),
        **rope_keys(10000.0),
        **llama_keys(),
        "attention_bias": followed("biases of q, k, v and o", False),
        "mlp_bias": NO_BIAS,
        "use_sliding_window": followed("turns the window on, in every layer", False),
        "sliding_window": followed(
            "window of every layer where use_sliding_window; null: none", 4096, nullable=True
        ),
        "max_window_layers": followed("checked: 0 where use_sliding_window; else without effect"),
        "layer_types": WINDOW_TYPES,
        "num_experts": followed("experts of a layer", 128),
        "num_local_experts": alias("num_experts"),
        "num_experts_per_tok": followed("experts used per token", 8),
        "moe_intermediate_size": followed("inner width of an expert", 768),
        "norm_topk_prob": followed("weights of the chosen experts sum to 1", False),
        "decoder_sparse_step": followed(
            "layer period: every N-th layer is a mixture of experts", 1
        ),
        "mlp_only_layers": followed("layers with a dense MLP"),
        "use_qk_norm": must_equal(True, note="heads are normed, as in transformers", private=True),
        "qkv_bias": must_equal(False, note="`attention_bias` decides", private=True),
        "shared_expert_intermediate_size": must_equal(0, note="no shared MLP", private=True),
    },
    "mixtral": {
        **COMMON_KEYS,
        **ROUTER,
        **sizes(32000, 4096, 14336, 32, 32, 8, 131072),
        **rope_keys(1e6),
        **llama_keys(),
        "rms_norm_eps": followed("epsilon of the norms", 1e-5),
        "attention_bias": NO_BIAS,
        "mlp_bias": NO_BIAS,
        "sliding_window": followed("window of every layer; null: none", nullable=True),
        "layer_types": WINDOW_TYPES,
        "num_local_experts": followed("experts of a layer", 8),
        "num_experts": alias("num_local_experts"),
        "num_experts_per_tok": followed("experts used per token", 2),
    },
    "gemma2": {
        **COMMON_KEYS,
        **sizes(256000, 2304, 9216, 26, 8, 4, 8192),
        **rope_keys(10000.0),
        **GEMMA,
        "attn_logit_softcapping": followed(
            "cap of attention scores; null: none", 50.0, nullable=True
        ),
        "final_logit_softcapping": followed("cap of logits; null: none", 30.0, nullable=True),
    },
    "gemma3_text": {
        **COMMON_KEYS,
        **sizes(262208, 2304, 9216, 26, 8, 4, 131072),
        **rope_keys(1e6),
        **GEMMA,
        "rope_parameters": followed(
            "one rope record per layer type: full_attention, sliding_attention"
        ),
        "rope_scaling": followed("changes the record of full_attention"),
        "rope_theta": theta_key("theta of full_attention", 1e6),
        "rope_local_base_freq": theta_key("theta of sliding_attention", 10000.0),
        "original_max_position_embeddings": must_equal(note="belongs in the rope record"),
        "sliding_window_pattern": followed(
            "layer period: every N-th layer is full attention, where layer_types is absent", 6
        ),
        "_sliding_window_pattern": followed(
            "checked: 6 where neither layer_types nor sliding_window_pattern is present"
        ),
        "attn_logit_softcapping": must_equal(note="transformers ignores it in gemma3"),
        "final_logit_softcapping": followed("cap of logits; null: none", nullable=True),
    },
    "gemma3": {
        **COMMON_KEYS,
        "text_config": followed(
            "the language model: see gemma3_text; its final_logit_softcapping must be null"
        ),
        "vision_config": IMAGES,
        "tie_word_embeddings": followed("wins over text_config's value", True),
        "mm_tokens_per_image": IMAGES,
        "boi_token_index": IMAGES,
        "eoi_token_index": IMAGES,
        "image_token_index": IMAGES,
        "boi_token_id": IMAGES,
        "eoi_token_id": IMAGES,
        "image_token_id": IMAGES,
    },
    "phi3": {
        **COMMON_KEYS,
        **sizes(32064, 3072, 8192, 32, 32, None, 4096),
        **rope_keys(10000.0, partial=True, original=4096),
        **llama_keys(),
        "full_attn_mod": must_equal(1, note="not used by transformers", private=True),
        "interpolate_factor": must_equal(1, note="not used by transformers", private=True),
        "rms_norm_eps": followed("epsilon of the norms", 1e-5),
        "attention_bias": NO_BIAS,
        "mlp_bias": NO_BIAS,
        "sliding_window": followed("window of every layer; null: none", nullable=True),
        "layer_types": WINDOW_TYPES,
    },
    "gpt2": {
        **COMMON_KEYS,
        "vocab_size": followed("rows of the embedding", 50257),
        "n_positions": followed("context", 1024),
        "n_embd": followed("width of the model", 768),
        "n_layer": followed("layers", 12),
        "n_head": followed("heads", 12),
        "n_inner": followed("inner width of the MLP; null: 4 n_embd"),
        "hidden_size": alias("n_embd"),
        "max_position_embeddings": alias("n_positions"),
        "num_attention_heads": alias("n_head"),
        "num_hidden_layers": alias("n_layer"),
        "activation_function": followed("activation of the MLP", "gelu_new"),
        "layer_norm_epsilon": followed("epsilon of the norms", 1e-5),
        "scale_attn_weights": followed("scores are divided by the root of a head's size", True),
        "scale_attn_by_inverse_layer_idx": must_equal(False, note="all layers scale scores alike"),
        "reorder_and_upcast_attn": no_effect(
            "order of a multiplication; attention is float32 here"
        ),
        "tie_word_embeddings": followed(
            "the head is the embedding, unless the file has another head", True
        ),
        "layer_types": FULL_ONLY,
        "sliding_window": NO_WINDOW,
        "summary_type": LABELS,
        "summary_use_proj": LABELS,
        "summary_activation": LABELS,
        "summary_proj_to_labels": LABELS,
        "summary_first_dropout": LABELS,
        "n_ctx": no_effect("older name; `n_positions` decides", private=True),
    },
    **DENSE_KEYS,
    **OTHER_KEYS,
    **RECURRENT_KEYS,
    **GEMMA4_KEYS,
}

# --------------------------------------------------------------------------------------- rope

_ORIGINAL = {"original_max_position_embeddings": followed("trained length")}
_FACTOR = {"factor": followed("scale")}
_RATIO = {
    "factor": followed("scale; null, as in longrope absent: ratio of the lengths", nullable=True)
}
_ATTENTION = {
    "attention_factor": followed("multiplies cosines and sines; null: as absent", nullable=True)
}
_ANY: dict[str, Key] = {
    "rope_type": followed("kind of scaling", "default"),
    "type": followed("older name of `rope_type`, which wins; null only beside it", nullable=True),
    "rope_theta": followed("base of the frequencies"),
    "partial_rotary_factor": followed(
        "rotated fraction of a head (phi3, glm4, glm4_moe, gpt_neox, stablelm, qwen3_next, "
        "qwen3_5_text, qwen3_5_moe_text); others need 1.0"
    ),
    "mrope_section": must_equal(note="positions are one number per token"),
    "finetuned": no_effect("metadata", private=True),
}

# Keys of a rope record by rope_type. A key of another rope_type has no effect; a warning names it.
ROPE_KEYS: dict[str, Table] = {
    "default": _ANY,
    "linear": {**_ANY, **_FACTOR},
    "proportional": {
        **_ANY,
        **_FACTOR,
        "partial_rotary_factor": followed(
            "fraction of a head's pairs that rotate; absent: the config's own, else 1"
        ),
    },
    "dynamic": {**_ANY, **_FACTOR},
    "llama3": {
        **_ANY,
        **_FACTOR,
        **_ORIGINAL,
        "low_freq_factor": followed("end of the blended band"),
        "high_freq_factor": followed("start of the blended band"),
    },
    "yarn": {
        **_ANY,
        **_RATIO,
        **_ORIGINAL,
        **_ATTENTION,
        "beta_fast": followed("start of the blended band; null: 32", 32.0, nullable=True),
        "beta_slow": followed("end of the blended band; null: 1", 1.0, nullable=True),
        "mscale": followed("numerator of the attention factor; null: as absent", nullable=True),
        "mscale_all_dim": followed(
            "denominator of the attention factor; null: as absent", nullable=True
        ),
        "truncate": followed("round the band to whole pairs", True),
    },
    "longrope": {
        **_ANY,
        **_RATIO,
        **_ORIGINAL,
        **_ATTENTION,
        "short_factor": followed(
            "divisors where the engine's context is at most the trained length"
        ),
        "long_factor": followed("divisors where the engine's context is longer"),
    },
}


# Keys of published checkpoints that no rope_type of transformers reads; a warning names them.
ROPE_UNREAD: Table = {"attn_factor": no_effect("`attention_factor` is the key")}

# Keys of rope records that one family has, with any rope_type.
ROPE_EXTRA: dict[str, Table] = {
    "ministral3": {
        "llama_4_scaling_beta": followed(
            "queries at position p are multiplied by 1 + beta ln(1 + floor(p / trained length))"
        ),
        "max_position_embeddings": no_effect("the config's own value decides"),
    },
    "qwen3_5_text": {
        "mrope_section": no_effect("text has one position per token in every section"),
        "mrope_interleaved": no_effect("text has one position per token in every section"),
    },
    "hunyuan_v1_dense": {
        "alpha": followed(
            "with dynamic: theta is multiplied by alpha ** (d / (d - 2)); null: as absent",
            nullable=True,
        ),
    },
}


def all_rope_keys() -> dict[str, Any]:
    keys = {name: key for table in ROPE_KEYS.values() for name, key in table.items()}
    return {**keys, **ROPE_UNREAD}
