"""The config that the tests' tiny models start from."""

from __future__ import annotations

from typing import Any

from verbatim.model.families.common.family import Values

_BASE: Values = {
    "vocab_size": 260,  # verbatim.testing.fakes.ByteTokenizer's ids
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def tiny(**changes: Any) -> Values:
    """A tiny config; None removes a key."""
    return {key: value for key, value in {**_BASE, **changes}.items() if value is not None}


def tiny_layer_norm(**changes: Any) -> Values:
    return tiny(rms_norm_eps=None, **changes)
