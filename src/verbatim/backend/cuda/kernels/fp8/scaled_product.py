"""Products of FP8 (e4m3) codes on the tensor cores of Hopper GPUs: blocks as published.

In: rows, and a ScaledWeight: codes [n, k] with a scale per block of 128 x 128. The rows are rounded
to bfloat16, then to codes with a scale per row and group of 128 inputs. Out: sums in float32.
docs/numerics.md defines both; no bit depends on the number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from verbatim.backend.cuda.kernels.block_readers import E4M3_BIAS, READERS
from verbatim.backend.cuda.kernels.few_rows.product import SMS, dependence
from verbatim.backend.cuda.kernels.fp8 import jit_scaled
from verbatim.backend.cuda.kernels.kernels import FUSED_ACTIVATIONS, SplitSums, TensorDescriptor
from verbatim.backend.cuda.kernels.launch import INTERPRETED, launch
from verbatim.backend.gpu_weights import BK, split_k
from verbatim.formats.registry import SIZES
from verbatim.formats.tensor import Tensor

LARGEST = 448.0  # of e4m3
SMALLEST = 2.0**-100  # the largest value of a block counts as this at least
CHUNK_VALUES = 1 << 26  # values converted at a time while loading
GROUPS = 8  # groups of a row that a program rounds to codes


class ScaledTile(NamedTuple):
    """How a product is launched. None of it affects the bits."""

    rows: int  # of x
    columns: int  # rows of weights; with an activation half of them are the gate's
    warps: int
    stages: int
    parallel: int  # programs that share the splits of a tile: 1, or one per split


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    codes: torch.Tensor  # [n, k] e4m3
    scales: torch.Tensor  # [n / 128, k / 128] float32, rounded up

    dtype = torch.bfloat16  # to which its product rounds rows first
    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes)

    def unpacked(self) -> torch.Tensor:
        """The weight in bfloat16, to be joined with one that has no scales."""
        scales = self.scales.repeat_interleave(BK, 0)[: self.shape[0]].repeat_interleave(BK, 1)
        return (self.codes.float() * scales).to(self.dtype)


@functools.cache
def available() -> bool:
    """Whether this GPU has the instructions: Hopper. Other ones have others, or none."""
    return INTERPRETED or (
        torch.cuda.is_available() and bool(torch.cuda.get_device_capability()[0] == 9)
    )


def quantise(weight: torch.Tensor) -> ScaledWeight:
    """Round a weight [n, k] to codes with a scale per block: the largest magnitude / 448."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, -n % BK))
    blocks = padded.view(-1, BK, k // BK, BK)
    scales = blocks.abs().amax((1, 3)).clamp(min=SMALLEST) / LARGEST
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return ScaledWeight(codes.view(-1, k)[:n].contiguous(), scales)


def from_blocks(tensor: Tensor, device: torch.device) -> ScaledWeight | None:
    """A weight in blocks of e4m3_128, whose type repeats a scale for each row; None: the rows of a
    block have several."""
    (values, size), (n, k) = SIZES[tensor.type], tensor.shape
    raw, step = tensor.row_view(), max(1, CHUNK_VALUES // k // BK) * BK
    codes = torch.empty((n, k), dtype=torch.uint8, device=device)
    scales = torch.empty((triton.cdiv(n, BK), k // BK), dtype=torch.float32, device=device)
    for start in range(0, n, step):
        rows = torch.from_numpy(raw[start : start + step].copy()).to(device)
        found = READERS[tensor.type](rows.view(len(rows), k // values, size))
        codes[start : start + step] = found.codes
        first = found.scales[::BK]
        if not torch.equal(first.repeat_interleave(BK, 0)[: len(rows)], found.scales):
            return None
        scales[start // BK : start // BK + len(first)] = first / E4M3_BIAS
    return ScaledWeight(codes.view(torch.float8_e4m3fn), scales)


def join(weights: Sequence[ScaledWeight]) -> ScaledWeight | None:
    """The weights with their outputs concatenated; None if one ends inside a block."""
    if any(weight.shape[0] % BK for weight in weights[:-1]):
        return None
    return ScaledWeight(
        torch.cat([weight.codes.view(torch.uint8) for weight in weights]).view(torch.float8_e4m3fn),
        torch.cat([weight.scales for weight in weights]),
    )


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [m, k] and scales [k / 128, m] of rows, rounded to bfloat16 first."""
    m, k = x.shape
    codes = torch.empty((m, k), dtype=torch.uint8, device=x.device)
    scales = torch.empty((k // BK, m), dtype=torch.float32, device=x.device)
    launch(
        jit_scaled.quantise_rows,
        (m, triton.cdiv(k // BK, GROUPS), 1),
        (x.to(torch.bfloat16), codes, scales, m, k),
        (GROUPS,),
        dependent=dependence(m),
    )
    return codes.view(torch.float8_e4m3fn), scales


def can_fuse(weight: ScaledWeight, kind: str) -> bool:
    """Whether `product` computes this activation of a product with this weight."""
    n, k = weight.shape
    return kind in FUSED_ACTIVATIONS and n % (2 * BK) == 0 and split_k(n, k)[0] == 1


def product(
    x: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None = None,
    gate: str = "none",
    tile: ScaledTile | None = None,
) -> SplitSums:
    """x [m, k] times weightᵀ; with `gate` activation(gate) * up [m, n / 2] in bfloat16."""
    (m, k), n = x.shape, weight.shape[0]
    splits, blocks = split_k(n, k)
    tile = tile or choose_tile(m, n, splits, gate != "none")
    columns, w = tile.columns, weight.codes
    shape, dtype = [columns, BK], torch.float32
    if gate != "none":
        n, columns, dtype = n // 2, columns // 2, torch.bfloat16
        w, shape = w.view(2, n, k), [2, columns, BK]
    codes, scales = quantise_rows(x)
    out = torch.empty((tile.parallel, m, n), dtype=dtype, device=x.device)
    launch(
        jit_scaled.matmul_scaled,
        (triton.cdiv(n, columns) * triton.cdiv(m, tile.rows), tile.parallel, 1),
        (
            TensorDescriptor.from_tensor(codes, [tile.rows, BK]), scales,
            TensorDescriptor.from_tensor(w, shape), weight.scales, out, m, n, k // BK, blocks,
        ),
        (splits // tile.parallel, tile.rows, tile.columns, gate),
        warps=tile.warps,
        stages=tile.stages,
        fuse=True,
        dependent=dependence(m),
    )  # fmt: skip
    return SplitSums(out, bias)


def all_tiles(n: int, splits: int, gated: bool) -> set[ScaledTile]:
    """Every tile that choose_tile may return for a weight."""
    return {choose_tile(m, n, splits, gated) for m in (1, 32, 64, 256, 512)}


@functools.cache
def choose_tile(m: int, n: int, splits: int, gated: bool) -> ScaledTile:
    """The fastest tile of those that were measured with the shapes of 8B."""
    if m <= 16:
        return ScaledTile(16, 64 if splits == 1 else 128, 4, 6, splits)
    if m <= 32:
        few = splits == 1 and triton.cdiv(n, 64) <= SMS
        return ScaledTile(32, 64, 4, 6, 1) if few else ScaledTile(32, 128, 4, 5, splits)
    if m <= 64 or 128 < m <= 192:
        return ScaledTile(64, 128, 4, 4, splits)
    return ScaledTile(128, 64, 4, 3, splits if m <= 256 else 1)
