"""Rows of the key tables of config.json: keys of every family, and groups that families share.

A row says what the engine does with a key. The default of an absent key, and whether null is a
value of its own, come from transformers' config classes (defaults.json), unless the row says so.
"""

from __future__ import annotations

from verbatim.model.families.common.class_defaults import GENERATION_KEYS
from verbatim.model.keys import Key, Table, followed, must_equal, no_effect

_GENERATION = no_effect("default of a generation setting; requests set their own")
TRAINING = no_effect("training only")
OUTPUT = no_effect("chooses what a call returns, not the logits")
LABELS = no_effect("classification heads only")

# Keys that cannot change logits, by the reason. Any config may hold them: they are fields of
# transformers' base class and of its older versions, or are written by tools.
_WITHOUT_EFFECT = {
    "metadata": "transformers_version name_or_path _name_or_path _commit_hash prefix"
    " finetuning_task is_llama_config _from_model_config _pre_quantization_dtype unsloth_fixed"
    " unsloth_version transformers.js_config",
    "the tokenizer's own setting decides": "bos_token_id bos_token eos_token",
    "sequences are not padded": "pad_token_id pad_token",
    "not used in a causal model": "sep_token_id decoder_start_token_id",
    "the KV cache is always used, and changes no logits": "use_cache",
    "the tensors decide which head the file has": "architectures",
    "the tensors have their own types": "dtype torch_dtype",
    "read with the tokenizer": "tokenizer_class",
    "names code beside the model, which is never run": "auto_map",
    LABELS.note: "id2label label2id num_labels _num_labels problem_type classifier_dropout"
    " hidden_dropout",
    OUTPUT.note: "output_hidden_states output_attentions _output_attentions return_dict"
    " tie_last_hidden_states output_past",
    "splits the MLP into chunks, with equal results": "chunk_size_feed_forward",
    "choice of kernel in transformers": "attn_implementation _attn_implementation"
    " _attn_implementation_internal experts_implementation _experts_implementation"
    " _experts_implementation_internal distributed_config cache_implementation"
    " _attn_implementation_autoset _flash_attn_2_enabled",
    "choice of kernel": "use_flash_attn",
    TRAINING.note: "initializer_range gradient_checkpointing attention_dropout attn_pdrop"
    " embd_pdrop resid_pdrop",
    "splits matrix products, with equal results; unused by transformers 5": "pretraining_tp",
    "decoder-only families are decoders": "is_decoder",
    "export only": "torchscript",
    "TensorFlow only": "use_bfloat16 tf_legacy_loss",
    "there is no encoder": "tie_encoder_decoder",
    "`max_position_embeddings` decides": "max_sequence_length model_max_length seq_length",
}
# Keys that any config may hold.
COMMON_KEYS: dict[str, Key] = {
    **dict.fromkeys((*GENERATION_KEYS, "task_specific_params"), _GENERATION),
    **{name: no_effect(note) for note, names in _WITHOUT_EFFECT.items() for name in names.split()},
    "model_type": followed("chooses the family"),
    "eos_token_id": followed("stop tokens, together with those of generation_config.json"),
    "is_encoder_decoder": must_equal(False, note="there is no encoder"),
    "add_cross_attention": must_equal(False, note="there is no encoder to attend to"),
    "cross_attention_hidden_size": must_equal(note="there is no encoder to attend to"),
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
    "compression_config": must_equal(note="the weights are read as they are"),
    "pruned_heads": must_equal({}, note="all heads of all layers are used"),
    "rope_interleaved": must_equal(False, note="rotary halves, not interleaved pairs"),
    "use_mrope": must_equal(False, note="positions are one number per token"),
    "qk_layernorm": must_equal(False, note="no layer norm of queries and keys"),
    "lm_head_bias": must_equal(False, note="the head has no bias"),
}


KV_HEADS = followed("key and value heads; null: as many as query heads", nullable=True)
SIZES: Table = {
    "vocab_size": followed("rows of the embedding"),
    "hidden_size": followed("width of the model"),
    "intermediate_size": followed("inner width of the MLP"),
    "num_hidden_layers": followed("layers"),
    "num_attention_heads": followed("query heads"),
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": followed("context, and the trained length of rope scalings"),
}


def theta_key(what: str, default: float | None = None, more: str = "") -> Key:
    note = f"{what}, where the rope record has none; null: the record must have it{more}"
    return followed(note, default, nullable=True)


