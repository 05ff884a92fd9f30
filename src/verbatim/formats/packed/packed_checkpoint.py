"""Quantised safetensors checkpoints: dequantise them when they are loaded.

In: the tensors of a model directory and the `quantization_config` of its config.json. Out: the
same weights as float tensors under their usual names. Formats: block FP8, compressed-tensors
(float-, int-, naive- and pack-quantized), AWQ, GPTQ, MXFP4. Others are refused by name.

Every value has the bits of the format's own dequantiser: integers times scale in float32, rounded
once to the type of the scale. Activations are not quantised, whatever the config says. With
`blocks` the integers stay integers where a GGUF block type holds them (packed_blocks.py). With
`gpu` codes and scales stay as they are, in blocks (checkpoint_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.conversion import dequantise
from verbatim.formats.packed.packed_config import (
    ConfigGroups,
    block_sizes,
    check_keys,
    group_index,
    mapping,
    scale_groups,
)
from verbatim.formats.packed.packed_weight import PackedWeight
from verbatim.formats.tensor import Tensor

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
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    raw: Mapping[str, RawTensor],
    file: str,
    *,
    blocks: bool = False,
    gpu: bool = False,
) -> tuple[dict[str, Tensor], dict[str, RawTensor], tuple[str, ...]]:
    """(float tensors, the rest, warnings). Weights that are not quantised stay as they are.
    `blocks`: keep integers in GGUF's blocks; `gpu`: keep codes in those of checkpoint_blocks.py."""
    method = config.get("quant_method")
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        known = ", ".join(_METHODS)
        absent = "null" if "quant_method" in config else "missing"
        found = absent if method is None else f"{method!r:.60}"
        raise ModelError(
            f"quantization_config.quant_method is {found}; supported: {known}; "
            "use a float or GGUF file of this model",
            file=file,
        )
    checkpoint = _Checkpoint(dict(tensors), dict(raw), config, blocks, gpu)
    try:
        checkpoint.warnings += check_keys(str(method), config)
        reader(checkpoint)
    # ValueError, IndexError, TypeError: NumPy's, for tensors of a wrong shape or type
    except (ModelError, ValueError, IndexError, TypeError) as error:
        where = f", {checkpoint.current}" if checkpoint.current else ""
        raise ModelError(f"quantization_config: {method}{where}: {error}", file=file) from None
    if not checkpoint.current:
        checkpoint.warnings.append(
            f"quantization_config says {method}, and no weight of the files is quantised; they are "
            "used as they are"
        )
    if floats := checkpoint.unpacked:
        what = "FP8, groups" if blocks else "rows or groups"
        last = "or these scales" if blocks else "NaN, or these scales"
        checkpoint.warnings.append(
            f"{len(floats)} quantised weights are unpacked to floats, such as {floats[0]}: no "
            f"block type holds {what} that are no multiples of 32 columns or in another order "
            f"(desc_act), {last}"
        )
    return checkpoint.floats, checkpoint.raw, tuple(checkpoint.warnings)


class _Checkpoint:
    def __init__(
        self,
        floats: dict[str, Tensor],
        raw: dict[str, RawTensor],
        config: Mapping[str, object],
        blocks: bool,
        gpu: bool,
    ) -> None:
        self.floats, self.raw, self.config = floats, raw, config
        self.blocks, self.gpu = blocks, gpu
        self.unpacked: list[str] = []  # weights that `blocks` or `gpu` could not keep
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

    def put(self, weight: PackedWeight) -> None:
        name = weight.name
        if name in self.floats:
            raise ModelError(f"{name} is in the files twice, quantised and not")
        packed = None
        if self.blocks or self.gpu:
            packed = weight.to_gguf_blocks() if self.blocks else weight.to_checkpoint_blocks()
            if packed is None:
                self.unpacked.append(name)
        self.floats[name] = weight.to_floats() if packed is None else packed

    def drop(self, *suffixes: str) -> None:
        """Remove tensors that concern activations or repeat what is known."""
        ends = tuple(f".{suffix}" for suffix in suffixes)
        for group in (self.floats, self.raw):
            for name in [name for name in group if name.endswith(ends)]:
                del group[name]


