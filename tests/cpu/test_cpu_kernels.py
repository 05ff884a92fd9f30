"""Each kind of product against NumPy on the dequantised weights, within its stated tolerance; the cpu backend's quality on the default model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cpu_blocks import random_blocks

from verbatim.backend.reference import ReferenceBackend
from verbatim.base.config import EngineConfig
from verbatim.base.records import SeqStep, StepPlan
from verbatim.model.load import load_model
from verbatim.weights.quant import dequantise
from verbatim.weights.tensor import BLOCKS

cpu = pytest.importorskip("verbatim.backend.cpu.backend")
pytestmark = pytest.mark.native

FLOATS = ("f32", "f16", "bf16")


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_product(kind: str, rows: int) -> None:
    """Float weights: float32 rounding. Quantised: the activations lose 8-bit rounding, at most max/254 in each value."""
    random = np.random.default_rng(5)
    n, k = 50, 768
    weights = random_blocks(kind, random, n, k)
    x = random.standard_normal((rows, k), dtype=np.float32)
    exact = x.astype(np.float64) @ dequantise(kind, weights, (n, k)).astype(np.float64).T
    ours = cpu.native.product(cpu.native.best_isa(), kind, weights, n, x)
    error = np.sqrt(np.mean((ours - exact) ** 2) / np.mean(exact**2))
    assert error < (1e-6 if kind in FLOATS else 0.01)


def test_product_of_quantised_activations_is_exact() -> None:
    """Activations that 8 bits hold exactly leave only float rounding: the integer part loses nothing."""
    random = np.random.default_rng(6)
    x = random.integers(-127, 128, (4, 256)).astype(np.float32)
    x[:, ::32] = 127.0  # every block's scale is 1
    for kind in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "q2_k", "q3_k", "q8_k"):
        weights = random_blocks(kind, random, 20, 256)
        exact = x.astype(np.float64) @ dequantise(kind, weights, (20, 256)).astype(np.float64).T
        ours = cpu.native.product(cpu.native.best_isa(), kind, weights, 20, x)
        assert np.abs(ours - exact).max() < 2e-6 * np.abs(x).sum(axis=1).max(), kind


def test_hostile_weights_are_refused() -> None:
    x = np.zeros((1, 64), np.float32)
    for kind, size in (("q4_0", 35), ("q4_0", 0), ("q9_9", 36), ("q4_k", 36)):
        with pytest.raises(ValueError, match=r"cannot have|no kernel"):
            cpu.native.product("scalar", kind, np.zeros(size, np.uint8), 1, x)


TEXT_TOKENS = 192


@pytest.mark.model
@pytest.mark.parametrize("kv_type", ["f16", "q8"])
def test_perplexity_of_the_default_model(kv_type: str, default_model: Path) -> None:
    """Within 0.3 % of the reference on dequantised weights with f16 keys and values; the 8-bit cache may cost another 0.5 %."""
    model = load_model(default_model)
    tokens = default_text(model)
    losses = []
    for backend in (cpu.CpuBackend(model, EngineConfig(kv_type=kv_type)), ReferenceBackend(model)):
        backend.allocate((16,))
        step = SeqStep(0, tuple(tokens[:-1]), 0, (tuple(range(16)),), targets=tuple(tokens[1:]))
        scored = backend.execute(StepPlan(0, (step,))).sequences[0].scored
        losses.append(-np.mean([s.logprob for s in scored]))
        backend.close()
    ratio = float(np.exp(losses[0] - losses[1]))
    print(f"perplexity {np.exp(losses[0]):.3f} against {np.exp(losses[1]):.3f}: ratio {ratio:.5f}")
    assert abs(ratio - 1) < (0.003 if kv_type == "f16" else 0.008)


def default_text(model: object) -> list[int]:
    from verbatim.text.tokenizer import from_gguf

    text = Path(__file__).with_name("text.txt").read_text()
    tokens = from_gguf(model.source.metadata).encode(text)  # type: ignore[attr-defined]
    assert len(tokens) > TEXT_TOKENS
    return tokens[:TEXT_TOKENS]
