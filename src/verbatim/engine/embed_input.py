"""EmbedInput: one text, or one pair of texts, for an embedding or a relevance score.

In: what a caller of `embed` or `rerank` gave. Out: token ids and warnings, and after the prefill
the vector that HiddenPool makes of the hidden states. The model must state how a text becomes one
vector, or the user must: otherwise the request is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from verbatim.base.errors import ContextError, ParameterError, UnsupportedError
from verbatim.base.params import SamplingParams
from verbatim.model.embedding import POOLINGS, EmbeddingSpec

if TYPE_CHECKING:
    from verbatim.engine.loaded_model import LoadedModel

MIN_LENGTH = 1e-12  # a shorter vector is divided by this, as torch.nn.functional.normalize does


@dataclass(frozen=True, slots=True)
class EmbedInput:
    """text: a text or token ids
    document: the second text of a pair, for a cross-encoder
    prompt_name: the model's prompt to put before the text; None: the model's default, if it has one
    truncate: cut the end of a text that is too long, instead of refusing it
    adapter: a loaded LoRA adapter; empty: the base model"""

    text: str | Sequence[int]
    document: str | None = None
    prompt_name: str | None = None
    truncate: bool = False
    adapter: str = ""

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=0, adapter=self.adapter)

    def with_prompt(self, loaded: LoadedModel) -> str | Sequence[int]:
        """The text behind the prompt that it names, or the model's default prompt."""
        prompts = loaded.embedding.prompts
        name = loaded.embedding.default_prompt if self.prompt_name is None else self.prompt_name
        if self.prompt_name is not None and name not in prompts:
            known = f"known: {', '.join(prompts)}" if prompts else "the model has no prompts"
            raise ParameterError("prompt_name", f"{name!r:.60} is not a prompt; {known}")
        if not name:
            return self.text
        if not isinstance(self.text, str):
            if self.prompt_name is None:
                return self.text
            raise ParameterError("prompt_name", "belongs to a text; token ids get no prompt")
        return prompts[name] + self.text


def check_task(loaded: LoadedModel, *, hidden: bool, pair: bool) -> None:
    """Refuse what the model cannot do: text from an encoder, scores from another model."""
    if loaded.task != "generate" and not hidden:
        use = "rerank" if loaded.task == "rerank" else "embed"
        raise UnsupportedError(
            "model", f"{loaded.name} is an encoder and generates no text; use {use}"
        )
    if pair and loaded.task != "rerank":
        raise UnsupportedError(
            "model",
            f"{loaded.name} is no cross-encoder, so it cannot score a query and a document; "
            "use a model whose architecture ends in ForSequenceClassification with one label, such "
            "as ms-marco-minilm (91 MB)",
        )
    if hidden and not pair and loaded.task == "rerank":
        raise UnsupportedError(
            "model", f"{loaded.name} is a cross-encoder and gives no embeddings; use rerank"
        )
    if hidden and not pair:
        _check_pooling(loaded)


def can_embed(loaded: LoadedModel) -> bool:
    """Whether check_task() accepts the request for an embedding."""
    return loaded.task != "rerank" and loaded.embedding.pooling in POOLINGS


def _check_pooling(loaded: LoadedModel) -> None:
    pooling = loaded.embedding.pooling
    if pooling in POOLINGS:
        return
    choose = (
        f"choose {' or '.join(POOLINGS)}: `verbatim serve --pooling mean`, "
        "`verbatim embed --pooling mean`, LLM(..., pooling='mean'), or a model made for it, such "
        "as all-minilm (91 MB)"
    )
    if not pooling:
        raise UnsupportedError(
            "pooling",
            f"{loaded.name} does not state how hidden states become one embedding "
            f"(modules.json with a Pooling module, or pooling_type in GGUF); {choose}",
        )
    raise UnsupportedError(
        "pooling", f"{loaded.name} says {pooling!r:.60}, which gives no single vector; {choose}"
    )


def encode_pair(model: LoadedModel, given: EmbedInput, context: int) -> tuple[list[int], list[str]]:
    """Token ids of a query and a document, and warnings."""
    tokenizer: Any = model.tokenizer
    assert isinstance(given.text, str)
    assert given.document is not None
    ids: list[int] = tokenizer.encode_pair(given.text, given.document)
    if len(ids) <= context:
        return ids, []
    if not given.truncate:
        raise ContextError(
            f"the query and the document have {len(ids)} tokens and the context holds {context}; "
            f"shorten them by at least {len(ids) - context}, or set truncate",
            param="documents",
        )
    cut: list[int] = tokenizer.encode_pair(given.text, given.document, context)
    return cut, [
        f"query and document: {len(ids)} tokens were truncated to {len(cut)}, the longer text first"
    ]


def cut_text(
    loaded: LoadedModel, given: EmbedInput, ids: tuple[int, ...], context: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ids of a text that is too long, truncated if the caller asked for that."""
    if not given.truncate or len(ids) <= context:
        return ids, ()
    tokenizer: Any = loaded.tokenizer
    whole = isinstance(given.text, str)
    cut = tuple(tokenizer.truncated(list(ids), context)) if whole else ids[:context]
    return cut, (f"prompt: {len(ids)} tokens were truncated to {len(cut)}",)


class HiddenPool:
    """Pools the prompt's hidden states into one vector: their mean, the first (cls) or the last,
    scaled to length 1 if the model says so.

    States are added in order of position, so prefill chunk sizes change no bit. Memory: one state.
    """

    def __init__(self, spec: EmbeddingSpec | None = None) -> None:
        self._pooling = spec.pooling if spec is not None else "mean"
        self._normalise = spec is not None and spec.normalise
        self._sum: np.ndarray | None = None  # float64 [hidden]
        self.count = 0

    def add(self, start: int, states: np.ndarray) -> None:
        """Add float [positions, hidden] from position `start` on. Skips positions that are already
        added: a preempted sequence computes them again."""
        for state in states[self.count - start :]:
            if self._sum is None or self._pooling == "last":
                self._sum = state.astype(np.float64)
            elif self._pooling == "mean":
                self._sum = self._sum + state
            self.count += 1

    def vector(self) -> np.ndarray:
        """The embedding of the prompt: float32 [hidden]."""
        assert self._sum is not None, "no hidden state was computed"
        divisor = self.count if self._pooling == "mean" else 1
        pooled = self._sum / divisor
        if self._normalise:
            pooled = pooled / max(float(np.sqrt(np.sum(pooled * pooled))), MIN_LENGTH)
        vector: np.ndarray = pooled.astype(np.float32)
        return vector
