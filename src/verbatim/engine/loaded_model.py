"""LoadedModel: a model name comes in; a backend, a tokenizer and a chat template go out.

The engine calls code that knows about files and formats only from here, so that an engine can also
run on the fakes of verbatim.testing.fakes.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verbatim.backend.protocol import Backend
from verbatim.base.config import EngineConfig
from verbatim.base.defaults import (
    NO_DEFAULTS,
    ModelDefaults,
    catalog_defaults,
    read_generation_config,
    read_gguf,
)
from verbatim.base.errors import ModelError, ParameterError
from verbatim.model.embedding import EmbeddingSpec

if TYPE_CHECKING:
    from verbatim.model.loading.draft_head import DraftHead
    from verbatim.model.loading.load import Model

# progress(task, done, total); total is 0 while it is unknown
Progress = Callable[[str, int, int], None]


class EngineTokenizer(Protocol):
    """The tokenizer interface of the engine: text/tokenizer.py, verbatim.testing.ByteTokenizer."""

    space_prefix: bool
    """Encoding adds a space before the first word, and decoding removes it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> Sequence[int]: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def is_control(self, token: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What the file of a model says about it, for lists of models. A fake model has none of it."""

    format: str = ""  # gguf or safetensors
    bytes: int = 0
    modified: int = 0  # Unix time of the file's last change
    parameters: int = 0
    quantisation: str = ""  # Q4_0, BF16: the type of most weights as they are loaded
    license: str = ""  # as the file states it
    embeds: bool = False  # a text becomes one vector, as the file or the setting `pooling` says


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded LoRA adapter. Its place in LoadedModel.adapters is its number in step plans."""

    name: str
    digest: str  # of its matrices; part of the fingerprint and of the prefix cache's salt
    rank: int = 0  # the largest one
    path: str = ""


@dataclass(frozen=True)
class LoadedModel:
    """What an engine runs on. `template` is None when the model has no chat template."""

    backend: Backend
    tokenizer: EngineTokenizer
    eos_ids: tuple[int, ...]
    name: str = "model"
    digest: str = ""  # of the weights; part of the fingerprint
    context: int | None = None  # tokens; None: the context of the backend's spec
    template: Any = None  # text.chat_template.ChatTemplate
    draft: Backend | None = None  # draft model of speculative decoding, with the same vocabulary
    head: DraftHead | None = None  # drafts from the target model's hidden states
    # Sampling parameters that the model states; requests take those that they do not give.
    defaults: ModelDefaults = NO_DEFAULTS
    # Keys of the model's files that are ignored, or that transformers reads differently.
    warnings: tuple[str, ...] = ()
    # How the hidden states of a text become one embedding, as the model's files say.
    embedding: EmbeddingSpec = field(default_factory=EmbeddingSpec)
    # generate: a causal model, which may embed too; embed, rerank: an encoder
    task: str = "generate"
    file: ModelFile = field(default_factory=ModelFile)
    weight_files: tuple[Path, ...] = ()
    adapters: tuple[AdapterInfo, ...] = ()  # LoRA adapters that requests may name


def load_for_engine(
    model: str | os.PathLike[str],
    config: EngineConfig,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    change: Callable[[Model], Model] = lambda model: model,
) -> LoadedModel:
    """Resolve the model (a path, a catalog name, org/name on the hub), load it, open a backend.
    `change` is applied to the loaded model before the backend opens."""
    from verbatim.backend import may_use_gpu, open_backend
    from verbatim.encoder.encoder_load import encoder_type
    from verbatim.hub.catalog import resolve
    from verbatim.model.loading.load import load_model

    path = resolve(os.fspath(model), revision=revision, offline=offline, progress=progress)
    if encoder_type(path) is not None:
        return _load_encoder(os.fspath(model), path, config)
    gpu = may_use_gpu(config)
    loaded = change(load_model(path, context=config.context, quant=config.quant, gpu=gpu))
    if config.adapters:
        from verbatim.lora.adapter_load import with_adapters

        loaded = with_adapters(loaded, config.adapters)
    # Reading the tokenizer takes about 0.25 s, which overlaps with packing the weights.
    text = _BackgroundTask(lambda: _read_text(loaded.source))
    backend = open_backend(loaded, config)
    try:
        tokenizer, template = text.result()
        # Models pad their vocabulary: an id without a token may be drawn, and decodes to no text.
        tokenizer.fit(loaded.spec.vocab)
        draft, draft_warnings = _load_draft(
            config, loaded.spec.vocab, offline=offline, progress=progress
        )
        head = _find_head(config, loaded)
    except BaseException:
        backend.close()
        raise
    defaults = _sampling_defaults(os.fspath(model), path, loaded)
    return LoadedModel(
        draft=draft,
        head=head,
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
        file=_file_of(loaded),
        weight_files=tuple(weight_files(loaded.path)),
        adapters=adapter_infos(loaded),
    )


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
    files = [p.stat() for p in weight_files(path)]
    most = max(model.types, key=lambda kind: model.types[kind], default="")
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
        file=ModelFile(
            "safetensors" if metadata is None else "gguf",
            sum(s.st_size for s in files),
            int(max((s.st_mtime for s in files), default=0)),
            sum(model.types.values()),
            most.upper(),
        ),
    )


