"""The launcher of the FakeBackend, so that tests run overlapped decoding without a GPU.

A step is computed when it is launched, in the order of the launches, as on a device with one
stream. A few rows stay undecided, as those do that a device leaves to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from verbatim.base.records import Drawn, SeqResult, SeqStep

UNDECIDED = 16  # a row whose token is a multiple of this is undecided

Compute = Callable[[SeqStep], SeqResult]


class FakeLauncher:
    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def can_launch(self, steps: Sequence[SeqStep]) -> bool:
        draws = [step.draw for step in steps]
        return all(draw is not None and not draw.masks and not draw.beam for draw in draws)

    def launch(self, steps: tuple[SeqStep, ...]) -> FakeLaunch:
        return FakeLaunch(self._compute, steps)


class FakeLaunch:
    def __init__(self, compute: Compute, steps: Sequence[SeqStep]) -> None:
        self._compute = compute
        drawn = [compute(step).drawn[0] for step in steps]
        self._drawn = [
            None if one.token < 0 or one.token % UNDECIDED == 0 else one for one in drawn
        ]

    def launch_next(self, steps: tuple[SeqStep, ...], rows: Sequence[int]) -> FakeLaunch:
        tokens = [0 if (one := self._drawn[row]) is None else one.token for row in rows]
        return FakeLaunch(
            self._compute, [_with_token(s, t) for s, t in zip(steps, tokens, strict=True)]
        )

    def collect(self, rows: Sequence[int]) -> list[Drawn | None]:
        return [self._drawn[row] for row in rows]

    def states(self, row: int) -> None:
        return None  # a fake has no draft layer


def _with_token(step: SeqStep, token: int) -> SeqStep:
    draw = step.draw
    if draw is not None and draw.history:
        draw = replace(draw, history=(*draw.history, token))
    return step._replace(tokens=(token,), draw=draw)
