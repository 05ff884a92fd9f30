"""Cost of one token by its position: constant in the matrices, linear in attention.

A token at depth d (d positions before it) costs 1 + d / D tokens at depth 0. D is the depth at
which attention takes as long as the matrices. Example: the default model does 106 million
multiplications per token in matrices and 34,560 per earlier position in attention. An attention
operation costs three matrix operations, so D is 1,024, and a token at depth 6,000 costs 6.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.base.records import CacheGroup, SeqStep

# Positions with log-probabilities of the prompt in one step: each needs a row of logits, of 128,000
# tokens half a megabyte, on the GPU and on the host, which scores them.
MAX_SCORES = 512
# Time of an attention operation (float) per matrix operation (8-bit integer). Measured by a line
# through the times of chunks up to a depth of 5,000: 2.8 and 3.5 with AMX, 3.2 with AVX-512, 0.9
# with AVX2. Where the true ratio is lower, chunks come out shorter than needed; with AMX, chunks
# down to 64 tokens lose no throughput (not measured elsewhere).
ATTENTION_WEIGHT = 3


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Operations of one token. Only their ratio matters; position=0 leaves attention out."""

    matrices: int = 1  # multiplications in the matrices of all layers
    position: int = 0  # multiplications in one layer's attention per visible position

    def at(self, depth: int, groups: Sequence[CacheGroup]) -> int:
        """Cost of one token at `depth`, in matrix operations: `matrices` at depth 0. A sliding
        window bounds the visible positions."""
        visible = sum(
            len(g.layers) * (depth if g.window is None else min(depth, g.window)) for g in groups
        )
        return self.matrices + ATTENTION_WEIGHT * self.position * visible

    def affordable(self, budget: int, depth: int, groups: Sequence[CacheGroup]) -> int:
        """Tokens at `depth` that cost as much as `budget` tokens at depth 0; at least one."""
        return max(1, budget * self.matrices // self.at(depth, groups))

    def of_step(self, step: SeqStep, groups: Sequence[CacheGroup]) -> int:
        """Budget that a step uses, in tokens at depth 0. A decoded token, drafts, and the one token
        that every running sequence gets cost one each at any depth: their place is guaranteed."""
        n = len(step.tokens)
        return n if n in (1, step.draws) else self.of_chunk(n, step.start, groups)

    def of_chunk(self, n: int, depth: int, groups: Sequence[CacheGroup]) -> int:
        """Cost of n prompt tokens from `depth` on, in tokens at depth 0."""
        return -(-n * self.at(depth, groups) // self.matrices)
