"""Overlapped decoding: launch step N+1 before the host has read step N's tokens.

In: the plans of successive steps, and a backend with a launcher. Out: their results.

In steady decode a sequence continues with the token that it drew, at the next position, in the
blocks that it holds, with the same sampling parameters. The token is on the device already, so the
next step needs no plan. When the plan arrives, rows that match it are used and all others are
discarded: they have written one key and value past the end of a sequence, which the next owner of
the slot overwrites. A row's bits depend only on its own sequence (docs/numerics.md), so it does not
matter which other rows the launched step had.
"""

from __future__ import annotations

from typing import NamedTuple

from verbatim.backend.protocol import Backend, LaunchedStep, StepLauncher
from verbatim.base.config import BLOCK_SIZE
from verbatim.base.records import DrawSpec, SeqResult, SeqStep, StepPlan, StepResult

BACK_OFF = 8  # steps without a launch ahead, after a launched step of which most rows did not match

Tables = tuple[tuple[int, ...], ...]


class EarlyStep(NamedTuple):
    """Step N+1, launched before its plan."""

    launched: LaunchedStep
    steps: tuple[SeqStep, ...]  # one row each, with a placeholder token
    inputs: tuple[int, ...] = ()  # the rows' input tokens; -1: the device did not decide the token


class Current(NamedTuple):
    """The launched rows of a plan."""

    launched: LaunchedStep | None  # None: the plan is executed without overlap
    rows: dict[int, int]  # row in `launched` by sequence id
    steady: bool  # every sequence of the plan is launched and can continue


class Overlap:
    """Holds the step that was launched ahead, and decides when to launch another."""

    def __init__(self, backend: Backend, launcher: StepLauncher) -> None:
        self._backend = backend
        self._launcher = launcher
        self._ahead: EarlyStep | None = None
        self._previous = StepPlan(0, ())
        self._back_off = 0

    def launch(self, plan: StepPlan) -> Current:
        """Step N: the rows that were launched ahead and match the plan; without one, and in steady
        decode, all rows, launched now. Otherwise no row: collect() executes the plan."""
        ahead, self._ahead = self._ahead, None
        rows = {} if ahead is None else self._matching(ahead, plan)
        steady = self._steady(plan, len(rows))
        if ahead is not None and rows:
            return Current(ahead.launched, rows, steady and len(rows) == len(plan.sequences))
        if not steady:
            return Current(None, {}, steady=False)
        rows = {step.seq_id: row for row, step in enumerate(plan.sequences)}
        return Current(self._launcher.launch(plan.sequences), rows, steady=True)

    def launch_next(self, plan: StepPlan, current: Current) -> EarlyStep | None:
        """Step N+1 of the sequences that can continue. The host does not have their tokens yet."""
        if current.launched is None or not current.steady:
            return None
        context = self._backend.spec.context
        steps = tuple(
            [
                step
                for planned in plan.sequences
                if (step := next_step(planned, context)) is not None
            ]
        )
        if not steps:
            return None
        rows = [current.rows[step.seq_id] for step in steps]
        return EarlyStep(current.launched.launch_next(steps, rows), steps)

    def collect(self, plan: StepPlan, current: Current, following: EarlyStep | None) -> StepResult:
        """Wait for step N. The rows that were not launched or not decided are executed now."""
        if current.launched is None:
            return self._backend.execute(plan)
        found = current.launched.collect(list(current.rows.values()))
        tokens = {
            seq_id: -1 if drawn is None else drawn.token
            for seq_id, drawn in zip(current.rows, found, strict=True)
        }
        if following is not None:
            inputs = tuple([tokens[step.seq_id] for step in following.steps])
            self._ahead = following._replace(inputs=inputs)
        done = {
            seq_id: SeqResult(seq_id, (drawn,), captured=current.launched.states(row))
            for (seq_id, row), drawn in zip(current.rows.items(), found, strict=True)
            if drawn is not None
        }
        rest = tuple([step for step in plan.sequences if step.seq_id not in done])
        if rest:
            result = self._backend.execute(plan._replace(sequences=rest))
            done |= {one.seq_id: one for one in result.sequences}
        return StepResult(plan.step, tuple([done[step.seq_id] for step in plan.sequences]))

    def discard(self) -> None:
        """Forget the step that was launched ahead. It may still run."""
        self._ahead = None

    def _matching(self, ahead: EarlyStep, plan: StepPlan) -> dict[int, int]:
        """The row in the launched step of each sequence of the plan that matches it. None matches
        while the plan copies blocks: the copies come before the step."""
        if plan.copies:
            return {}
        rows = {step.seq_id: row for row, step in enumerate(ahead.steps)}
        matched: dict[int, int] = {}
        for planned in plan.sequences:
            row = rows.get(planned.seq_id)
            if (
                row is not None
                and planned.tokens[0] == ahead.inputs[row]
                and _matches(ahead.steps[row], planned)
            ):
                matched[planned.seq_id] = row
        if 2 * len(matched) < len(rows):
            self._back_off = BACK_OFF
        return matched

    def _steady(self, plan: StepPlan, matched: int) -> bool:
        """Whether every sequence is in steady decode: it continues the previous plan by one token,
        with the same DrawSpec, which the device samples. `matched`: sequences that match the step
        launched ahead."""
        previous, self._previous = self._previous, plan
        if matched == len(plan.sequences):
            return matched > 0
        if self._back_off:
            self._back_off -= 1
            return False
        if plan.copies:
            return False
        decoded = {step.seq_id: (step.end, step.draw) for step in previous.sequences}
        for step in plan.sequences:
            end, draw = decoded.get(step.seq_id, (-1, None))
            if not (
                _is_decode(step)
                and end == step.start
                and step.draw is not None
                and _same_draw(draw, step.draw)
            ):
                return False
        return self._launcher.can_launch(plan.sequences)


def next_step(step: SeqStep, context: int) -> SeqStep | None:
    """The decode step after this one, with a placeholder token; None if the sequence has no block
    for that position or reaches the end of the context."""
    end, blocks = step.start + len(step.tokens), step.blocks
    if end >= context:
        return None
    for table in blocks:
        if end >= BLOCK_SIZE * len(table):
            return None
    return step._replace(tokens=(0,), start=end, draws=1)


def _is_decode(step: SeqStep) -> bool:
    return len(step.tokens) == step.draws == 1 and not step.targets


def _same_draw(before: DrawSpec | None, now: DrawSpec | None) -> bool:
    """Whether a sequence samples as in the step before. A spec with a history is another object in
    every step; its history is that of the sequence, which only grows."""
    return before is now or (
        before is not None
        and now is not None
        and bool(now.history)
        and before.params is now.params
        and before.key == now.key
        and before.withheld == now.withheld
        and not before.masks
        and not now.masks
    )


def _matches(launched: SeqStep, planned: SeqStep) -> bool:
    """Whether both are the same decode step, except for the token."""
    return (
        launched.start == planned.start
        and _same_draw(launched.draw, planned.draw)
        and _is_decode(planned)
        and planned.hidden <= launched.hidden
        and (
            launched.blocks is planned.blocks
            or _same_blocks(launched.blocks, planned.blocks, planned.start // BLOCK_SIZE + 1)
        )
    )


def _same_blocks(launched: Tables, planned: Tables, used: int) -> bool:
    """Whether the first `used` blocks are the same. The planned table may have more blocks after
    them, and -1 for blocks that have left the window."""
    return all(
        len(new) >= used and all(a == b or b < 0 for a, b in zip(old[:used], new, strict=False))
        for old, new in zip(launched, planned, strict=True)
    )
