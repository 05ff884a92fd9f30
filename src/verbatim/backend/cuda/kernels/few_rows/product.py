"""The product of up to 16 rows: its weights are on the way before the kernel before it has ended.

In: rows and a weight [n, k] in half precision. Out: partial sums [splits, rows, n] with the bits of
kernels.matmul, which is the fallback where `takes` is false: other GPUs than Hopper, an older
Triton, and weights whose splits are not whole pieces.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton

from verbatim.backend.cuda.kernels.launch import INTERPRETED, launch
from verbatim.backend.gpu_weights import BK, split_k

FEW_ROWS = 16
WIDTHS = (1, 8, FEW_ROWS)  # rows of x that the kernel is compiled for
PIECES = (256, 128)  # inputs that are copied and multiplied at once; does not affect the bits
SMS = 132  # multiprocessors of an H200
TRITON = (3, 6)  # the oldest version whose Gluon was tried


class ProductTile(NamedTuple):
    """How a product is launched. None of it affects the bits."""

    warps: int  # 16 rows of weights each
    piece: int
    stages: int  # pieces that are copied ahead


class Normed(NamedTuple):
    """One row as jit.add_norm computes it: the norm of x + sums."""

    x: torch.Tensor  # [1, k], float32
    sums: torch.Tensor | None  # [splits, 1, k]
    weight: torch.Tensor
    eps: float
    offset: float

    @property
    def reducers(self) -> int:
        """Warps of jit.add_norm."""
        return min(8, max(1, self.block // 256))

    @property
    def block(self) -> int:
        return max(256, int(triton.next_power_of_2(self.x.shape[1])))


@functools.cache
def _device_code() -> Any:
    """The kernel. An older Triton cannot import it."""
    return import_module("verbatim.backend.cuda.kernels.few_rows.jit_product").product


@functools.cache
def available() -> bool:
    """Whether this GPU and this Triton run the kernel. Its order of additions was compared on
    Hopper GPUs."""
    if INTERPRETED or not torch.cuda.is_available():
        return False
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= TRITON and bool(torch.cuda.get_device_capability()[0] == 9)


def dependence(rows: int) -> int:
    """How a kernel starts early (jit_matmul.wait_for_inputs). A chain of kernels of few rows gains
    if their products load weights before they wait, and loses otherwise."""
    return 1 if rows > FEW_ROWS else 2 if available() else 0


def takes(weight: object, rows: int) -> bool:
    """Whether `product` multiplies so many rows with this weight. The last layer of a prefill chunk
    without a draw has no rows."""
    if not 0 < rows <= FEW_ROWS or not isinstance(weight, torch.Tensor) or not available():
        return False
    if weight.ndim != 2 or weight.element_size() != 2:
        return False
    splits, blocks = split_k(*weight.shape)
    return bool(weight.shape[1] == splits * blocks * BK)


def takes_norm(weight: object) -> bool:
    """Whether `product` computes the norm of its one row, too: a warp reduces PIECES[0] values."""
    return takes(weight, 1) and bool(weight.shape[1] >= PIECES[0])  # type: ignore[attr-defined]


@functools.cache
def choose_tile(n: int, inputs: int, splits: int, gated: bool, columns: int) -> ProductTile:
    """Programs that fit on the GPU at once, and leave room for the next kernel's (measured)."""

    def programs(warps: int) -> int:
        return int(triton.cdiv(n, 16 * warps) * splits)

    if programs(4) > 4 * SMS:  # a head
        warps, piece, ring = 4, 128, 64
    elif gated:
        warps, piece, ring = (4, 128, 96) if programs(4) >= 96 else (2, 256, 128)
    elif splits == 1:
        warps, piece, ring = (4, 256, 192) if programs(4) <= SMS else (2, 256, 64)
    elif n * splits * inputs * 2 <= SMS * (192 << 10):  # all weights at once
        warps, piece, ring = 2 if inputs <= 512 else 4, 256, 128
        if programs(1) > 2 * SMS:
            warps = 1
    elif programs(2) <= 3 * SMS:
        warps, piece, ring = 2, 256, 64
    else:  # short ones follow attention, which leaves most of an SM to them
        warps, piece, ring = 8, 128, 192 if inputs <= 1024 else 128
    if columns > 1 and not gated:  # rows of x take room, too, and every program reads them
        warps, piece, ring = 4, 256 if inputs <= 1024 or splits == 1 else 128, 128
    if inputs % piece:
        piece = PIECES[-1]
    size = piece * 2 * (16 * warps * (1 + gated) + (0 if columns == 1 else columns))
    return ProductTile(warps, piece, min(inputs // piece, max(2, (ring << 10) // size)))


def columns_of(rows: int) -> int:
    """The constant COLUMNS of the kernel."""
    return next(width for width in WIDTHS if rows <= width)


def product(
    x: torch.Tensor | Normed,
    weight: torch.Tensor,
    gate: str = "none",
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Partial sums [splits, rows, n], or activation(gate) * up [1, rows, n / 2] in `dtype`; and
    x + sums, if x is Normed with sums."""
    rows, (n, k) = x.x if isinstance(x, Normed) else x, weight.shape
    splits, blocks = split_k(n, k)
    m, inputs = len(rows), blocks * BK
    if gate != "none":
        n //= 2
    columns = columns_of(m)
    if columns > 1:
        x = rows = rows.to(weight.dtype)
    tile = choose_tile(n, inputs, splits, gate != "none", columns)
    if out is None or splits > 1:
        out = torch.empty((splits, m, n), dtype=dtype, device=rows.device)
    else:
        out = out[None]
    norm = x if isinstance(x, Normed) else None
    sums = None if norm is None else norm.sums
    moved = None if sums is None else torch.empty_like(rows)
    held = norm.block // tile.piece if norm else triton.next_power_of_2(inputs // tile.piece)
    launch(
        _device_code(),
        (triton.cdiv(n, 16 * tile.warps), splits, 1),
        (
            rows, rows if sums is None else sums, norm.weight if norm else rows,
            rows if moved is None else moved, weight, out, m, n, k,
            norm.eps if norm else 0.0, norm.offset if norm else 0.0,
        ),
        (
            k, inputs, tile.piece, tile.stages, columns, gate, norm is not None,
            0 if sums is None else len(sums), held, norm.reducers if norm else 1, tile.warps,
        ),
        warps=tile.warps,
        dependent=2,
    )  # fmt: skip
    return out, moved
