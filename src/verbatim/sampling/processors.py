"""The stages of the sampler, one small class each: definition, source, a worked number.

In comes a RowState: one row of logits and the request's parameters. Each stage changes the logits or removes ids; it never
looks at another row. STAGES lists them in the order of design and documentation; pipeline.py runs them and keeps, for
explain, what each one removed: there is no second implementation that could tell a different story.

Before the temperature a removed id has the logit -inf. At the temperature the row becomes a list of live ids with
d = (logit - best logit) / temperature, and the filters after it shorten that list. Bans may empty a row (the request
contradicts itself); filters always leave at least one id.
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

NONE = -np.inf
DRY_GROWTH = 63  # DRY counts a repeat up to allowed_length + 63: base^63 is past any logit, and bounds the search


@dataclass(slots=True)
class RowState:
    """One row on its way. `logits` until the temperature, then `ids` (ascending) and `d` (best is 0, if still there)."""

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
        self.logits[np.asarray(ids, np.int64)] = NONE

    def keep(self, which: NDArray[np.bool_]) -> None:
        """Shorten the list of live ids. The masses stay valid as long as the best id does."""
        best_before = self.d.max()
        self.ids, self.d = self.ids[which], self.d[which]
        assert len(self.ids), "a filter must leave at least one id"
        if self._mass is not None:
            self._mass = self._mass[which] if self.d.max() == best_before else None

    @property
    def centred(self) -> F64:
        """d relative to the best id that is still there."""
        out: F64 = self.d - self.d.max()
        return out

    @property
    def mass(self) -> I64:
        if self._mass is None:
            self._mass = masses(self.centred)
        return self._mass


class Stage(Protocol):
    name: str  # the parameter that switches it on

    def active(self, row: RowState) -> bool: ...
    def apply(self, row: RowState) -> None: ...


# --------------------------------------------------------------------------------------------------- bias and bans


class LogitBias:
    """logit[id] += bias[id] (OpenAI's logit_bias). A logit of 2.0 with a bias of -1.5 becomes 0.5."""

    name = "logit_bias"

    def active(self, row: RowState) -> bool:
        return bool(row.params.logit_bias)

    def apply(self, row: RowState) -> None:
        pairs = dict(row.params.logit_bias)
        row.logits[list(pairs.keys())] += np.array(list(pairs.values()), np.float64)


class Grammar:
    """Ids whose next bytes the structure (json_schema, regex, grammar, choice) does not allow are removed. The mask is
    made by grammar/matcher.py: bit i of byte i // 8, lowest first. Ids past the mask's end are removed."""

    name = "structure"

    def active(self, row: RowState) -> bool:
        return row.mask is not None

    def apply(self, row: RowState) -> None:
        assert row.mask is not None
        bits = np.unpackbits(np.frombuffer(row.mask, np.uint8), bitorder="little")[
            : len(row.logits)
        ].astype(bool)
        row.logits[: len(bits)][~bits] = NONE
        row.logits[len(bits) :] = NONE


class Allowed:
    """Only allowed_token_ids may be drawn."""

    name = "allowed_token_ids"

    def active(self, row: RowState) -> bool:
        return row.params.allowed_token_ids is not None

    def apply(self, row: RowState) -> None:
        allowed = np.array(row.params.allowed_token_ids, np.int64)
        kept = row.logits[allowed]
        row.logits[:] = NONE
        row.logits[allowed] = kept


class Banned:
    """banned_token_ids are never drawn."""

    name = "banned_token_ids"

    def active(self, row: RowState) -> bool:
        return bool(row.params.banned_token_ids)

    def apply(self, row: RowState) -> None:
        row.remove(list(row.params.banned_token_ids))


class MinTokens:
    """While fewer than min_tokens are written, the ids that would end the answer are removed. With a prompt of 10 tokens
    and min_tokens=3 that is at positions 10, 11 and 12."""

    name = "min_tokens"

    def active(self, row: RowState) -> bool:
        return bool(row.withheld) and row.position - row.prompt_len < row.params.min_tokens

    def apply(self, row: RowState) -> None:
        row.remove(row.withheld)


# ------------------------------------------------------------------------------------------------------ penalties


class Repetition:
    """Ids seen in prompt or output: a positive logit is divided, a negative one multiplied (Keskar et al., "CTRL", 2019,
    with the sign rule of later use). With 1.3, a logit of 2.6 becomes 2.0 and -1.0 becomes -1.3."""

    name = "repetition_penalty"

    def active(self, row: RowState) -> bool:
        return row.params.repetition_penalty != 1.0 and len(row.history) > 0

    def apply(self, row: RowState) -> None:
        r = row.params.repetition_penalty
        seen = np.unique(np.asarray(row.history, np.int64))
        x = row.logits[seen]
        row.logits[seen] = np.where(x > 0.0, x / r, x * r)


class Frequency:
    """logit[id] -= penalty * (times the id was written), output only (OpenAI). An id written 3 times at 0.5 loses 1.5."""

    name = "frequency_penalty"

    def active(self, row: RowState) -> bool:
        return row.params.frequency_penalty != 0.0 and len(row.history) > row.prompt_len

    def apply(self, row: RowState) -> None:
        written, count = np.unique(
            np.asarray(row.history[row.prompt_len :], np.int64), return_counts=True
        )
        row.logits[written] -= row.params.frequency_penalty * count.astype(np.float64)


class Presence:
    """logit[id] -= penalty once if the id was written, output only (OpenAI). An id written 3 times at 0.5 loses 0.5."""

    name = "presence_penalty"

    def active(self, row: RowState) -> bool:
        return row.params.presence_penalty != 0.0 and len(row.history) > row.prompt_len

    def apply(self, row: RowState) -> None:
        row.logits[np.unique(np.asarray(row.history[row.prompt_len :], np.int64))] -= (
            row.params.presence_penalty
        )


class Dry:
    """ "Don't repeat yourself" (p-e-w, 2024): an id that would continue a repeat of length n >= allowed_length loses
    multiplier * base^(n - allowed_length). n is the longest run that both ends the text and stands, earlier in it, right
    before that id. Runs do not reach across breakers; an id that is a breaker is not penalised.

    Text a b c d a b c, allowed_length 2, multiplier 0.8, base 1.75: "a b c" came before d, so n = 3 and d loses
    0.8 * 1.75 = 1.4.
    """

    name = "dry_multiplier"

    def active(self, row: RowState) -> bool:
        return row.params.dry_multiplier != 0.0 and len(row.history) > 1

    def apply(self, row: RowState) -> None:
        p = row.params
        text = np.asarray(row.history[-p.dry_range :] if p.dry_range else row.history, np.int64)
        lengths = repeat_lengths(
            text, breaker_places(text, row.breakers), p.dry_allowed_length + DRY_GROWTH
        )
        for token, n in sorted(lengths.items()):
            if n >= p.dry_allowed_length:
                growth = 1.0
                for _ in range(n - p.dry_allowed_length):
                    growth *= p.dry_base
                row.logits[token] -= p.dry_multiplier * growth


class NoRepeatNgram:
    """No run of n ids appears twice: an id that would complete one already in prompt or output is removed (Paulus et al.,
    2017; as in transformers). Text a b c a b with n = 3: c is removed."""

    name = "no_repeat_ngram"

    def active(self, row: RowState) -> bool:
        return 0 < row.params.no_repeat_ngram <= len(row.history)

    def apply(self, row: RowState) -> None:
        n = row.params.no_repeat_ngram
        text = np.asarray(row.history, np.int64)
        starts = np.arange(len(text) - n + 1)  # runs of n that are complete
        for i in range(n - 1):
            starts = starts[text[starts + i] == text[len(text) - n + 1 + i]]
        row.remove(text[starts + n - 1])


# ---------------------------------------------------------------------------------------------------- temperature


class Temperature:
    """d = (logit - best logit) / temperature: below 1 sharper, above 1 flatter (Ackley, Hinton, Sejnowski 1985).
    Logits 3 and 1 at temperature 2: d = 0 and -1, that is 73 % and 27 %. Always runs: it makes the list of live ids.
    Temperature 0 never comes here (pipeline.py takes the argmax); a temperature so small that the division overflows
    leaves -inf, an id that cannot win."""

    name = "temperature"

    def active(self, row: RowState) -> bool:
        return True

    def apply(self, row: RowState) -> None:
        row.ids = np.flatnonzero(row.logits > NONE)
        live = row.logits[row.ids]
        with np.errstate(over="ignore"):
            row.d = (live - live.max()) / row.params.temperature


# -------------------------------------------------------------------------------------------------------- filters


class TopK:
    """Keep exactly the k most likely ids, ties to the lower id (Fan, Lewis, Dauphin 2018). transformers keeps all ids
    that tie with the last one."""

    name = "top_k"

    def active(self, row: RowState) -> bool:
        return 0 < row.params.top_k < len(row.ids)

    def apply(self, row: RowState) -> None:
        which = np.zeros(len(row.ids), bool)
        which[best(row.d, row.params.top_k)] = True
        row.keep(which)


class TopP:
    """Keep the smallest set, in order of probability then id, whose mass is at least p (Holtzman et al. 2019).
    Probabilities 0.5, 0.3, 0.2 and p = 0.8 keep two; p = 0.81 keeps three."""

    name = "top_p"

    def active(self, row: RowState) -> bool:
        return row.params.top_p < 1.0

    def apply(self, row: RowState) -> None:
        mass = row.mass
        need = mass_needed(row.params.top_p, int(mass.sum()))
        # Only the likely part needs sorting, if it has mass enough: it is closed upwards, so the prefix is the same.
        some = np.flatnonzero(row.d >= row.d.max() - 8.0)
        if int(mass[some].sum()) < need:
            some = np.arange(len(row.ids))
        order = some[np.argsort(-row.d[some], kind="stable")]
        row.keep(_prefix(mass, order, need))


class MinP:
    """Keep ids with p_i >= min_p * max p (Nguyen et al. 2024), tested as d_i >= log(min_p). Best 0.5, min_p = 0.1: ids
    of at least 0.05 stay."""

    name = "min_p"

    def active(self, row: RowState) -> bool:
        return row.params.min_p > 0.0

    def apply(self, row: RowState) -> None:
        row.keep(row.centred >= log_of_share(row.params.min_p))


class TypicalP:
    """Keep the ids whose surprise is nearest to the entropy, until their mass is at least p (Meister et al. 2022). Order:
    | -log p_i - H |, then id. Probabilities 0.6, 0.3, 0.1 have H = 0.90 nats and surprises 0.51, 1.20, 2.30: the second is the
    most typical (0.31 away), then the first (0.39); p = 0.2 keeps only the second."""

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
    """Keep ids whose logit is at least best - n * sigma, sigma the standard deviation of all logits that no ban removed
    (Tang et al., "Top-n-sigma", 2024). Penalties count, the temperature cancels, and the filters before it do not change sigma.
    Logits 3, 1, 0, 0: sigma = 1.22, n = 1 keeps the first only."""

    name = "top_n_sigma"

    def active(self, row: RowState) -> bool:
        return row.params.top_n_sigma > 0.0

    def apply(self, row: RowState) -> None:
        live = row.logits > NONE
        z = np.where(live, row.logits - row.logits.max(), 0.0)
        count = float(np.count_nonzero(live))
        mean = lane_sum(z) / count
        off = np.where(live, z - mean, 0.0)
        sigma = float(np.sqrt(lane_sum(off * off) / count))
        near = z[row.ids] >= -(row.params.top_n_sigma * sigma)
        if not near.any():  # the filters before left only ids farther away: the best of them stays
            near[np.argmax(row.d)] = True
        row.keep(near)


class Xtc:
    """ "Exclude top choices" (p-e-w, 2024): with the given probability, of the ids with p >= threshold all but the least
    likely are removed. Probabilities 0.5, 0.3, 0.15, 0.05 and threshold 0.1: the first two go. The chance is a number of
    its own, made from (key, position)."""

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


# -------------------------------------------------------------------------------------------------------- helpers


def _prefix(mass: I64, order: I64, need: int) -> NDArray[np.bool_]:
    """The shortest prefix of `order` with at least `need` mass (all of it, if it never gets there)."""
    count = int(np.searchsorted(np.cumsum(mass[order]), need)) + 1
    which = np.zeros(len(mass), bool)
    which[order[:count]] = True
    return which


@lru_cache(maxsize=1024)
def log_of_share(share: float) -> float:
    """log of a number in (0, 1]; a subnormal one counts as the smallest normal."""
    return log1(max(share, 2.0**-1022))


def breaker_places(text: I64, breakers: tuple[tuple[int, ...], ...]) -> NDArray[np.bool_]:
    """True where a token of `text` belongs to a breaker (an id, or a run of ids)."""
    singles, runs = _split(breakers)
    flags = np.isin(text, singles)
    for run in runs:
        starts = np.arange(len(text) - len(run) + 1)
        for i, token in enumerate(run):
            starts = starts[text[starts + i] == token]
        for i in range(len(run)):
            flags[starts + i] = True
    return flags


@lru_cache(maxsize=64)
def _split(breakers: tuple[tuple[int, ...], ...]) -> tuple[I64, tuple[tuple[int, ...], ...]]:
    singles = np.array(sorted({run[0] for run in breakers if len(run) == 1}), np.int64)
    return singles, tuple(run for run in breakers if len(run) > 1)


def repeat_lengths(text: I64, breaker: NDArray[np.bool_], limit: int) -> dict[int, int]:
    """For each id that once followed a run equal to the end of `text`: the length of the longest such run, up to limit.

    >>> repeat_lengths(np.array([1, 2, 3, 4, 1, 2, 3]), np.zeros(7, bool), 50)
    {4: 3}
    """
    last = len(text) - 1
    if last < 1 or breaker[last]:
        return {}
    ends = np.flatnonzero((text[:-1] == text[last]) & ~breaker[1:])
    out: dict[int, int] = {}
    length = 1
    while len(ends):
        out.update(
            dict.fromkeys(text[ends + 1].tolist(), length)
        )  # longer runs come later and overwrite
        if length >= limit or last - length < 0 or breaker[last - length]:
            break
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == text[last - length]]
        length += 1
    return out
