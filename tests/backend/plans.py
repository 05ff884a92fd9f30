"""Build and run step plans by hand, without a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from verbatim.backend import gpu
from verbatim.backend.protocol import Backend
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, StepPlan
from verbatim.model.spec import ModelSpec

NAMES = ("reference", "cpu", "cuda")
MARKS = {
    "cuda": [
        pytest.mark.gpu,
        pytest.mark.skipif(not gpu.present(), reason="needs an NVIDIA GPU: `make test-gpu`"),
    ]
}
BACKENDS = [pytest.param(name, marks=MARKS.get(name, ())) for name in NAMES]
BLOCKS = 96  # KV cache blocks per cache group
Open = Callable[..., Backend]  # the fixture `open_tiny`: model -> backend with an allocated cache


@dataclass
class ScoredSeq:
    """A sequence that is scored token by token: its block tables, its progress and its results."""

    id: int
    tokens: list[int]
    tables: tuple[list[int], ...]
    done: int = 0  # tokens computed so far
    logprobs: list[float] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)
    drawn: list[tuple[int, float]] = field(default_factory=list)
    adapter: int = -1

    @property
    def finished(self) -> bool:
        return self.done >= len(self.tokens) - 1


class Blocks:
    """Allocates block ids in random order, separately for each cache group."""

    def __init__(self, spec: ModelSpec, size: int, seed: int) -> None:
        self.spec, self.size = spec, size
        random = np.random.default_rng(seed)
        self.free = [random.permutation(BLOCKS).tolist() for _ in spec.groups]

    def allocate(self, number: int, tokens: list[int]) -> ScoredSeq:
        count = -(-len(tokens) // self.size)
        tables = tuple([free.pop() for _ in range(count)] for free in self.free)
        return ScoredSeq(number, tokens, tables)

    def release(self, seq: ScoredSeq) -> None:
        for free, table in zip(self.free, seq.tables, strict=True):
            free.extend(b for b in table if b >= 0)


def params(seq: ScoredSeq) -> DrawSpec:
    return DrawSpec(
        SamplingParams(temperature=1.0, seed=7, logprobs=0), key=seq.id + 1000, prompt_len=1
    )


def make_plan(
    spec: ModelSpec, size: int, seqs: list[ScoredSeq], counts: list[int], *, release: bool = False
) -> StepPlan:
    """A plan that computes counts[i] more tokens of seqs[i].

    Each token is scored and its hidden state returned; the last row is sampled. `release`: blocks
    that left a window become -1."""
    steps = []
    for seq, count in zip(seqs, counts, strict=True):
        count = min(count, len(seq.tokens) - 1 - seq.done)
        now = seq.tokens[seq.done : seq.done + count]
        if release:
            for group, table in zip(spec.groups, seq.tables, strict=True):
                if group.window is not None:
                    for b in range(max(0, seq.done - group.window + 1) // size):
                        table[b] = -1
        steps.append(
            SeqStep(
                seq.id,
                tuple(now),
                seq.done,
                tuple(tuple(t) for t in seq.tables),
                draws=1,
                draw=params(seq),
                targets=tuple(seq.tokens[seq.done + 1 : seq.done + 1 + count]),
                hidden=True,
                adapter=seq.adapter,
            )
        )
    return StepPlan(0, tuple(steps))


def run(
    backend: Backend, seqs: list[ScoredSeq], counts: list[int], *, release: bool = False
) -> None:
    plan = make_plan(backend.spec, backend.block_size, seqs, counts, release=release)
    for seq, step, result in zip(
        seqs, plan.sequences, backend.execute(plan).sequences, strict=True
    ):
        seq.done += len(step.tokens)
        seq.logprobs.extend(s.logprob for s in result.scored)
        assert result.hidden is not None
        seq.hidden.extend(result.hidden)
        seq.drawn = [(result.drawn[0].token, result.drawn[0].logprob)]


def run_alone(
    backend: Backend, tokens: list[int], seed: int = 0, number: int = 0, adapter: int = -1
) -> ScoredSeq:
    """Compute the sequence alone, in one step."""
    seq = Blocks(backend.spec, backend.block_size, seed).allocate(number, tokens)
    seq.adapter = adapter
    run(backend, [seq], [len(tokens)])
    return seq


def run_prompts(
    backend: Backend, tokens: list[int], adapters: Sequence[int] = (-1,), number: int = 0
) -> list[list[tuple[int, float]]]:
    """Compute the sequence once per adapter, as prompts in two chunks, of which only the last row
    needs logits. Returns what run_alone(number=number), number + 1, … draw."""
    blocks = Blocks(backend.spec, backend.block_size, 3)
    first, rest, end = [], [], len(tokens) - 1
    for i, adapter in enumerate(adapters):
        seq = blocks.allocate(number + i, tokens)
        tables = tuple(tuple(t) for t in seq.tables)
        first.append(SeqStep(seq.id, tuple(tokens[:2]), 0, tables, adapter=adapter))
        last = SeqStep(seq.id, tuple(tokens[2:end]), 2, tables, 1, params(seq), adapter=adapter)
        rest.append(last)
    backend.execute(StepPlan(0, tuple(first)))
    done = backend.execute(StepPlan(1, tuple(rest))).sequences
    return [[(one.token, one.logprob) for one in result.drawn] for result in done]


def same_bits(a: ScoredSeq, b: ScoredSeq) -> bool:
    """Whether all results are equal to the last bit."""
    return (
        a.logprobs == b.logprobs
        and a.drawn == b.drawn
        and all(x.tobytes() == y.tobytes() for x, y in zip(a.hidden, b.hidden, strict=True))
    )