ROPE: Table = {
    "rope_parameters": followed("rotary positions; see the rope table"),
    "rope_scaling": followed("older name of `rope_parameters`; replaces it where both are present"),
    "rope_theta": theta_key("base of the frequencies"),
    "partial_rotary_factor": must_equal(1.0, 1, note="whole heads are rotated, as in transformers"),
    "original_max_position_embeddings": followed("wins over the rope record's value"),
}
PARTIAL: Table = {
    "partial_rotary_factor": followed("rotated fraction of a head, where the rope record has none")
}
# One rope record per layer type (gemma3, gemma4, olmo3).
ROPES = followed("one rope record per layer type: full_attention, sliding_attention")
NESTED_ROPE: Table = {
    "rope_parameters": ROPES,
    "rope_scaling": followed("changes the record of full_attention"),
    "original_max_position_embeddings": must_equal(note="belongs in the rope record"),
}
TIED = followed("the head is the embedding, unless the file has another head", nullable=False)
ROTARY_HEAD_DIM = followed("size of a head; null: hidden_size / num_attention_heads")
HEAD_DIM = followed("size of a head")
HEAD_DIM_OR_NULL = followed("size of a head; null: hidden_size / heads")
FIXED_HEAD_DIM = must_equal(note="it is hidden_size / num_attention_heads, as in transformers")


def rotary_keys(*parts: Table, eps: str = "rms_norm_eps") -> Table:
    """The keys of a family with rotary positions: llama's, then its own. `eps`: its name of the
    norms' epsilon."""
    table: dict[str, Key] = {
        **COMMON_KEYS,
        **SIZES,
        **ROPE,
        eps: followed("epsilon of the norms"),
        "hidden_act": followed("activation of the MLP"),
        "head_dim": ROTARY_HEAD_DIM,
        "tie_word_embeddings": TIED,
    }
    for part in parts:
        table |= part
    return table


FULL_ONLY = followed("checked: every layer is full_attention")
WINDOW_TYPES = followed(
    "checked: sliding_attention in every layer with a window, else full_attention"
)
LAYER_WINDOWS = followed("window or none, layer by layer")
PERIOD = "layer period: every N-th layer is full attention, where layer_types is absent"
SLIDING = followed("window of the sliding_attention layers")
NO_BIAS = must_equal(False, note="no biases in this family, as in transformers")
NO_WINDOW = must_equal(note="no sliding window in this family, as in transformers")
ATTENTION_BIAS = followed("biases of q, k, v and o")
BIASES: Table = {"attention_bias": ATTENTION_BIAS, "mlp_bias": followed("biases of the MLP")}
NO_BIASES: Table = {"attention_bias": NO_BIAS, "mlp_bias": NO_BIAS}
ATTENTION_BIASES: Table = {"attention_bias": ATTENTION_BIAS, "mlp_bias": NO_BIAS}
FULL: Table = {"sliding_window": NO_WINDOW, "layer_types": FULL_ONLY}
ONE_WINDOW: Table = {
    "sliding_window": followed("window of every layer; null: none", nullable=True),
    "layer_types": WINDOW_TYPES,
}
QWEN_WINDOWS: Table = {
    "use_sliding_window": followed("turns the windows on"),
    "sliding_window": followed("window of the layers from max_window_layers on; null: none"),
    "max_window_layers": followed("first layer with a window"),
    "layer_types": LAYER_WINDOWS,
}
IMAGES = no_effect("images are not read")
ROUTER: Table = {
    "output_router_logits": OUTPUT,
    "router_aux_loss_coef": TRAINING,
    "router_jitter_noise": TRAINING,
}
EXPERTS = followed("experts of a layer")
EXPERTS_USED = followed("experts used per token")
EXPERT_MLP = followed("inner width of an expert")
RENORMALISED = followed("weights of the chosen experts sum to 1")
SPARSE_STEP = followed("layer period: every N-th layer is a mixture of experts")
DENSE_LAYERS = followed("layers with a dense MLP")
EXPERTS_SCALE = followed("multiplies the weights of the chosen experts")
PARALLEL = "attention and MLP read the same residual"


def mask_token(default: int) -> Key:
    return followed("token of an undecided position", default, private=True)


def wrapper_keys(text: str, *images: str, more: Table | None = None) -> Table:
    """Keys of a multi-modal model, of which only the language model is used. `images`: keys of its
    other parts."""
    return {
        **COMMON_KEYS,
        "text_config": followed(f"the language model: see {text}"),
        "vision_config": IMAGES,
        "tie_word_embeddings": followed("wins over text_config's value", nullable=False),
        **dict.fromkeys(images, IMAGES),
        **(more or {}),
    }
