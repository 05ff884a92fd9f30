"""Make and run step plans by hand: what a scheduler would do, without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from verbatim.backend.protocol import Backend
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, StepPlan
from verbatim.model.spec import ModelSpec

BLOCKS = 96
Open = Callable[..., Backend]  # the fixture `open_tiny`: a model -> an opened backend with a cache


@dataclass
class Text:
    """A sequence that is scored token by token: its tables, how far it is, and what came back."""

    id: int
    tokens: list[int]
    tables: tuple[list[int], ...]
    done: int = 0
    logprobs: list[float] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)
    drawn: list[tuple[int, float]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.done >= len(self.tokens) - 1


class Blocks:
    """Block ids in a random order, for each group of its own."""

    def __init__(self, spec: ModelSpec, size: int, seed: int) -> None:
        self.spec, self.size = spec, size
        random = np.random.default_rng(seed)
        self.free = [random.permutation(BLOCKS).tolist() for _ in spec.groups]

    def text(self, number: int, tokens: list[int]) -> Text:
        count = -(-len(tokens) // self.size)
        return Text(number, tokens, tuple([free.pop() for _ in range(count)] for free in self.free))

    def release(self, text: Text) -> None:
        for free, table in zip(self.free, text.tables, strict=True):
            free.extend(b for b in table if b >= 0)


def params(text: Text) -> DrawSpec:
    return DrawSpec(
        SamplingParams(temperature=1.0, seed=7, logprobs=0), key=text.id + 1000, prompt_len=1
    )


def advance(
    spec: ModelSpec, size: int, texts: list[Text], counts: list[int], *, forget: bool = False
) -> StepPlan:
    """A plan that computes counts[i] more tokens of texts[i]: each is scored, its hidden state is returned, and the last is drawn from."""
    steps = []
    for text, count in zip(texts, counts, strict=True):
        count = min(count, len(text.tokens) - 1 - text.done)
        now = text.tokens[text.done : text.done + count]
        if forget:  # blocks wholly behind a window are not the sequence's any more
            for group, table in zip(spec.groups, text.tables, strict=True):
                if group.window is not None:
                    for b in range(max(0, text.done - group.window + 1) // size):
                        table[b] = -1
        steps.append(
            SeqStep(
                text.id,
                tuple(now),
                text.done,
                tuple(tuple(t) for t in text.tables),
                draws=1,
                draw=params(text),
                targets=tuple(text.tokens[text.done + 1 : text.done + 1 + count]),
                hidden=True,
            )
        )
    return StepPlan(0, tuple(steps))


def run(backend: Backend, texts: list[Text], counts: list[int], *, forget: bool = False) -> None:
    plan = advance(backend.spec, backend.block_size, texts, counts, forget=forget)
    for text, step, result in zip(
        texts, plan.sequences, backend.execute(plan).sequences, strict=True
    ):
        text.done += len(step.tokens)
        text.logprobs.extend(s.logprob for s in result.scored)
        assert result.hidden is not None
        text.hidden.extend(result.hidden)
        text.drawn = [(result.drawn[0].token, result.drawn[0].logprob)]


def whole(backend: Backend, tokens: list[int], seed: int = 0, number: int = 0) -> Text:
    """The text alone, in one step."""
    text = Blocks(backend.spec, backend.block_size, seed).text(number, tokens)
    run(backend, [text], [len(tokens)])
    return text


def same(a: Text, b: Text) -> bool:
    """Equal to the last bit."""
    return (
        a.logprobs == b.logprobs
        and a.drawn == b.drawn
        and all(x.tobytes() == y.tobytes() for x, y in zip(a.hidden, b.hidden, strict=True))
    )
