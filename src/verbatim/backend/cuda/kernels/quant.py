"""Weights that stay in their quantised blocks on the device, and the matmul that reads them.

In: a Tensor of a type of BLOCK_FORMATS. Out: a BlockWeight: codes of 4 or 8 bits, and a scale (and
an offset or a zero point) per group of 16 to 128 inputs. Few rows are multiplied with weights that
the kernel unpacks in registers, on Hopper GPUs; for more rows the weight is unpacked to half
precision first: at loading if memory allows, else into a buffer that all weights share. All three
give the same bits.
Codes and scales are stored in the order in which the kernel's threads read them (jit_quant.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import triton

from verbatim.backend.cuda.kernels import jit_quant, kernels
from verbatim.backend.cuda.kernels.block_readers import HALVES, READERS
from verbatim.backend.cuda.kernels.experts import ExpertTiles
from verbatim.backend.cuda.kernels.kernels import SplitSums
from verbatim.backend.cuda.kernels.launch import INTERPRETED, launch, unpacks_in_order
from verbatim.backend.gpu_weights import (
    BK,
    BLOCK_FORMATS,
    HEADS,
    MAX_BUFFER,
    PACKS,
    TILE,
    packing,
    split_k,
)
from verbatim.formats.format import GpuBlocks
from verbatim.formats.registry import SIZES
from verbatim.formats.tensor import Tensor

ROWS = (16, 32)  # tiles that unpack weights in the kernel; more rows use unpacked float16
CHUNK_VALUES = 1 << 26  # values converted at a time while loading
OFFSETS = {"none": 0, "add": 1, "zero": 2}  # as jit_quant.py has them
EXPERT_ROWS = 64  # most rows of experts that a program multiplies


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A weight [n, k], or one per expert [experts, n, k] with n a multiple of TILE, in blocks."""

    shape: tuple[int, ...]
    wide: int  # k rounded up to whole packs of every split
    codes: torch.Tensor  # uint8: n rounded up to a multiple of 64, times wide * bits / 8
    scales: torch.Tensor  # float16 or float32, one per group
    offsets: torch.Tensor | None
    form: GpuBlocks
    pack: int  # inputs that the kernel reads at once
    unpacked: torch.Tensor | None = None  # [n, k] of `dtype`
    buffer: torch.Tensor | None = None  # float16, shared by all weights

    @property
    def dtype(self) -> torch.dtype:
        """Of the unpacked weights."""
        return HALVES[self.form.result]

    @property
    def constants(self) -> tuple[int, int, bool, int]:
        """Compile-time constants that tell the kernels how the weight is stored."""
        return (
            self.form.bits, self.form.group, self.form.code != "int", OFFSETS[self.form.offset],
        )  # fmt: skip

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def plain(self) -> torch.Tensor | None:
        """[n, k] of `dtype` that kernels.matmul multiplies with many rows: the unpacked weight, or
        its place in the buffer; None: the weight has neither."""
        if self.unpacked is not None or self.buffer is None:
            return self.unpacked
        n, k = self.shape
        return self.buffer[: n * k].view(self.dtype).view(n, k)

    @property
    def nbytes(self) -> int:
        """Bytes that a decode step reads."""
        parts = [self.codes, self.scales, self.offsets]
        return sum(int(part.nbytes) for part in parts if part is not None)


# ---- loading


