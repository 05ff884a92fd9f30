"""Logits to token: the order of every sampler, for every backend and mode.

In: rows of float32 logits with one Row each (parameters, noise key, position, history, grammar
mask). Out: one Drawn per row. A row's result depends on that row alone, never on the batch.

    logit bias -> grammar mask, allowed, banned, minimum length
    -> repetition, frequency, presence, DRY, no-repeat n-grams
    -> temperature -> top-k -> top-p -> min-p -> typical-p -> top-n-sigma -> XTC -> draw

At temperature 0 the token is the argmax after the penalties; a tie goes to the lower id, no filter
runs and no noise is made. When bans exclude every id, the token is NOTHING (-1); when the logits
are not finite, it is BROKEN (-2). The engine ends that request with an error; other rows are not
affected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verbatim.base.records import BROKEN, NOTHING, Drawn, DrawSpec, SeqStep
from verbatim.sampling import draw as noise
from verbatim.sampling.logprobs import finite_row, log_normaliser, token_logprobs
from verbatim.sampling.numerics import F64, best, log_mass, masses, spreads
from verbatim.sampling.processors import AFTER, BEFORE
from verbatim.sampling.record import Recorder
from verbatim.sampling.row_state import REMOVED, RowState, Stage


class Row(NamedTuple):
    """One draw: DrawSpec, position of the token to draw, all tokens before it, grammar mask."""

    spec: DrawSpec
    position: int
    history: tuple[int, ...] = ()
    mask: bytes | None = None


def rows_of(step: SeqStep) -> list[Row]:
    """The rows that a SeqStep draws: one for its last token, or 1 + k if the last k are drafts.

    Draw i is for position end - draws + i + 1; its history includes the drafts before it.

    >>> spec = DrawSpec(SamplingParams(repetition_penalty=1.1), 0, 2, history=(5, 6))
    >>> [(r.position, r.history) for r in rows_of(SeqStep(0, (6, 8, 9), 1, (), draws=3, draw=spec))]
    [(2, (5, 6)), (3, (5, 6, 8)), (4, (5, 6, 8, 9))]

    With `picks`, draw i is for the position after row picks[i], and all have one history.
    """
    if not step.draws:
        return []
    spec = step.draw
    assert spec is not None, "a step that draws needs a DrawSpec"
    if step.picks:
        at, known = step.start + 1 + step.shift, tuple(spec.history)
        return [
            Row(spec, at + row, known, spec.masks[i] if spec.masks else None)
            for i, row in enumerate(step.picks)
        ]
    before = len(step.tokens) - step.draws + 1  # tokens before the first draw; the rest are drafts
    first, drafts = step.start + before + step.shift, step.tokens[before:]
    history, masks = tuple(spec.history), spec.masks
    return [
        Row(spec, first + i, history + drafts[:i] if history else (), masks[i] if masks else None)
        for i in range(step.draws)
    ]


def sample_rows(logits: NDArray[np.float32], rows: Sequence[Row]) -> list[Drawn]:
    """One Drawn per row of `logits` [rows, vocab]."""
    assert len(logits) == len(rows), "one Row for each row of logits"
    return [_sample(finite_row(logits[i]), row) for i, row in enumerate(rows)]


def _sample(raw: F64 | None, row: Row) -> Drawn:
    if raw is None:
        return Drawn(BROKEN, 0.0)
    state = state_of(raw, row)
    recorder = Recorder(raw, state) if row.spec.params.explain else None
    _run(BEFORE, state, recorder)
    if not (state.logits > REMOVED).any():
        return Drawn(NOTHING, REMOVED)
    if row.spec.beam:
        return _beam(raw, state, row.spec.beam, recorder)
    if row.spec.params.greedy:
        token, scores = int(np.argmax(state.logits)), None
        processed = state.logits
    else:
        _run(AFTER, state, recorder)
        winner, g, scores = noise.draw(state.ids, state.d, state.key, state.counter)
        token = int(state.ids[winner])
        processed = np.full(len(raw), REMOVED)
        processed[state.ids] = state.d
        if recorder:
            recorder.noise(g, scores)
    report = _report(raw, state, processed, token, row.spec.params.logprobs_mode == "processed")
    if row.spec.step < 0:
        return Drawn(token, *report, explain=recorder.finish(token) if recorder else None)
    sure, entropy = _certainty(processed, token, row.spec)
    denoising = {"denoising_step": row.spec.step, "confidence": sure}
    record = recorder.finish(token, denoising=denoising) if recorder else None
    return Drawn(token, *report, record, confidence=sure, entropy=entropy)


def _certainty(processed: F64, token: int, spec: DrawSpec) -> tuple[float, float]:
    """(log-probability of the token, entropy) of the distribution that a denoising step samples.
    At temperature 0 that is the model's own after bias, bans and penalties."""
    d = processed - processed.max()
    mass = masses(d)
    norm = log_mass(int(mass.sum()))
    entropy = 0.0
    if spec.params.remasking == "entropy_bounded":
        entropy = norm + float(int(spreads(d).sum())) / float(int(mass.sum()))
    return float(d[token]) - norm, entropy


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
        step=max(spec.step, 0),
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
    """(log-probability, best alternatives) of the model's own or of the processed distribution."""
    if not state.params.wants_logprob:
        return 0.0, ()
    row = processed if use_processed else raw
    norm = None
    if use_processed and len(state.ids):  # the filters have computed the masses
        norm = log_mass(int(state.mass.sum()))
    scored = token_logprobs(row, token, state.params.logprobs or 0, norm=norm)
    return scored.logprob, scored.top


def _beam(raw: F64, state: RowState, count: int, recorder: Recorder | None) -> Drawn:
    """Beam search: the best `count` ids, with log-probabilities after bias, bans and penalties."""
    norm, peak = log_normaliser(state.logits), float(state.logits.max())
    first = [int(i) for i in best(state.logits, count) if state.logits[i] > REMOVED]
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
