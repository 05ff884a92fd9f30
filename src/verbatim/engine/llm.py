"""LLM: the library's front door, blocking. Prompts come in, Completions go out; many prompts share the steps of one engine.

    from verbatim import LLM, SamplingParams

    with LLM("smollm2") as llm:
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)).text)

An LLM belongs to one thread at a time; servers use AsyncEngine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, overload

from verbatim.base.config import EngineConfig
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, Delta, TokenLogprob
from verbatim.engine.parts import Parts, load_parts

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Score:
    """What `LLM.score` returns: the teacher-forced log-probability of every token, from one pass."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]  # one a token; the first has nothing before it and is None
    total: float  # sum of the log-probabilities, in nats
    perplexity: float  # exp(-mean)


@dataclass(frozen=True, slots=True)
class Vote:
    """What `LLM.vote` returns: the answer that most continuations gave. Ties go to the answer that came first."""

    answer: str
    counts: tuple[tuple[str, int], ...]  # most first; texts for which extract() gave None are not counted
    completion: Completion


class Stream:
    """One request being written: iterate for Deltas; afterwards `completion` holds the whole.

    Closing it early (or leaving its `with` block, or dropping it) aborts the request. Deltas of several choices interleave; `delta.index`
    says whose they are. Deltas of one choice concatenate to exactly its text."""

    request_id: str
    completion: Completion | None

    def __iter__(self) -> Iterator[Delta]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LLM:
    """A model, opened. `options` are the fields of EngineConfig; an unknown one is a TypeError.

    model: a path to a .gguf file or a safetensors directory, a catalog name (`smollm2`), or `org/name` on the hub."""

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        *,
        revision: str | None = None,
        offline: bool = False,
        progress: Callable[[str], None] | None = None,
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
        self.parts = parts
        self.config = config

    # facts about the model: tokenizer, context, name, fingerprint
    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        raise NotImplementedError

    @property
    def has_template(self) -> bool:
        return self.parts.template is not None

    @property
    def fingerprint(self) -> str:
        """Digest of model, backend and numerics: equal fingerprints promise equal tokens."""
        raise NotImplementedError

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None) -> Completion: ...
    @overload
    def generate(self, prompts: Sequence[int], params: SamplingParams | None = None) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]: ...
    def generate(self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None = None) -> Any:
        """Write on. One prompt (a string, or a list of token ids) gives one Completion; a list of prompts gives a list, in order,
        computed together. `params` is one for all, or one for each prompt. Any prompt that is refused raises before anything runs."""
        raise NotImplementedError

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """The same as generate, piece by piece, for one prompt."""
        raise NotImplementedError

    @overload
    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[Completion]: ...
    def chat(self, messages: Any, params: Any = None, **template: Any) -> Any:
        """Answer a conversation (or a list of them) through the model's chat template. `template` options (tools=..., enable_thinking=...)
        go to the template. A model without a template is an UnsupportedError."""
        raise NotImplementedError

    def chat_stream(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> Stream:
        raise NotImplementedError

    def encode_chat(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """The token ids that `chat` would send as the prompt."""
        raise NotImplementedError

    def score(self, text: Prompt, *, top: int = 0) -> Score:
        """Teacher-forced log-probability of every token and the perplexity, in one pass. `top`: alternatives to report."""
        raise NotImplementedError

    def vote(
        self,
        prompt: Prompt,
        n: int,
        *,
        extract: Callable[[str], str | None] = str.strip,
        params: SamplingParams | None = None,
    ) -> Vote:
        """Self-consistency: write n continuations, take from each its answer, return the majority's."""
        raise NotImplementedError

    def embed(self, text: Prompt) -> Any:
        """Mean of the final hidden states over all tokens: a float32 array [hidden]."""
        raise NotImplementedError

    def cache_plan(self) -> dict[str, Any]:
        """How the cache was sized: bytes, blocks, the rule that decided. Plain data, for printing."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the engine, as plain numbers."""
        raise NotImplementedError

    def check(self) -> None:
        """Prove the block accounting; an AssertionError says what is wrong."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the backend. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
