"""Stages of the sampler, one small class each: definition, source, a worked example.

In: a RowState, that is one row of logits and the request's parameters. Each stage changes logits or
removes ids of that row; it never reads another row. STAGES lists them in order; pipeline.py runs
them, and `explain` records what each one removed in the same run.

Before the temperature a removed id has the logit -inf. The temperature turns the row into a list of
live ids with d = (logit - best logit) / temperature, and the filters after it shorten that list.
Bans may remove every id; filters always leave at least one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from verbatim.base.params import SamplingParams
from verbatim.sampling.draw import chance
from verbatim.sampling.numerics import F64, I64, best, lane_sum, log1, mass_needed, masses, spreads

REMOVED = -np.inf  # logit of an id that cannot be drawn
# Tokens. DRY counts a repeat up to allowed_length + 63: base^63 exceeds any logit, and the search
# is bounded.
DRY_GROWTH = 63


@dataclass(slots=True)
class RowState:
    """One row between stages: `logits` [vocab] before the temperature, then `ids` (ascending) and
    `d` (0 for the best id of the row)."""

    params: SamplingParams
    key: int
    position: int
    prompt_len: int
    history: Sequence[int]
    withheld: tuple[int, ...]
    breakers: tuple[tuple[int, ...], ...]
    mask: bytes | None
    logits: F64
    ids: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    d: F64 = field(default_factory=lambda: np.zeros(0))
    _mass: I64 | None = None

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


# ------------------------------------------------------------------------------------ bias and bans


class LogitBias:
    """logit[id] += bias[id] (OpenAI's logit_bias). A logit of 2.0 with a bias of -1.5 becomes
    0.5."""

    name = "logit_bias"

    def active(self, row: RowState) -> bool:
        return bool(row.params.logit_bias)

    def apply(self, row: RowState) -> None:
        pairs = dict(row.params.logit_bias)
        row.logits[list(pairs.keys())] += np.array(list(pairs.values()), np.float64)


class Grammar:
    """Remove ids that the grammar (json_schema, regex, grammar, choice) does not allow next.
    grammar/matcher.py makes the mask: bit i of byte i // 8, lowest first. Ids past its end are
    removed."""

    name = "structure"

    def active(self, row: RowState) -> bool:
        return row.mask is not None

    def apply(self, row: RowState) -> None:
        assert row.mask is not None
        bits = np.unpackbits(np.frombuffer(row.mask, np.uint8), bitorder="little")[
            : len(row.logits)
        ].astype(bool)
        row.logits[: len(bits)][~bits] = REMOVED
        row.logits[len(bits) :] = REMOVED


class Allowed:
    """Remove all ids except allowed_token_ids."""

    name = "allowed_token_ids"

    def active(self, row: RowState) -> bool:
        return row.params.allowed_token_ids is not None

    def apply(self, row: RowState) -> None:
        allowed = np.array(row.params.allowed_token_ids, np.int64)
        kept = row.logits[allowed]
        row.logits[:] = REMOVED
        row.logits[allowed] = kept


class Banned:
    """Remove banned_token_ids."""

    name = "banned_token_ids"

    def active(self, row: RowState) -> bool:
        return bool(row.params.banned_token_ids)

    def apply(self, row: RowState) -> None:
        row.remove(list(row.params.banned_token_ids))


class MinTokens:
    """Remove the ids that end the output while it has fewer than min_tokens. With a prompt of 10
    tokens and min_tokens=3: at positions 10, 11 and 12."""

    name = "min_tokens"

    def active(self, row: RowState) -> bool:
        return bool(row.withheld) and row.position - row.prompt_len < row.params.min_tokens

    def apply(self, row: RowState) -> None:
        row.remove(row.withheld)


# ---------------------------------------------------------------------------------------- penalties


def _recent(row: RowState, first: int) -> Sequence[int]:
    """The tokens from `first` on that are among the last penalty_range ones."""
    window = row.params.penalty_range
    return row.history[max(first, len(row.history) - window) if window else first :]


class Repetition:
    """Ids in prompt or output: divide a positive logit, multiply a negative one (Keskar et al.,
    "CTRL", 2019, with the later sign rule). With 1.3, 2.6 becomes 2.0 and -1.0 becomes -1.3."""

    name = "repetition_penalty"

    def active(self, row: RowState) -> bool:
        return row.params.repetition_penalty != 1.0 and len(row.history) > 0

    def apply(self, row: RowState) -> None:
        r = row.params.repetition_penalty
        seen = np.unique(np.asarray(_recent(row, 0), np.int64))
        x = row.logits[seen]
        row.logits[seen] = np.where(x > 0.0, x / r, x * r)


class Frequency:
    """logit[id] -= penalty * (count of the id in the output) (OpenAI). A count of 3 at 0.5:
    -1.5."""

    name = "frequency_penalty"

    def active(self, row: RowState) -> bool:
        return row.params.frequency_penalty != 0.0 and len(row.history) > row.prompt_len

    def apply(self, row: RowState) -> None:
        written, count = np.unique(
            np.asarray(_recent(row, row.prompt_len), np.int64), return_counts=True
        )
        row.logits[written] -= row.params.frequency_penalty * count.astype(np.float64)


class Presence:
    """logit[id] -= penalty if the id is in the output (OpenAI). A count of 3 at 0.5: -0.5."""

    name = "presence_penalty"

    def active(self, row: RowState) -> bool:
        return row.params.presence_penalty != 0.0 and len(row.history) > row.prompt_len

    def apply(self, row: RowState) -> None:
        written = np.unique(np.asarray(_recent(row, row.prompt_len), np.int64))
        row.logits[written] -= row.params.presence_penalty


class Dry:
    """ "Don't repeat yourself" (p-e-w, 2024): an id that would continue a repeat of length
    n >= allowed_length loses multiplier * base^(n - allowed_length). n is the length of the longest
    run that ends the tokens so far and also occurs earlier, right before that id. Runs do not cross
    breakers; a breaker id is not penalised.

    Tokens a b c d a b c, allowed_length 2, multiplier 0.8, base 1.75: "a b c" preceded d, so n = 3
    and d loses 0.8 * 1.75 = 1.4.
    """

    name = "dry_multiplier"

    def active(self, row: RowState) -> bool:
        return row.params.dry_multiplier != 0.0 and len(row.history) > 1

    def apply(self, row: RowState) -> None:
        p = row.params
        tokens = np.asarray(row.history[-p.dry_range :] if p.dry_range else row.history, np.int64)
        lengths = repeat_lengths(
            tokens, breaker_flags(tokens, row.breakers), p.dry_allowed_length + DRY_GROWTH
        )
        for token, n in sorted(lengths.items()):
            if n >= p.dry_allowed_length:
                growth = 1.0
                for _ in range(n - p.dry_allowed_length):
                    growth *= p.dry_base
                row.logits[token] -= p.dry_multiplier * growth


class NoRepeatNgram:
    """Remove ids that would complete an n-gram already in prompt or output (Paulus et al., 2017; as
    in transformers). Tokens a b c a b with n = 3: c is removed."""

    name = "no_repeat_ngram"

    def active(self, row: RowState) -> bool:
        return 0 < row.params.no_repeat_ngram <= len(row.history)

    def apply(self, row: RowState) -> None:
        n = row.params.no_repeat_ngram
        tokens = np.asarray(row.history, np.int64)
        starts = np.arange(len(tokens) - n + 1)  # complete n-grams
        for i in range(n - 1):
            starts = starts[tokens[starts + i] == tokens[len(tokens) - n + 1 + i]]
        row.remove(tokens[starts + n - 1])


# -------------------------------------------------------------------------------------- temperature


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


# ------------------------------------------------------------------------------------------ filters


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
        if not chance(row.key, row.position) < row.params.xtc_probability:
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


BEFORE: tuple[Stage, ...] = (
    LogitBias(), Grammar(), Allowed(), Banned(), MinTokens(),
    Repetition(), Frequency(), Presence(), Dry(), NoRepeatNgram(),
)  # fmt: skip
FILTERS: tuple[Stage, ...] = (TopK(), TopP(), MinP(), TypicalP(), TopNSigma(), Xtc())
STAGES: tuple[Stage, ...] = (*BEFORE, Temperature(), *FILTERS)


# ------------------------------------------------------------------------------------------ helpers


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


def breaker_flags(tokens: I64, breakers: tuple[tuple[int, ...], ...]) -> NDArray[np.bool_]:
    """True where a token belongs to a breaker (an id, or a run of ids)."""
    singles, runs = _split(breakers)
    flags = np.isin(tokens, singles)
    for run in runs:
        starts = np.arange(len(tokens) - len(run) + 1)
        for i, token in enumerate(run):
            starts = starts[tokens[starts + i] == token]
        for i in range(len(run)):
            flags[starts + i] = True
    return flags


@lru_cache(maxsize=64)
def _split(breakers: tuple[tuple[int, ...], ...]) -> tuple[I64, tuple[tuple[int, ...], ...]]:
    singles = np.array(sorted({run[0] for run in breakers if len(run) == 1}), np.int64)
    return singles, tuple(run for run in breakers if len(run) > 1)


def repeat_lengths(tokens: I64, breaker: NDArray[np.bool_], limit: int) -> dict[int, int]:
    """Per id that followed an earlier copy of the end of `tokens`: the length of the longest such
    copy, up to `limit`.

    >>> repeat_lengths(np.array([1, 2, 3, 4, 1, 2, 3]), np.zeros(7, bool), 50)
    {4: 3}
    """
    last = len(tokens) - 1
    if last < 1 or breaker[last]:
        return {}
    ends = np.flatnonzero((tokens[:-1] == tokens[last]) & ~breaker[1:])
    out: dict[int, int] = {}
    length = 1
    while len(ends):
        # Longer runs come later and overwrite shorter ones.
        out.update(dict.fromkeys(tokens[ends + 1].tolist(), length))
        if length >= limit or last - length < 0 or breaker[last - length]:
            break
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[last - length]]
        length += 1
    return out
