"""Flatten a StepPlan into one row per token, and assemble the StepResult from logits.

In: a plan (sequences, each with its tokens of this step). Out: `make_batch` returns one row per
token (token id, position) and the rows whose final hidden states and logits are needed; a prompt's
inner rows need neither. `collect` samples and scores the computed logits. All backends share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np

from verbatim.base.records import Drawn, SeqResult, SeqStep, StepPlan, StepResult, TokenLogprob
from verbatim.sampling.logprobs import score_targets
from verbatim.sampling.pipeline import Row, rows_of, sample_rows


class LogitRows(Protocol):
    """The rows of logits of one step, to be sampled and scored from row `first` on."""

    def draw(self, rows: Sequence[Row], first: int = 0) -> list[Drawn]: ...
    def score(
        self, targets: Sequence[int], top: int, first: int = 0
    ) -> tuple[TokenLogprob, ...]: ...


class HostRows:
    """LogitRows in NumPy: the specification."""

    def __init__(self, logits: np.ndarray) -> None:
        self._logits = logits  # [logits, V]

    def draw(self, rows: Sequence[Row], first: int = 0) -> list[Drawn]:
        return sample_rows(self._logits[first : first + len(rows)], rows)

    def score(self, targets: Sequence[int], top: int, first: int = 0) -> tuple[TokenLogprob, ...]:
        return score_targets(self._logits[first : first + len(targets)], targets, top)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """All arrays are int32. Rows of one sequence are adjacent and in order of position.

    Example: one sequence computes positions 4, 5, 6 and draws after 6; another scores its
    positions 0 and 1:

        tokens    [17, 3, 9, 40, 41]    outputs [2, 3, 4]  rows whose final state is needed
        positions [ 4, 5, 6,  0,  1]    ends    [5, 6, 7, 1, 2]
                                        logits  [0, 1, 2]  indices into `outputs`: logits needed
        first     [0, 3, 5]             rows of sequence s: first[s] .. first[s + 1]
        adapters  [-1, -1, -1, 2, 2]    rows of the second sequence use adapter 2
        drafted   []                    sequences with drafts
    """

    tokens: np.ndarray  # [rows]
    positions: np.ndarray  # [rows]
    ends: np.ndarray  # [rows]: a row sees the keys before this position
    first: np.ndarray  # [sequences + 1]
    tables: tuple[np.ndarray, ...]  # per cache group [sequences, max blocks]: block ids, -1: none
    outputs: np.ndarray  # [outputs]
    logits: np.ndarray  # [logits]
    # [rows]: number of the row's LoRA adapter, -1: none; empty: no row has one
    adapters: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    drafted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # sequences
    states: np.ndarray | None = None  # [rows, width] float32: of a draft layer (SeqStep.states)

    @property
    def rows(self) -> int:
        return len(self.tokens)


def make_batch(plan: StepPlan, groups: int) -> Batch:
    lengths = [len(s.tokens) for s in plan.sequences]
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    outputs: list[int] = []
    logits: list[int] = []
    for s, start in zip(plan.sequences, first[:-1].tolist(), strict=True):
        needed = needed_logits(s)
        for i in range(len(s.tokens)) if s.hidden else needed:
            if i in needed:
                logits.append(len(outputs))
            outputs.append(start + i)
    return Batch(
        tokens=np.array([t for s in plan.sequences for t in s.tokens], np.int32),
        positions=np.concatenate(
            [np.arange(s.start, s.end, dtype=np.int32) for s in plan.sequences]
            or [np.zeros(0, np.int32)]
        ),
        ends=np.concatenate([_ends(s) for s in plan.sequences] or [np.zeros(0, np.int32)]),
        first=first,
        tables=tuple(_table(plan, g) for g in range(groups)),
        outputs=np.array(outputs, np.int32),
        logits=np.array(logits, np.int32),
        adapters=np.repeat(np.array([s.adapter for s in plan.sequences], np.int32), lengths),
        drafted=np.array(
            [i for i, s in enumerate(plan.sequences) if s.draws > 1 and not s.picks], np.int32
        ),
    )


def _ends(step: SeqStep) -> np.ndarray:
    """Per row the end of its visible range: attention of every kind, in one line."""
    positions = np.arange(step.start, step.end, dtype=np.int32)
    if not step.block:
        return positions
    ends = np.minimum((positions // step.block + 1) * step.block, step.end)
    return np.where(positions < step.causal, positions + 1, ends).astype(np.int32)


def draft_states(plan: StepPlan) -> np.ndarray | None:
    """The states of a step of a draft layer, row by row."""
    found = [row for s in plan.sequences for row in s.states]
    return np.stack(found) if found else None


def needed_logits(step: SeqStep) -> list[int]:
    """The rows of a sequence that need logits: its scored targets (the first rows) and its draws
    (the last rows, or those that are picked)."""
    if step.picks:
        return list(step.picks)
    count, scored = len(step.tokens), len(step.targets)
    drawn = count - step.draws
    if scored >= drawn:
        return list(range(count)) if step.draws else list(range(scored))
    return [*range(scored), *range(drawn, count)]


def _table(plan: StepPlan, group: int) -> np.ndarray:
    lengths = np.array([len(s.blocks[group]) for s in plan.sequences], np.int32)
    table = np.full((len(lengths), lengths.max(initial=0)), -1, np.int32)
    # one conversion for all sequences: an assignment per row takes four times as long
    flat = chain.from_iterable([s.blocks[group] for s in plan.sequences])
    table[np.arange(table.shape[1]) < lengths[:, None]] = np.fromiter(flat, np.int32, lengths.sum())
    return table


def only_draws(plan: StepPlan) -> bool:
    """Whether no sequence needs scores or final states: then every row of logits is a draw."""
    return not any(s.targets or s.hidden for s in plan.sequences)


def split_draws(plan: StepPlan, drawn: Sequence[Drawn]) -> StepResult:
    """Split the draws of a step with only_draws(), in row order, by sequence."""
    results: list[SeqResult] = []
    at = 0
    for s in plan.sequences:
        results.append(SeqResult(s.seq_id, tuple(drawn[at : at + s.draws])))
        at += s.draws
    return StepResult(plan.step, tuple(results))


def collect(
    plan: StepPlan, hidden: np.ndarray, logits: LogitRows, captured: np.ndarray | None = None
) -> StepResult:
    """Sample and score a step whose plan make_batch flattened. `hidden` is [outputs, H], `captured`
    the states of the captured layers of the same rows."""
    results: list[SeqResult] = []
    h = r = 0
    scores = any(s.targets for s in plan.sequences)
    rows = [] if scores else [row for s in plan.sequences for row in rows_of(s)]
    draws = logits.draw(rows) if rows else []  # without scores, every row of logits is a draw
    for s in plan.sequences:
        needed = needed_logits(s)
        outputs = len(s.tokens) if s.hidden else len(needed)
        drawn = tuple(draws[r : r + s.draws])
        scored: tuple[TokenLogprob, ...] = ()
        if s.draws and scores:
            drawn = tuple(logits.draw(rows_of(s), r + len(needed) - s.draws))
        if s.targets:
            scored = logits.score(s.targets, s.target_top, r)
        state = hidden[h : h + outputs].copy() if s.hidden else None
        found = captured[h : h + outputs].copy() if s.hidden and captured is not None else None
        results.append(SeqResult(s.seq_id, drawn, scored, state, found))
        h, r = h + outputs, r + len(needed)
    return StepResult(plan.step, tuple(results))
