"""Load a model for the engine: its name comes in; a LoadedModel goes out.

The engine calls code that knows about files and formats only from this folder, so that an engine
can also run on the fakes of verbatim.testing.fakes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from verbatim.backend.protocol import Backend, DraftLayer
from verbatim.base.config import EngineConfig
from verbatim.base.errors import ModelError, ParameterError
from verbatim.engine.loaded_model import AdapterInfo, LoadedModel, Progress
from verbatim.engine.loading import model_info
from verbatim.model.embedding import EmbeddingSpec

if TYPE_CHECKING:
    from verbatim.model.loading.load import Model


log = logging.getLogger("verbatim.engine")


def load_for_engine(
    model: str | os.PathLike[str],
    config: EngineConfig,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    change: Callable[[Model], Model] = lambda model: model,
) -> LoadedModel:
    """Resolve the model (a path, a catalog name, org/name on the hub), load it, `change` it, open a
    backend."""
    from verbatim.encoder.encoder_load import encoder_type
    from verbatim.hub.catalog import resolve

    path = resolve(os.fspath(model), revision=revision, offline=offline, progress=progress)
    if encoder_type(path) is not None:
        return _load_encoder(os.fspath(model), path, config)
    loaded = _with_head(config, _load_decoder(path, config, change), offline, progress)
    # Reading the tokenizer takes about 0.25 s, which overlaps with packing the weights.
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(model_info.read_text, loaded.source)
        backend, of_ranks = _open_backend(loaded, config)
    try:
        tokenizer, template = text.result()
        tokenizer.fit(loaded.spec.vocab)  # padding may be drawn, and decodes to no text
        draft, draft_warnings = _load_draft(config, loaded.spec.vocab, offline, progress)
        layer = _open_layer(config, loaded, backend)
    except BaseException:
        backend.close()
        raise
    defaults = model_info.sampling_defaults(os.fspath(model), path, loaded)
    return LoadedModel(
        draft=draft,
        layer=layer,
        backend=backend,
        tokenizer=tokenizer,
        eos_ids=tuple(sorted({*loaded.eos_ids, *tokenizer.eos_ids})),
        name=os.fspath(model),
        digest=loaded.weights.digest,
        context=config.context or loaded.spec.context,
        template=template,
        defaults=defaults,
        warnings=(*loaded.warnings, *defaults.warnings, *draft_warnings),
        embedding=loaded.embedding,
        file=model_info.file_of(loaded.path, model_info.weight_types(loaded), loaded.source),
        weight_files=tuple(model_info.weight_files(loaded.path)),
        adapters=adapter_infos(loaded),
        **of_ranks,
    )


class OfRanks(TypedDict, total=False):
    """The fields of LoadedModel that several processes have."""

    failure: Callable[[], str]
    waits: Callable[[], Sequence[float]]


def _open_backend(model: Model, config: EngineConfig) -> tuple[Backend, OfRanks]:
    if config.ranks == 1:
        from verbatim.backend import open_backend

        return open_backend(model, config), {}
    from verbatim.parallel.backend import ParallelBackend

    backend = ParallelBackend(model, config)
    group = backend.group
    return backend, {"failure": lambda: group.failure, "waits": group.mesh.waits}


def _load_decoder(path: Path, config: EngineConfig, change: Callable[[Model], Model]) -> Model:
    from verbatim.backend import may_use_gpu
    from verbatim.lora.adapter_load import with_adapters
    from verbatim.parallel.rank_process import load_part

    model = change(load_part(path, config, 0, config.ranks, may_use_gpu(config)))
    return with_adapters(model, config.adapters) if config.adapters else model


def adapter_infos(model: Model) -> tuple[AdapterInfo, ...]:
    return tuple(AdapterInfo(a.name, a.digest, a.rank, a.path) for a in model.adapters)


def _load_encoder(name: str, path: Path, config: EngineConfig) -> LoadedModel:
    from verbatim.encoder.encoder import EncoderBackend
    from verbatim.encoder.encoder_load import load_encoder
    from verbatim.text import tokenizer as text

    model = load_encoder(path, context=config.context)
    metadata = getattr(model.source, "metadata", None)
    tokenizer = text.from_directory(path) if metadata is None else text.from_gguf(metadata)
    tokenizer.fit(model.spec.vocab)
    separator, embedding, task = None, model.embedding, "embed"
    if model.spec.scores:
        pair = tokenizer.pair
        if pair is None:
            raise ModelError(
                "the tokenizer puts nothing between the two texts of a pair, "
                "which a cross-encoder needs",
                file=str(path / "tokenizer.json"),
            )
        separator = pair.between[0] if pair.typed and model.spec.types > 1 else None
        # The backend returns one row, the score.
        embedding, task = EmbeddingSpec("last"), "rerank"
    return LoadedModel(
        EncoderBackend(model, config, separator),
        tokenizer,
        eos_ids=(),
        name=name,
        digest=model.digest,
        context=model.spec.context,
        warnings=model.warnings,
        embedding=embedding,
        task=task,
        file=model_info.file_of(path, model.types),
    )


def _with_head(
    config: EngineConfig, model: Model, offline: bool, progress: Progress | None
) -> Model:
    """The model with the head of `speculate=head:PATH` as its draft layer."""
    from verbatim.hub.catalog import resolve
    from verbatim.model.loading.heads import open_head

    mode, _, name = config.speculate.partition(":")
    if mode != "head":
        return model
    if not name:
        raise ParameterError("speculate", "'head' needs a draft head: head:PATH or head:ORG/NAME")
    head = open_head(resolve(name, offline=offline, progress=progress), model.spec)
    return replace(model, draft=head.load(model), captured=head.captured)


def _open_layer(config: EngineConfig, model: Model, backend: Backend) -> DraftLayer | None:
    """The draft layer of the model's file, for `speculate=mtp` and auto, or the head."""
    from verbatim.backend import unpacked

    mode = config.speculate.partition(":")[0]
    if mode not in ("auto", "mtp", "head") or not config.use_cache:
        return None
    asked = mode != "auto" or backend.info.name != "cuda"
    layer = backend.draft_layer(unpacked(model.draft)) if model.draft and asked else None
    if layer is not None:
        return layer
    kind = "draft layers" if model.draft is None else model.draft.spec.draft_kind
    why = f"the {backend.info.name} backend runs no {kind}"
    if not asked:
        why = "on a GPU speculate=mtp asks for it"
    if model.draft is None:
        told = [text for text in model.warnings if "draft layer" in text]
        why = told[0] if told else "the model's file has no draft layer"
    elif mode != "head":
        log.warning("speculate: the file's draft layer is not used: %s", why)
    if mode != "auto":
        raise ParameterError("speculate", f"{mode!r} is not possible: {why}")
    return None