def _nibbles(packed: np.ndarray, bits: int) -> np.ndarray:
    """int32 [..., n] -> the values of `bits` bits in it [..., n, 32 / bits], lowest first."""
    _check_words(packed)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (packed.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)


def _check_words(packed: np.ndarray) -> None:
    if packed.dtype != np.int32:
        raise ModelError(f"packed values are words of the type {packed.dtype}, not int32")


def _codes(words: np.ndarray, bits: int) -> tuple[str, np.ndarray]:
    """int32 [rows, words], the lowest bits first -> (i4 or i8, codes uint8 [rows, bytes]). A value
    less half its range is the code: both kinds of codes are signed."""
    _check_words(words)
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return "i8", data ^ np.uint8(128)
    if bits == 2:
        pairs = np.stack([data & 15, data >> 4], axis=-1)  # two values each
        return "i4", ((pairs & 3) | (pairs >> 2) << 4).astype(np.uint8).reshape(len(data), -1)
    return "i4", data


# --------------------------------------------------------------------------------- the formats


def _fp8(checkpoint: _Checkpoint) -> None:
    """`weight` (E4M3) and `weight_scale_inv`, one scale per block of 128 × 128, or per row or
    tensor."""
    for module in checkpoint.modules("weight"):
        if checkpoint.raw[f"{module}.weight"].dtype != "F8_E4M3":
            continue
        values = checkpoint.take(f"{module}.weight")
        name = f"{module}.weight_scale_inv"
        if name not in checkpoint.floats and name not in checkpoint.raw:
            name = f"{module}.weight_scale"
        scale, type = checkpoint.take_scale(name)
        type = "bf16" if type == "f32" else type
        block = block_sizes(checkpoint.config, "weight_block_size")
        scale, groups = scale_groups(scale, values.shape, block)
        data = values.reshape(-1, values.shape[-1])
        checkpoint.put(
            PackedWeight(f"{module}.weight", "e4m3", values.shape, data, scale, type, groups=groups)
        )
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
        if not is_float and tensor.dtype != "I8":
            raise ModelError(f"the type {tensor.dtype} is not supported in a quantised weight")
        data = values.view(np.uint8).reshape(-1, values.shape[-1])
        code = "e4m3" if is_float else "i8"
        _compressed_scaled(checkpoint, module, code, data, values.shape, None)
    groups = mapping(config, "config_groups")
    stated = [mapping(groups, name) for name in groups]
    if any(g.get("input_activations") or g.get("output_activations") for g in stated):
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
    zero = None
    name = f"{module}.weight_zero_point"
    if name in checkpoint.raw and checkpoint.raw[name].dtype != "I8":  # per row or group
        words = checkpoint.take(name)  # packed along the rows
        zero = _nibbles(np.ascontiguousarray(words.T), bits).reshape(words.shape[1], -1).T
        zero = zero[:rows].astype(np.float32) - offset
    _compressed_scaled(checkpoint, module, *_codes(packed, bits), (rows, columns), zero)


