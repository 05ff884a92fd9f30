"""Key tables of config.json, one per `model_type` (see keys.py for the three treatments).

Defaults and the set of keys are those of transformers' config classes;
tests/parity/test_config_keys.py compares them. Keys marked private occur in published configs but
in no config class. docs/config-keys.md is generated from these tables by `make config-keys`.
"""

from __future__ import annotations

from typing import Any

from verbatim.model.keys import Key, Table, alias, followed, must_equal, no_effect

_GENERATION = no_effect("default of a generation setting; requests set their own")
_METADATA = no_effect("metadata")
_TRAINING = no_effect("training only")
_OUTPUT = no_effect("chooses what a call returns, not the logits")
_KERNEL = no_effect("choice of kernel in transformers")
_LABELS = no_effect("classification heads only")

_GENERATION_KEYS = [
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
]

# Keys that any config may hold: fields of transformers' base class and of its older versions.
COMMON_KEYS: dict[str, Key] = {
    **dict.fromkeys(_GENERATION_KEYS, _GENERATION),
    "model_type": followed("chooses the family"),
    "eos_token_id": followed("stop tokens, together with those of generation_config.json"),
    "bos_token_id": no_effect("the tokenizer's own setting decides"),
    "pad_token_id": no_effect("sequences are not padded"),
    "sep_token_id": no_effect("not used in a causal model"),
    "decoder_start_token_id": no_effect("not used in a causal model"),
    "use_cache": no_effect("the KV cache is always used, and changes no logits"),
    "architectures": no_effect("the tensors decide which head the file has"),
    "dtype": no_effect("the tensors have their own types"),
    "torch_dtype": no_effect("the tensors have their own types"),
    "transformers_version": _METADATA,
    "name_or_path": _METADATA,
    "_name_or_path": _METADATA,
    "_commit_hash": _METADATA,
    "tokenizer_class": no_effect("read with the tokenizer"),
    "auto_map": no_effect("names code beside the model, which is never run"),
    "prefix": _METADATA,
    "task_specific_params": no_effect(
        "default of a generation setting; requests set their own", private=True
    ),
    "id2label": _LABELS,
    "label2id": _LABELS,
    "num_labels": _LABELS,
    "problem_type": _LABELS,
    "classifier_dropout": _LABELS,
    "hidden_dropout": _LABELS,
    "output_hidden_states": _OUTPUT,
    "output_attentions": _OUTPUT,
    "_output_attentions": _OUTPUT,
    "return_dict": _OUTPUT,
    "tie_last_hidden_states": _OUTPUT,
    "chunk_size_feed_forward": no_effect("splits the MLP into chunks, with equal results"),
    "attn_implementation": _KERNEL,
    "_attn_implementation": _KERNEL,
    "_attn_implementation_internal": _KERNEL,
    "experts_implementation": _KERNEL,
    "_experts_implementation": _KERNEL,
    "_experts_implementation_internal": _KERNEL,
    "distributed_config": _KERNEL,
    "cache_implementation": _KERNEL,
    "initializer_range": _TRAINING,
    "gradient_checkpointing": _TRAINING,
    "attention_dropout": _TRAINING,
    "pretraining_tp": no_effect(
        "splits matrix products, with equal results; unused by transformers 5"
    ),
    "is_decoder": no_effect("decoder-only families are decoders", private=True),
    "is_encoder_decoder": must_equal(False, note="there is no encoder"),
    "add_cross_attention": must_equal(False, note="there is no encoder to attend to"),
    "is_causal": must_equal(True, note="attention is causal; encoders are not supported"),
    "use_bidirectional_attention": must_equal(
        False, note="attention is causal; encoders are not supported"
    ),
    "per_layer_config": must_equal({}, note="all layers share the config's numbers"),
    "quantization_config": must_equal(
        note="an object is followed when the weights are read; nothing else has a meaning"
    ),
    "fusion_config": must_equal(note="the weights are read under their usual names"),
    "transformers_weights": must_equal(note="the weights are read from the usual files"),
    # written by older versions of transformers and by tools; found in many published configs
    "finetuning_task": no_effect("metadata", private=True),
    "output_past": no_effect("chooses what a call returns, not the logits", private=True),
    "torchscript": no_effect("export only", private=True),
    "use_bfloat16": no_effect("TensorFlow only", private=True),
    "tf_legacy_loss": no_effect("TensorFlow only", private=True),
    "tie_encoder_decoder": no_effect("there is no encoder", private=True),
    "cross_attention_hidden_size": must_equal(
        note="there is no encoder to attend to", private=True
    ),
    "pruned_heads": must_equal({}, note="all heads of all layers are used", private=True),
    "compression_config": must_equal(note="the weights are read as they are", private=True),
    "is_llama_config": no_effect("metadata", private=True),
    "max_sequence_length": no_effect("`max_position_embeddings` decides", private=True),
    "model_max_length": no_effect("`max_position_embeddings` decides", private=True),
    "seq_length": no_effect("`max_position_embeddings` decides", private=True),
    "_attn_implementation_autoset": no_effect("choice of kernel in transformers", private=True),
    "_flash_attn_2_enabled": no_effect("choice of kernel in transformers", private=True),
    "use_flash_attn": no_effect("choice of kernel", private=True),
    "_from_model_config": no_effect("metadata", private=True),
    "_num_labels": no_effect("classification heads only", private=True),
    "_pre_quantization_dtype": no_effect("metadata", private=True),
    "unsloth_fixed": no_effect("metadata", private=True),
    "unsloth_version": no_effect("metadata", private=True),
    "transformers.js_config": no_effect("metadata", private=True),
    "bos_token": no_effect("the tokenizer's own setting decides", private=True),
    "eos_token": no_effect("the tokenizer's own setting decides", private=True),
    "pad_token": no_effect("sequences are not padded", private=True),
    "rope_interleaved": must_equal(
        False, note="rotary halves, not interleaved pairs", private=True
    ),
    "use_mrope": must_equal(False, note="positions are one number per token", private=True),
    "qk_layernorm": must_equal(False, note="no layer norm of queries and keys", private=True),
    "lm_head_bias": must_equal(False, note="the head has no bias", private=True),
    "attn_pdrop": no_effect("training only"),
    "embd_pdrop": no_effect("training only"),
    "resid_pdrop": no_effect("training only"),
}


