"""Check a load before other models make room for it: what can be told without the weights.

In: a model's name and engine settings. Out: nothing, or the error that the load would end with.
Read are the headers of the weight files, the config, the tokenizer and the adapters. A model that
would have to be downloaded first passes if the hub lists it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbatim.base.config import split_adapter
from verbatim.base.errors import ModelError


def check_load(
    model: str | os.PathLike[str],
    settings: Mapping[str, Any],
    *,
    revision: str | None = None,
    offline: bool = False,
) -> None:
    """Raise the error that loading `model` with these engine settings must end with, if any."""
    from verbatim.encoder.encoder_load import check_encoder, encoder_type
    from verbatim.lora.adapter_load import load_adapter
    from verbatim.model.loading.heads import open_head
    from verbatim.model.loading.load import check_model

    path = _local_path(os.fspath(model), revision, offline)
    if path is None:
        return
    if encoder_type(path) is not None:
        check_encoder(path, context=settings.get("context"))
        _read_tokenizer(path)
        return
    spec = check_model(path, context=settings.get("context"), quant=settings.get("quant"))
    _read_tokenizer(path)
    for entry in settings.get("adapters") or ():
        name, adapter = split_adapter(entry)
        load_adapter(name, adapter, spec)
    kind, _, file = str(settings.get("speculate", "")).partition(":")
    if kind == "draft" and file:
        check_load(file, {}, offline=offline)
    elif kind == "head" and file and (head := _local_path(file, None, offline)) is not None:
        open_head(head, spec)


def can_use_gpu(settings: Mapping[str, object]) -> bool:
    """Whether the weights may go to a GPU: then the machine's memory is no limit for them."""
    from verbatim.backend import gpu

    return settings.get("backend", "auto") in ("auto", "cuda") and gpu.present()


def _local_path(model: str, revision: str | None, offline: bool) -> Path | None:
    """The model's file or directory; None if it must be downloaded first."""
    from verbatim.hub.catalog import check_known, check_listed, resolve

    check_known(model)
    try:
        return resolve(model, revision=revision, offline=True)
    except ModelError:
        # models/x.gguf has the form of a hub name; beside a folder "models" it is a missing file.
        is_file = model.endswith(".gguf") and Path(model).parent.is_dir()
        if offline or is_file:
            raise
    check_listed(model, revision=revision)
    return None


def _read_tokenizer(path: Path) -> None:
    from verbatim.files.gguf import read_gguf
    from verbatim.text.tokenizer import from_directory, from_gguf

    if path.is_dir():
        from_directory(path)
    else:
        from_gguf(read_gguf(path).metadata, file=str(path))
