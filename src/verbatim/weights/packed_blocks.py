"""Integers with scales as GGUF blocks of 32: the weights of AWQ, GPTQ and compressed-tensors.

In: integers and their scales. Out: a block tensor whose values are integer × scale, exactly, or
None where no block type can hold them. The formats' own dequantisers round this product once more,
to the type of the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verbatim.weights.tensor import Tensor

BLOCK = 32
# Block type -> the largest magnitude of a negative integer, which is the offset of its codes.
_TYPES = {"q4_0": 8, "q5_0": 16, "q8_0": 128}


def to_blocks(name: str, integers: np.ndarray, scale: np.ndarray) -> Tensor | None:
    """`integers` [rows, columns], whole numbers; `scale` of that shape or broadcast to it."""
    rows, columns = integers.shape
    if columns % BLOCK or not integers.size:
        return None
    scales = np.broadcast_to(scale, integers.shape).reshape(rows, -1, BLOCK)
    first = scales[:, :, 0]
    with np.errstate(over="ignore"):
        halves = first.astype(np.float16)
    # desc_act gives neighbouring columns other groups; float16 may not hold a bfloat16 scale
    if (scales != first[:, :, None]).any() or (halves.astype(np.float32) != first).any():
        return None
    low, high = int(integers.min()), int(integers.max())
    kind = next((t for t, most in _TYPES.items() if -most <= low and high < most), None)
    if kind is None:
        return None
    codes = integers.astype(np.int16).reshape(rows, -1, BLOCK)
    parts = [halves[:, :, None].view(np.uint8), *_packed(kind, codes)]
    return Tensor(name, kind, integers.shape, np.concatenate(parts, axis=-1).reshape(-1))


def planned_type(config: Mapping[str, Any]) -> str | None:
    """The block type in which `to_blocks` keeps the weights of a checkpoint with this
    quantization_config, or None for floats. It is known without the weights."""
    method, weights = config.get("quant_method"), config
    if method == "compressed-tensors":
        groups = (config.get("config_groups") or {}).values()
        weights = next((g["weights"] for g in groups if (g or {}).get("weights")), {})
        bits, symmetric = weights.get("num_bits", 4), weights.get("symmetric", True)
        ordered = weights.get("actorder") in (True, "group", "dynamic")
    elif method in ("gptq", "awq"):
        bits = config.get("bits", 4)
        symmetric = not config.get("zero_point", True) if method == "awq" else config.get("sym")
        ordered = bool(config.get("desc_act"))
    else:
        return None
    group = weights.get("group_size") or 0
    if weights.get("type", "int") != "int" or ordered or (group > 0 and group % BLOCK):
        return None
    most = 2 ** (bits - 1) if symmetric else 2**bits  # the integer less its zero point
    return next((kind for kind, limit in _TYPES.items() if most <= limit), None)


def _packed(kind: str, codes: np.ndarray) -> list[np.ndarray]:
    """The bytes of blocks behind their scale."""
    if kind == "q8_0":
        return [codes.astype(np.int8).view(np.uint8)]
    codes = (codes + _TYPES[kind]).astype(np.uint8)
    low = codes & 15
    nibbles = low[:, :, : BLOCK // 2] | low[:, :, BLOCK // 2 :] << 4
    if kind == "q4_0":
        return [nibbles]
    return [np.packbits(codes >> 4, axis=-1, bitorder="little"), nibbles]
