"""Logits -> token: the order and the meaning of every sampler, for every backend and mode.

In come rows of float32 logits with one Row each (parameters, noise key, position, history, grammar mask); out comes one
Drawn each. A row is a function of itself alone: sample_rows of many rows is sample_rows of each.

    logit bias -> grammar mask, allowed, banned, minimum length -> repetition, frequency, presence, DRY, no-repeat n-grams
    -> temperature -> top-k -> top-p -> min-p -> typical-p -> top-n-sigma -> XTC -> draw

At temperature 0 the answer is the argmax after the penalties, ties to the lower id: no filter runs and no noise is made.
When bans leave nothing to draw, the token is NOTHING (-1) and the engine ends that request with an error; its
neighbours never notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verbatim.base.records import Drawn, DrawSpec, SeqStep
from verbatim.sampling import draw as noise
from verbatim.sampling.logprobs import as_row, log_normaliser, token_logprobs
from verbatim.sampling.numerics import F64, best, log_mass
from verbatim.sampling.processors import BEFORE, FILTERS, NONE, RowState, Stage, Temperature
from verbatim.sampling.record import Recorder

NOTHING = -1  # Drawn.token when the bans of a request leave no id
_TEMPERATURE = Temperature()


class Row(NamedTuple):
    """One draw: the request's spec, the position of the token to be drawn, all tokens before it, the grammar's mask."""

    spec: DrawSpec
    position: int
    history: tuple[int, ...] = ()
    mask: bytes | None = None


def rows_of(step: SeqStep) -> list[Row]:
    """The rows that a SeqStep draws: one for its last token, or 1 + k where the last k tokens are drafts.

    Drawing i stands at position end - draws + i + 1 and has seen the drafts before it.

    >>> spec = DrawSpec(SamplingParams(repetition_penalty=1.1), 0, 2, history=(5, 6))
    >>> [(r.position, r.history) for r in rows_of(SeqStep(0, (6, 8, 9), 1, (), draws=3, draw=spec))]
    [(2, (5, 6)), (3, (5, 6, 8)), (4, (5, 6, 8, 9))]
    """
    if not step.draws:
        return []
    spec = step.draw
    assert spec is not None, "a step that draws must say how"
    before = (
        len(step.tokens) - step.draws + 1
    )  # tokens that the first draw has seen; the others are drafts
    first, drafts, history, masks = (
        step.start + before,
        step.tokens[before:],
        spec.history,
        spec.masks,
    )
    return [
        Row(spec, first + i, history + drafts[:i] if history else (), masks[i] if masks else None)
        for i in range(step.draws)
    ]


def sample_rows(logits: NDArray[np.float32], rows: Sequence[Row]) -> list[Drawn]:
    """One Drawn for each row of `logits` [rows, vocab]."""
    assert len(logits) == len(rows), "one Row for each row of logits"
    return [_sample(as_row(logits[i]), row) for i, row in enumerate(rows)]


def _sample(raw: F64, row: Row) -> Drawn:
    state = state_of(raw, row)
    recorder = Recorder(raw, state) if row.spec.params.explain else None
    _run(BEFORE, state, recorder)
    if not (state.logits > NONE).any():
        return Drawn(NOTHING, NONE)
    if row.spec.beam:
        return _beam(raw, state, row.spec.beam, recorder)
    if row.spec.params.greedy:
        token, scores = int(np.argmax(state.logits)), None
        processed = state.logits
    else:
        _run((_TEMPERATURE, *FILTERS), state, recorder)
        winner, g, scores = noise.draw(state.ids, state.d, state.key, state.position)
        token = int(state.ids[winner])
        processed = np.full(len(raw), NONE)
        processed[state.ids] = state.d
        if recorder:
            recorder.noise(g, scores)
    report = _report(raw, state, processed, token, row.spec.params.logprobs_mode == "processed")
    return Drawn(token, *report, explain=recorder.finish(token) if recorder else None)


def state_of(raw: F64, row: Row) -> RowState:
    spec = row.spec
    return RowState(
        params=spec.params,
        key=spec.key,
        position=row.position,
        prompt_len=spec.prompt_len,
        history=row.history,
        withheld=spec.withheld,
        breakers=spec.breakers,
        mask=row.mask,
        logits=raw.copy(),
    )


def _run(stages: Sequence[Stage], state: RowState, recorder: Recorder | None) -> None:
    for stage in stages:
        if stage.active(state):
            stage.apply(state)
            if recorder:
                recorder.after(stage.name)


def _report(
    raw: F64, state: RowState, processed: F64, token: int, use_processed: bool
) -> tuple[float, Any]:
    """(log-probability, best alternatives) from the model's own distribution or from the one that was drawn from."""
    if not state.params.wants_logprob:
        return 0.0, ()
    row = processed if use_processed else raw
    norm = None
    if use_processed and len(state.ids):  # the filters have the masses already
        norm = log_mass(int(state.mass.sum()))
    scored = token_logprobs(row, token, state.params.logprobs or 0, norm=norm)
    return scored.logprob, scored.top


def _beam(raw: F64, state: RowState, count: int, recorder: Recorder | None) -> Drawn:
    """The best `count` ids with their log-probability after bias, bans and penalties: what beam search extends."""
    norm, peak = log_normaliser(state.logits), float(state.logits.max())
    first = [int(i) for i in best(state.logits, count) if state.logits[i] > NONE]
    found = tuple((i, (float(state.logits[i]) - peak) - norm) for i in first)
    reported: tuple[float, ...] = ()
    top: tuple[tuple[int, float], ...] = ()
    if state.params.logprobs is not None:
        row = state.logits if state.params.logprobs_mode == "processed" else raw
        own = log_normaliser(row)
        reported = tuple((float(row[i]) - float(row.max())) - own for i in first)
        top = token_logprobs(row, first[0], state.params.logprobs, norm=own).top
    explain = recorder.finish(None, found) if recorder else None
    return Drawn(found[0][0], found[0][1], top, explain, candidates=found, reported=reported)
