"""Key tables of config.json: Gemma 4."""

from __future__ import annotations

from verbatim.model.families.config_key_parts import COMMON_KEYS, IMAGES, sizes
from verbatim.model.keys import Key, Table, followed, must_equal, no_effect

_RECORD = must_equal(note="belongs in the rope record of a layer type")
_AUDIO = no_effect("audio is not read")
_TEXT: dict[str, Key] = {
    **COMMON_KEYS,
    **sizes(262144, 2304, 9216, 30, 8, 4, 131072),
    "num_key_value_heads": followed("key and value heads of the sliding layers", 4),
    "head_dim": followed("size of a head of the sliding layers", 256),
    "global_head_dim": followed(
        "size of a head of the full layers, where per_layer_config is absent", 512
    ),
    "num_global_key_value_heads": followed(
        "key heads of the full layers with attention_k_eq_v, where per_layer_config is absent"
    ),
    "per_layer_config": followed('head_dim and num_key_value_heads by layer number ("5" or "05")'),
    "attention_k_eq_v": followed("the values of full layers are their keys before norm", False),
    "num_kv_shared_layers": followed(
        "last layers, which read the keys and values of the last earlier layer of their type", 0
    ),
    "use_double_wide_mlp": followed("the MLP of those layers is twice as wide", False),
    "hidden_size_per_layer_input": followed("width of each layer's own input; 0: none", 256),
    "vocab_size_per_layer_input": followed("checked: equal to vocab_size", 262144),
    "hidden_activation": followed("activation of the MLP", "gelu_pytorch_tanh"),
    "hidden_act": no_effect("`hidden_activation` decides, as in transformers"),
    "rms_norm_eps": followed("epsilon of the norms", 1e-6),
    "tie_word_embeddings": followed(
        "the head is the embedding, unless the file has another head", True
    ),
    "rope_parameters": followed(
        "one rope record per layer type: full_attention, sliding_attention"
    ),
    "rope_theta": _RECORD,
    "rope_scaling": _RECORD,
    "partial_rotary_factor": _RECORD,
    "original_max_position_embeddings": _RECORD,
    "attention_bias": followed("biases of q, k, v and o", False),
    "mlp_bias": must_equal(False, note="no biases in this family, as in transformers"),
    "sliding_window": followed("window of the sliding layers", 512),
    "layer_types": followed("window or none, layer by layer; absent: every sixth is full"),
    "final_logit_softcapping": followed("cap of logits; null: none", nullable=True),
    "use_bidirectional_attention": must_equal("vision", note="text attends to what is before it"),
    "enable_moe_block": followed("every layer has experts beside its MLP", False),
    "num_experts": followed("experts of a layer, with enable_moe_block"),
    "top_k_experts": followed("experts used per token, with enable_moe_block"),
    "moe_intermediate_size": followed("inner width of an expert, with enable_moe_block"),
}
GEMMA4_KEYS: dict[str, Table] = {
    "gemma4_text": _TEXT,
    "gemma4": {
        **COMMON_KEYS,
        "text_config": followed("the language model: see gemma4_text"),
        "vision_config": IMAGES,
        "audio_config": _AUDIO,
        "tie_word_embeddings": followed("wins over text_config's value", True),
        "boi_token_id": IMAGES,
        "eoi_token_id": IMAGES,
        "image_token_id": IMAGES,
        "video_token_id": IMAGES,
        "vision_soft_tokens_per_image": no_effect("images are not read", private=True),
        "boa_token_id": _AUDIO,
        "eoa_token_id": no_effect("audio is not read", private=True),
        "eoa_token_index": _AUDIO,
        "audio_token_id": _AUDIO,
    },
}
