"""Every backend computes the mathematics of the reference: each family, each way of storing weights.

The tolerance is of mean log-probabilities over a text. Another backend may round keys and values to half precision (float weights: 0.003)
and activations to 8 bits before it meets quantised weights (0.12); what was measured is a third of that. A wrong mask, rotation, block or
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


def differences(open_tiny: Open, family: str, type: str, **changes: object) -> np.ndarray:
    model = tiny_model(family, type=type, **changes)
    reference = ReferenceBackend(model)
    reference.allocate((BLOCKS,) * len(model.spec.groups))
    ours, theirs = whole(open_tiny(model), TOKENS, seed=3).logprobs, whole(reference, TOKENS).logprobs
    return np.abs(np.array(ours) - np.array(theirs))


@pytest.mark.parametrize("type", [*FLOATS, "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_type(family: str, type: str, open_tiny: Open) -> None:
    limit = 0.003 if type in FLOATS else 0.12
    assert differences(open_tiny, family, type).mean() < limit


@pytest.mark.parametrize("type", ["q4_k", "q6_k"])
@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_blocks_of_256(family: str, type: str, open_tiny: Open) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    assert differences(open_tiny, family, type, **sizes).mean() < 0.12


def test_a_wrong_model_would_be_noticed() -> None:
    """The measure itself: one rotary base against another, and one seed of weights against another."""
    texts = []
    for model in (tiny_model("llama"), tiny_model("llama", rope_theta=500.0), tiny_model("llama", seed=1)):
        backend = ReferenceBackend(model)
        backend.allocate((BLOCKS,))
        texts.append(np.array(whole(backend, TOKENS).logprobs))
    assert np.abs(texts[0] - texts[1]).mean() > 0.3
    assert np.abs(texts[0] - texts[2]).mean() > 1.0
