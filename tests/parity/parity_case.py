"""One tiny checkpoint of the parity tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB = 96
PROMPT = 24
STEPS = 32
ABSENT: Any = object()  # the key is not in the config


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    `context`: the engine's context. `gguf`: architecture of the GGUF file that convert.py
    writes; if empty, `verbatim convert` writes it, or refuses and names the key `refused`.
    `seed`: of the weights, chosen so that no two logits of a greedy step are a near tie."""

    name: str
    kind: str  # prefix of transformers' classes
    changes: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    gguf: str = ""
    prompt: int = PROMPT
    steps: int = STEPS
    refused: str = ""
    seed: int = 0