def load_text(
    model: str | os.PathLike[str], *, revision: str | None = None, offline: bool = False
) -> tuple[EngineTokenizer, Any]:
    """The tokenizer and the chat template of a model; no weight is read."""
    from verbatim.files.gguf import read_gguf
    from verbatim.files.safetensors import read_directory
    from verbatim.hub.catalog import resolve

    path = resolve(os.fspath(model), revision=revision, offline=offline)
    return _read_text(read_directory(path) if path.is_dir() else read_gguf(path))


def _file_of(model: Model) -> ModelFile:
    from verbatim.formats.checkpoint_blocks import CHECKPOINT_TYPES

    path = model.path
    stats = [p.stat() for p in weight_files(path)]
    counts: Counter[str] = Counter()
    for tensor in model.weights.values():
        blocks = CHECKPOINT_TYPES.get(tensor.type)  # in memory only; named as on a CPU
        counts[tensor.type if blocks is None else blocks.result] += math.prod(tensor.shape)
    stated = getattr(model.source, "metadata", {}).get("general.license", "")
    return ModelFile(
        format="safetensors" if path.is_dir() else "gguf",
        bytes=sum(s.st_size for s in stats),
        modified=int(max((s.st_mtime for s in stats), default=0)),
        parameters=sum(counts.values()),
        quantisation=counts.most_common(1)[0][0].upper() if counts else "",
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


def _sampling_defaults(name: str, path: Path, model: Model) -> ModelDefaults:
    """What the model's file states, else what the catalog knows about it."""
    from verbatim.files.gguf_file import GGUFFile
    from verbatim.hub.catalog import sampling_defaults

    source = model.source
    stated = (
        read_gguf(source.metadata)
        if isinstance(source, GGUFFile)
        else read_generation_config(model.generation_config, model.spec.context)
    )
    return (
        stated
        if stated.source
        else replace(catalog_defaults(sampling_defaults(name, path)), warnings=stated.warnings)
    )


def _read_text(source: Any) -> tuple[Any, Any]:
    """The tokenizer and the chat template of a GGUF file or a safetensors directory."""
    from verbatim.files.gguf_file import GGUFFile
    from verbatim.text import tokenizer
    from verbatim.text.templates import template_files

    if isinstance(source, GGUFFile):
        return tokenizer.from_gguf(source.metadata), template_files.template_from_gguf(
            source.metadata
        )
    return tokenizer.from_directory(source.path), template_files.template_from_directory(
        source.path
    )


class _BackgroundTask(threading.Thread):
    """Runs one function in a thread. result() waits for it and raises what it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join()
        if self._error is not None:
            raise self._error
        return self._value


def _find_head(config: EngineConfig, model: Model) -> DraftHead | None:
    """The draft head of `speculate=head:FILE`, or the one that ships with the engine."""
    from verbatim.model.loading.draft_head import find_head, read_head

    mode, colon, file = config.speculate.partition(":")
    if mode == "head" and colon and not file:
        raise ParameterError(
            "speculate",
            "'head:' needs a file: head:FILE, or head alone for the one that comes with the model",
        )
    return read_head(file, model.spec) if mode == "head" and file else find_head(model)


def _load_draft(
    config: EngineConfig, vocab: int, *, offline: bool, progress: Progress | None
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