def to_blocks(tensor: Tensor, device: torch.device) -> BlockWeight:
    """Copy a weight to the device in its blocks."""
    form, (values, size) = BLOCK_FORMATS[tensor.type], SIZES[tensor.type]
    n, k = tensor.rows, tensor.shape[-1]
    pack, wide = packing(k)
    step = max(1, CHUNK_VALUES // k // TILE) * TILE
    parts = []
    raw = tensor.row_view()
    for start in range(0, n, step):
        rows = torch.from_numpy(raw[start : start + step].copy()).to(device)
        found = READERS[tensor.type](rows.view(len(rows), k // values, size))
        scales, offsets = (
            None if part is None else _pad(part, wide // form.group) for part in found[1:]
        )
        parts.append(
            (
                pack_codes(_pad(found.codes, wide), form.bits),
                *[
                    None if part is None else pack_scales(part, form.bits, form.group)
                    for part in (scales, offsets)
                ],
            )
        )
    codes, scales, offsets = (_cat(list(part)) for part in zip(*parts, strict=True))
    assert codes is not None
    assert scales is not None
    return BlockWeight(tensor.shape, wide, codes, scales, offsets, form, pack)


def _pad(values: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros up to `width` columns and a multiple of TILE rows."""
    n, k = values.shape
    return torch.nn.functional.pad(values, (0, width - k, 0, -n % TILE))


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [n, k] in the order of the kernel, flat."""
    # tile, warp, half, line, chunk, nibble, eight, column, odd
    parts = codes.view(len(codes) // TILE, 4, 2, 8, -1, 8 // bits, 4, 4, 2)
    merged = parts.select(5, 0)
    if bits == 4:
        merged = merged | (parts.select(5, 1) << 4)
    return merged.permute(0, 4, 1, 3, 6, 5, 7, 2).flatten()


def pack_scales(scales: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Scales [n, k / group] in the order of the kernel, flat."""
    by_nibble, by_eight = 2 if bits == 4 and group <= 32 else 1, 2 if group == 16 else 1
    # tile, warp, half, line, span, nibble, eight
    parts = scales.view(len(scales) // TILE, 4, 2, 8, -1, by_nibble, by_eight)
    return parts.permute(0, 4, 1, 3, 6, 2, 5).flatten()


def _cat(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def join(weights: Sequence[BlockWeight]) -> BlockWeight | None:
    """The weights with their outputs concatenated, for each expert; None if their formats differ,
    or if one ends inside a tile."""
    first = weights[0]
    alike = {(w.form, w.shape[-1], w.ndim) for w in weights}
    if len(alike) > 1 or any(w.shape[-2] % TILE for w in weights[:-1]):
        return None
    count = first.shape[0] if first.ndim == 3 else 1

    def joined(name: str) -> torch.Tensor:
        parts = [getattr(w, name).view(count, -1) for w in weights]
        return torch.cat(parts, 1).flatten()

    shape = (*first.shape[:-2], sum(w.shape[-2] for w in weights), first.shape[-1])
    offsets = None if first.offsets is None else joined("offsets")
    return replace(
        first, shape=shape, codes=joined("codes"), scales=joined("scales"), offsets=offsets
    )


def buffer_values(weights: Mapping[str, BlockWeight]) -> int:
    """Size of the buffer into which the largest of these weights is unpacked. Heads, and weights
    beyond MAX_BUFFER, are unpacked in the kernel with any number of rows, if it adds in order."""
    sizes = {name: w.shape[0] * w.shape[1] for name, w in weights.items() if w.ndim == 2}
    if not unpacks_in_order():
        return max(sizes.values(), default=0)
    return max(
        (size for name, size in sizes.items() if name not in HEADS and size <= MAX_BUFFER),
        default=0,
    )


# ---- kernels


def unpack(
    weight: BlockWeight, out: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The weight in half precision, or the given rows of one [n, k]."""
    k = weight.shape[-1]
    n = math.prod(weight.shape[:-1]) if rows is None else len(rows)
    if out is None:
        shape = weight.shape if rows is None else (n, k)
        out = torch.empty(shape, dtype=weight.dtype, device=weight.codes.device)
    parts = (weight.codes, weight.scales, _or(weight.offsets, weight.scales))
    form = (weight.pack, *weight.constants)
    packs = weight.wide // weight.pack
    if rows is None:
        launch(
            jit_quant.unpack_tiles,
            (triton.cdiv(n, TILE), packs, 1),
            (*parts, out, n, k, weight.wide),
            (*form, not INTERPRETED),
        )
    else:
        launch(
            jit_quant.unpack_row, (n, packs, 1), (*parts, rows, out, k, weight.wide), form, warps=1
        )
    return out


def unpack_tensor(tensor: Tensor, device: torch.device) -> torch.Tensor:
    """A weight of any shape in half precision. Only some rows are in blocks at a time."""
    (n, k), raw = (tensor.rows, tensor.shape[-1]), tensor.row_view()
    dtype = HALVES[BLOCK_FORMATS[tensor.type].result]
    out = torch.empty((n, k), dtype=dtype, device=device)
    step = max(1, CHUNK_VALUES // k)
    for start in range(0, n, step):
        rows = raw[start : start + step]
        part = Tensor(tensor.name, tensor.type, (len(rows), k), rows.reshape(-1))
        unpack(to_blocks(part, device), out[start : start + step])
    return out.view(tensor.shape)


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor | BlockWeight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    whole: int | None = None,
) -> SplitSums:
    """kernels.matmul for weights of both kinds."""
    plain = plain_weight(weight, len(x))
    if plain is None:
        assert isinstance(weight, BlockWeight)
        return _matmul(x, weight, bias, out, whole)
    return kernels.matmul(x, plain, bias, out=out, whole=whole)


def plain_weight(weight: torch.Tensor | BlockWeight, rows: int) -> torch.Tensor | None:
    """The weight for kernels.matmul with so many rows; None: the kernel unpacks the blocks."""
    if isinstance(weight, torch.Tensor):
        return weight
    if in_kernel(weight, rows):
        return None
    plain = weight.plain
    assert plain is not None, "a weight without a buffer is multiplied in its blocks"
    return plain if weight.unpacked is not None else unpack(weight, plain)


def in_kernel(weight: BlockWeight, rows: int) -> bool:
    """Whether the matmul's kernel unpacks the weight."""
    if not unpacks_in_order():
        return False
    return rows <= ROWS[-1] or (weight.unpacked is None and weight.buffer is None)


def _matmul(
    x: torch.Tensor,
    weight: BlockWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    whole: int | None,
) -> SplitSums:
    m, (n, k) = len(x), weight.shape
    splits, blocks = split_k(whole or n, k)
    # more rows and 8 bits: of a smaller pack, more stages fit into shared memory
    pack = PACKS[-1] if m > ROWS[0] and weight.form.bits == 8 else weight.pack
    packs = (weight.wide if splits == 1 else blocks * BK) // pack
    if out is None or splits > 1:
        out = torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
    else:
        out = out[None]
    lines = next((rows for rows in ROWS if m <= rows), ROWS[-1])
    launch(
        jit_quant.quant_matmul,
        (triton.cdiv(n, TILE), splits, triton.cdiv(m, lines)),
        (
            x.to(weight.dtype), weight.codes, weight.scales, _or(weight.offsets, weight.scales),
            out, m, n, k, weight.wide, packs,
        ),
        (lines, pack, *weight.constants, not INTERPRETED),
        warps=4,
        stages=3 if weight.form.bits == 4 else 4,
        fuse=True,  # for the tensor cores; a fused scale and offset is exact before its rounding
    )  # fmt: skip
    return SplitSums(out, bias)


def expert_matmul(
    x: torch.Tensor,
    weight: BlockWeight,
    tiles: ExpertTiles,
    rows: torch.Tensor,
    whole: int | None = None,
) -> torch.Tensor:
    """kernels.expert_matmul without an activation. Any number of rows is multiplied with weights
    that the kernel unpacks."""
    (_, k), n = x.shape, weight.shape[1]
    splits, blocks = split_k(whole or n, k)
    lines = min(tiles.height, EXPERT_ROWS)
    pack = PACKS[-1] if lines > ROWS[0] else weight.pack
    packs = (weight.wide if splits == 1 else blocks * BK) // pack
    out = torch.empty((len(rows), n), dtype=torch.float32, device=x.device)
    launch(
        jit_quant.quant_expert_matmul,
        (triton.cdiv(n, TILE), len(rows) // lines, 1),
        (
            x.to(weight.dtype), weight.codes, weight.scales, _or(weight.offsets, weight.scales),
            out, rows, tiles.experts, n, k, weight.wide, packs,
        ),
        (splits, tiles.height, lines, pack, *weight.constants, not INTERPRETED),
        warps=4,
        stages=3 if weight.form.bits == 4 or lines > ROWS[0] else 4,
        fuse=True,
    )  # fmt: skip
    return out


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor
