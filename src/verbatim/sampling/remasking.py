"""Remasking: which tokens of a denoising step stay; the other positions are masked again.

In: one Drawn per masked position of a block, in order. Out: the indices of those that stay, at
least one. The confidence of a token is its probability in the distribution that was sampled, after
temperature and filters, as in SDAR's published code; at temperature 0 in the model's own. Ties go
to the lower position. A policy reads integers and float64 of sampling/numerics.py only, so the
choice is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verbatim.base.records import Drawn
from verbatim.sampling.draw import DOMAIN_REMASK, uniform
from verbatim.sampling.numerics import log1


def _first(scores: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` greatest, in order."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return sorted(order[:count])


class Sequential:
    """The first `count` masked positions. One step per position: left to right."""

    name = "sequential"

    def choose(
        self, drawn: Sequence[Drawn], positions: Sequence[int], count: int, step: int, key: int
    ) -> list[int]:
        return list(range(min(count, len(drawn))))


class Random:
    """`count` positions, by noise of (key, position, step)."""

    name = "random"

    def choose(
        self, drawn: Sequence[Drawn], positions: Sequence[int], count: int, step: int, key: int
    ) -> list[int]:
        at = np.asarray(positions, np.int64) | step << 32
        return _first(uniform(key, at, np.zeros(1, np.int64), DOMAIN_REMASK).tolist(), count)


class LowConfidenceStatic:
    """The `count` most confident ones (LLaDA)."""

    name = "low_confidence_static"

    def choose(
        self, drawn: Sequence[Drawn], positions: Sequence[int], count: int, step: int, key: int
    ) -> list[int]:
        return _first([d.confidence for d in drawn], count)


class LowConfidenceDynamic:
    """All above the threshold, if they are at least `count`; else the `count` most confident
    (SDAR)."""

    name = "low_confidence_dynamic"

    def __init__(self, threshold: float) -> None:
        self._least = log1(threshold)

    def choose(
        self, drawn: Sequence[Drawn], positions: Sequence[int], count: int, step: int, key: int
    ) -> list[int]:
        sure = [i for i, d in enumerate(drawn) if d.confidence > self._least]
        return sure if len(sure) >= count else _first([d.confidence for d in drawn], count)


class EntropyBounded:
    """The positions of least entropy, as long as the entropies sum to less than the threshold; at
    least one (Ben-Hamu et al., 2025, as in JetEngine)."""

    name = "entropy_bounded"

    def __init__(self, threshold: float) -> None:
        self._most = threshold

    def choose(
        self, drawn: Sequence[Drawn], positions: Sequence[int], count: int, step: int, key: int
    ) -> list[int]:
        order = sorted(range(len(drawn)), key=lambda i: (drawn[i].entropy, i))
        total, chosen = 0.0, order[:1]
        for i in order:
            total += drawn[i].entropy
            if total >= self._most:
                break
            chosen.append(i)
        return sorted({*chosen})


Policy = Sequential | Random | LowConfidenceStatic | LowConfidenceDynamic | EntropyBounded


def policy(name: str, confidence: float, entropy: float) -> Policy:
    """The policy of a request's parameters."""
    if name == LowConfidenceDynamic.name:
        return LowConfidenceDynamic(confidence)
    if name == EntropyBounded.name:
        return EntropyBounded(entropy)
    plain: dict[str, type[Sequential | Random | LowConfidenceStatic]] = {
        kind.name: kind for kind in (Sequential, Random, LowConfidenceStatic)
    }
    return plain[name]()
