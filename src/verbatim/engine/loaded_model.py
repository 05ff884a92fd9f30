"""LoadedModel: the backend, tokenizer and chat template that an engine runs on.

loading/load_engine.py makes it from a model's name, verbatim.testing.fakes without a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verbatim.backend.protocol import Backend, DraftLayer
from verbatim.base.defaults import NO_DEFAULTS, ModelDefaults
from verbatim.model.embedding import EmbeddingSpec

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
    digest: str  # hash of its matrices; part of the fingerprint and of the prefix cache's salt
    rank: int = 0  # the largest one
    path: str = ""


@dataclass(frozen=True)
class LoadedModel:
    """What an engine runs on. `template` is None when the model has no chat template."""

    backend: Backend
    tokenizer: EngineTokenizer
    eos_ids: tuple[int, ...]
    name: str = "model"
    digest: str = ""  # hash of the weights; part of the fingerprint
    context: int | None = None  # tokens; None: the context of the backend's spec
    template: Any = None  # text.chat_template.ChatTemplate
    draft: Backend | None = None  # draft model of speculative decoding, with the same vocabulary
    layer: DraftLayer | None = None  # draft layer: of the model's file, or a head
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
    # Why a process of the backend has ended, empty while all work; also while no step runs.
    failure: Callable[[], str] = str
    waits: Callable[[], Sequence[float]] = tuple  # seconds of waiting for each process

    def fingerprint(self, adapter: int = -1) -> str:
        """Digest of weights, backend, numerics and adapter: equal fingerprints promise equal
        tokens."""
        info = self.backend.info
        adapted = (self.adapters[adapter].digest,) if adapter >= 0 else ()
        identity = "\0".join((self.digest, info.name, info.numerics, *adapted))
        return f"vb-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