def _sizes(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv: int | None, context: int
) -> dict[str, Key]:
    return {
        "vocab_size": followed("rows of the embedding", vocab),
        "hidden_size": followed("width of the model", hidden),
        "intermediate_size": followed("inner width of the MLP", mlp),
        "num_hidden_layers": followed("layers", layers),
        "num_attention_heads": followed("query heads", heads),
        "num_key_value_heads": followed(
            "key and value heads; null: as many as query heads", kv, nullable=True
        ),
        "max_position_embeddings": followed(
            "context, and the trained length of rope scalings", context
        ),
    }


def _rope(theta: float, *, partial: bool = False, original: int | None = None) -> dict[str, Key]:
    return {
        "rope_parameters": followed("rotary positions; see the rope table"),
        "rope_scaling": followed(
            "older name of `rope_parameters`; replaces it where both are present"
        ),
        "rope_theta": followed("base of the frequencies, where the rope record has none", theta),
        "partial_rotary_factor": followed(
            "rotated fraction of a head, where the rope record has none"
        )
        if partial
        else must_equal(1.0, 1, note="whole heads are rotated, as in transformers"),
        "original_max_position_embeddings": followed("wins over the rope record's value", original),
    }


def _llama(head_dim: Key | None = None) -> dict[str, Key]:
    return {
        "rms_norm_eps": followed("epsilon of the norms", 1e-6),
        "hidden_act": followed("activation of the MLP", "silu"),
        "head_dim": head_dim or followed("size of a head; null: hidden_size / num_attention_heads"),
        "tie_word_embeddings": followed(
            "the head is the embedding, unless the file has another head", False
        ),
    }


_FULL_ONLY = followed("checked: every layer is full_attention")
_WINDOW_TYPES = followed(
    "checked: sliding_attention in every layer with a window, else full_attention"
)
_NO_BIAS = must_equal(False, note="no biases in this family, as in transformers")
_NO_WINDOW = must_equal(note="no sliding window in this family, as in transformers")

