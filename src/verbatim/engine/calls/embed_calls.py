"""embed() and rerank() of LLM. Texts come in; vectors or ranked documents go out.

Each text is one request of the engine: its vector does not depend on the other texts of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from verbatim.base.errors import ParameterError
from verbatim.engine.calls.call_inputs import Prompt, is_one
from verbatim.engine.embed_input import EmbedInput


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document of `LLM.rerank`.

    >>> Ranked(0, 0.98, "Paris is the capital of France.").score
    0.98
    """

    index: int  # the document's place in the list that was given
    score: float  # relevance, as the model's activation gives it: 0 to 1 after a sigmoid
    document: str


class EmbedCalls:
    """The part of LLM that needs no sampling. `parts` and `_vectors` are LLM's."""

    loaded: Any

    def _vectors(self, inputs: Sequence[EmbedInput]) -> list[np.ndarray]:
        raise NotImplementedError

    @overload
    def embed(
        self,
        texts: str | list[int] | tuple[int, ...],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        adapter: str = "",
    ) -> np.ndarray: ...
    @overload
    def embed(
        self,
        texts: list[str] | list[list[int]],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        adapter: str = "",
    ) -> np.ndarray: ...
    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        adapter: str = "",
    ) -> np.ndarray:
        """Embedding of a text: its final hidden states, pooled and scaled as the model's files say.
        A model that states no pooling needs the setting `pooling`; else UnsupportedError.

        texts: a string or a list of token ids, or a list of them
        prompt_name: the model's prompt to put before each text; None: its default, if it has one
        dimensions: keep this many leading numbers (Matryoshka models), scaled to length 1 again if
            the model's embeddings have it
        truncate: cut a text that is longer than the context, instead of raising ContextError
        adapter: a loaded LoRA adapter; empty: the base model
        Returns float32 [hidden] for one text, [texts, hidden] for a list.

        >>> llm.embed("hi").dtype.name
        'float32'
        >>> llm.embed(["hi", "hello"]).shape == (2, *llm.embed("hi").shape)
        True
        """
        given: Any = texts
        single = is_one(given)
        if not single and not len(given):
            raise ParameterError("texts", "the list is empty; give at least one text")
        inputs = [
            EmbedInput(text, prompt_name=prompt_name, truncate=truncate, adapter=adapter)
            for text in ([given] if single else given)
        ]
        width = self.loaded.backend.spec.hidden
        if dimensions is not None and not 1 <= dimensions <= width:
            raise ParameterError("dimensions", f"{dimensions} is not from 1 to {width}")
        found = np.stack(self._vectors(inputs))
        if dimensions is not None:
            found = shortened(found, dimensions, normalise=self.loaded.embedding.normalise)
        return found[0] if single else found

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool = False,
    ) -> list[Ranked]:
        """Score documents by their relevance to a query, with a cross-encoder. Another model raises
        UnsupportedError.

        query: a text
        documents: texts; each is scored alone with the query
        top_n: return only this many, the best; None: all
        truncate: cut a pair that is longer than the context, the longer text first, instead of
            raising ContextError
        Returns Ranked records, best first; documents with equal scores keep their order.
        """
        inputs = pairs(query, documents, top_n, truncate)
        scores = [float(vector[0]) for vector in self._vectors(inputs)]
        return ranked(documents, scores, top_n)


def ranked(documents: Sequence[str], scores: Sequence[float], top_n: int | None) -> list[Ranked]:
    order = sorted(range(len(scores)), key=lambda i: -scores[i])  # stable: ties in order
    return [Ranked(i, scores[i], documents[i]) for i in order[:top_n]]


def pairs(
    query: str, documents: Sequence[str], top_n: int | None, truncate: bool
) -> list[EmbedInput]:
    """The inputs of a rerank call; an empty or mistyped text is an error that names it."""
    if top_n is not None and top_n < 1:
        raise ParameterError("top_n", f"{top_n} is below 1")
    if isinstance(documents, str) or not isinstance(documents, Sequence) or not documents:
        raise ParameterError("documents", "a list of at least one text is needed")
    named = [("query", query), *((f"documents[{i}]", d) for i, d in enumerate(documents))]
    for name, text in named:
        if not isinstance(text, str) or not text:
            what = "is empty" if text == "" else f"{type(text).__name__} is not a text"
            raise ParameterError(name, f"{what}; give at least one character")
    return [EmbedInput(query, document, truncate=truncate) for document in documents]


def shortened(vectors: np.ndarray, dimensions: int, *, normalise: bool) -> np.ndarray:
    """The leading numbers of each vector."""
    kept = vectors[:, :dimensions].astype(np.float64)
    if normalise:
        kept = kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), 1e-12)
    return kept.astype(np.float32)