def _compressed_scaled(
    checkpoint: _Checkpoint,
    module: str,
    code: str,
    data: np.ndarray,
    shape: tuple[int, ...],
    zero: np.ndarray | None,
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
    groups: np.ndarray | None
    if block is None and scale.ndim == 2 and scale.shape[1] > 1:
        size = args.get("group_size")
        groups = group_index(shape[1], scale.shape[1], 0 if size is None else size)
        if f"{module}.weight_g_idx" in checkpoint.raw:
            name = f"{module}.weight_g_idx"
            if (checkpoint.raw[name].array() == -1).any():  # the library: columns in their order
                checkpoint.take(name)
            else:
                groups = checkpoint.take_groups(name, shape[1], scale.shape[1])
    else:
        zero = None if zero is None else scale_groups(zero, shape, block)[0]
        scale, groups = scale_groups(scale, shape, block)
    checkpoint.put(PackedWeight(f"{module}.weight", code, shape, data, scale, type, zero, groups))


def _awq(checkpoint: _Checkpoint) -> None:
    """`qweight` int32 [k, n / 8], `qzeros`, `scales` [k / group, n]; the weight is transposed."""
    _check_bits(checkpoint, (4,))

    for module in checkpoint.modules("qweight"):
        words = checkpoint.take(f"{module}.qweight")
        data = _awq_codes(words)
        zeros = checkpoint.take(f"{module}.qzeros")
        zero = _nibbles(zeros, 4)[..., _AWQ_ORDER].reshape(len(zeros), -1)
        scale, type = checkpoint.take_scale(f"{module}.scales")
        size = checkpoint.config.get("group_size", checkpoint.config.get("q_group_size", 0))
        groups = group_index(len(words), len(scale), size)
        _put_transposed(checkpoint, module, ("i4", data), len(words), scale, zero, groups, type)


def _awq_codes(words: np.ndarray) -> np.ndarray:
    """int32 [k, n / 8] -> codes [n, k / 2]."""
    _check_words(words)
    k, count = words.shape
    if k % 2:
        words = np.concatenate([words, np.zeros((1, count), np.int32)])
    out = np.empty((count, 8, len(words) // 2), np.uint8)
    for column, nibble in enumerate(_AWQ_ORDER):
        values = (words >> (4 * nibble)).astype(np.uint8) & np.uint8(15)
        out[:, column] = (values[::2] | values[1::2] << 4).T
    return out.reshape(8 * count, -1)


def _put_transposed(
    checkpoint: _Checkpoint,
    module: str,
    codes: tuple[str, np.ndarray],
    columns: int,
    scale: np.ndarray,
    zero: np.ndarray,
    groups: np.ndarray,
    type: str,
) -> None:
    """Put a weight whose scales and zero points, of unsigned values, are [groups, rows]."""
    if zero.shape != scale.shape:
        raise ModelError(f"zero points {zero.shape} do not fit scales {scale.shape}")
    (code, data), half = codes, 8 if codes[0] == "i4" else 128
    shape, signed = (len(data), columns), zero.astype(np.float32) - half
    name = f"{module}.weight"
    checkpoint.put(PackedWeight(name, code, shape, data, scale.T, type, signed.T, groups))


def _gptq(checkpoint: _Checkpoint) -> None:
    """`qweight` int32 [k / 8, n], `qzeros` [k / group, n / 8], `scales`, `g_idx` [k]. The format
    `gptq` stores the zeros minus one, `gptq_v2` as they are."""
    bits = _check_bits(checkpoint, (2, 4, 8))
    # transformers: checkpoint_format, the older name, decides if both are there
    key = "checkpoint_format" if "checkpoint_format" in checkpoint.config else "format"
    form = str(stated := checkpoint.config.get(key, "gptq")).lower()
    if form not in ("gptq", "gptq_v2"):
        raise ModelError(f"{key} is {stated!r:.60}; supported: gptq, gptq_v2")
    add = 0 if form == "gptq_v2" else 1
    for module in checkpoint.modules("qweight"):
        words = checkpoint.take(f"{module}.qweight")
        codes, columns = _codes(words.T, bits), len(words) * (32 // bits)
        zeros = checkpoint.take(f"{module}.qzeros")
        zero = (_nibbles(zeros, bits).reshape(len(zeros), -1) + add) & ((1 << bits) - 1)
        scale, type = checkpoint.take_scale(f"{module}.scales")
        groups = group_index(columns, len(scale), checkpoint.config.get("group_size", 0))
        if f"{module}.g_idx" in checkpoint.raw:
            groups = checkpoint.take_groups(f"{module}.g_idx", columns, len(scale))
        elif checkpoint.config.get("desc_act"):
            raise ModelError(f"desc_act is true, and {module}.g_idx is missing")
        _put_transposed(checkpoint, module, codes, columns, scale, zero, groups, type)


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
