"""f32, f16 and bf16: a block is one value."""

from __future__ import annotations

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.format import FileType, Format


def _unpack_f32(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks.view("<f4")


def _pack_f32(x: np.ndarray, out: np.ndarray) -> None:
    out[:] = x.astype("<f4").view(np.uint8)


def _unpack_f16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks.view("<f2")


def _pack_f16(x: np.ndarray, out: np.ndarray) -> None:
    half = x.astype("<f2")
    if not np.isfinite(half).all() and np.isfinite(x).all():
        raise ModelError(f"the weight {np.abs(x).max()} is too large for f16 (65504); use bf16")
    out[:] = half.view(np.uint8)


def _unpack_bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pack_bf16(x: np.ndarray, out: np.ndarray) -> None:
    bits = np.ascontiguousarray(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits.astype(np.uint64) + np.uint64(0x7FFF) + odd) >> np.uint64(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits >> np.uint32(16)) | np.uint32(64)  # rounding could carry a NaN into infinity
    out[:] = np.where(nan, quiet, rounded).astype("<u2").view(np.uint8)


def _broken_bf16(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(blocks.view("<u2") & np.uint16(0x7F80) == 0x7F80)


FORMATS = (
    Format(
        "f32", 1, 4, 0, _unpack_f32, pack=_pack_f32, scales=(0,), scale_type="<f4",
        file_type=FileType(0),
    ),
    Format(
        "f16", 1, 2, 1, _unpack_f16, pack=_pack_f16, pack_error=0.0003, scales=(0,),
        file_type=FileType(1),
    ),
    Format(
        "bf16", 1, 2, 30, _unpack_bf16, pack=_pack_bf16, pack_error=0.0019, broken=_broken_bf16,
        file_type=FileType(32),
    ),
)  # fmt: skip
