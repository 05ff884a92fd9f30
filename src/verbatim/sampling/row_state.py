"""RowState: one row of logits on its way through the sampler, and the interface of a stage.

Before the temperature a removed id has the logit -inf. The temperature turns the row into a list of
live ids with d = (logit - best logit) / temperature, and the filters after it shorten that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from verbatim.base.params import SamplingParams
from verbatim.sampling.numerics import F64, I64, masses

REMOVED = -np.inf  # logit of an id that cannot be drawn


@dataclass(slots=True)
class RowState:
    """One row between stages: `logits` [vocab] before the temperature, then `ids` (ascending) and
    `d` (0 for the best id of the row)."""

    params: SamplingParams
    key: int  # noise key: seed and choice
    position: int  # position of the token to draw
    prompt_len: int
    history: Sequence[int]  # all tokens before it; empty if no parameter reads them
    withheld: tuple[int, ...]  # ids that end the output: removed before min_tokens
    breakers: tuple[tuple[int, ...], ...]  # DRY breakers, as runs of ids
    mask: bytes | None  # grammar mask: bit i allows id i
    logits: F64
    step: int = 0  # denoising step; 0 also in autoregressive decoding
    ids: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    d: F64 = field(default_factory=lambda: np.zeros(0))
    _mass: I64 | None = None

    @property
    def counter(self) -> int:
        """Position and denoising step, as the noise counts them (draw.py)."""
        return self.position | self.step << 32

    def remove(self, ids: Sequence[int] | I64) -> None:
        self.logits[np.asarray(ids, np.int64)] = REMOVED

    def keep(self, which: NDArray[np.bool_]) -> None:
        """Shorten the list of live ids. The masses stay valid while the best id is live."""
        best_before = self.d.max()
        self.ids, self.d = self.ids[which], self.d[which]
        assert len(self.ids), "a filter must leave at least one id"
        if self._mass is not None:
            self._mass = self._mass[which] if self.d.max() == best_before else None

    @property
    def centred(self) -> F64:
        """d relative to the best live id."""
        out: F64 = self.d - self.d.max()
        return out

    @property
    def mass(self) -> I64:
        if self._mass is None:
            self._mass = masses(self.centred)
        return self._mass


class Stage(Protocol):
    name: str  # the parameter that enables it

    def active(self, row: RowState) -> bool: ...
    def apply(self, row: RowState) -> None: ...
