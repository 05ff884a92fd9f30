"""Base configs and values for the random config mutations of multi-modal wrappers.

The language model's config is in `text_config`; the name of such a key here is `text_config/KEY`.
The image encoder is built too, as small as possible, and never run.
"""

from __future__ import annotations

from typing import Any

import registry_cases
from parity_case import ABSENT
from special_values import Values

_TEXT = {
    "gemma3-wrapper": "gemma3",
    "gemma4": "gemma4_text",
    "mistral3": "ministral3",
    "mistral3-mistral": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
}
_OUTER: dict[str, dict[str, Any]] = {
    "gemma3-wrapper": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
    },
    "gemma4": {"model_type": "gemma4", "vision_config": None, "audio_config": None},
    "mistral3": {"model_type": "mistral3", "vision_config": {"model_type": "pixtral", **_VISION}},
    "mistral3-mistral": {
        "model_type": "mistral3",
        "vision_config": {"model_type": "pixtral", **_VISION},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "vision_config": {"model_type": "qwen3_vl_vision", **registry_cases.VISION},
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "vision_config": {"model_type": "qwen3_5_vision", **_QWEN_VISION},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "vision_config": {"model_type": "qwen3_5_moe_vision", **_QWEN_VISION},
    },
}


def bases(texts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        family: {**outer, "text_config": texts[_TEXT[family]]} for family, outer in _OUTER.items()
    }


def values(texts: dict[str, Values], common: Values) -> dict[str, Values]:
    """`texts`: values of the language models; `common`: keys of every config."""
    outer: Values = {
        **common,
        "tie_word_embeddings": (True, False, ABSENT),
        "image_token_id": (5, 95),
        "image_token_index": (5, 95),
        "video_token_id": (6,),
        "spatial_merge_size": (1, 2),
        "projector_hidden_act": ("relu",),
        "vocab_size": (96, 100),
        "hidden_size": (32, 48),
        "rope_theta": (100.0,),
        "sliding_window": (3,),
        "rope_scaling": ({"rope_type": "linear", "factor": 2.0},),
    }
    result: dict[str, Values] = {}
    for family, text in _TEXT.items():
        inner = {f"text_config/{key}": choices for key, choices in texts[text].items()}
        result[family] = {**outer, **inner}
        # Without a model_type mistral3 reads a mistral config: the error then names the key of
        # ministral3's rope record, which the mutation did not change.
        if family != "mistral3":
            result[family]["text_config/model_type"] = (ABSENT, "llama")
    return result
