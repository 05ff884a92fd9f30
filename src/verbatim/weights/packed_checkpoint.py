"""Quantised safetensors checkpoints: dequantise them when they are loaded.

In: the tensors of a model directory and the `quantization_config` of its config.json. Out: the
same weights as float tensors under their usual names. Formats: block FP8, compressed-tensors
(float-, int-, naive- and pack-quantized), AWQ, GPTQ, MXFP4. Others are refused by name.

Every value has the bits of the format's own dequantiser: integers times scale in float32, rounded
once to the type of the scale. Activations are not quantised, whatever the config says. With
`blocks` the integers stay integers where a GGUF block type holds them (packed_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.weights.block_formats import dequantise
from verbatim.weights.packed_blocks import to_blocks
from verbatim.weights.packed_config import (
    ConfigGroups,
    block_scale,
    block_sizes,
    check_keys,
    group_index,
    mapping,
)
from verbatim.weights.tensor import Tensor

_INTEGERS = {"U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8", "F8_E4M3": "u1", "F8_E8M0": "u1"}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble that holds column 0, 1, 2, … of eight


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A tensor that is not a float weight: integers, FP8, packed nibbles."""

    dtype: str  # type name in the safetensors header: "I32", "F8_E4M3", ...
    shape: tuple[int, ...]
    data: np.ndarray  # flat uint8

    def array(self) -> np.ndarray:
        if self.dtype not in _INTEGERS:
            raise ModelError(f"the type {self.dtype} is not supported in a quantised weight")
        return self.data.view(_INTEGERS[self.dtype]).reshape(self.shape)


def unpack_checkpoint(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    raw: Mapping[str, RawTensor],
    file: str,
    *,
    blocks: bool = False,
) -> tuple[dict[str, Tensor], dict[str, RawTensor], tuple[str, ...]]:
    """(float tensors, the rest, warnings). Weights that are not quantised stay as they are."""
    method = config.get("quant_method")
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        known = ", ".join(_METHODS)
        raise ModelError(
            f"quantization_config.quant_method is {method!r:.60}; supported: {known}; "
            "use a float or GGUF file of this model",
            file=file,
        )
    checkpoint = _Checkpoint(dict(tensors), dict(raw), config, blocks)
    try:
        checkpoint.warnings += check_keys(str(method), config)
        reader(checkpoint)
    # ValueError, IndexError, TypeError: NumPy's, for tensors of a wrong shape or type
    except (ModelError, ValueError, IndexError, TypeError) as error:
        where = f", {checkpoint.current}" if checkpoint.current else ""
        raise ModelError(f"quantization_config: {method}{where}: {error}", file=file) from None
    if floats := checkpoint.unpacked:
        checkpoint.warnings.append(
            f"{len(floats)} quantised weights are unpacked to floats, such as {floats[0]}: no "
            "block type holds FP8, groups that are no multiples of 32 columns or in another order "
            "(desc_act), or these scales"
        )
    return checkpoint.floats, checkpoint.raw, tuple(checkpoint.warnings)


