"""Check a load before other models make room for it: what can be told without the weights.

In: a model's name and engine settings. Out: nothing, or the error that the load would end with.
Read are the headers of the weight files, the config, the tokenizer and the adapters. A model that
would have to be downloaded first passes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.base.config import split_adapter
from verbatim.base.errors import ModelError

if TYPE_CHECKING:
    from verbatim.model.spec import ModelSpec


def check_load(
    model: str | os.PathLike[str],
    settings: Mapping[str, Any],
    *,
    revision: str | None = None,
    offline: bool = False,
) -> None:
    """Raise the error that loading `model` with these engine settings must end with, if any."""
    path = _local_path(os.fspath(model), revision, offline)
    if path is None:
        return
    spec = _read_directory(path, settings) if path.is_dir() else _read_gguf(path, settings)
    if spec is None:
        return
    from verbatim.model.adapter_load import load_adapter

    for entry in settings.get("adapters") or ():
        name, adapter = split_adapter(entry)
        load_adapter(name, adapter, spec)
    kind, _, draft = str(settings.get("speculate", "")).partition(":")
    if kind == "draft" and draft:
        check_load(draft, {}, offline=offline)


def can_use_gpu(settings: Mapping[str, Any]) -> bool:
    """Whether the weights may go to a GPU: then the machine's memory is no limit for them."""
    from verbatim.backend import gpu

    return settings.get("backend", "auto") in ("auto", "cuda") and gpu.present()


def _local_path(model: str, revision: str | None, offline: bool) -> Path | None:
    """The model's file or directory; None if only the hub can tell."""
    from verbatim.weights.catalog import check_known, resolve

    check_known(model)
    try:
        return resolve(model, revision=revision, offline=True)
    except ModelError:
        # models/x.gguf has the form of a hub name; beside a folder "models" it is a missing file.
        is_file = model.endswith(".gguf") and Path(model).parent.is_dir()
        if offline or is_file:
            raise
        return None


def _read_gguf(path: Path, settings: Mapping[str, Any]) -> ModelSpec | None:
    """The spec of a GGUF file; None for an encoder."""
    from verbatim.model.encoder_load import encoder_type
    from verbatim.model.gguf_families import read_header
    from verbatim.text.tokenizer import from_gguf
    from verbatim.weights.gguf import read_gguf

    encoder = encoder_type(path) is not None
    source = read_gguf(path)
    from_gguf(source.metadata, file=str(path))
    if encoder:
        return None
    context = settings.get("context")
    return read_header(source.metadata, source.tensors, context=context, file=str(path)).spec


def _read_directory(path: Path, settings: Mapping[str, Any]) -> ModelSpec | None:
    """The spec of a safetensors directory; None for an encoder."""
    from verbatim.model.encoder_load import encoder_type
    from verbatim.model.families import read_config
    from verbatim.text.tokenizer import from_directory
    from verbatim.weights.safetensors import read_directory, read_json, read_safetensors

    config = read_json(path / "config.json") if (path / "config.json").exists() else {}
    if config.get("quantization_config"):  # read_directory would unpack the weights
        for shard in sorted(path.glob("*.safetensors")):
            read_safetensors(shard)
    else:
        config = read_directory(path).config
    from_directory(path)
    if encoder_type(path) is not None:
        return None
    file = str(path / "config.json")
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    return read_config(config, context=settings.get("context"), file=file)[0]
