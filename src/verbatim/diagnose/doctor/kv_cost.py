"""What a KV cache of 8 bits costs in quality: KL divergence and agreement with an f16 cache.

In: the scores of one text by the same model with each type of KV cache. Out: KvCost records and
Findings. The text is fixed and is computed in order, so equal settings give equal figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verbatim.base.records import TokenLogprob
from verbatim.diagnose.doctor.findings import Finding, good, note

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM

TEXT_TOKENS = 384  # scored tokens: the first ones of TEXT
TOP = 512  # most likely tokens, compared one by one; the rest of the vocabulary is one event
NOTABLE = 0.02  # nats per token for a note: twice fp8 on the default model (cpu: 0.0096)
WORST = 0.5  # nats at one position for a note: seven times fp8 on the default model (cpu: 0.070)

# Prose, dialogue, numbers and code, so that both sure and unsure positions occur.
TEXT = """\
The lighthouse stood at the end of a narrow spit of land, and for most of the year only one person \
lived there. Every evening, an hour before sunset, she climbed the ninety-one steps to the lamp, \
wiped the salt from the glass, and wrote three numbers in a book: the height of the water, the \
direction of the wind, and the number of ships in sight. On 4 March 1911 the book says 2.35, \
north-west, 7. On the next page there is nothing but a drawing of a bird.

"Why a bird?" asked the boy who had come with the supply boat.

"Because no ship came that day," she said, "and I had to write down something."

Water expands when it freezes. That is why ice floats, why pipes burst in winter, and why a lake \
freezes from the top. If ice sank, a lake would freeze from the bottom, and few fish would survive \
until spring. The density of ice at 0 degrees Celsius is about 917 kilograms per cubic metre, and \
that of water is about 1,000, so roughly nine tenths of an iceberg lie below the surface.

def mean(values):
    \"\"\"The arithmetic mean of a list of numbers.\"\"\"
    if not values:
        raise ValueError("mean of an empty list")
    return sum(values) / len(values)

The first ten prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29; their sum is 129. To make \
bread you need flour, water, salt and yeast. Mix them, knead the dough for ten minutes, let it \
rise for an hour, shape it, let it rise again, and bake it until the crust is brown.
"""


@dataclass(frozen=True, slots=True)
class KvCost:
    """One type of KV cache against f16, on the built-in text."""

    kv_type: str
    positions: int
    kl: float  # mean KL divergence from f16's distribution, nats per token
    worst: float  # one position's
    agreement: float  # share of positions with the same most likely token
    token_bytes: int  # KV cache of one token
    f16_bytes: int


@dataclass(frozen=True, slots=True)
class TextScores:
    """The distributions of one engine over TEXT."""

    kv_type: str
    token_bytes: int
    rows: tuple[TokenLogprob, ...]  # one per token after the first


def score_text(llm: LLM) -> TextScores:
    ids = llm.encode(TEXT)[: min(TEXT_TOKENS, llm.context)]
    rows = tuple(row for row in llm.score(ids, top=TOP).logprobs if row is not None)
    return TextScores(llm.config.kv_type, llm.loaded.backend.info.kv_token_bytes, rows)


def kv_cost(f16: TextScores, other: TextScores) -> KvCost:
    pairs = list(zip(f16.rows, other.rows, strict=True))
    found = [divergence(a.top, b.top) for a, b in pairs]
    same = sum(a.top[0][0] == b.top[0][0] for a, b in pairs)
    return KvCost(
        other.kv_type,
        len(pairs),
        math.fsum(found) / len(found),
        max(found),
        same / len(pairs),
        other.token_bytes,
        f16.token_bytes,
    )


def divergence(p: Sequence[tuple[int, float]], q: Sequence[tuple[int, float]]) -> float:
    """KL(p || q) in nats from the log-probabilities of the most likely tokens. The tokens that are
    not in both lists count as one event, so the figure is a lower bound.

    >>> half = math.log(0.5)
    >>> round(divergence([(1, half), (2, half)], [(1, math.log(0.75)), (2, math.log(0.25))]), 4)
    0.1438
    """
    others = dict(q)
    shared = [(a, others[token]) for token, a in p if token in others]
    total = math.fsum(math.exp(a) * (a - b) for a, b in shared)
    rest, other_rest = (
        max(0.0, 1.0 - math.fsum(math.exp(pair[side]) for pair in shared)) for side in (0, 1)
    )
    # below 1e-6 the rest is the rounding of the sums
    if rest > 1e-6 and other_rest > 1e-6:
        total += rest * math.log(rest / other_rest)
    return max(0.0, total)


def cost_findings(costs: Sequence[KvCost]) -> list[Finding]:
    """One finding per type; a note if its cost is not negligible, on average or at one position, or
    if another type costs less in no more memory."""
    found = []
    for c in costs:
        text = (
            f"kv_type {c.kv_type}: KL {c.kl:.4f} nats per token against f16, the same most likely"
            f" token at {c.agreement:.1%} of {c.positions} positions"
        )
        evidence = (
            f"{c.token_bytes:,} bytes per token instead of {c.f16_bytes:,}"
            f" ({1 - c.token_bytes / c.f16_bytes:.0%} saved); worst position {c.worst:.3f} nats"
        )
        better = [other for other in costs if other.kl < c.kl and other.worst < c.worst]
        smaller = any(other.token_bytes <= c.token_bytes for other in better)
        if c.kl < NOTABLE and c.worst < WORST and not smaller:
            found.append(good(text, evidence, check="kv cache"))
        else:
            best = min(better, key=lambda cost: cost.kl, default=None)
            remedy = "keep f16" if best is None else f"--kv-type {best.kv_type} costs less"
            found.append(note(text, evidence, remedy, check="kv cache"))
    return found
