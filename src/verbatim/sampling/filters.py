"""Temperature, and the filters after it: top-k, top-p, min-p, typical-p, top-n-sigma, XTC.

The temperature makes the list of live ids; each filter shortens it and leaves at least one id.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from verbatim.sampling.draw import chance
from verbatim.sampling.numerics import I64, best, lane_sum, log1, mass_needed, spreads
from verbatim.sampling.row_state import REMOVED, RowState, Stage


class Temperature:
    """d = (logit - best logit) / temperature: below 1 sharper, above 1 flatter (Ackley, Hinton,
    Sejnowski 1985). Logits 3 and 1 at temperature 2: d = 0 and -1, that is 73 % and 27 %. Always
    active: it makes the list of live ids. At temperature 0 pipeline.py takes the argmax instead. A
    division that overflows gives -inf, an id that cannot win."""

    name = "temperature"

    def active(self, row: RowState) -> bool:
        return True

    def apply(self, row: RowState) -> None:
        row.ids = np.flatnonzero(row.logits > REMOVED)
        live = row.logits[row.ids]
        with np.errstate(over="ignore"):
            row.d = (live - live.max()) / row.params.temperature


class TopK:
    """Keep exactly the k most likely ids; a tie goes to the lower id (Fan, Lewis, Dauphin 2018).
    transformers keeps all ids that tie with the last one."""

    name = "top_k"

    def active(self, row: RowState) -> bool:
        return 0 < row.params.top_k < len(row.ids)

    def apply(self, row: RowState) -> None:
        which = np.zeros(len(row.ids), bool)
        which[best(row.d, row.params.top_k)] = True
        row.keep(which)


class TopP:
    """Keep the smallest set, by probability then id, with mass at least p (Holtzman et al. 2019).
    Probabilities 0.5, 0.3, 0.2 and p = 0.8 keep two; p = 0.81 keeps three."""

    name = "top_p"

    def active(self, row: RowState) -> bool:
        return row.params.top_p < 1.0

    def apply(self, row: RowState) -> None:
        mass = row.mass
        need = mass_needed(row.params.top_p, int(mass.sum()))
        # Sort only ids within e^-8 of the best if their mass suffices: the same prefix, much
        # faster.
        some = np.flatnonzero(row.d >= row.d.max() - 8.0)
        if int(mass[some].sum()) < need:
            some = np.arange(len(row.ids))
        order = some[np.argsort(-row.d[some], kind="stable")]
        row.keep(_prefix(mass, order, need))


class MinP:
    """Keep ids with p_i >= min_p * max p (Nguyen et al. 2024), tested as d_i >= log(min_p). Best
    0.5, min_p = 0.1: ids of at least 0.05 stay."""

    name = "min_p"

    def active(self, row: RowState) -> bool:
        return row.params.min_p > 0.0

    def apply(self, row: RowState) -> None:
        row.keep(row.centred >= log_of_share(row.params.min_p))


class TypicalP:
    """Keep the ids whose surprisal is nearest to the entropy, until their mass is at least p
    (Meister et al. 2022). Order: | -log p_i - H |, then id. Probabilities 0.6, 0.3, 0.1 have
    H = 0.90 nats and surprisals 0.51, 1.20, 2.30: the second is the most typical (0.31 away), then
    the first (0.39); p = 0.2 keeps only the second."""

    name = "typical_p"

    def active(self, row: RowState) -> bool:
        return row.params.typical_p < 1.0

    def apply(self, row: RowState) -> None:
        c, mass = row.centred, row.mass
        total = int(mass.sum())
        # -log p_i - H = (log Z - c_i) - (log Z + mean of -c): log Z cancels
        mean = float(int(spreads(c).sum())) / float(total)
        order = np.argsort(np.abs(-c - mean), kind="stable")
        row.keep(_prefix(mass, order, mass_needed(row.params.typical_p, total)))


class TopNSigma:
    """Keep ids whose logit is at least best - n * sigma, with sigma the standard deviation of all
    logits that no ban removed (Tang et al., "Top-n-sigma", 2024). Penalties affect sigma, the
    temperature cancels, and earlier filters do not change it. Logits 3, 1, 0, 0: sigma = 1.22,
    n = 1 keeps the first only."""

    name = "top_n_sigma"

    def active(self, row: RowState) -> bool:
        return row.params.top_n_sigma > 0.0

    def apply(self, row: RowState) -> None:
        live = row.logits > REMOVED
        z = np.where(live, row.logits - row.logits.max(), 0.0)
        count = float(np.count_nonzero(live))
        mean = lane_sum(z) / count
        off = np.where(live, z - mean, 0.0)
        sigma = float(np.sqrt(lane_sum(off * off) / count))
        near = z[row.ids] >= -(row.params.top_n_sigma * sigma)
        if not near.any():  # earlier filters left only ids farther away
            near[np.argmax(row.d)] = True
        row.keep(near)


class Xtc:
    """ "Exclude top choices" (p-e-w, 2024): with xtc_probability, remove all ids with p >=
    threshold except the least likely of them. Probabilities 0.5, 0.3, 0.15, 0.05 and threshold 0.1:
    the first two are removed. The random number is a function of (key, position)."""

    name = "xtc_probability"

    def active(self, row: RowState) -> bool:
        return row.params.xtc_probability > 0.0

    def apply(self, row: RowState) -> None:
        if not chance(row.key, row.counter) < row.params.xtc_probability:
            return
        mass = row.mass
        top = np.flatnonzero(
            mass.astype(np.float64) >= row.params.xtc_threshold * float(int(mass.sum()))
        )
        if len(top) < 2:
            return
        order = top[np.argsort(-row.d[top], kind="stable")]
        which = np.ones(len(row.ids), bool)
        which[order[:-1]] = False
        row.keep(which)


FILTER_STAGES: tuple[Stage, ...] = (TopK(), TopP(), MinP(), TypicalP(), TopNSigma(), Xtc())


def _prefix(mass: I64, order: I64, need: int) -> NDArray[np.bool_]:
    """The shortest prefix of `order` with at least `need` mass, or all of `order`."""
    count = int(np.searchsorted(np.cumsum(mass[order]), need)) + 1
    which = np.zeros(len(mass), bool)
    which[order[:count]] = True
    return which


@lru_cache(maxsize=1024)
def log_of_share(share: float) -> float:
    """log of a number in (0, 1]; subnormal numbers are rounded up to the smallest normal one."""
    return log1(max(share, 2.0**-1022))
