"""What LLM and AsyncEngine have in common: a model's name and settings come in, an opened model with its engine core goes out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

from verbatim.base.config import EngineConfig
from verbatim.base.errors import UnsupportedError
from verbatim.engine.core import EngineCore
from verbatim.engine.parts import Parts, Progress, load_parts

Message = Mapping[str, Any]


class OpenedModel:
    """A model, opened. `options` are the fields of EngineConfig; an unknown one is a TypeError.

    model: a path to a .gguf file or a safetensors directory, a catalog name (`smollm2`), or `org/name` on the hub."""

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        *,
        revision: str | None = None,
        offline: bool = False,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig(**options)
        self._open(load_parts(model, config, revision=revision, offline=offline, progress=progress), config)

    @classmethod
    def from_parts(cls, parts: Parts, **options: Any) -> Self:
        """An engine of given parts: fakes in tests, or a model that is already open."""
        self = cls.__new__(cls)
        self._open(parts, EngineConfig(**options))
        return self

    def _open(self, parts: Parts, config: EngineConfig) -> None:
        """Subclasses go on from here with what is theirs: locks, streams, a thread."""
        self.parts = parts
        self.config = config
        self.core = EngineCore(parts, config)

    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.core.context

    @property
    def has_template(self) -> bool:
        return self.parts.template is not None

    @property
    def fingerprint(self) -> str:
        """Digest of model, backend and numerics: equal fingerprints promise equal tokens."""
        return self.core.fingerprint

    def encode_chat(self, messages: Sequence[Message], /, **template: Any) -> list[int]:
        """The token ids that a conversation is sent as, through the model's chat template; `template` holds its options
        (tools, ...). A control token typed by a user stays text."""
        if self.parts.template is None:
            raise UnsupportedError("messages", f"{self.parts.name} has no chat template; use generate() with plain text")
        from verbatim.text.chat import encode_chat

        tokenizer: Any = self.parts.tokenizer
        return list(encode_chat(tokenizer, self.parts.template, messages, **template))

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the engine (running, waiting, blocks, tokens in and out, ...), as plain numbers."""
        return self.core.stats()