class _Checkpoint:
    def __init__(
        self,
        floats: dict[str, Tensor],
        raw: dict[str, RawTensor],
        config: Mapping[str, Any],
        blocks: bool,
    ) -> None:
        self.floats, self.raw, self.config, self.blocks = floats, raw, config, blocks
        self.unpacked: list[str] = []  # weights that `blocks` could not keep
        self.warnings: list[str] = []
        self.current = ""  # the weight in work, for error texts

    @cached_property
    def groups(self) -> ConfigGroups:
        return ConfigGroups(self.config)

    def modules(self, suffix: str) -> list[str]:
        """Names of the modules that have a raw tensor with this suffix."""
        end = f".{suffix}"
        return [name.removesuffix(end) for name in sorted(self.raw) if name.endswith(end)]

    def take(self, name: str) -> np.ndarray:
        """The integers of a raw tensor, which leaves the checkpoint."""
        self.current = name
        if name not in self.raw:
            raise ModelError(f"{name} is missing")
        return self.raw.pop(name).array()

    def take_scale(self, name: str) -> tuple[np.ndarray, str]:
        """A scale as float32, and its type."""
        self.current = name
        if name in self.raw and self.raw[name].dtype == "F8_E8M0":
            return np.exp2(self.take(name).astype(np.float32) - 127), "bf16"
        if name not in self.floats:
            raise ModelError(f"{name} is missing")
        tensor = self.floats.pop(name)
        return dequantise(tensor.type, tensor.data, tensor.shape), tensor.type

    def take_groups(self, name: str, inputs: int, count: int) -> np.ndarray:
        """The group of each input, of `count` groups."""
        groups = self.take(name)
        if groups.shape != (inputs,):
            raise ModelError(f"{name} is {groups.shape}, and the weight has {inputs} inputs")
        if groups.size and not 0 <= groups.min() <= groups.max() < count:
            raise ModelError(f"{name} has a group that is none of the {count} with a scale")
        return groups

    def put(self, name: str, values: np.ndarray, scale: np.ndarray, type: str) -> None:
        """The weight values × scale. `values` are whole numbers, except those of FP8."""
        if name in self.floats:
            raise ModelError(f"{name} is in the files twice, quantised and not")
        if self.blocks:
            whole = bool((values == np.rint(values)).all())
            if whole and (packed := to_blocks(name, values, scale)) is not None:
                self.floats[name] = packed
                return
            self.unpacked.append(name)
        product = values * scale
        self.floats[name] = Tensor(name, type, product.shape, to_type(product, type))

    def drop(self, *suffixes: str) -> None:
        """Remove tensors that concern activations or repeat what is known."""
        ends = tuple(f".{suffix}" for suffix in suffixes)
        for group in (self.floats, self.raw):
            for name in [name for name in group if name.endswith(ends)]:
                del group[name]


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


