"""Block types for the weights of quantised safetensors (FP8, AWQ, GPTQ, compressed-tensors).

They exist in memory only: no file holds them, and GGUF has no number for them. A block holds the
codes of 32 or 128 consecutive values of one row, in this order:

    scale   float32 for FP8, else of the result's type
    zero    float16, a whole number; only in types with a zero point
    codes   e4m3 and i8: one byte per value
            i4: byte j has value 2 j in its low nibble, 2 j + 1 in its high one, both plus 8

value = (code - zero) * scale in float32, rounded once to the result's type: the bits of the
format's own dequantiser. A name states all of this: i4z_128_bf16 has 4-bit codes with a zero point,
128 values per block, and values rounded to bfloat16.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from verbatim.formats.format import Format, GpuBlocks

GROUPS = (128, 32)  # values per block; the first that a checkpoint's groups allow
_SIZES = {"f32": 4, "f16": 2, "bf16": 2}


class CheckpointType(NamedTuple):
    code: str  # e4m3, i4 or i8
    zero: bool
    group: int  # values per block
    result: str  # f32, f16 or bf16

    @property
    def name(self) -> str:
        return f"{self.code}{'z' if self.zero else ''}_{self.group}_{self.result}"

    @property
    def scale_type(self) -> str:
        return "f32" if self.code == "e4m3" else self.result

    @property
    def scale_bytes(self) -> int:
        return _SIZES[self.scale_type]

    @property
    def codes_at(self) -> int:
        """Bytes of a block before its codes."""
        return self.scale_bytes + (2 if self.zero else 0)

    @property
    def bits(self) -> int:
        return 4 if self.code == "i4" else 8

    @property
    def block_bytes(self) -> int:
        return self.codes_at + self.group * self.bits // 8


_ALL = [
    CheckpointType(code, zero, group, result)
    for code, zeros in (("e4m3", (False,)), ("i4", (False, True)), ("i8", (False, True)))
    for zero in zeros
    for group in GROUPS
    for result in _SIZES
]
CHECKPOINT_TYPES = {kind.name: kind for kind in _ALL}


def _e4m3_table() -> np.ndarray:
    """float32 of every FP8 E4M3 byte: 4 exponent bits with bias 7, 3 mantissa bits, no infinity."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    value = np.where((byte & 127) == 127, np.nan, value)
    return np.where(byte & 128, -value, value).astype(np.float32)


E4M3 = _e4m3_table()


def code_values(code: str, data: np.ndarray) -> np.ndarray:
    """Bytes of codes [n, bytes] -> their values [n, values]: float32 of e4m3, int8 of integers."""
    if code == "e4m3":
        return np.asarray(E4M3[data])
    if code == "i8":
        return data.view(np.int8)
    pairs = np.stack([data & np.uint8(15), data >> np.uint8(4)], axis=-1)
    return pairs.reshape(len(data), -1).view(np.int8) - np.int8(8)


def to_type(values: np.ndarray, type: str) -> np.ndarray:
    """float32 -> flat bytes of f32, f16 or bf16, rounded to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if type == "f32":
        return values.reshape(-1).view(np.uint8)
    if type == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).reshape(-1).view(np.uint8)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
    return rounded.astype(np.uint16).reshape(-1).view(np.uint8)


def from_type(data: np.ndarray, type: str) -> np.ndarray:
    """Flat bytes of f32, f16 or bf16 -> float32."""
    if type == "f32":
        return data.view("<f4")
    if type == "f16":
        return data.view("<f2").astype(np.float32)
    return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _unpack(kind: CheckpointType, blocks: np.ndarray, out: np.ndarray) -> None:
    """Blocks uint8 [n, bytes per block] -> out, float32 [n, values per block]."""
    head = np.ascontiguousarray(blocks[:, : kind.codes_at])
    scale = from_type(head[:, : kind.scale_bytes].reshape(-1), kind.scale_type)
    values = code_values(kind.code, np.ascontiguousarray(blocks[:, kind.codes_at :]))
    if kind.zero:
        values = values - from_type(head[:, kind.scale_bytes :].reshape(-1), "f16")[:, None]
    np.multiply(values, scale[:, None], out=out)
    if kind.result != "f32":
        out[:] = from_type(to_type(out, kind.result), kind.result).reshape(out.shape)


def _gpu_blocks(kind: CheckpointType) -> GpuBlocks:
    # float32 for large groups: a copy to shared memory that the kernel does not wait for needs
    # 4 bytes per thread
    scale_bytes = 4 * (2 if kind.zero else 1) if kind.group == 128 else kind.codes_at
    return GpuBlocks(
        kind.bits,
        kind.group,
        scale_bytes,
        code="e4m3" if kind.code == "e4m3" else "int",
        offset="zero" if kind.zero else "none",
        result="bf16" if kind.result == "bf16" else "f16",
    )


FORMATS = tuple(
    Format(
        kind.name, kind.group, kind.block_bytes, unpack=partial(_unpack, kind),
        gpu=_gpu_blocks(kind),
    )
    for kind in _ALL
)  # fmt: skip
