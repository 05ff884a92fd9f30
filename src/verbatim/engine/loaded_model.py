"""What an engine is made of: a model name comes in, a backend, a tokenizer and a chat template go out, found and opened once.

Everything that knows about files and formats is called from here and from nowhere else in the engine, so that an engine
can just as well be made of the fakes in verbatim.testing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from verbatim.backend.protocol import Backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError

if TYPE_CHECKING:
    from verbatim.model.draft_head import DraftHead
    from verbatim.model.load import Model

Progress = Callable[
    [str, int, int], None
]  # (what is done, how much of it, of how much); 0 where it is not known


class Tokenizer(Protocol):
    """What the engine needs of text/tokenizer.py (and of verbatim.testing.ByteTokenizer)."""

    space_prefix: bool
    """Whether encoding puts a space before the first word, which decoding takes away again."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def is_control(self, token: int) -> bool: ...


@dataclass(frozen=True)
class LoadedModel:
    """An opened model. `template` is None where the file has no chat template."""

    backend: Backend
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    name: str = "model"
    digest: str = ""  # of the weights; half of the fingerprint
    context: int | None = None  # None: the backend's spec says
    template: Any = None  # text.chat.ChatTemplate
    draft: Backend | None = None  # a smaller model with the same vocabulary, for speculation
    head: DraftHead | None = None  # a net that guesses from the model's own states, likewise
    generation_config: dict[str, Any] = field(
        default_factory=dict
    )  # what the model's authors suggest; never applied silently
    warnings: tuple[
        str, ...
    ] = ()  # keys of the model's files that are ignored, or followed otherwise than in transformers
    pooling: str = "mean"  # how the hidden states of a text become one vector


def load_parts(
    model: str | os.PathLike[str],
    config: EngineConfig,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Find the model (a path, a catalog name, org/name on the hub), read it, and open a backend for it."""
    from verbatim.backend import open_backend
    from verbatim.model.load import load_model
    from verbatim.weights.catalog import resolve

    path = resolve(os.fspath(model), revision=revision, offline=offline, progress=progress)
    loaded = load_model(path, context=config.context, quant=config.quant)
    text = _Aside(
        lambda: _read_text(loaded.source)
    )  # a quarter of a second's work, done while the kernels pack the weights
    backend = open_backend(loaded, config)
    try:
        words, template = text.result()
        words.fit(
            loaded.spec.vocab
        )  # models pad their vocabulary: an id without a token may be drawn, and stands for no text
        draft, draft_warnings = _load_draft(
            config, loaded.spec.vocab, offline=offline, progress=progress
        )
        head = _find_head(config, loaded)
    except BaseException:
        backend.close()
        raise
    return LoadedModel(
        draft=draft,
        head=head,
        backend=backend,
        tokenizer=words,
        eos_ids=tuple(sorted({*loaded.eos_ids, *words.eos_ids})),
        name=os.fspath(model),
        digest=loaded.weights.digest,
        context=config.context or loaded.spec.context,
        template=template,
        generation_config=dict(loaded.generation_config),
        warnings=(*loaded.warnings, *draft_warnings),
        pooling=loaded.pooling,
    )


def _read_text(source: Any) -> tuple[Any, Any]:
    """The tokenizer and the chat template of a GGUF file or a safetensors directory."""
    from verbatim.text import chat_template, tokenizer
    from verbatim.weights.gguf_file import GGUFFile

    if isinstance(source, GGUFFile):
        return tokenizer.from_gguf(source.metadata), chat_template.template_from_gguf(
            source.metadata
        )
    return tokenizer.from_directory(source.path), chat_template.template_from_directory(source.path)


class _Aside(threading.Thread):
    """One function, run beside the caller. result() waits for it, and raises what it raised."""

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
    """The draft head that `speculate=head:FILE` names, or the one that comes with the engine for this model."""
    from verbatim.model.draft_head import find_head, read_head

    mode, colon, file = config.speculate.partition(":")
    if mode == "head" and colon and not file:
        raise ParameterError(
            "speculate",
            "'head:' needs a file: head:FILE, or head alone for the one that comes with the model",
        )
    return read_head(file, model) if mode == "head" and file else find_head(model)


def _load_draft(
    config: EngineConfig, vocab: int, *, offline: bool, progress: Progress | None
) -> tuple[Backend | None, tuple[str, ...]]:
    """The model that `speculate=draft:MODEL` names, and what its loader warns of. Same vocabulary, or its guesses would mean
    nothing."""
    from verbatim.backend import open_backend
    from verbatim.model.load import load_model
    from verbatim.weights.catalog import resolve

    mode, _, name = config.speculate.partition(":")
    if mode != "draft":
        return None, ()
    if not name:
        raise ParameterError("speculate", "'draft' needs a model: draft:MODEL")
    path = resolve(name, offline=offline, progress=progress)
    try:
        model = load_model(path, context=config.context, quant=config.quant)
    except ParameterError as error:
        if error.param != "context":
            raise
        model = load_model(
            path, quant=config.quant
        )  # fewer positions than were asked for: beyond its own it makes no guesses
    if model.spec.vocab != vocab:
        raise ParameterError(
            "speculate",
            f"the draft model {name} has {model.spec.vocab} tokens and the model {vocab}; they must be the same",
        )
    return open_backend(model, config), tuple(
        f"draft model {name}: {line}" for line in model.warnings
    )
