"""Parts of the key tables of config.json: keys of every family, and groups that families share."""

from __future__ import annotations

from verbatim.model.keys import Key, followed, must_equal, no_effect

_GENERATION = no_effect("default of a generation setting; requests set their own")
_METADATA = no_effect("metadata")
TRAINING = no_effect("training only")
OUTPUT = no_effect("chooses what a call returns, not the logits")
_KERNEL = no_effect("choice of kernel in transformers")
LABELS = no_effect("classification heads only")

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
    "id2label": LABELS,
    "label2id": LABELS,
    "num_labels": LABELS,
    "problem_type": LABELS,
    "classifier_dropout": LABELS,
    "hidden_dropout": LABELS,
    "output_hidden_states": OUTPUT,
    "output_attentions": OUTPUT,
    "_output_attentions": OUTPUT,
    "return_dict": OUTPUT,
    "tie_last_hidden_states": OUTPUT,
    "chunk_size_feed_forward": no_effect("splits the MLP into chunks, with equal results"),
    "attn_implementation": _KERNEL,
    "_attn_implementation": _KERNEL,
    "_attn_implementation_internal": _KERNEL,
    "experts_implementation": _KERNEL,
    "_experts_implementation": _KERNEL,
    "_experts_implementation_internal": _KERNEL,
    "distributed_config": _KERNEL,
    "cache_implementation": _KERNEL,
    "initializer_range": TRAINING,
    "gradient_checkpointing": TRAINING,
    "attention_dropout": TRAINING,
    "pretraining_tp": no_effect(
        "splits matrix products, with equal results; unused by transformers 5"
    ),
    "is_decoder": no_effect("decoder-only families are decoders", private=True),
    "is_encoder_decoder": must_equal(False, note="there is no encoder"),
    "add_cross_attention": must_equal(False, note="there is no encoder to attend to"),
    "is_causal": must_equal(
        True, note="attention is causal; encoders are not supported", nullable=False
    ),
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


def sizes(
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


def theta_key(what: str, default: float, more: str = "") -> Key:
    note = f"{what}, where the rope record has none; null: the record must have it{more}"
    return followed(note, default, nullable=True)


def rope_keys(
    theta: float,
    *,
    partial: bool = False,
    fraction: float | None = None,
    original: int | None = None,
) -> dict[str, Key]:
    return {
        "rope_parameters": followed("rotary positions; see the rope table"),
        "rope_scaling": followed(
            "older name of `rope_parameters`; replaces it where both are present"
        ),
        "rope_theta": theta_key("base of the frequencies", theta),
        "partial_rotary_factor": followed(
            "rotated fraction of a head, where the rope record has none", fraction
        )
        if partial or fraction
        else must_equal(1.0, 1, note="whole heads are rotated, as in transformers"),
        "original_max_position_embeddings": followed("wins over the rope record's value", original),
    }


def llama_keys(
    head_dim: Key | None = None,
    *,
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    act: str = "silu",
    tied: bool = False,
) -> dict[str, Key]:
    return {
        eps[0]: followed("epsilon of the norms", eps[1]),
        "hidden_act": followed("activation of the MLP", act),
        "head_dim": head_dim or followed("size of a head; null: hidden_size / num_attention_heads"),
        "tie_word_embeddings": followed(
            "the head is the embedding, unless the file has another head", tied
        ),
    }


FULL_ONLY = followed("checked: every layer is full_attention")
WINDOW_TYPES = followed(
    "checked: sliding_attention in every layer with a window, else full_attention"
)
NO_BIAS = must_equal(False, note="no biases in this family, as in transformers")
NO_WINDOW = must_equal(note="no sliding window in this family, as in transformers")
BIASES = {
    "attention_bias": followed("biases of q, k, v and o", False),
    "mlp_bias": followed("biases of the MLP", False),
}
FULL = {"sliding_window": NO_WINDOW, "layer_types": FULL_ONLY}
IMAGES = no_effect("images are not read")
ROUTER = {
    "output_router_logits": OUTPUT,
    "router_aux_loss_coef": TRAINING,
    "router_jitter_noise": TRAINING,
}
