"""The cost of a model from its shape alone: bytes of weights and KV cache, operations per token.

In: a config.json, a GGUF header, or a parameter count such as 7B. Out: a Footprint. No weight is
read. The operation counts are those of `verbatim bench` (observe/roofline.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from verbatim.backend.cpu.repack import MEMORY
from verbatim.backend.gpu_weights import block_mode, device_bytes, weight_bytes
from verbatim.backend.protocol import BackendInfo
from verbatim.base.config import BLOCK_SIZE
from verbatim.base.errors import ModelError, ParameterError
from verbatim.base.json_io import JsonMapping
from verbatim.files.gguf import read_gguf
from verbatim.files.safetensors import read_json
from verbatim.formats.packed.packed_blocks import planned_gpu_type, planned_type
from verbatim.formats.registry import BLOCKS
from verbatim.model.architecture import read_config, read_header
from verbatim.model.layout import is_expert, is_quantisable, is_read_by_row, layout, parameters
from verbatim.model.loading.collect_weights import PACKED
from verbatim.model.loading.names import FUSED_EXPERTS_GGUF, gguf_source
from verbatim.model.spec import ModelSpec
from verbatim.observe.roofline import cost_card, expert_share, layer_position_ops

# Bytes per weight in memory. The cpu backend rewrites types with a codebook into larger ones. "fp8"
# is no type of ours, but a common way to serve on a GPU.
WEIGHT_TYPES = {name: size / values for name, (values, size) in BLOCKS.items()} | MEMORY
WEIGHT_TYPES["fp8"] = 1.0
# Bytes per value of the KV cache, and per head and position: q8 has a float32 scale (ADR 24).
KV_TYPES = {"f16": (2, 0), "bf16": (2, 0), "f32": (4, 0), "fp8": (1, 0), "q8": (1, 4)}
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([bm])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    window: int | None
    kv_heads: int
    head_dim: int
    kv_bytes: float  # keys and values of one position; 0 if the layer reads those of another
    ops_position: int  # operations per position attended to


class WeightPart(NamedTuple):
    """One weight as the file has it."""

    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes and operations of one model. `attention` is empty if only the parameter count is
    known: then there is no KV cache and no attention in any number."""

    name: str
    shape: str  # layers and widths in one line, for the report
    stored: str  # type of the weights
    params: int
    weight_bytes: float  # in memory
    step_bytes: float  # read by every decode step, experts not counted
    kv_type: str
    ops_token: int
    prompt_ops_token: int  # without the LM head
    expert_bytes: float = 0.0  # all experts
    experts: int = 0
    experts_used: int = 0
    kv_heads: int = 0  # the fewest of a layer
    heads: int = 0
    attention: tuple[AttentionLayer, ...] = ()
    context: int = 0  # positions of the model; 0: unknown
    parts: Mapping[str, WeightPart] = field(default_factory=dict)  # empty: a parameter count
    tied: bool = False  # the embedding is also the LM head
    # on a GPU, where quantised safetensors stay in their blocks; empty: as `parts`
    gpu_parts: Mapping[str, WeightPart] = field(default_factory=dict)
    kept: str = ""  # how a GPU keeps the weights; empty: as the file has them
    state_bytes: int = 0  # cache blocks of recurrent layers that a running sequence holds
    spec: ModelSpec | None = None  # None: a parameter count

    @property
    def denoised(self) -> int | None:
        """Positions of a denoising step of a diffusion model that does not decode from left to
        right; 0: prompt and canvas; None: another model."""
        blocks = None if self.spec is None else self.spec.diffusion
        if blocks is None or blocks.causal:
            return None
        return 0 if blocks.full else blocks.block

    def on_gpu(self, memory: float) -> Footprint:
        """The footprint in the cuda backend on a GPU with so many bytes of memory. It unpacks
        quantised weights where both copies fit, and rounds float32 to float16. Without the shapes
        of a model, and for --quant fp8, which it does not know, nothing changes."""
        if not self.parts or any(part.type == "fp8" for part in self.parts.values()):
            return self
        parts = self.gpu_parts or self.parts
        blocks = block_mode(parts, memory)
        found = device_bytes(parts, blocks)
        step, experts = _read_sums({name: b.read for name, b in found.items()}, self.tied)
        held = sum(size.held for size in found.values())
        if blocks == "only":
            held = weight_bytes(parts, "only")  # with the buffer
        kept = "in float16" if self.stored == "f32" else ""
        values = {name: prod(part.shape) for name, part in parts.items()}
        packed = any(size.read < 2 * values[name] for name, size in found.items())
        if packed or WEIGHT_TYPES[self.stored] < 2:
            twice = any(size.held > size.read for size in found.values())
            kept = "unpacked to float16" if not packed else "in blocks"
            kept += " and in float16" if twice else ""
        return replace(self, weight_bytes=held, step_bytes=step, expert_bytes=experts, kept=kept)

    def read_bytes(self, batch: float) -> float:
        """Weight bytes that one decode step of `batch` sequences reads."""
        share = expert_share(self.experts, self.experts_used, batch)
        return self.step_bytes + share * self.expert_bytes

    def kv_bytes(self, tokens: float) -> float:
        """KV cache of one sequence. Layers with a window keep at most that many positions."""
        return sum(a.kv_bytes * min(tokens, a.window or tokens) for a in self.attention)

    def attention_ops(self, context: float) -> float:
        """Operations in attention of one new token that sees `context` positions."""
        return sum(a.ops_position * min(context, a.window or context) for a in self.attention)

    def prompt_attention_ops(self, tokens: float) -> float:
        """Operations in attention of all tokens of a prompt. Token i sees i positions, or its
        window."""
        total = 0.0
        for layer in self.attention:
            seen = min(tokens, layer.window or tokens)
            total += layer.ops_position * (seen * seen / 2 + (tokens - seen) * seen)
        return total


