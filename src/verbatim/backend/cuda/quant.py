"""Weights that stay in their quantised blocks on the device, and the matmul that reads them.

In: a Tensor of a type of BLOCK_FORMATS. Out: a BlockWeight: codes of 4 or 8 bits, and a scale (and
an offset) per group of 16 or 32 inputs. Few rows are multiplied with weights that the kernel
unpacks in registers; for more rows the weight is unpacked to float16 first: at loading if memory
allows, else into a buffer that all weights share. All three give the same bits (jit_quant.py).

The codes of a row lie in packs. A pack of 4-bit codes holds inputs 0 .. PACK/2 in the low nibbles
of its bytes and the others in the high nibbles, so both halves are read in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from verbatim.backend.cuda import jit_quant, kernels
from verbatim.backend.cuda.kernels import SplitSums
from verbatim.backend.cuda.launch import INTERPRETED, launch
from verbatim.backend.gpu_layout import (
    BK,
    BLOCK_FORMATS,
    MAX_BUFFER,
    PACKS,
    packing,
    split_k,
)
from verbatim.weights.tensor import BLOCKS, Tensor

FEW_ROWS = 16  # multiplied with unpacking in the kernel
MORE_ROWS = 32  # also multiplied that way, if the weight is not unpacked at loading
MAX_BYTES = 256  # of 8-bit codes per pack; with more, shared memory holds fewer programs
COLUMNS = (
    64  # outputs per tile: the instruction of the large tiles, whose order of additions it has
)
UNPACK_ROWS = 8
CHUNK_VALUES = 1 << 26  # values converted at a time while loading


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A weight [n, k] in blocks."""

    shape: tuple[int, int]
    codes: torch.Tensor  # [n, wide * bits / 8] uint8; wide: k rounded up to whole packs
    scales: torch.Tensor  # [n, wide / group] float16 or float32
    offsets: torch.Tensor | None
    bits: int
    group: int
    pack: int
    unpacked: torch.Tensor | None = None  # [n, k] float16
    buffer: torch.Tensor | None = None  # float16, shared by all weights

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16

    @property
    def ndim(self) -> int:
        return 2

    @property
    def fast(self) -> bool:
        """Whether few rows are multiplied faster in blocks than with float16 weights: measured for
        Q4_0 and the largest pack (docs/gpu-performance.md)."""
        return self.bits == 4 and self.offsets is None and self.pack == PACKS[0]

    @property
    def nbytes(self) -> int:
        """Bytes that a decode step reads."""
        parts = [self.codes, self.scales, self.offsets]
        return sum(int(part.nbytes) for part in parts if part is not None)


class Values(NamedTuple):
    """Codes [n, k] uint8, scales and offsets [n, k / group] of some rows."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None


# ---- file formats (weights/block_formats.py describes the blocks)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Bytes [..., m] -> [..., 2 m]: low nibbles of `width` bytes, then their high nibbles."""
    parts = packed.unflatten(-1, (-1, width))
    return torch.stack([parts & 15, parts >> 4], -2).flatten(-3)


def _rows(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).contiguous()


def _q4_0(blocks: torch.Tensor) -> Values:
    return Values(_rows(_nibbles(blocks[..., 2:], 16)), _half(blocks, 0), None)