_ROUTER = {
    "output_router_logits": _OUTPUT,
    "router_aux_loss_coef": _TRAINING,
    "router_jitter_noise": _TRAINING,
}
_QWEN_WINDOWS = {
    "use_sliding_window": followed("turns the windows on", False),
    "sliding_window": followed(
        "window of the layers from max_window_layers on; null: none", 4096, nullable=True
    ),
    "max_window_layers": followed("first layer with a window", 28),
    "layer_types": followed("window or none, layer by layer"),
}
_GEMMA: dict[str, Key] = {
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
    "mlp_bias": _NO_BIAS,
    "query_pre_attn_scalar": followed("queries are divided by its square root", 256),
    "sliding_window": followed("window of the sliding_attention layers", 4096, nullable=True),
    "layer_types": followed("window or none, layer by layer"),
    "sliding_window_size": no_effect("older name; `sliding_window` decides", private=True),
}

CONFIG_KEYS: dict[str, Table] = {
    "llama": {
        **COMMON_KEYS,
        **_sizes(32000, 4096, 11008, 32, 32, None, 2048),
        **_rope(10000.0),
        **_llama(),
        "attention_bias": followed("biases of q, k, v and o", False),
        "mlp_bias": followed("biases of the MLP", False),
        "sliding_window": _NO_WINDOW,
        "layer_types": _FULL_ONLY,
    },
    "mistral": {
        **COMMON_KEYS,
        **_sizes(32000, 4096, 14336, 32, 32, 8, 131072),
        **_rope(10000.0),
        **_llama(),
        "attention_bias": _NO_BIAS,
        "mlp_bias": _NO_BIAS,
        "sliding_window": followed("window of every layer; null: none", 4096, nullable=True),
        "layer_types": _WINDOW_TYPES,
    },
    "qwen2": {
        **COMMON_KEYS,
        **_sizes(151936, 4096, 22016, 32, 32, 32, 32768),
        **_rope(10000.0),
        **_llama(),
        **_QWEN_WINDOWS,
        "attention_bias": no_effect("q, k, v have biases always, o never, as in transformers"),
        "mlp_bias": _NO_BIAS,
    },
    "qwen3": {
        **COMMON_KEYS,
        **_sizes(151936, 4096, 22016, 32, 32, 32, 32768),
        **_rope(10000.0),
        **_llama(followed("size of a head", 128)),
        **_QWEN_WINDOWS,
        "attention_bias": followed("biases of q, k, v and o", False),
        "mlp_bias": _NO_BIAS,
    },
    "qwen3_moe": {
        **COMMON_KEYS,
        **_ROUTER,
        **_sizes(151936, 2048, 6144, 24, 32, 4, 32768),
        **_rope(10000.0),
        **_llama(),
        "attention_bias": followed("biases of q, k, v and o", False),
        "mlp_bias": _NO_BIAS,
        "use_sliding_window": followed("turns the window on, in every layer", False),
        "sliding_window": followed(
            "window of every layer where use_sliding_window; null: none", 4096, nullable=True
        ),
        "max_window_layers": followed("checked: 0 where use_sliding_window; else without effect"),
        "layer_types": _WINDOW_TYPES,
        "num_experts": followed("experts of a layer", 128),
        "num_local_experts": alias("num_experts"),
        "num_experts_per_tok": followed("experts used per token", 8),
        "moe_intermediate_size": followed("inner width of an expert", 768),
        "norm_topk_prob": followed("weights of the chosen experts sum to 1", False),
        "decoder_sparse_step": followed(
            "layer period: every N-th layer is a mixture of experts", 1
        ),
        "mlp_only_layers": followed("layers with a dense MLP"),
    },
    "mixtral": {
        **COMMON_KEYS,
        **_ROUTER,
        **_sizes(32000, 4096, 14336, 32, 32, 8, 131072),
        **_rope(1e6),
        **_llama(),
        "rms_norm_eps": followed("epsilon of the norms", 1e-5),
        "attention_bias": _NO_BIAS,
        "mlp_bias": _NO_BIAS,
        "sliding_window": followed("window of every layer; null: none", nullable=True),
        "layer_types": _WINDOW_TYPES,
        "num_local_experts": followed("experts of a layer", 8),
        "num_experts": alias("num_local_experts"),
        "num_experts_per_tok": followed("experts used per token", 2),
    },
    "gemma2": {
        **COMMON_KEYS,
        **_sizes(256000, 2304, 9216, 26, 8, 4, 8192),
        **_rope(10000.0),
        **_GEMMA,
        "attn_logit_softcapping": followed(
            "cap of attention scores; null: none", 50.0, nullable=True
        ),
        "final_logit_softcapping": followed("cap of logits; null: none", 30.0, nullable=True),
    },
    "gemma3_text": {
        **COMMON_KEYS,
        **_sizes(262208, 2304, 9216, 26, 8, 4, 131072),
        **_rope(1e6),
        **_GEMMA,
        "rope_parameters": followed(
            "one rope record per layer type: full_attention, sliding_attention"
        ),
        "rope_scaling": followed("changes the record of full_attention"),
        "rope_theta": followed("theta of full_attention, where its record has none", 1e6),
        "rope_local_base_freq": followed(
            "theta of sliding_attention, where its record has none", 10000.0
        ),
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
        "text_config": followed("the language model: see gemma3_text"),
        "vision_config": no_effect("images are not read"),
        "tie_word_embeddings": followed("wins over text_config's value", True),
        "mm_tokens_per_image": no_effect("images are not read"),
        "boi_token_index": no_effect("images are not read"),
        "eoi_token_index": no_effect("images are not read"),
        "image_token_index": no_effect("images are not read"),
        "boi_token_id": no_effect("images are not read"),
        "eoi_token_id": no_effect("images are not read"),
        "image_token_id": no_effect("images are not read"),
    },
    "phi3": {
        **COMMON_KEYS,
        **_sizes(32064, 3072, 8192, 32, 32, None, 4096),
        **_rope(10000.0, partial=True, original=4096),
        **_llama(),
        "rms_norm_eps": followed("epsilon of the norms", 1e-5),
        "attention_bias": _NO_BIAS,
        "mlp_bias": _NO_BIAS,
        "sliding_window": followed("window of every layer; null: none", nullable=True),
        "layer_types": _WINDOW_TYPES,
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
        "layer_types": _FULL_ONLY,
        "sliding_window": _NO_WINDOW,
        "summary_type": _LABELS,
        "summary_use_proj": _LABELS,
        "summary_activation": _LABELS,
        "summary_proj_to_labels": _LABELS,
        "summary_first_dropout": _LABELS,
        "n_ctx": no_effect("older name; `n_positions` decides", private=True),
    },
}

# --------------------------------------------------------------------------------------- rope

_ORIGINAL = {"original_max_position_embeddings": followed("trained length")}
_FACTOR = {"factor": followed("scale")}
_ATTENTION = {"attention_factor": followed("multiplies cosines and sines")}
_ANY: dict[str, Key] = {
    "rope_type": followed("kind of scaling", "default"),
    "type": followed("older name of `rope_type`, which wins"),
    "rope_theta": followed("base of the frequencies"),
    "partial_rotary_factor": followed("rotated fraction of a head (phi3); other families need 1.0"),
    "mrope_section": must_equal(note="positions are one number per token"),
    "finetuned": no_effect("metadata", private=True),
}

# Keys of a rope record by rope_type. A key of another rope_type has no effect; a warning names it.
ROPE_KEYS: dict[str, Table] = {
    "default": _ANY,
    "linear": {**_ANY, **_FACTOR},
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
        **_FACTOR,
        **_ORIGINAL,
        **_ATTENTION,
        "beta_fast": followed("start of the blended band", 32.0),
        "beta_slow": followed("end of the blended band", 1.0),
        "mscale": followed("numerator of the attention factor"),
        "mscale_all_dim": followed("denominator of the attention factor"),
        "truncate": followed("round the band to whole pairs", True),
    },
    "longrope": {
        **_ANY,
        **_FACTOR,
        **_ORIGINAL,
        **_ATTENTION,
        "short_factor": followed(
            "divisors where the engine's context is at most the trained length"
        ),
        "long_factor": followed("divisors where the engine's context is longer"),
    },
}


def all_rope_keys() -> dict[str, Any]:
    return {name: key for table in ROPE_KEYS.values() for name, key in table.items()}
