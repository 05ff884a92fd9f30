"""Load LoRA adapters for a model: names and paths in, Adapters out.

The file's modules are mapped to the model's weights by the names of the file's own format, so a
PEFT adapter fits a GGUF model and a GGUF adapter a safetensors model. B is rearranged like the
rows of the weight it belongs to: fused matrices are split, interleaved rotary rows reordered.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from verbatim.base.config import split_adapter
from verbatim.base.errors import ModelError
from verbatim.formats.conversion import dequantise
from verbatim.formats.tensor import Tensor
from verbatim.lora.adapter_file import AdapterFile, read_adapter
from verbatim.model.adapter import Adapter, LowRank, is_adapted
from verbatim.model.families import ARCHITECTURES, gguf_architecture, named
from verbatim.model.families.common.tensors import HF_PREFIXES
from verbatim.model.layout import HF_KEY_NAMES, Shape, deciding_keys, layout
from verbatim.model.loading.collect_weights import file_rows
from verbatim.model.loading.load import Model
from verbatim.model.loading.names import Source, gguf_source, hf_source
from verbatim.model.spec import ModelSpec

FLOATS = ("f32", "f16", "bf16")
# Weights that an adapter changes by `verbatim merge` only -> what they are.
_MERGED = {"embed": "embedding", "head": "output head"}


def with_adapters(model: Model, given: Iterable[str]) -> Model:
    """The model with the adapters of these NAME=PATH entries."""
    entries = [split_adapter(entry) for entry in given]
    adapters = tuple(load_adapter(name, path, model.spec, model.weights) for name, path in entries)
    warnings = (f"adapter {a.name}: {line}" for a in adapters for line in a.warnings)
    return replace(model, adapters=adapters, warnings=(*model.warnings, *warnings))


def load_adapter(
    name: str,
    path: str,
    spec: ModelSpec,
    weights: Mapping[str, Tensor] | None = None,
    *,
    to_merge: bool = False,
) -> Adapter:
    """Read the adapter at `path` and check it against the model's weights (None: not loaded yet; of
    the file's copies of weights only the shapes are checked). `to_merge`: it will be added to the
    weights, so it may also change an embedding and an output head that are not one matrix."""
    source = read_adapter(path)
    file = str(source.path)
    shapes = {n: shape for n, shape in layout(spec).items() if is_adapted(n) or n in _MERGED}
    places = _places(source, spec, dict.fromkeys([*shapes, *_MERGED]), file)
    _check_copies(source, spec, places, shapes, weights)
    if spec.tied or source.kind == "gguf":  # llama.cpp's pairs of an embedding are not read
        del shapes["embed"]
    parts: dict[str, LowRank] = {}
    for module, pair in source.pairs.items():
        targets = places.get(module)
        if not targets or targets[0][0] not in shapes:
            raise ModelError(_unknown(module, spec, places), file=file)
        for weight, rows in targets:
            if weight in _MERGED and not to_merge:
                raise ModelError(
                    f"{module} is the {_MERGED[weight]}, which an adapter cannot change per "
                    "request; `verbatim merge` adds the adapter to the weights",
                    file=file,
                )
            parts[weight] = _part(weight, pair, rows, shapes[weight], spec, file)
        used = sum(shapes[weight][0] for weight, _ in targets)
        if used < pair.b.shape[0]:  # a part of a fused matrix that no backend adapts
            raise ModelError(
                f"{module}: {pair.b.name} has {pair.b.shape[0]} rows, and an adapter can change "
                f"{used} of them",
                file=file,
            )
    _check_complete(source, places, file)
    warnings = _uneven_layers(parts, shapes) if source.targets is None else ()
    return Adapter(name, _digest(parts), parts, file, warnings)


def _check_complete(
    source: AdapterFile, places: Mapping[str, list[tuple[str, Source]]], file: str
) -> None:
    """Every module of the model that the config targets has matrices. PEFT warns and leaves such a
    module as it was initialised, without effect. A GGUF file has no list of targets."""
    if source.targets is None:
        return
    for module, targets in places.items():
        weight = targets[0][0]
        if is_adapted(weight) and module not in source.pairs and source.targets(module):
            raise ModelError(
                f"layer {weight.split('.')[1]} has no matrices of {module}, which target_modules "
                "names; name the layers that the adapter changes in layers_to_transform, or what "
                "it leaves out in exclude_modules",
                file=file,
            )


def _check_copies(
    source: AdapterFile,
    spec: ModelSpec,
    places: Mapping[str, list[tuple[str, Source]]],
    shapes: Mapping[str, Shape],
    weights: Mapping[str, Tensor] | None,
) -> None:
    """The file's copies of the embedding and of the head are those of the model. Others were
    trained, or belong to another vocabulary."""
    for module, copy in source.copies.items():
        weight = places[module][0][0] if module in places else ""
        if weight not in _MERGED:
            raise ModelError(
                f"tensor {copy.name} is neither a LoRA matrix (lora_A, lora_B) nor a copy of the "
                "embedding or the output head; whole modules are not supported",
                file=str(source.path),
            )
        weight = "embed" if spec.tied else weight
        if copy.shape != shapes[weight] or (weights and not _equal(copy, weights[weight])):
            raise ModelError(
                f"tensor {copy.name} differs from the model's {_MERGED[weight]}: whole modules are "
                "not supported; if it was not trained, or the model here is a quantised one, save "
                "the adapter with save_embedding_layers=False",
                file=str(source.path),
            )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices of a shape have equal values, compared in parts: they are large."""
    step = max(1, (1 << 22) // one.shape[-1])
    for i in range(0, one.rows, step):
        a, b = (
            dequantise(t.type, part, (len(part), t.shape[-1]))
            for t, part in ((t, t.row_view()[i : i + step]) for t in (one, other))
        )
        if not np.array_equal(a, b):
            return False
    return True


def _uneven_layers(parts: Iterable[str], weights: Iterable[str]) -> tuple[str, ...]:
    """A warning if a layer lacks matrices that other layers of the adapter have. A GGUF file does
    not say whether it was made so or lost them."""
    found: dict[str, set[str]] = {}  # layer -> kinds of weights with matrices
    for weight in parts:
        if weight != "head":
            _, layer, kind = weight.split(".", 2)
            found.setdefault(layer, set()).add(kind)
    kinds = set().union(*found.values())
    known = set(weights)
    missing = [
        f"layers.{layer}.{kind}"
        for layer, own in found.items()
        for kind in sorted(kinds - own)
        if f"layers.{layer}.{kind}" in known
    ]
    if not missing:
        return ()
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return (
        f"no matrices of {', '.join(missing[:3])}{more}, which other layers have: check that the "
        "file is whole",
    )


def refused_modules(spec: ModelSpec) -> dict[str, str]:
    """PEFT's name of every module with a matrix that no adapter can change -> the same without the
    layer and the expert, as docs/adapters.md lists it. Embedding and head have errors of their own.
    """
    experts = max(layer.experts for layer in spec.layers)
    found: dict[str, str] = {}
    for weight, shape in layout(spec).items():
        if len(shape) < 2 or is_adapted(weight) or weight in _MERGED or weight.endswith(".bias"):
            continue
        for name in hf_source(spec.family, "model.", weight, experts).names:
            module = name.removesuffix(".weight")
            kind = re.sub(r"^model\.(\w+\.\d+\.)?", "", module)
            found[module] = re.sub(r"\.\d+\.", ".*.", kind)
    return found


def _places(
    source: AdapterFile, spec: ModelSpec, shapes: Iterable[str], file: str
) -> dict[str, list[tuple[str, Source]]]:
    """The weights that each module name of the file can adapt; several if the module is fused."""
    if source.fan_in_fan_out and spec.family != "gpt2":
        raise ModelError(
            f"fan_in_fan_out is true, which is right for gpt2 only; this model is {spec.family}",
            file=file,
        )
    names = list(shapes)
    if source.kind == "gguf":
        architecture = gguf_architecture(spec.family)
        if source.architecture != architecture or architecture not in ARCHITECTURES:
            raise ModelError(
                f"general.architecture is {source.architecture!r:.40}, and the model is "
                f"{architecture}: the adapter belongs to another model",
                file=file,
            )
        return _by_module(names, lambda name: gguf_source(architecture, name), "")
    if named(spec.family) is None:
        raise ModelError(f"PEFT's names of {spec.family} are not known", file=file)
    found: dict[str, list[tuple[str, Source]]] = {}
    for prefix in HF_PREFIXES:

        def find(name: str, prefix: str = prefix) -> Source:
            return hf_source(spec.family, prefix, name, 0)

        found = _by_module(names, find, ".weight")
        if any(module in found for module in source.pairs):
            break
    return found


def _by_module(
    names: Iterable[str], find: Callable[[str], Source], suffix: str
) -> dict[str, list[tuple[str, Source]]]:
    found: dict[str, list[tuple[str, Source]]] = {}
    for name in names:
        rows = find(name)
        found.setdefault(rows.names[0].removesuffix(suffix), []).append((name, rows))
    return found


def _unknown(module: str, spec: ModelSpec, places: Iterable[str]) -> str:
    # behind the layer's number: model.layers.0.mlp.up_proj, blk.0.ffn_up.weight
    split = (re.split(r"\.\d+\.", place, maxsplit=1) for place in places)
    kinds = sorted({parts[1].removesuffix(".weight") for parts in split if len(parts) > 1})
    return (
        f"{module} is no linear layer of this {spec.family} model of {len(spec.layers)} layers "
        f"that an adapter can change; those are {', '.join(kinds)} of each layer (embeddings "
        "that are the head, heads that are the embedding, norms, routers and experts are not "
        "supported)"
    )


def _part(
    weight: str, pair: LowRank, rows: Source, shape: Shape, spec: ModelSpec, file: str
) -> LowRank:
    """The pair of one weight. B is [out, rank], its rows in the file's order of W's rows."""
    a, b = _float(pair.a), file_rows(spec, _float(pair.b), rows, file)
    out, inputs = shape
    if a.shape[1] != inputs or b.shape[0] != out:
        raise ModelError(
            f"{pair.a.name} is {pair.a.shape} and {pair.b.name} {pair.b.shape}; the weight {weight}"
            f" is {shape}, by {deciding_keys(weight, HF_KEY_NAMES)}: the adapter belongs to "
            "another model",
            file=file,
        )
    for tensor in (a, b):
        if not np.isfinite(tensor.to_f32()).all():
            raise ModelError(
                f"tensor {tensor.name} holds a value that is not a finite number", file=file
            )
    return LowRank(a, b, pair.scale)


def _float(tensor: Tensor) -> Tensor:
    """A float tensor as it is; a quantised one as float32."""
    if tensor.type in FLOATS:
        return tensor
    values = np.ascontiguousarray(tensor.to_f32(), np.float32)
    return Tensor(tensor.name, "f32", tensor.shape, values.reshape(-1).view(np.uint8))


def _digest(parts: dict[str, LowRank]) -> str:
    """SHA-256 of every matrix and scale: adapters are small, so all of their bytes."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        part = parts[name]
        digest.update(repr((name, part.scale)).encode())
        for tensor in (part.a, part.b):
            digest.update(repr((tensor.type, tensor.shape)).encode())
            digest.update(np.ascontiguousarray(tensor.data).data)
    return digest.hexdigest()