def _e4m3_table() -> np.ndarray:
    """float32 of every FP8 E4M3 byte: 4 exponent bits with bias 7, 3 mantissa bits, no infinity."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    value = np.where((byte & 127) == 127, np.nan, value)
    return np.where(byte & 128, -value, value).astype(np.float32)


E4M3 = _e4m3_table()


def _nibbles(packed: np.ndarray, bits: int) -> np.ndarray:
    """int32 [..., n] -> the values of `bits` bits in it [..., n, 32 / bits], lowest first."""
    if packed.dtype != np.int32:
        raise ModelError(f"packed values are words of the type {packed.dtype}, not int32")
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (packed.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)


# --------------------------------------------------------------------------------- the formats


def _fp8(checkpoint: _Checkpoint) -> None:
    """`weight` (E4M3) and `weight_scale_inv`, one scale per block of 128 × 128, or per row or
    tensor."""
    for module in checkpoint.modules("weight"):
        if checkpoint.raw[f"{module}.weight"].dtype != "F8_E4M3":
            continue
        values = E4M3[checkpoint.take(f"{module}.weight")]
        name = f"{module}.weight_scale_inv"
        name = (
            name
            if name in checkpoint.floats or name in checkpoint.raw
            else f"{module}.weight_scale"
        )
        scale, type = checkpoint.take_scale(name)
        type = "bf16" if type == "f32" else type
        block = block_sizes(checkpoint.config, "weight_block_size")
        checkpoint.put(f"{module}.weight", values, block_scale(scale, values.shape, block), type)
    checkpoint.drop("input_scale", "activation_scale")


def _compressed(checkpoint: _Checkpoint) -> None:
    config = checkpoint.config
    if mapping(config, "sparsity_config").get("format", "dense") != "dense":
        raise ModelError("sparsity_config is not supported")
    for module in checkpoint.modules("weight_packed"):
        if f"{module}.weight_shape" not in checkpoint.raw:
            raise ModelError("only pack-quantized integers are supported; nvfp4 and mxfp are not")
        _compressed_packed(checkpoint, module)
    for module in checkpoint.modules("weight"):
        tensor = checkpoint.raw[f"{module}.weight"]
        values = checkpoint.take(f"{module}.weight")
        is_float = tensor.dtype == "F8_E4M3"
        _check_type(checkpoint, module, "float" if is_float else "int")
        floats = E4M3[values] if is_float else values.astype(np.float32)
        _compressed_scaled(checkpoint, module, floats, None)
    groups = mapping(config, "config_groups")
    if any(mapping(groups, name).get("input_activations") for name in groups):
        checkpoint.warnings.append(
            "quantization_config asks for quantised activations; they are not quantised here, so "
            "the logits are closer to the float model's"
        )
    checkpoint.drop("input_scale", "input_zero_point", "output_scale")


def _check_type(checkpoint: _Checkpoint, module: str, type: str) -> None:
    stated = checkpoint.groups.weights(module).get("type")
    if stated not in (None, type):
        raise ModelError(f"type is {stated!r}, and the values of {module} are of the type {type}")


def _compressed_packed(checkpoint: _Checkpoint, module: str) -> None:
    _check_type(checkpoint, module, "int")
    rows, columns = (int(n) for n in checkpoint.take(f"{module}.weight_shape").reshape(-1))
    packed = checkpoint.take(f"{module}.weight_packed")
    stated = checkpoint.groups.weights(module).get("num_bits")
    if stated not in (None, 4, 8):
        raise ModelError(f"num_bits is {stated!r:.20}; supported: 4, 8")
    known = (4, 8) if stated is None else (int(stated),)
    bits = next((b for b in known if -(-columns // (32 // b)) == packed.shape[-1]), None)
    if bits is None or packed.shape[0] != rows:
        raise ModelError(
            f"{packed.shape} words do not hold {rows} × {columns} values of "
            f"{' or '.join(map(str, known))} bits"
        )
    offset = 1 << (bits - 1)
    values = _nibbles(packed, bits).reshape(rows, -1)[:, :columns].astype(np.float32) - offset
    zero = None
    name = f"{module}.weight_zero_point"
    if name in checkpoint.raw and checkpoint.raw[name].dtype != "I8":  # per row or group
        words = checkpoint.take(name)  # packed along the rows
        zero = _nibbles(np.ascontiguousarray(words.T), bits).reshape(words.shape[1], -1).T
        zero = zero[:rows].astype(np.float32) - offset
    _compressed_scaled(checkpoint, module, values, zero)


def _compressed_scaled(
    checkpoint: _Checkpoint, module: str, values: np.ndarray, zero: np.ndarray | None
) -> None:
    """Multiply by a scale per tensor, per row, per group of columns (`weight_g_idx` orders them) or
    per block."""
    scale, type = checkpoint.take_scale(f"{module}.weight_scale")
    if zero is None and f"{module}.weight_zero_point" in checkpoint.raw:
        zero = checkpoint.take(f"{module}.weight_zero_point").astype(np.float32)
    args = checkpoint.groups.weights(module)
    if zero is None and args.get("symmetric") is False:
        raise ModelError(f"symmetric is false, and {module}.weight_zero_point is missing")
    if zero is not None and zero.size != scale.size:
        raise ModelError(f"zero points {zero.shape} do not fit scales {scale.shape}")
    order = args.get("actorder")
    if order in ("group", "dynamic", True) and f"{module}.weight_g_idx" not in checkpoint.raw:
        raise ModelError(f"actorder is {order!r}, and {module}.weight_g_idx is missing")
    block = block_sizes(args, "block_structure")
    if args.get("strategy") == "block" and block is None:
        raise ModelError("strategy is 'block', and block_structure is missing")
    if block is not None:
        scale = block_scale(scale, values.shape, block)
        zero = None if zero is None else block_scale(zero, values.shape, block)
    elif scale.ndim == 2 and scale.shape[1] > 1:
        groups = group_index(values.shape[1], scale.shape[1], args.get("group_size"))
        if f"{module}.weight_g_idx" in checkpoint.raw:
            name, inputs = f"{module}.weight_g_idx", values.shape[1]
            if (checkpoint.raw[name].array() == -1).any():  # the library: columns in their order
                checkpoint.take(name)
            else:
                groups = checkpoint.take_groups(name, inputs, scale.shape[1])
        if len(scale) not in (1, len(values)):
            raise ModelError(f"scales {scale.shape} do not fit a weight {values.shape}")
        scale = scale[:, groups]
        zero = None if zero is None else zero[:, groups]
    else:
        scale = block_scale(scale, values.shape, None)
        zero = None if zero is None else block_scale(zero, values.shape, None)
    checkpoint.put(f"{module}.weight", values if zero is None else values - zero, scale, type)


def _awq(checkpoint: _Checkpoint) -> None:
    """`qweight` int32 [k, n / 8], `qzeros`, `scales` [k / group, n]; the weight is transposed."""
    _check_bits(checkpoint, (4,))

    def columns(words: np.ndarray) -> np.ndarray:
        return _nibbles(words, 4)[..., _AWQ_ORDER].reshape(len(words), -1).astype(np.float32)

    for module in checkpoint.modules("qweight"):
        values = columns(checkpoint.take(f"{module}.qweight"))
        zero = columns(checkpoint.take(f"{module}.qzeros"))
        scale, type = checkpoint.take_scale(f"{module}.scales")
        size = checkpoint.config.get("group_size", checkpoint.config.get("q_group_size"))
        group = group_index(len(values), len(scale), size)
        _check_zeros(zero, scale)
        checkpoint.put(f"{module}.weight", (values - zero[group]).T, scale[group].T, type)


def _gptq(checkpoint: _Checkpoint) -> None:
    """`qweight` int32 [k / 8, n], `qzeros` [k / group, n / 8], `scales`, `g_idx` [k]. The format
    `gptq` stores the zeros minus one, `gptq_v2` as they are."""
    bits = _check_bits(checkpoint, (2, 4, 8))
    add = 0 if str(checkpoint.config.get("checkpoint_format")).lower() == "gptq_v2" else 1
    for module in checkpoint.modules("qweight"):
        words = checkpoint.take(f"{module}.qweight")
        values = _nibbles(np.ascontiguousarray(words.T), bits).reshape(words.shape[1], -1).T
        zeros = checkpoint.take(f"{module}.qzeros")
        zero = (_nibbles(zeros, bits).reshape(len(zeros), -1) + add) & ((1 << bits) - 1)
        scale, type = checkpoint.take_scale(f"{module}.scales")
        group = group_index(len(values), len(scale), checkpoint.config.get("group_size"))
        if f"{module}.g_idx" in checkpoint.raw:
            group = checkpoint.take_groups(f"{module}.g_idx", len(values), len(scale))
        elif checkpoint.config.get("desc_act"):
            raise ModelError(f"desc_act is true, and {module}.g_idx is missing")
        _check_zeros(zero, scale)
        difference = values.astype(np.float32) - zero.astype(np.float32)[group]
        checkpoint.put(f"{module}.weight", difference.T, scale[group].T, type)


def _check_zeros(zero: np.ndarray, scale: np.ndarray) -> None:
    if zero.shape != scale.shape:
        raise ModelError(f"zero points {zero.shape} do not fit scales {scale.shape}")


def _check_bits(checkpoint: _Checkpoint, known: tuple[int, ...]) -> int:
    bits = checkpoint.config.get("bits", checkpoint.config.get("w_bit"))
    if bits not in known:
        raise ModelError(f"bits is {bits!r:.20}; supported: {', '.join(map(str, known))}")
    return int(bits)


def _mxfp4(checkpoint: _Checkpoint) -> None:
    """`NAME_blocks` (two E2M1 values per byte, blocks of 32) and `NAME_scales` (powers of two), as
    gpt-oss stores its experts: [experts, outputs, inputs]. The weight stays in these blocks, in
    GGUF's order: a scale, then the 16 bytes with value j and value j + 16."""
    for name in [name for name in sorted(checkpoint.raw) if name.endswith("_blocks")]:
        base = name.removesuffix("_blocks")
        blocks = checkpoint.take(name)
        scale = checkpoint.take(f"{base}_scales")
        if blocks.shape != (*scale.shape, 16) or scale.ndim < 2:
            raise ModelError(f"blocks {blocks.shape} do not match scales {scale.shape}")
        low, high = blocks & 15, blocks >> 4  # values 0, 2, .. 30 and 1, 3, .. 31
        first, last = (
            np.stack([low[..., part], high[..., part]], axis=-1).reshape(blocks.shape)
            for part in (slice(0, 8), slice(8, 16))
        )
        packed = np.concatenate([scale[..., None], first | last << 4], axis=-1, dtype=np.uint8)
        shape = (*scale.shape[:-1], 32 * scale.shape[-1])
        checkpoint.floats[base] = Tensor(base, "mxfp4", shape, packed.reshape(-1))


_METHODS: dict[str, Callable[[_Checkpoint], None]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
