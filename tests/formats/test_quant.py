"""Block formats: dequantisation and quantisation have the bits of the `gguf` package."""

from __future__ import annotations

import tracemalloc

import gguf as oracle
import numpy as np
import pytest

from verbatim.base.errors import ModelError
from verbatim.formats.codebooks import LEVELS, codebook
from verbatim.formats.conversion import dequantise, nbytes, quantise
from verbatim.formats.registry import BLOCKS, FORMATS, WRITABLE
from verbatim.formats.requantise import broken_block, requantise
from verbatim.formats.tensor import Tensor

WRITTEN_BY_BOTH = ("f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")


def their_type(kind: str) -> oracle.GGMLQuantizationType:
    return getattr(oracle.GGMLQuantizationType, kind.upper())


def weights(seed: int, scale: float = 0.05) -> np.ndarray:
    """[48, 2048] with difficult rows: zeros, one sign, constants, ties, outliers."""
    x = (np.random.default_rng(seed).standard_normal((48, 2048)) * scale).astype(np.float32)
    x[0] = 0
    x[1] = np.abs(x[1])
    x[2] = -np.abs(x[2])
    x[3] = scale / 8
    x[4] = np.rint(x[4] / scale * 4) / 4 * scale
    x[5] = 0
    x[5, ::300] = scale * 100
    x[6] = -0.0
    x[7, ::2], x[7, 1::2] = scale, -scale
    return x


