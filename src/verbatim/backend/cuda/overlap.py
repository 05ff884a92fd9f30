"""Overlapped decoding: launch step N+1 before the host has read step N's tokens.

In: the plans of successive steps. Out: which rows of the launched step a plan can use, and whether
to launch another step ahead.

In steady decode a sequence continues with the token that it drew, at the next position, in the
blocks that it holds, with the same sampling parameters. The token is on the device already, so the
next step needs no plan. When the plan arrives, rows that match it are used and all others are
discarded: they have written one key and value past the end of a sequence, which the next owner of
the slot overwrites. A row's bits depend only on its own sequence (docs/numerics.md), so it does not
matter which other rows the launched step had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from verbatim.backend.cuda.pending_tokens import PendingTokens
from verbatim.base.config import BLOCK_SIZE
from verbatim.base.records import DrawSpec, SeqStep, StepPlan

BACK_OFF = 8  # steps without a launch ahead, after a launched step of which most rows did not match

Tables = tuple[tuple[int, ...], ...]


class LaunchedStep(NamedTuple):
    steps: tuple[SeqStep, ...]  # one row each; of a step launched ahead the tokens are placeholders
    inputs: list[int]  # the rows' input tokens; -1: the device did not decide the token
    tokens: PendingTokens  # the rows' sampled tokens


class LaunchAhead:
    """Holds the step that was launched ahead, and decides when to launch another."""

    def __init__(self) -> None:
        self.launched: LaunchedStep | None = None
        self._previous = StepPlan(0, ())
        self._back_off = 0

    def take(self, plan: StepPlan) -> tuple[LaunchedStep | None, dict[int, int]]:
        """The launched step, and the row in it of each sequence of the plan that matches it."""
        launched, self.launched = self.launched, None
        if launched is None:
            return None, {}
        steps, inputs, _ = launched
        rows = {step.seq_id: row for row, step in enumerate(steps)}
        matched: dict[int, int] = {}
        for planned in plan.sequences:
            row = rows.get(planned.seq_id)
            if (
                row is not None
                and planned.tokens[0] == inputs[row]
                and _matches(steps[row], planned)
            ):
                matched[planned.seq_id] = row
        if 2 * len(matched) < len(rows):
            self._back_off = BACK_OFF
        return launched, matched

    def steady(self, plan: StepPlan, matched: int, supports: Callable[[DrawSpec], bool]) -> bool:
        """Whether every sequence is in steady decode: it continues the previous plan by one token,
        with the same DrawSpec, which the device samples. (A draft model's sequences are not: it
        drafts a few tokens, then waits.) `matched`: sequences that match the launched step."""
        previous, self._previous = self._previous, plan
        if matched == len(plan.sequences):
            return matched > 0  # a plan may consist of block copies only
        if self._back_off:
            self._back_off -= 1
            return False
        decoded = {step.seq_id: (step.end, step.draw) for step in previous.sequences}
        for step in plan.sequences:
            end, draw = decoded.get(step.seq_id, (-1, None))
            if not (
                _is_decode(step)
                and end == step.start
                and step.draw is not None
                and _same_draw(draw, step.draw)
                and supports(step.draw)
            ):
                return False
        return True


def next_step(step: SeqStep, context: int) -> SeqStep | None:
    """The decode step after this one, with a placeholder token; None if the sequence has no block
    for that position or reaches the end of the context."""
    end, blocks = step.start + len(step.tokens), step.blocks
    if end >= context:
        return None
    for table in blocks:
        if end >= BLOCK_SIZE * len(table):
            return None
    return SeqStep(step.seq_id, (0,), end, blocks, 1, step.draw, adapter=step.adapter)


def _is_decode(step: SeqStep) -> bool:
    return len(step.tokens) == step.draws == 1 and not step.targets and not step.hidden


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
