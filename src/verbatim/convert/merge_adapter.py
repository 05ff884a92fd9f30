"""Merge a LoRA adapter into a model: W + scale · B · A, computed in float32 and stored in the
type of W.

In: a model and an Adapter. Out: a Model with merged weights (for GGUF), or a safetensors
directory whose files keep the names, shards and types of the source. A merged model rounds each
sum to the type of the file, so its logits are close to those of the adapter, not equal.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from verbatim.base.errors import ModelError, ParameterError
from verbatim.files.safetensors import FLOATS, read_safetensors, shard_names
from verbatim.formats.conversion import quantise
from verbatim.formats.tensor import Tensor, Weights
from verbatim.hub.hub import PATTERNS
from verbatim.lora.adapter_file import read_adapter
from verbatim.model.adapter import Adapter, LowRank, merged
from verbatim.model.families.common.tensors import HF_PREFIXES
from verbatim.model.loading.load import Model

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
_DTYPES = {kind: dtype for dtype, kind in FLOATS.items()}


def merged_model(model: Model, adapter: Adapter, *, requantise: bool = False) -> Model:
    """The model with the adapter's sums added to its weights. Quantised weights are refused unless
    `requantise`."""
    tensors = dict(model.weights.tensors)
    for name, part in adapter.parts.items():
        tensors[name] = _merged(tensors[name], part, requantise)
    return replace(model, weights=Weights(tensors, model.weights.source, model.weights.digest))


def _merged(weight: Tensor, part: LowRank, requantise: bool) -> Tensor:
    if weight.type not in _DTYPES and not requantise:
        raise ParameterError(
            "model",
            f"{weight.name} is quantised ({weight.type}), and quantising the sum again adds to its "
            "error; merge into the original weights, or use --requantise",
        )
    return Tensor(
        weight.name, weight.type, weight.shape, quantise(weight.type, merged(weight, part))
    )


def merge_directory(source: Path, adapter: Path, target: Path) -> int:
    """Write the merged model as a safetensors directory; returns the number of merged tensors.

    The directory appears complete or not at all."""
    shards = shard_names(source)
    pairs = _file_pairs(source, shards, adapter)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        left = set(pairs)
        for file in sorted(source.iterdir()):
            if file.name in shards:  # not a second copy (consolidated.safetensors)
                left -= _merge_file(file, part / file.name, pairs)
            elif file.is_file() and file.suffix not in _WEIGHT_FILES:
                shutil.copyfile(file, part / file.name)
        for pattern in (pattern for pattern in PATTERNS if "/" in pattern):
            for file in source.glob(pattern):  # pooling, further chat templates
                copy = part / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
        if left:
            raise ModelError(f"tensor {sorted(left)[0]} is missing", file=str(source))
        os.replace(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return len(pairs)


def _file_pairs(source: Path, shards: Iterable[str], adapter: Path) -> dict[str, LowRank]:
    """The adapter's matrices by tensor name in the model's files. PEFT's modules have the layout of
    these files."""
    read = read_adapter(adapter)
    if read.kind != "peft":
        raise ParameterError(
            "out", "a GGUF adapter is merged into a GGUF file: choose a name that ends in .gguf"
        )
    names: set[str] = set()
    for shard in shards:
        names.update(read_safetensors(source / shard)[0])
    pairs: dict[str, LowRank] = {}
    for module, pair in read.pairs.items():
        stems = [module, *(module.removeprefix(prefix) for prefix in HF_PREFIXES if prefix)]
        found = next((f"{stem}.weight" for stem in stems if f"{stem}.weight" in names), None)
        if found is None:
            raise ModelError(
                f"tensor {module}.weight is missing, or quantised under another name; merge into "
                "the original weights",
                file=str(source),
            )
        pairs[found] = pair
    return pairs


def _merge_file(source: Path, target: Path, pairs: Mapping[str, LowRank]) -> set[str]:
    """Copy a safetensors file and merge the tensors that `pairs` names; returns their names."""
    tensors, others = read_safetensors(source)
    for name in pairs:
        if name in others:
            raise ModelError(
                f"tensor {name} has the type {others[name].dtype}; merge into float weights",
                file=str(source),
            )
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    entries = [(t.name, _DTYPES[t.type], t.shape, t.data) for t in tensors.values()]
    entries += [(name, t.dtype, t.shape, t.data) for name, t in others.items()]
    at = 0
    for name, dtype, shape, data in entries:
        size = int(data.nbytes)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "xb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, _, _, data in entries:
            if name in pairs:
                data = _merged_bytes(tensors[name], pairs[name])
            out.write(np.ascontiguousarray(data).data)
    return set(tensors) & set(pairs)


def _merged_bytes(weight: Tensor, pair: LowRank) -> np.ndarray:
    shape = (pair.b.shape[0], pair.a.shape[1])
    if weight.shape == shape[::-1] != shape or (weight.shape == shape and _is_conv1d(weight.name)):
        turned = np.ascontiguousarray(weight.to_f32().T)  # gpt2's Conv1D stores [in, out]
        base = Tensor(weight.name, "f32", shape, turned.reshape(-1).view(np.uint8))
        total = np.ascontiguousarray(merged(base, pair).T)
    else:
        total = merged(weight, pair)
    return quantise(weight.type, total)


def _is_conv1d(name: str) -> bool:
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) and ".h." in f".{name}"