@pytest.mark.parametrize("kind", [k for k in BLOCKS if k != "q8_k"])
def test_dequantisation_has_the_bits_of_the_gguf_package(kind: str) -> None:
    values, size = BLOCKS[kind]
    columns = 4 * 256
    raw = np.random.default_rng(7).integers(0, 256, (400, columns // values * size), dtype=np.uint8)
    ours = dequantise(kind, raw, (400, columns))
    with np.errstate(all="ignore"):
        theirs = oracle.quants.dequantize(raw, their_type(kind))
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.reshape(ours.shape).view(np.uint32))
    assert np.isfinite(ours).mean() > 0.8  # otherwise the comparison means little


@pytest.mark.parametrize("name", LEVELS)
def test_codebooks_equal_those_of_the_gguf_package(name: str) -> None:
    theirs = getattr(oracle.quants, name.upper())
    theirs.init_grid()
    grid = theirs.grid.reshape(theirs.grid_shape)
    np.testing.assert_array_equal(codebook(name), grid)


@pytest.mark.parametrize("kind", BLOCKS)
def test_broken_block_finds_the_first_block_with_non_finite_values(kind: str) -> None:
    """Expected by dequantisation: a non-finite scale makes values of its block non-finite."""
    values, size = BLOCKS[kind]
    raw = np.random.default_rng(3).integers(
        0, 256, (60_000 if values == 1 else 4000, size), dtype=np.uint8
    )
    if kind == "q8_k":
        # d is non-finite or of medium size, so that d * q does not overflow
        raw[:, 3] = np.where(raw[:, 3] % 32 == 0, 0x7F, 0x3F)
        raw[:, 2] |= 0x80
    non_finite = ~np.isfinite(dequantise(kind, raw, (len(raw), values))).all(axis=1)
    assert non_finite.any()
    assert broken_block(Tensor("w", kind, (len(raw), values), raw.reshape(-1))) == int(
        np.argmax(non_finite)
    )
    good = np.ascontiguousarray(raw[~non_finite])
    assert broken_block(Tensor("w", kind, (len(good), values), good.reshape(-1))) is None
    for block in raw[non_finite][:50]:
        assert broken_block(Tensor("w", kind, (1, values), block)) == 0


def test_q8_k_is_dequantised_by_its_definition() -> None:
    """float d; int8 q[256]; int16 sums[16]: the value is d * q. The gguf package cannot read it."""
    rng = np.random.default_rng(1)
    d = rng.standard_normal(6).astype("<f4")
    q = rng.integers(-128, 128, (6, 256)).astype(np.int8)
    sums = q.reshape(6, 16, 16).sum(axis=2).astype("<i2")
    raw = np.concatenate(
        [d.reshape(6, 1).view(np.uint8), q.view(np.uint8), sums.view(np.uint8)], axis=1
    )
    assert raw.shape == (6, BLOCKS["q8_k"][1])
    found = dequantise("q8_k", raw, (3, 512))
    np.testing.assert_array_equal(found.reshape(6, 256), d[:, None] * q.astype(np.float32))


def test_dequantisation_does_not_depend_on_chunks_or_alignment() -> None:
    raw = np.random.default_rng(2).integers(0, 60, 3000 * 144 + 1, dtype=np.uint8)
    whole = dequantise("q4_k", raw[1:], (3000, 256))
    np.testing.assert_array_equal(
        whole[2999:], dequantise("q4_k", raw[1 + 2999 * 144 :].copy(), (1, 256))
    )


@pytest.mark.parametrize("kind", WRITTEN_BY_BOTH)
@pytest.mark.parametrize("scale", [1e-6, 0.05, 100.0])
def test_quantisation_has_the_bits_of_the_gguf_package(kind: str, scale: float) -> None:
    x = weights(3, scale)
    with np.errstate(all="ignore"):
        theirs = oracle.quants.quantize(x, their_type(kind))
    np.testing.assert_array_equal(quantise(kind, x), theirs.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("kind", WRITABLE)
def test_the_quantisation_error_stays_within_its_bound(kind: str) -> None:
    x = np.random.default_rng(4).standard_normal((64, 2048), dtype=np.float32)
    back = dequantise(kind, quantise(kind, x), x.shape)
    assert np.sqrt(np.mean((back - x) ** 2)) <= FORMATS[kind].pack_error


@pytest.mark.parametrize("kind", WRITABLE)
def test_difficult_rows_are_quantised_within_one_step(kind: str) -> None:
    x = weights(5)
    back = dequantise(kind, quantise(kind, x), x.shape)
    assert np.isfinite(back).all()
    assert not back[0].any()
    assert not back[6].any()
    # no error exceeds one quantisation step of its block of 256
    span = np.abs(x).reshape(48, -1, 256).max(axis=2)
    error = np.abs(back - x).reshape(48, -1, 256).max(axis=2)
    assert (error <= span / 7).all()


@pytest.mark.parametrize("kind", [k for k in WRITABLE if BLOCKS[k][0] == 256])
def test_the_scale_search_recovers_representable_values(kind: str) -> None:
    """The bits of a K-quant are the digit in its name."""
    rng, levels, blocks = np.random.default_rng(6), 1 << int(kind[1]), FORMATS[kind].gpu
    assert blocks is not None
    q = rng.integers(0, levels, (20, 256 // blocks.group, blocks.group)).astype(np.float32)
    q[:, :, 0], q[:, :, 1] = 0, levels - 1
    if blocks.offset == "add":
        x = (q * np.float32(63 / 64) - np.float32(63 / 32)).reshape(20, 256)
    else:
        x = ((q - levels // 2) * np.float32(0.25)).reshape(20, 256)
    back = dequantise(kind, quantise(kind, x), x.shape)
    np.testing.assert_allclose(back, x, atol=2e-3 * np.abs(x).max())


@pytest.mark.parametrize("kind", [k for k in WRITABLE if k not in ("f32", "bf16", "f16")])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38])
def test_values_that_do_not_fit_an_f16_scale_are_rejected(kind: str, bad: float) -> None:
    x = weights(8)
    x[9, 100] = bad
    with pytest.raises(ModelError):
        quantise(kind, x)


def test_f16_rejects_values_that_would_become_infinite() -> None:
    with pytest.raises(ModelError, match="bf16"):
        quantise("f16", np.array([1.0, 70_000.0], dtype=np.float32))


def test_bf16_keeps_infinities_and_nan() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 1.0], dtype=np.float32)
    np.testing.assert_array_equal(dequantise("bf16", quantise("bf16", x), (4,)), x)


def test_unknown_types_and_wrong_sizes_are_rejected() -> None:
    with pytest.raises(ModelError, match="q9"):
        dequantise("q9", np.zeros(4, dtype=np.uint8), (1,))
    with pytest.raises(ModelError, match="takes 18 bytes"):
        dequantise("q4_0", np.zeros(17, dtype=np.uint8), (32,))
    with pytest.raises(ModelError, match="multiple of 32"):
        quantise("q8_0", np.zeros((2, 33), dtype=np.float32))
    with pytest.raises(ModelError, match="q2_k"):
        quantise("q2_k", np.zeros((2, 256), dtype=np.float32))
    assert nbytes("q4_0", (2**62, 2**62, 32)) == 18 * 2**124  # no overflow, no allocation


def test_requantise_never_holds_a_float32_copy() -> None:
    """Result 8.5 MiB, at most 12 MiB more at the peak; a float32 copy would be 32 MiB."""
    raw = np.random.default_rng(0).integers(0, 0x3F80, 1 << 23).astype("<u2").view(np.uint8)
    tensor = Tensor("w", "bf16", (4096, 2048), raw)
    tracemalloc.start()
    done = requantise(tensor, "q8_0")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert done.type == "q8_0"
    assert done.data.nbytes == nbytes("q8_0", tensor.shape)
    assert peak < done.data.nbytes + (12 << 20)
    np.testing.assert_array_equal(done.data, quantise("q8_0", tensor.to_f32()))


def test_an_error_of_requantise_names_the_weight() -> None:
    tensor = Tensor("layers.0.attn.q", "f32", (2, 33), np.zeros(2 * 33 * 4, dtype=np.uint8))
    with pytest.raises(ModelError, match=r"layers\.0\.attn\.q"):
        requantise(tensor, "q8_0")


@pytest.mark.model
def test_tensors_of_the_default_model_equal_those_of_the_gguf_package(
    default_model: object,
) -> None:
    from verbatim.files.gguf import read_gguf

    for name, tensor in read_gguf(default_model).tensors.items():  # type: ignore[arg-type]
        if name.startswith(("blk.0.", "blk.29.", "output")):
            theirs = oracle.quants.dequantize(tensor.row_view(), their_type(tensor.type))
            np.testing.assert_array_equal(tensor.to_f32().reshape(-1), theirs.reshape(-1))