def _q4_1(blocks: torch.Tensor) -> Values:
    return Values(_rows(_nibbles(blocks[..., 4:], 16)), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Values:
    return Values(_rows(blocks[..., 2:]), _half(blocks, 0), None)


def _q4_k(blocks: torch.Tensor) -> Values:
    a, b, c = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([a & 63, (c & 15) | ((a >> 2) & 48)], -1).float()
    minima = torch.cat([b & 63, (c >> 4) | ((b >> 2) & 48)], -1).float()
    return Values(
        _rows(_nibbles(blocks[..., 16:], 32)),
        _rows(_half(blocks, 0).float()[..., None] * scales),
        _rows(-(_half(blocks, 2).float()[..., None] * minima)),
    )


def _q6_k(blocks: torch.Tensor) -> Values:
    low = _nibbles(blocks[..., :128], 64)
    pairs = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((pairs >> shifts) & 3).flatten(-3)
    signed = (low | (high << 4)).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return Values(
        _rows(signed.view(torch.uint8)),
        _rows(_half(blocks, 208).float()[..., None] * scales),
        None,
    )


# by type: the function that unpacks blocks [n, k / values, bytes per block] uint8
READERS: dict[str, Callable[[torch.Tensor], Values]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q4_k": _q4_k,
    "q6_k": _q6_k,
    "q8_0": _q8_0,
}


# ---- loading


def to_blocks(tensor: Tensor, device: torch.device) -> BlockWeight:
    """Copy a weight [n, k] to the device in its blocks."""
    form, (values, size), (n, k) = BLOCK_FORMATS[tensor.type], BLOCKS[tensor.type], tensor.shape
    pack, wide = packing(k)
    if form.bits == 8:  # codes in order: a pack is only what the kernel reads at once
        pack = min(pack, MAX_BYTES)
    step = max(1, CHUNK_VALUES // k)
    parts = []
    raw = tensor.row_view()
    for start in range(0, n, step):
        rows = torch.from_numpy(raw[start : start + step].copy()).to(device)
        found = READERS[tensor.type](rows.view(len(rows), k // values, size))
        pad = (wide - k) // form.group
        parts.append(
            (
                _pack(torch.nn.functional.pad(found.codes, (0, wide - k)), form.bits, pack),
                torch.nn.functional.pad(found.scales, (0, pad)),
                None if found.offsets is None else torch.nn.functional.pad(found.offsets, (0, pad)),
            )
        )
    codes, scales, offsets = (_cat(list(part)) for part in zip(*parts, strict=True))
    assert codes is not None
    assert scales is not None
    return BlockWeight((n, k), codes, scales, offsets, form.bits, form.group, pack)


def _pack(codes: torch.Tensor, bits: int, pack: int) -> torch.Tensor:
    if bits == 8:
        return codes
    halves = codes.view(len(codes), -1, 2, pack // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)


def _cat(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def join(weights: Sequence[BlockWeight]) -> BlockWeight | None:
    """The weights with their outputs concatenated; None if their formats differ."""
    first = weights[0]
    alike = {(w.bits, w.group, w.scales.dtype, w.offsets is None, w.shape[1]) for w in weights}
    if len(alike) > 1:
        return None
    codes, scales, offsets = (
        _cat([getattr(w, name) for w in weights]) for name in ("codes", "scales", "offsets")
    )
    assert codes is not None
    assert scales is not None
    shape = (sum(w.shape[0] for w in weights), first.shape[1])
    return replace(first, shape=shape, codes=codes, scales=scales, offsets=offsets)


def buffer_values(weights: Sequence[BlockWeight]) -> int:
    """Size of the buffer into which the largest of these weights is unpacked."""
    sizes = [w.shape[0] * w.shape[1] for w in weights]
    return max((size for size in sizes if size <= MAX_BUFFER), default=0)


# ---- kernels


def unpack(
    weight: BlockWeight, out: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The weight in float16 [n, k], or the given rows of it."""
    n, k = weight.shape if rows is None else (len(rows), weight.shape[1])
    if out is None:
        out = torch.empty((n, k), dtype=torch.float16, device=weight.codes.device)
    wide = weight.scales.shape[1] * weight.group
    launch(
        jit_quant.unpack_rows,
        (triton.cdiv(n, UNPACK_ROWS), wide // weight.pack, 1),
        (
            weight.codes, weight.scales, _or(weight.offsets, weight.scales),
            weight.codes if rows is None else rows, out, n, k, wide,
        ),
        (
            UNPACK_ROWS, weight.pack, weight.bits, weight.group, weight.offsets is not None,
            rows is not None, not INTERPRETED,
        ),
    )  # fmt: skip
    return out


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor | BlockWeight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> SplitSums:
    """kernels.matmul for weights of both kinds."""
    plain = plain_weight(weight, len(x))
    if plain is None:
        assert isinstance(weight, BlockWeight)
        return _matmul(x, weight, bias, out)
    return kernels.matmul(x, plain, bias, out=out)


def plain_weight(weight: torch.Tensor | BlockWeight, rows: int) -> torch.Tensor | None:
    """The weight for kernels.matmul with so many rows; None: the kernel unpacks the blocks."""
    if isinstance(weight, torch.Tensor):
        return weight
    if in_kernel(weight, rows):
        return None
    if weight.unpacked is not None:
        return weight.unpacked
    assert weight.buffer is not None, "a weight without a buffer is multiplied in its blocks"
    n, k = weight.shape
    return unpack(weight, weight.buffer[: n * k].view(n, k))


def in_kernel(weight: BlockWeight, rows: int) -> bool:
    """Whether the matmul's kernel unpacks the weight."""
    if weight.unpacked is not None:
        return rows <= FEW_ROWS
    return rows <= MORE_ROWS or weight.buffer is None


def _matmul(
    x: torch.Tensor, weight: BlockWeight, bias: torch.Tensor | None, out: torch.Tensor | None
) -> SplitSums:
    m, (n, k) = len(x), weight.shape
    splits, blocks = split_k(n, k)
    wide = weight.scales.shape[1] * weight.group
    packs = (wide if splits == 1 else blocks * BK) // weight.pack
    if out is None or splits > 1:
        out = torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
    else:
        out = out[None]
    lines = FEW_ROWS if m <= FEW_ROWS else MORE_ROWS
    launch(
        jit_quant.quant_matmul,
        (triton.cdiv(n, COLUMNS), splits, triton.cdiv(m, lines)),
        (
            x.to(torch.float16), weight.codes, weight.scales, _or(weight.offsets, weight.scales),
            out, m, n, k, wide, packs,
        ),
        (
            lines, COLUMNS, weight.pack, weight.bits, weight.group, weight.offsets is not None,
            not INTERPRETED,
        ),
        warps=4,
        stages=3 if weight.bits == 4 else 4,
        fuse=True,  # for the tensor cores; a fused scale and offset is exact before its rounding
    )  # fmt: skip
    return SplitSums(out, bias)


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor
