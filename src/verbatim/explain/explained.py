"""Explanation: the records of one answer as objects that print themselves.

In: a Completion whose request had explain set, its parameters, and a tokenizer. Out: a sequence of
TokenExplanation. The records are those of explain/explanation.py; nothing is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from verbatim.base.notebook import box, token_span
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.explain.explanation import WhatIf, headline, render, render_what_if, what_if
from verbatim.sampling.dry_breakers import VocabBytes, breakers_of


@dataclass(frozen=True, slots=True, repr=False)
class TokenExplanation:
    """Why one token was drawn. Printing it shows the stages and the best candidates.

    `record` is the plain data (docs/sampling.md lists its keys); an explanation can be indexed
    like it: token["rank"]. Ranks count from 1.

    >>> token = llm.explain("hi", SamplingParams(max_tokens=1, seed=1))[0]
    >>> token.rank >= 1, 0 <= token.probability <= 1, token["token"] == token.id
    (True, True, True)
    """

    record: Mapping[str, Any]
    texts: Mapping[int, bytes] = field(compare=False)

    @property
    def id(self) -> int:
        return int(self.record["token"])

    @property
    def text(self) -> str:
        return self.texts[self.id].decode("utf-8", "replace")

    @property
    def probability(self) -> float:
        """In the model's own distribution, before any setting."""
        return math.exp(self.record["logprob"])

    @property
    def rank(self) -> int:
        """1: the token with the largest logit."""
        return int(self.record["rank"])

    def __getitem__(self, key: str) -> Any:
        return self.record[key]

    def __repr__(self) -> str:
        return render(self.record, self.texts.__getitem__)

    def line(self) -> str:
        """The explanation in one line."""
        return headline(self.record, self.texts.__getitem__)


class Explanation(Sequence[TokenExplanation]):
    """Why each token of an answer was drawn: a sequence of TokenExplanation.

    Printing it shows one line per token; printing one element shows all about that token. In a
    notebook the tokens are coloured by probability.

    >>> why = llm.explain("hi", SamplingParams(max_tokens=3, temperature=0))
    >>> len(why), why[0].rank
    (3, 1)
    """

    def __init__(
        self, completion: Completion, params: SamplingParams, tokenizer: VocabBytes
    ) -> None:
        self.completion = completion
        self._params = params
        ids: set[int | None] = set()
        for record in completion.choices[0].explain:
            ids |= {record["token"], record.get("runner_up")}
            ids |= {candidate["id"] for candidate in record["top"]}
            ids.update(*(stage["removed_top"] for stage in record["stages"]))
        self._tokenizer = tokenizer
        self._texts = {i: tokenizer.token_bytes(i) for i in ids if i is not None}
        self._tokens = tuple(
            TokenExplanation(record, self._texts) for record in completion.choices[0].explain
        )

    @property
    def text(self) -> str:
        """The text of the answer."""
        return self.completion.text

    @property
    def records(self) -> tuple[Mapping[str, Any], ...]:
        """The plain records, as JSON-ready data."""
        return self.completion.choices[0].explain

    def what_if(self, **changes: Any) -> WhatIfs:
        """Draw the recorded steps again under other settings, without the model. Each step keeps
        its recorded history. Only the first 64 tokens are drawn again: later ones keep no logits.

        changes: sampling parameters (temperature=0, top_p=0.5, ...)

        >>> why = llm.explain("hi", SamplingParams(max_tokens=3, seed=1))
        >>> all(step.after == step.record["best"] for step in why.what_if(temperature=0))
        True
        """
        breakers = None
        if self._params.dry_multiplier or changes.get("dry_multiplier"):
            breakers = breakers_of(self._params.with_(**changes).dry_breakers, self._tokenizer)
        whole = [record for record in self.records if record.get("row") is not None]
        found = what_if(
            whole or self.records,
            self._params,
            changes,
            prompt_ids=self.completion.prompt_ids,
            breakers=breakers,
        )
        return WhatIfs(found, self._tokenizer)

    @overload
    def __getitem__(self, index: int) -> TokenExplanation: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenExplanation, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._tokens[index]

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[TokenExplanation]:
        return iter(self._tokens)

    def __repr__(self) -> str:
        lines = [f"Explanation of {self.text!r}, {len(self)} tokens; [i] shows all about one:"]
        return "\n".join([*lines, *(f"  {token.line()}" for token in self)])

    def _repr_html_(self) -> str:
        spans = [token_span(token.text, token.record["logprob"], token.line()) for token in self]
        return box(spans, "point at a token for its rank, probability and lead")


class WhatIfs(tuple[WhatIf, ...]):
    """The steps of a what-if, which print as a table."""

    _tokenizer: VocabBytes

    def __new__(cls, steps: Sequence[WhatIf], tokenizer: VocabBytes) -> WhatIfs:
        self = super().__new__(cls, steps)
        self._tokenizer = tokenizer
        return self

    def __repr__(self) -> str:
        return render_what_if(self, self._tokenizer.token_bytes)
