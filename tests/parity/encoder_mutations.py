"""Base configs and values for the random config mutations of encoders."""

from __future__ import annotations

from typing import Any

from parity_case import ABSENT
from special_values import Values

KIND = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "nomic_bert": "NomicBert",
}
_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
    "type_vocab_size": 2,
}
BASES: dict[str, dict[str, Any]] = {
    family: {"model_type": family, **_SIZES, "pad_token_id": 1 if "roberta" in family else 0}
    for family in KIND
}
_ROPE: Values = {
    "head_dim": (8, 16, 12, 7, ABSENT),
    "rope_theta": (100.0, 10000, ABSENT),
    "partial_rotary_factor": (0.5, 1.0),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 100.0},
        {"rope_type": "default"},
        {"rope_theta": 100.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
        {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        {"rope_type": None, "rope_theta": 100.0},
        {},
    ),
    "rope_scaling": ({"rope_type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}),
}


def values(common: Values, activations: tuple[str, ...]) -> dict[str, Values]:
    """`common`: keys of every config."""
    own: Values = {
        **common,
        "vocab_size": (96, 100),
        "hidden_size": (32, 48, 30),
        "num_hidden_layers": (1, 3),
        "num_attention_heads": (2, 8, 5),
        "intermediate_size": (40, 64),
        "max_position_embeddings": (16, 64, 12, ABSENT),
        "type_vocab_size": (1, 3, ABSENT),
        "layer_norm_eps": (1e-3, 1e-5, ABSENT),
        "hidden_act": (*activations, ABSENT),
        "pad_token_id": (0, 1, 3, ABSENT),
        "position_embedding_type": ("absolute", "relative_key", "relative_key_query"),
        "tie_word_embeddings": (True, False),
        "hidden_dropout_prob": (0.5,),
        "attention_probs_dropout_prob": (0.5,),
        "classifier_dropout": (0.5,),
        "attention_bias": (True, False),
        "sliding_window": (3,),
    }
    return {family: {**own, **(_ROPE if family == "nomic_bert" else {})} for family in KIND}