def _load_draft(
    config: EngineConfig, vocab: int, offline: bool, progress: Progress | None
) -> tuple[Backend | None, tuple[str, ...]]:
    """The draft model of `speculate=draft:MODEL`, and its warnings. It must have the target's
    vocabulary: drafts are token ids."""
    from verbatim.backend import may_use_gpu, open_backend
    from verbatim.hub.catalog import resolve
    from verbatim.model.loading.load import load_model

    mode, _, name = config.speculate.partition(":")
    if mode != "draft":
        return None, ()
    if not name:
        raise ParameterError("speculate", "'draft' needs a model: draft:MODEL")
    path = resolve(name, offline=offline, progress=progress)
    gpu = may_use_gpu(config)
    try:
        model = load_model(path, context=config.context, quant=config.quant, gpu=gpu)
    except ParameterError as error:
        if error.param != "context":
            raise
        # The draft model's context is shorter than requested: beyond it, it drafts nothing.
        model = load_model(path, quant=config.quant, gpu=gpu)
    if model.spec.vocab != vocab:
        raise ParameterError(
            "speculate",
            f"the draft model {name} has {model.spec.vocab} tokens and the model {vocab}; "
            "they must be the same",
        )
    return open_backend(model, config), tuple(
        f"draft model {name}: {line}" for line in model.warnings
    )