def read_footprint(
    model: str, *, quant: str | None, kv_type: str, resolve: Callable[[str], Path]
) -> Footprint:
    """The footprint of a config.json, a directory, a .gguf file, a parameter count (7B), or a
    model name, which `resolve` turns into a path."""
    if quant is not None and quant not in (*WEIGHT_TYPES, PACKED):
        known = ", ".join((*WEIGHT_TYPES, PACKED))
        raise ParameterError("quant", f"{quant!r:.40} is not one of {known}")
    if kv_type not in KV_TYPES:
        raise ParameterError("kv_type", f"{kv_type!r:.40} is not one of {', '.join(KV_TYPES)}")
    path = Path(model).expanduser()
    if quant == PACKED and (path.suffix == ".gguf" or _COUNT.fullmatch(model)):
        raise ParameterError("quant", "'packed' is for the config.json of quantised safetensors")
    if not path.exists():
        if count := _COUNT.fullmatch(model):
            params = int(float(count[1]) * (10**9 if count[2].lower() == "b" else 10**6))
            if not params:
                raise ParameterError("model", f"{model} has no parameters; give a count such as 7B")
            return _of_count(model, params, quant or "f16", kv_type)
        path = resolve(model)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return footprint_of_config(read_json(path), str(path), quant=quant, kv_type=kv_type)
    return _of_gguf(path, quant, kv_type)


def footprint_of_config(
    config: JsonMapping, file: str, *, quant: str | None = None, kv_type: str = "f16"
) -> Footprint:
    config = dict(config)
    packing = config.pop("quantization_config", None) or {}
    spec, _ = read_config(config, file=file)
    if quant == PACKED and not packing:
        raise ModelError(f"{PACKED!r} needs a quantization_config", file=file)
    dtype = config.get("dtype") or config.get("torch_dtype") or "float16"
    floats = _DTYPES.get(str(dtype)) if quant in (None, PACKED) else quant
    if floats is None:
        raise ModelError(f"dtype is {dtype!r:.40}; name a type with --quant", file=file)
    blocks = _block_type(packing, quant)
    shapes = layout(spec)

    def type_of(part: str) -> str:
        """Quantised are the matrices of the layers, or the experts alone (mxfp4)."""
        inside = ".moe." in part if blocks == "mxfp4" else part.startswith("layers.")
        if blocks and inside and is_quantisable(part) and shapes[part][-1] % 32 == 0:
            return blocks
        return _type_of(part, floats)

    path = Path(file)
    folder = path.parent.name if path.stem == "config" else ""
    name = config.get("_name_or_path") or folder or path.stem
    found = _of_spec(spec, str(name), blocks or floats, kv_type, type_of)
    if quant is not None or blocks or not packing:
        return found
    gpu_parts = {}
    for part, shape in shapes.items():
        kept = planned_gpu_type(packing, shape[-1], floats)
        quantised = kept and part.startswith("layers.") and is_quantisable(part)
        gpu_parts[part] = WeightPart(shape, kept if quantised and kept else type_of(part))
    return replace(found, gpu_parts=gpu_parts)


def _block_type(packing: Mapping[str, object], quant: str | None) -> str | None:
    """The block type of the quantised weights of a safetensors checkpoint in memory; None: they are
    unpacked to floats, or `quant` names another type."""
    if quant not in (None, PACKED):
        return None
    if packing.get("quant_method") == "mxfp4":  # stays in its blocks without `packed`, too
        return "mxfp4"
    return planned_type(packing) if quant == PACKED else None


