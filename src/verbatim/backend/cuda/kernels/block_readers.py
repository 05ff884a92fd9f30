"""Read the blocks of quantised weights on the device: codes, scales and offsets.

In: blocks [n, k / values, bytes per block], as a file has them or a checkpoint's weights are packed
(formats/). Out: Values, whose meaning GpuBlocks of the format states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from verbatim.base.errors import ModelError
from verbatim.formats.checkpoint_blocks import CHECKPOINT_TYPES, CheckpointType

HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}
E4M3_BIAS = 2.0**8  # an E4M3 byte, shifted into a float16, is smaller by this factor
E2M1_BIAS = 14  # a nibble of mxfp4 likewise, by this power of two


class Values(NamedTuple):
    """Codes [n, k] uint8, scales and offsets [n, k / group] of some rows."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None


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


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of K-quants with offsets."""
    a, b, c = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([a & 63, (c & 15) | ((a >> 2) & 48)], -1).float()
    minima = torch.cat([b & 63, (c >> 4) | ((b >> 2) & 48)], -1).float()
    return (
        _rows(_half(blocks, 0).float()[..., None] * scales),
        _rows(-(_half(blocks, 2).float()[..., None] * minima)),
    )


def _q4_k(blocks: torch.Tensor) -> Values:
    return Values(_rows(_nibbles(blocks[..., 16:], 32)), *_k_scales(blocks))


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., m] -> [..., 8, m] of 0 or 16: bit j of each byte."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)[:, None]
    return ((packed[..., None, :] >> shifts) & 1) << 4


def _q5(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Codes 0 .. 31 of q5_0 and q5_1: four bytes of fifth bits at `at`, then nibbles."""
    fifth = _fifth_bits(blocks[..., at : at + 4]).transpose(-1, -2).flatten(-2)
    return _nibbles(blocks[..., at + 4 :], 16) | fifth


def _q5_0(blocks: torch.Tensor) -> Values:
    signed = _q5(blocks, 2).to(torch.int8) - 16
    return Values(_rows(signed.view(torch.uint8)), _half(blocks, 0), None)


def _q5_1(blocks: torch.Tensor) -> Values:
    return Values(_rows(_q5(blocks, 4)), _half(blocks, 0), _half(blocks, 2))


def _q5_k(blocks: torch.Tensor) -> Values:
    codes = _nibbles(blocks[..., 48:], 32) | _fifth_bits(blocks[..., 16:48]).flatten(-2)
    scales, minima = _k_scales(blocks)
    return Values(_rows(codes), scales, minima)


def _q6_k(blocks: torch.Tensor) -> Values:
    low = _nibbles(blocks[..., :128], 64)
    pairs = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((pairs >> shifts) & 3).flatten(-3)
    signed = (low | (high << 4)).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return Values(
        _rows(signed.view(torch.uint8)), _rows(_half(blocks, 208).float()[..., None] * scales), None
    )


def _mxfp4(blocks: torch.Tensor) -> Values:
    """Powers of two as bfloat16, which holds them."""
    exponents = blocks[..., 0].int() - 127 + E2M1_BIAS
    if exponents.numel() and int(exponents.max()) > 127:
        raise ModelError("a weight in mxfp4 has a scale above 2^113, which no GPU type holds")
    scales = torch.exp2(exponents.double()).to(torch.bfloat16)
    return Values(_rows(_nibbles(blocks[..., 1:], 16)), scales, None)


def _checkpoint(kind: CheckpointType, blocks: torch.Tensor) -> Values:
    """A type of formats/checkpoint_blocks.py."""
    types = {"f32": torch.float32, **HALVES}
    scales = blocks[..., : kind.scale_bytes].contiguous().view(types[kind.scale_type])[..., 0]
    codes = blocks[..., kind.codes_at :]
    if kind.code == "i4":
        codes = torch.stack([codes & 15, codes >> 4], -1)
    elif kind.code == "e4m3":
        scales = scales * E4M3_BIAS
    zeros = _half(blocks, kind.scale_bytes) if kind.zero else None
    if kind.group == 128:  # gpu_weights.BLOCK_FORMATS
        return Values(_rows(codes), scales.float(), None if zeros is None else zeros.float())
    return Values(_rows(codes), scales, zeros)


# by type: the function that unpacks blocks [n, k / values, bytes per block] uint8
READERS: dict[str, Callable[[torch.Tensor], Values]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q4_k": _q4_k,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "q8_0": _q8_0,
    "mxfp4": _mxfp4,
    **{name: partial(_checkpoint, kind) for name, kind in CHECKPOINT_TYPES.items()},
}
