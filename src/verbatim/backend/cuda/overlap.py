"""The step behind the one that is asked for, begun before the host has read that one. So the device never waits for the host.

Most texts that are being written go on: with the token they draw, at the next position, in the blocks they hold, drawn from in the same way. That token
is on the device before it is on the host, and no plan is needed to know the rest. When the plan comes, what it asks for of the step that
was begun is taken, and what it does not ask for is dropped: a key and a value behind the end of a text, which whoever gets the place writes over. A row is
a function of its own text alone (docs/numerics.md), so it does not matter beside whom it was computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from verbatim.backend.cuda.gpu_sampler import Answer
from verbatim.base.config import BLOCK_SIZE
from verbatim.base.records import DrawSpec, SeqStep, StepPlan

NAP = 8  # steps in which nothing is begun ahead, after one that was begun in vain

Tables = tuple[tuple[int, ...], ...]


class Begun(NamedTuple):
    steps: tuple[SeqStep, ...]  # one row each
    inputs: list[
        int
    ]  # their tokens, which the steps do not know where they were begun ahead; -1: it was none
    answer: Answer


class Ahead:
    """What was begun, and whether to begin more."""

    def __init__(self) -> None:
        self.begun: Begun | None = None
        self._before = StepPlan(0, ())
        self._nap = 0

    def take(self, plan: StepPlan) -> tuple[Begun | None, dict[int, int]]:
        """What was begun, and the row of each sequence of the plan that asks for just that."""
        begun, self.begun = self.begun, None
        if begun is None:
            return None, {}
        steps, inputs, _ = begun
        rows = {step.seq_id: row for row, step in enumerate(steps)}
        found: dict[int, int] = {}
        for asked in plan.sequences:
            row = rows.get(asked.seq_id)
            if row is not None and asked.tokens[0] == inputs[row] and _same(steps[row], asked):
                found[asked.seq_id] = row
        if 2 * len(found) < len(rows):
            self._nap = NAP
        return begun, found

    def steady(self, plan: StepPlan, taken: int, knows: Callable[[DrawSpec], bool]) -> bool:
        """Whether all of its sequences are being written on, one token each, drawn by the device in the same way as the last one (a draft model's are
        not: it makes a few guesses, then waits). `taken`: how many go on as they were begun."""
        before, self._before = self._before, plan
        if taken == len(plan.sequences):
            return taken > 0  # a plan may be nothing but copies
        if self._nap:
            self._nap -= 1
            return False
        written = {step.seq_id: (step.end, step.draw) for step in before.sequences}
        for step in plan.sequences:
            end, draw = written.get(step.seq_id, (-1, None))
            if not (
                _plain(step)
                and end == step.start
                and draw is step.draw
                and draw is not None
                and knows(draw)
            ):
                return False
        return True


def goes_on(step: SeqStep, context: int) -> SeqStep | None:
    """The step behind one that draws once, its token left open; None where it holds no block for that position, or the model knows none."""
    end, blocks = step.start + len(step.tokens), step.blocks
    if end >= context:
        return None
    for table in blocks:
        if end >= BLOCK_SIZE * len(table):
            return None
    return SeqStep(step.seq_id, (0,), end, blocks, 1, step.draw)


def _plain(step: SeqStep) -> bool:
    return len(step.tokens) == step.draws == 1 and not step.targets and not step.hidden


def _same(begun: SeqStep, asked: SeqStep) -> bool:
    """But for the token."""
    return (
        begun.start == asked.start
        and begun.draw is asked.draw
        and _plain(asked)
        and (
            begun.blocks is asked.blocks
            or _agree(begun.blocks, asked.blocks, asked.start // BLOCK_SIZE + 1)
        )
    )


def _agree(begun: Tables, asked: Tables, used: int) -> bool:
    """Tables grow behind what is used, and lose blocks that have left the window; the rest must be the same."""
    return all(
        len(new) >= used and all(a == b or b < 0 for a, b in zip(old[:used], new, strict=False))
        for old, new in zip(begun, asked, strict=True)
    )
