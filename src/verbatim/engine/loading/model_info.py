"""What the engine reads of a model's files besides its weights: tokenizer, chat template, sampling
defaults, and the facts of ModelFile.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from verbatim.base.defaults import (
    ModelDefaults,
    catalog_defaults,
    read_generation_config,
    read_gguf,
)
from verbatim.engine.loaded_model import ModelFile

if TYPE_CHECKING:
    from verbatim.files.gguf_file import GGUFFile
    from verbatim.files.safetensors import SafetensorsDir
    from verbatim.model.loading.load import Model
    from verbatim.text.templates.chat_template import ChatTemplate
    from verbatim.text.tokenizer import Tokenizer


def load_text(
    model: str | os.PathLike[str], *, revision: str | None = None, offline: bool = False
) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer and the chat template of a model; no weight is read."""
    from verbatim.files.gguf import read_gguf
    from verbatim.files.safetensors import read_directory
    from verbatim.hub.catalog import resolve

    path = resolve(os.fspath(model), revision=revision, offline=offline)
    return read_text(read_directory(path) if path.is_dir() else read_gguf(path))


def read_text(source: GGUFFile | SafetensorsDir) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer and the chat template of a GGUF file or a safetensors directory."""
    from verbatim.files.gguf_file import GGUFFile
    from verbatim.text import tokenizer
    from verbatim.text.templates import template_files

    if isinstance(source, GGUFFile):
        metadata = source.metadata
        return tokenizer.from_gguf(metadata), template_files.template_from_gguf(metadata)
    path = source.path
    return tokenizer.from_directory(path), template_files.template_from_directory(path)


def weight_types(model: Model) -> Counter[str]:
    """Parameters per weight type as the model is loaded."""
    from verbatim.formats.checkpoint_blocks import CHECKPOINT_TYPES

    counts: Counter[str] = Counter()
    for tensor in model.weights.values():
        blocks = CHECKPOINT_TYPES.get(tensor.type)  # in memory only; named as on a CPU
        counts[tensor.type if blocks is None else blocks.result] += math.prod(tensor.shape)
    return counts


def file_of(path: Path, types: Mapping[str, int], source: object = None) -> ModelFile:
    """`types`: parameters per weight type. `source`: a GGUFFile may state a license."""
    stats = [p.stat() for p in weight_files(path)]
    stated = getattr(source, "metadata", {}).get("general.license", "")
    return ModelFile(
        format="safetensors" if path.is_dir() else "gguf",
        bytes=sum(s.st_size for s in stats),
        modified=int(max((s.st_mtime for s in stats), default=0)),
        parameters=sum(types.values()),
        quantisation=max(types, key=types.__getitem__, default="").upper(),
        license=stated if isinstance(stated, str) else "",
    )


def weight_files(path: Path) -> list[Path]:
    """The files that a load of the model at `path` reads its weights from: a directory may hold a
    second copy of them. Raises a ModelError if the directory's index is damaged."""
    from verbatim.files.safetensors import shard_names
    from verbatim.files.split import with_siblings

    if path.is_dir():
        return [path / name for name in shard_names(path)]
    return with_siblings(path)


def sampling_defaults(name: str, path: Path, model: Model) -> ModelDefaults:
    """What the model's file states, else what the catalog knows about it."""
    from verbatim.files.gguf_file import GGUFFile
    from verbatim.hub import catalog

    source = model.source
    stated = (
        read_gguf(source.metadata)
        if isinstance(source, GGUFFile)
        else read_generation_config(model.generation_config, model.spec.context)
    )
    if stated.source:
        return stated
    known = catalog_defaults(catalog.sampling_defaults(name, path))
    return replace(known, warnings=stated.warnings)
