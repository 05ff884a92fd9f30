"""The canvas: the block in progress of a sequence of a diffusion model (docs/adr/0034).

In: the draws of a denoising step. Out: the tokens that are decided, in order of position. A
position of the block is decided, or it has the mask id. A decided token never changes, and it is
known (scheduler.py) when all before it are decided. The state is a function of the tokens and of
the number of denoising steps, so preemption keeps it.

    prompt of 6, block_length 4           positions  4 5 | 6 7 8 9 …      block border: |
    first block                                      a b   M M            4 rows, 2 are drawn
    after a step decides position 7                  a b   M x
    after the next                                   a b c x              c and x become known
    next step: the final pass of this block, and the first of the next:   8 rows, 4 are drawn

The keys and values of a block are final once it was computed with its final tokens. Only then does
`computed` include it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from verbatim.base.records import Drawn


class Remasking(Protocol):
    """Chooses which drawn tokens of a denoising step stay (sampling/remasking.py)."""

    name: str

    def choose(
        self, drawn: Sequence[Drawn], positions: Sequence[int], count: int, step: int, key: int
    ) -> list[int]:
        """Indices of `drawn`, one per masked position, in order: at least one. `count`: how many
        the schedule asks for."""


@dataclass(frozen=True, slots=True)
class CanvasRules:
    """How a request fills its blocks."""

    mask: int  # token id of an undecided position
    length: int  # positions of a block
    steps: int  # denoising steps of a block
    policy: Remasking
    full: bool = False  # attention over prompt and all of the canvas; nothing is cached
    shift: bool = False  # the row before a position draws its token
    causal: bool = False  # finished tokens see no later ones; blocks begin behind the prompt

    def count(self, step: int) -> int:
        """Positions that the schedule decides in a step.

        >>> [CanvasRules(0, 8, 3, None).count(step) for step in range(3)]
        [3, 3, 2]
        """
        return self.length // self.steps + (step < self.length % self.steps)


class Canvas:
    def __init__(self, rules: CanvasRules, known: int, limit: int, key: int) -> None:
        """`known`: tokens of the prompt. `limit`: the length at which the sequence ends."""
        self.rules, self.known, self.limit, self.key = rules, known, limit, key
        # Where blocks begin: behind the prompt, or at position 0 (SDAR).
        self._anchor = known if rules.full or rules.causal else 0
        self.steps = 0  # denoising steps of all blocks
        self._open_block()

    def _open_block(self) -> None:
        size, past = self.rules.length, self.known - self._anchor
        self.end = self._anchor + (past // size + 1) * size
        if self.rules.full:
            self.end = min(self.end, self.limit)
        self.step = 0  # denoising steps of this block
        self.decided: dict[int, Drawn] = {}  # by position

    # ------------------------------------------------------------------------------- geometry

    @property
    def start(self) -> int:
        """The first position of the block in progress."""
        return self._anchor + (self.known - self._anchor) // self.rules.length * self.rules.length

    @property
    def block(self) -> int:
        """The block of attention: SeqStep.block."""
        return self.span if self.rules.full or self.rules.causal else self.rules.length

    @property
    def causal(self) -> int:
        """SeqStep.causal."""
        return self.start if self.rules.causal else 0

    @property
    def span(self) -> int:
        """Positions that a denoising step needs: known tokens and canvas."""
        return self.limit if self.rules.full else self.end

    @property
    def least(self) -> int:
        """The fewest rows of a step that computes undecided positions."""
        return self.limit if self.rules.full else self.rules.length

    @property
    def capacity(self) -> int:
        """The most positions that are ever computed."""
        past, size = self.limit - self._anchor, self.rules.length
        return self.limit if self.rules.full else self._anchor - -past // size * size

    @property
    def final(self) -> int:
        """The positions before this one have final keys and values once they are computed."""
        return 0 if self.rules.full else self.start

    def rows(self, computed: int, want: int, most: int) -> int:
        """Of `want` uncomputed positions, as many as `most` rows hold: up to a border of blocks,
        or with causal attention up to the block in progress."""
        if want <= most:
            return want
        if self.rules.causal:
            return min(most, self.start - computed)
        return most // self.block * self.block

    def hash_group(self, block_size: int) -> int:
        """KV blocks whose values depend on the same tokens: their hashes cover all of these.

        >>> policy = None
        >>> [Canvas(CanvasRules(0, n, 1, policy), 0, 9, 0).hash_group(16) for n in (4, 16, 24, 64)]
        [1, 1, 3, 4]
        """
        return 1 if self.rules.causal else math.lcm(self.block, block_size) // block_size

    # ----------------------------------------------------------------------------- denoising

    def tokens(self) -> list[int]:
        """The tokens behind the known ones: decided, or the mask."""
        found = (self.decided.get(at) for at in range(self.known, self.span))
        return [self.rules.mask if drawn is None else drawn.token for drawn in found]

    def masked(self) -> list[int]:
        """Positions that the next step draws. In sequential order only the first ones can stay."""
        masked = [at for at in range(self.known, self.end) if at not in self.decided]
        return masked[: self._count] if self.rules.policy.name == "sequential" else masked

    @property
    def _count(self) -> int:
        return max(1, self.rules.count(self.step))

    def decide(self, drawn: Sequence[Drawn]) -> list[Drawn]:
        """Apply the draws of a step at the masked positions. Returns the draws of the positions
        that are known now; the caller says how many it took with `advance`."""
        masked = self.masked()
        chosen = self.rules.policy.choose(drawn, masked, self._count, self.step, self.key)
        assert chosen, "a denoising step decides at least one position"
        self.decided.update((masked[i], drawn[i]) for i in chosen)
        self.step, self.steps = self.step + 1, self.steps + 1
        return self.ready()

    def ready(self) -> list[Drawn]:
        out: list[Drawn] = []
        while (drawn := self.decided.get(self.known + len(out))) is not None:
            out.append(drawn)
        return out

    def advance(self, count: int) -> None:
        """The first `count` of the decided tokens are known; behind a full block opens the next."""
        for at in range(self.known, self.known + count):
            del self.decided[at]
        self.known += count
        if self.known == self.end:
            self._open_block()
