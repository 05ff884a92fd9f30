"""A rope record of each rope_type, with the keys that it needs."""

from __future__ import annotations

from typing import Any


def rope_records(head_dim: int) -> dict[str, dict[str, Any]]:
    pairs, length = head_dim // 2, {"original_max_position_embeddings": 6}
    needed: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 2.0},
        "proportional": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **length},
        "yarn": {"factor": 2.0, **length},
        "longrope": {"long_factor": [2.0] * pairs, "short_factor": [1.5] * pairs, **length},
    }
    return {
        kind: {"rope_type": kind, "rope_theta": 100.0, **numbers}
        for kind, numbers in needed.items()
    }
