"""The source of a conversion as the content of a GGUF file: metadata, the GGUF types of its values,
and tensors by their GGUF names. What GGUF cannot express is an error or a warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from verbatim.base.defaults import (
    catalog_defaults,
    gguf_metadata,
    read_generation_config,
    without_gguf_key,
)
from verbatim.convert.export_model import check_round_trip, model_metadata, model_tensors
from verbatim.convert.export_tokenizer import tokenizer_metadata
from verbatim.convert.tensor_types import type_for
from verbatim.files.gguf import read_gguf
from verbatim.files.gguf_write import converted, write_gguf
from verbatim.formats.tensor import Tensor
from verbatim.hub.catalog import sampling_defaults
from verbatim.model.families import gguf_architecture
from verbatim.model.loading.load import Model, load_model
from verbatim.text.templates.template_files import template_from_directory
from verbatim.text.tokenizer import from_directory


def read_source(
    path: Path, warn: Callable[[str], None], change: Callable[[Model], Model] | None = None
) -> tuple[dict[str, object], dict[str, str], dict[str, Tensor]]:
    """Metadata, the GGUF types of its values, and tensors by their GGUF names. `change` replaces
    the weights of a safetensors model."""
    if path.is_file():
        file = read_gguf(path)
        stated = gguf_metadata(catalog_defaults(sampling_defaults("", path)))
        # the file's own keys win
        return {**stated, **file.metadata}, dict(file.types), dict(file.tensors)
    model = load_model(path)
    for line in model.warnings:
        warn(line)
    if change is not None:
        model = change(model)
    arch = gguf_architecture(model.spec.family)
    metadata, extra = model_metadata(model, path.name)
    tokenizer = from_directory(path)
    metadata |= tokenizer_metadata(path, tokenizer, model.spec.vocab, arch, model.eos_ids)
    template = template_from_directory(path)
    if template is not None:
        key = "tokenizer.chat_template"
        named = {name: one for name, one in sorted(template.sources.items()) if name != "default"}
        metadata |= {key: template.source, **{f"{key}.{name}": one for name, one in named.items()}}
        if named:
            metadata[f"{key}s"] = list(named)
    defaults = read_generation_config(model.generation_config)
    metadata |= gguf_metadata(defaults)
    for name in without_gguf_key(defaults):
        warn(f"generation_config.json: {name} has no key in GGUF, so the file does not state it")
    stated = {"normalisation": model.embedding.normalise, "prompts": model.embedding.prompts}
    if lost := [name for name, value in stated.items() if value]:
        warn(
            f"{' and '.join(lost)} of modules.json have no key in GGUF; keep the safetensors "
            "directory for embeddings with them"
        )
    tensors = {tensor.name: tensor for tensor in (*extra, *model_tensors(model))}
    check_round_trip(model, metadata, tensors)
    return metadata, {}, tensors


def write_merged(
    path: Path, target: Path, warn: Callable[[str], None], change: Callable[[Model], Model]
) -> None:
    """Write a changed model as GGUF; every other tensor and key is the source's, and vectors are
    float32."""
    metadata, kinds, tensors = read_source(path, warn, change)
    if path.is_file():
        before = load_model(path)
        after = change(before)
        kept = before.weights.tensors
        changed = {n for n, tensor in after.weights.items() if tensor is not kept[n]}
        tensors |= {t.name: t for t in model_tensors(after, only=changed)}
    written = [
        converted(t, type_for(t.name, t.type, t.shape, None, None)) for t in tensors.values()
    ]
    write_gguf(target, metadata, written, types=kinds)
