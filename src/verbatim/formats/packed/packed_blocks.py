"""Integers with scales as GGUF blocks of 32: the weights of AWQ, GPTQ and compressed-tensors.

In: integers and their scales. Out: a block tensor whose values are integer × scale, exactly, or
None where no block type can hold them. The formats' own dequantisers round this product once more,
to the type of the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from verbatim.base.json_io import JsonMapping
from verbatim.formats.checkpoint_blocks import GROUPS, CheckpointType
from verbatim.formats.tensor import Tensor

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


class PlannedCodes(NamedTuple):
    """What a quantization_config says about the stored weights."""

    bits: int
    is_float: bool
    symmetric: bool
    ordered: bool  # the columns of a group are not neighbours
    group: int  # columns per scale; 0: all


def planned_type(config: Mapping[str, object]) -> str | None:
    """The block type in which `to_blocks` keeps the weights of a checkpoint with this
    quantization_config, or None for floats. It is known without the weights."""
    codes = _planned_codes(config)
    if codes is None or codes.is_float or codes.ordered or codes.group % BLOCK:
        return None
    # the integer less its zero point
    most = 2 ** (codes.bits - 1) if codes.symmetric else 2**codes.bits
    return next((kind for kind, limit in _TYPES.items() if most <= limit), None)


def planned_gpu_type(config: JsonMapping, columns: int, floats: str) -> str | None:
    """The block type in which PackedWeight.to_checkpoint_blocks keeps a weight of so many columns,
    or None for floats. `floats`: the type of the weights that are not quantised."""
    codes = _planned_codes(config)
    if codes is None or codes.ordered:
        return None
    of = codes.group if codes.group < columns else 0
    group = next((size for size in GROUPS if columns % size == 0 and of % size == 0), None)
    if group is None:
        return None
    code = "e4m3" if codes.is_float else "i4" if codes.bits <= 4 else "i8"
    usual = {"fp8": "bf16", "awq": "f16", "gptq": "f16"}  # type of the scales
    result = usual.get(config.get("quant_method", ""), floats)
    return CheckpointType(code, not codes.symmetric and code != "e4m3", group, result).name


def _planned_codes(config: JsonMapping) -> PlannedCodes | None:
    """None: the weights are in no format with codes and scales, or the config is malformed, which
    is an error when the model is loaded."""
    method = config.get("quant_method")
    try:
        if method == "fp8":
            block = config.get("weight_block_size") or (0, 0)
            return PlannedCodes(8, True, True, False, int(block[1]))
        if method == "compressed-tensors":
            return _planned_compressed(config)
        if method in ("gptq", "awq"):
            symmetric = not config.get("zero_point", True) if method == "awq" else config.get("sym")
            group = max(int(config.get("group_size") or 0), 0)
            bits, ordered = int(config.get("bits", 4)), bool(config.get("desc_act"))
            return PlannedCodes(bits, False, bool(symmetric), ordered, group)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError):
        return None
    return None


def _planned_compressed(config: JsonMapping) -> PlannedCodes:
    groups = (config.get("config_groups") or {}).values()
    weights: JsonMapping = next((g["weights"] for g in groups if g and g.get("weights")), {})
    block = weights.get("block_structure") or (0, weights.get("group_size") or 0)
    return PlannedCodes(
        int(weights.get("num_bits", 4)),
        weights.get("type", "int") == "float",
        bool(weights.get("symmetric", True)),
        weights.get("actorder") in (True, "group", "dynamic"),
        max(int(block[1]), 0),
    )


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
