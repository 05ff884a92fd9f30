"""What a token costs by where it stands: the same in the matrices at every depth, and in attention more with every position before it.

A token at depth d counts for 1 + d / D tokens at the start of a text, where D is the depth at which attention takes as long as the
matrices do. Example: the default model multiplies 106 million times in matrices and 34,560 times for each earlier position; an
attention's operation weighs three of a matrix, so D is 1,024, and at a depth of 6,000 a token counts for 6.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.base.records import CacheGroup

# Matrices are products of 8-bit integers, attention works on floats. Measured, by a line through the times of chunks up to a depth of 5,000:
# 2.8 and 3.5 with AMX, 3.2 with AVX-512, 0.9 with AVX2. Where the matrices have no lead, a chunk comes out shorter than it must; down to 64
# tokens that costs nothing (with AMX; not measured elsewhere).
ATTENTION_WEIGHT = 3


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Operations of one token. Only their ratio matters; with position=0 depth costs nothing."""

    matrices: int = 1  # in the matrices of all layers
    position: int = 0  # in the attention of one layer, for each position that it looks at

    def at(self, depth: int, groups: Sequence[CacheGroup]) -> int:
        """One token's cost at this depth, in units of which a token at depth 0 has `matrices`. A window bounds what is looked at."""
        seen = sum(
            len(g.layers) * (depth if g.window is None else min(depth, g.window)) for g in groups
        )
        return self.matrices + ATTENTION_WEIGHT * self.position * seen
