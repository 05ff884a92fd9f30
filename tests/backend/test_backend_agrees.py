"""Every backend agrees with the reference backend, for each model family and weight type.

The measure is the mean absolute difference of log-probabilities over 60 tokens. A backend may round
keys and values to half precision (tolerance 0.003 with float weights) and activations to 8 bits
before a matmul with quantised weights (0.12); the measured differences are a third of that. The
cuda backend rounds activations to the type of the weights: to 8 bits of bfloat16 (0.03), or to 11
bits of float16 (0.02). A wrong mask, rotation, block or expert changes these random models by more
than 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cpu_blocks import random_blocks
from plans import BACKENDS, BLOCKS, MARKS, NAMES, Open, run_alone, same_bits

from parity_types import FLOATS, PLAIN, WIDE, WIDE_QUANTISED
from verbatim.backend.reference import ReferenceBackend
from verbatim.formats.tensor import Tensor
from verbatim.model.layout import is_quantisable
from verbatim.model.loading.load import Model
from verbatim.testing.tiny_models import FAMILIES, TINY_CONFIGS, tiny_model

SOAK = [pytest.mark.soak]
TOKENS = np.random.default_rng(1).integers(0, 260, 60).tolist()
# (family, weight type, whether `make test` computes it): half of the types of each family, and each
# type in half of the families. `make soak` has the others; a GPU, which needs seconds, gets all.
PAIRS = [
    (family, type, (number + place) % 2 == 0)
    for number, family in enumerate(FAMILIES)
    for place, type in enumerate(PLAIN)
]
# The backends that are compared with the reference.
FASTER = pytest.mark.parametrize("open_tiny", BACKENDS[1:], indirect=True)


def difference(open_tiny: Open, family: str, type: str, **changes: object) -> float:
    """The mean difference from the reference, as a fraction of the tolerance."""
    model = tiny_model(family, type=type, **changes)
    reference = ReferenceBackend(model)
    reference.allocate((BLOCKS,) * len(model.spec.groups))
    backend = open_tiny(model)
    ours = run_alone(backend, TOKENS, seed=3).logprobs
    theirs = run_alone(reference, TOKENS).logprobs
    limit = 0.003 if type in FLOATS else 0.12
    if backend.info.name == "cuda":
        limit = 0.03 if type == "bf16" else 0.02
    return np.abs(np.array(ours) - np.array(theirs)).mean() / limit


def with_blocks(kind: str) -> Model:
    """A llama model whose matrices are random blocks of `kind`. Their values are larger than a
    model's, so queries and keys stay as they are: a saturated softmax would amplify rounding."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = tiny_model("llama", **sizes)
    random = np.random.default_rng(3)
    for name, tensor in list(model.weights.tensors.items()):
        if is_quantisable(name) and not name.endswith((".q", ".k")):
            blocks = random_blocks(kind, random, tensor.rows, 256, 0.003)
            model.weights.tensors[name] = Tensor(name, kind, tensor.shape, blocks)
    return model


@FASTER
@pytest.mark.parametrize("kind", WIDE)
def test_types_with_wide_blocks_a_table_or_codebook_agree_with_the_reference(
    open_tiny: Open, kind: str
) -> None:
    """The logits are large, like the weights. Relative to them, the difference is that of 8-bit
    activations (cpu) or half precision (cuda)."""
    model = with_blocks(kind)
    reference = ReferenceBackend(model)
    reference.allocate((BLOCKS,))
    ours, theirs = (
        np.array(run_alone(backend, TOKENS[:20]).logprobs)
        for backend in (open_tiny(model), reference)
    )
    assert np.abs(theirs).mean() > 1.0
    assert np.abs(ours - theirs).mean() / np.abs(theirs).mean() < 0.02


@pytest.mark.parametrize(
    ("family", "type", "open_tiny"),
    [
        pytest.param(family, type, name, marks=MARKS.get(name, () if chosen else SOAK))
        for family, type, chosen in PAIRS
        for name in NAMES[1:]
    ],
    indirect=["open_tiny"],
)
def test_every_family_and_weight_type_agrees_with_the_reference(
    family: str, type: str, open_tiny: Open
) -> None:
    """In one of three models, for a mixture: where two experts score almost the same, rounding
    chooses the other one, and the token's log-probability changes by 0.1 to 0.8."""
    mixture = "experts" in "".join(TINY_CONFIGS[family])
    seeds = range(3 if mixture else 1)
    assert any(difference(open_tiny, family, type, seed=seed) < 1 for seed in seeds)


@pytest.mark.parametrize(
    ("family", "type"),
    [
        pytest.param(family, type, marks=() if chosen else SOAK)
        for family, type, chosen in PAIRS
        if type != PLAIN[0]
    ],
)
def test_the_reference_computes_with_the_values_of_every_weight_type(
    family: str, type: str
) -> None:
    """The bits of a model whose weights were dequantised before (test_quant.py compares those with
    the gguf package)."""
    stored = tiny_model(family, type=type)
    floats = {
        name: Tensor(name, "f32", t.shape, t.to_f32().reshape(-1).view(np.uint8))
        for name, t in stored.weights.items()
    }
    assert any(t.type == type for t in stored.weights.values())
    plain = replace(stored, weights=replace(stored.weights, tensors=floats))
    results = []
    for model in (stored, plain):
        backend = ReferenceBackend(model)
        backend.allocate((BLOCKS,) * len(model.spec.groups))
        results.append(run_alone(backend, TOKENS[:6]))
    assert same_bits(*results)


@FASTER
@pytest.mark.parametrize(
    ("family", "type"), [(f, type) for type, found in WIDE_QUANTISED.items() for f in found]
)
def test_types_with_blocks_of_256_weights_agree_with_the_reference(
    family: str, type: str, open_tiny: Open
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    if family == "qwen3moe":
        sizes["moe_intermediate_size"] = 256
    assert difference(open_tiny, family, type, **sizes) < 1


def test_the_measure_detects_a_wrong_model() -> None:
    """Compares two rotary bases, and two seeds of the weights."""
    results = []
    for model in (
        tiny_model("llama"),
        tiny_model("llama", rope_theta=500.0),
        tiny_model("llama", seed=1),
    ):
        backend = ReferenceBackend(model)
        backend.allocate((BLOCKS,))
        results.append(np.array(run_alone(backend, TOKENS).logprobs))
    assert np.abs(results[0] - results[1]).mean() > 0.3
    assert np.abs(results[0] - results[2]).mean() > 1.0
