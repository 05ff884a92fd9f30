"""The reference backend's functions: bits that depend neither on the number of rows nor on the
address of an array; activations; the thread count of BLAS."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("hypothesis")  # not installed for `make test-gpu`
from hypothesis import given
from hypothesis import strategies as st

from verbatim.backend.reference.blas import _controls, one_thread
from verbatim.backend.reference.ops import (
    activate,
    aligned,
    attend_row,
    rows_times,
    soft_cap,
    softmax,
)


def misplaced(array: np.ndarray, shift: int) -> np.ndarray:
    """The same numbers, `shift` floats past a 64-byte boundary."""
    buffer = aligned(np.zeros(array.size + 16, np.float32))
    view = buffer[shift : shift + array.size].reshape(array.shape)
    view[...] = array
    return view


@given(
    st.integers(1, 70),
    st.integers(1, 90),
    st.integers(1, 9),
    st.integers(0, 15),
    st.integers(0, 2**31),
)
def test_a_row_has_the_same_bits_in_any_batch(
    out: int, width: int, rows: int, shift: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    weight = aligned(random.standard_normal((out, width), dtype=np.float32))
    x = random.standard_normal((rows, width), dtype=np.float32)
    together = rows_times(misplaced(x, shift), weight)
    for i in range(rows):
        assert rows_times(x[i : i + 1].copy(), weight)[0].tobytes() == together[i].tobytes()
    assert np.allclose(together, x.astype(np.float64) @ weight.T.astype(np.float64), atol=1e-4)


@given(st.integers(1, 300), st.integers(0, 15), st.integers(1, 4), st.integers(0, 2**31))
def test_attention_has_the_same_bits_at_any_address(
    visible: int, shift: int, sharing: int, seed: int
) -> None:
    """Keys and values from a longer buffer, at any offset, as for a row late in a chunk."""
    random = np.random.default_rng(seed)
    q = random.standard_normal((2, sharing, 12), dtype=np.float32)
    keys, values = (random.standard_normal((2, visible, 12), dtype=np.float32) for _ in range(2))
    long_keys, long_values = (
        np.concatenate([t[:, :1].repeat(shift, 1), t, t[:, :3]], axis=1) for t in (keys, values)
    )
    seen = slice(shift, shift + visible)
    alone = attend_row(q, keys, values, 0.3, 0.0)
    assert (
        alone.tobytes()
        == attend_row(misplaced(q, 5), long_keys[:, seen], long_values[:, seen], 0.3, 0.0).tobytes()
    )
    scores = np.einsum("hgd,hnd->hgn", q, keys, dtype=np.float64) * 0.3
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hgn,hnd->hgd", shares / shares.sum(-1, keepdims=True), values)
    assert np.allclose(alone, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_equal_their_definition(kind: str) -> None:
    x = np.linspace(-30, 30, 601, dtype=np.float32)
    exact = {
        "silu": [v / (1 + math.exp(-v)) for v in x.tolist()],
        "gelu": [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()],
        "gelu_tanh": [
            0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
            for v in x.tolist()
        ],
    }
    assert np.allclose(activate(x, kind), exact[kind], atol=3e-6)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@given(st.integers(1, 40), st.integers(0, 2**31))
def test_elementwise_functions_do_not_depend_on_the_batch(kind: str, rows: int, seed: int) -> None:
    """Vector loops have scalar tails; a row's bits must not depend on the part that computes it."""
    x = (np.random.default_rng(seed).standard_normal((rows, 13)) * 4).astype(np.float32)
    for together, alone in (
        (activate(x, kind), [activate(row[None].copy(), kind)[0] for row in x]),
        (softmax(x), [softmax(row[None].copy())[0] for row in x]),
        (soft_cap(x, 3.0), [soft_cap(row[None].copy(), 3.0)[0] for row in x]),
    ):
        assert together.tobytes() == b"".join(row.tobytes() for row in alone)


def test_the_thread_count_of_blas_is_restored() -> None:
    controls = _controls()
    if controls is None:
        pytest.skip("this NumPy does not use OpenBLAS")
    before = controls[0]()
    with one_thread():
        assert controls[0]() == 1
    assert controls[0]() == before