def _of_gguf(path: Path, quant: str | None, kv_type: str) -> Footprint:
    source = read_gguf(path)
    spec = read_header(source.metadata, source.tensors, file=str(path)).spec
    architecture = source.metadata["general.architecture"]

    fused = any(f".{FUSED_EXPERTS_GGUF}." in name for name in source.tensors)

    def type_of(part: str) -> str:
        names = gguf_source(architecture, part, fused_experts=fused).names
        tensor = source.tensors.get(names[0])
        if tensor is None:
            raise ModelError(f"tensor {names[0]} is missing", file=str(path))
        return _type_of(part, quant) if quant else tensor.type

    types = [type_of(part) for part in layout(spec) if is_quantisable(part)]
    stored = quant or max(set(types), key=types.count)
    return _of_spec(spec, path.stem, stored, kv_type, type_of)


def _type_of(part: str, stored: str) -> str:
    """Norms, biases and routers stay float32 when the matrices are quantised."""
    return stored if is_quantisable(part) or WEIGHT_TYPES[stored] >= 2 else "f32"


def _of_spec(
    spec: ModelSpec, name: str, stored: str, kv_type: str, type_of: Callable[[str], str]
) -> Footprint:
    parts = {part: WeightPart(shape, type_of(part)) for part, shape in layout(spec).items()}
    sizes = {name: prod(part.shape) * WEIGHT_TYPES[part.type] for name, part in parts.items()}
    dense, expert_bytes = _read_sums(sizes, spec.tied)
    info = BackendInfo("plan", "", 1, "", int(dense + expert_bytes), 0)
    card = cost_card(spec, info)
    return Footprint(
        name=name,
        shape=_shape(spec),
        stored=stored,
        params=parameters(spec),
        weight_bytes=sum(sizes.values()),
        step_bytes=dense,
        expert_bytes=expert_bytes,
        experts=max(layer.experts for layer in spec.layers),
        experts_used=spec.experts_used,
        kv_type=kv_type,
        kv_heads=spec.min_kv_heads,
        heads=spec.heads,
        attention=tuple(_attention(spec, kv_type)),
        context=spec.context,
        ops_token=card.ops_token,
        prompt_ops_token=card.prompt_ops_token,
        parts=parts,
        tied=spec.tied,
        state_bytes=_state_bytes(spec),
        spec=spec,
    )


def _attention(spec: ModelSpec, kv_type: str) -> Iterator[AttentionLayer]:
    for i, layer in enumerate(spec.layers):
        if layer.mixer == "attention":
            size, ops = _kv_bytes(spec, i, kv_type), layer_position_ops(spec, layer)
            yield AttentionLayer(layer.window, *spec.kv_shape(i), size, ops)


def _read_sums(sizes: Mapping[str, float], tied: bool) -> tuple[float, float]:
    """Bytes that a decode step reads, and bytes of all experts, of which it reads a share."""
    step = sum(
        size
        for name, size in sizes.items()
        if not is_expert(name) and not is_read_by_row(name, tied=tied)
    )
    return step, sum(size for name, size in sizes.items() if is_expert(name))


def _kv_bytes(spec: ModelSpec, layer: int, kv_type: str) -> int:
    """Keys and values of one position of a layer."""
    if spec.layers[layer].kv_layer is not None:
        return 0
    per_value, per_head = KV_TYPES[kv_type]
    kv_heads, head_dim = spec.kv_shape(layer)
    return 2 * kv_heads * (head_dim * per_value + per_head)


def _state_bytes(spec: ModelSpec) -> int:
    """Two float32 blocks of every recurrent layer: the snapshot at the last border of a block and
    the block before it (docs/adr/0023)."""
    return sum(
        2 * 4 * spec.block_values(group, BLOCK_SIZE) * len(group.layers)
        for group in spec.groups
        if group.kind != "attention"
    )


def _of_count(name: str, params: int, stored: str, kv_type: str) -> Footprint:
    """Two operations and one read per weight: what a parameter count alone tells."""
    size = params * WEIGHT_TYPES[stored]
    return Footprint(
        name=name,
        shape="a parameter count alone: no KV cache, no attention",
        stored=stored,
        params=params,
        weight_bytes=size,
        step_bytes=size,
        kv_type=kv_type,
        ops_token=2 * params,
        prompt_ops_token=2 * params,
    )


def _shape(spec: ModelSpec) -> str:
    shapes = dict.fromkeys(
        spec.kv_shape(i) for i, layer in enumerate(spec.layers) if layer.mixer == "attention"
    )
    kinds = [{1: "MQA", spec.heads: "MHA"}.get(kv, "GQA") for kv, _ in shapes]
    keys = [f"{kv} key heads of {dim}" for kv, dim in shapes]
    heads = f"{spec.heads} query heads over {' or '.join(keys)}"
    heads += f" ({' or '.join(dict.fromkeys(kinds))})"
    experts = max(layer.experts for layer in spec.layers)
    mixture = f", {spec.experts_used} of {experts} experts" if experts else ""
    others = len(spec.layers) - spec.attention_layers
    recurrent = f", {others} recurrent layers" if others else ""
    layers = f"{len(spec.layers)} layers, hidden {spec.hidden}"
    return f"{spec.family}, {layers}, {heads}{mixture}{recurrent}"
