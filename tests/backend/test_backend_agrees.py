"""Every backend computes the mathematics of the reference: each family, each way of storing weights.

The tolerance is of mean log-probabilities over a text. Another backend may round keys and values to half precision (float weights: 0.003)
and activations to 8 bits before it meets quantised weights (0.12); what was measured is a third of that. The cuda backend rounds activations
to the type of the weights, so to 8 bits of bfloat16 (0.03), and to 11 of float16 elsewhere (0.02). A wrong mask, rotation, block or
expert moves these random models by more than 1.
"""

from __future__ import annotations

import numpy as np
import pytest
from plans import BLOCKS, Open, whole

from verbatim.backend.reference import ReferenceBackend
from verbatim.testing_models import FAMILIES, tiny_model

FLOATS = ("f32", "f16", "bf16")
TOKENS = np.random.default_rng(1).integers(0, 260, 60).tolist()


def difference(open_tiny: Open, family: str, type: str, **changes: object) -> float:
    """From the reference, as a share of what is allowed."""
    model = tiny_model(family, type=type, **changes)
    reference = ReferenceBackend(model)
    reference.allocate((BLOCKS,) * len(model.spec.groups))
    backend = open_tiny(model)
    ours, theirs = whole(backend, TOKENS, seed=3).logprobs, whole(reference, TOKENS).logprobs
    limit = 0.003 if type in FLOATS else 0.12
    if backend.info.name == "cuda":
        limit = 0.03 if type == "bf16" else 0.02
    return np.abs(np.array(ours) - np.array(theirs)).mean() / limit


@pytest.mark.parametrize("type", [*FLOATS, "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_type(family: str, type: str, open_tiny: Open) -> None:
    assert difference(open_tiny, family, type) < 1


@pytest.mark.parametrize("type", ["q4_k", "q6_k"])
@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_blocks_of_256(family: str, type: str, open_tiny: Open) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    if family == "qwen3moe":
        sizes["moe_intermediate_size"] = 256
    assert difference(open_tiny, family, type, **sizes) < 1


def test_a_wrong_model_would_be_noticed() -> None:
    """The measure itself: one rotary base against another, and one seed of weights against another."""
    texts = []
    for model in (
        tiny_model("llama"),
        tiny_model("llama", rope_theta=500.0),
        tiny_model("llama", seed=1),
    ):
        backend = ReferenceBackend(model)
        backend.allocate((BLOCKS,))
        texts.append(np.array(whole(backend, TOKENS).logprobs))
    assert np.abs(texts[0] - texts[1]).mean() > 0.3
    assert np.abs(texts[0] - texts[2]).mean() > 1.0
