"""Beam search over candidate lists: no arrays, no cache, no text.

In, per step: one Drawn per live beam, whose `candidates` are the best ids of the processed row with
their log-probabilities (DrawSpec.beam = search.needed). Out: which live beam each new beam extends,
and by which token; at the end the finished hypotheses. The engine forks sequences accordingly:

    search = BeamSearch(params, end_ids=(eos,), max_new=64, ends=ends)
    live = [prompt sequence]                 # before the first step the prompt is the only beam
    while not search.done:
        drawn = the Drawn of each live sequence, in order
        moves = search.step(drawn)           # new beam i extends live[parent] by token
        live = [fork(live[parent]) + token for parent, token in moves]    # drop the old beams
        stream search.agreed()               # tokens that every possible result begins with
    results = search.results()               # best first, num_return_sequences of them

The rules are those of transformers 5 (a test compares sequences and scores):
- each step ranks the K = max(2, 1 + end ids) * beams best extensions of all live beams; those that
  end and are among the first `beams` become hypotheses, the best that do not end stay live;
- a hypothesis scores (sum of log-probabilities) / (output tokens, end included) ^ length_penalty;
- early_stopping True ends when there are `beams` hypotheses; False when the best live beam, at its
  present length, cannot beat the worst of them; "never" when it could not even at max_new tokens
  (for length_penalty > 0).

One difference: bias, bans and penalties act on the logits before the log-softmax, so a score is the
log-probability under the requested distribution; transformers takes the log-softmax first and does
not normalise again.

Diverse groups (Vijayakumar et al., "Diverse beam search", 2016): the groups step one after another.
Group g ranks an extension by its log-probability less diversity_penalty for each time that the
groups before it chose the same token in this step. The penalty ranks; it is not part of the score.
(transformers 5 has no groups; version 4 added the penalty to the scores.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verbatim.base.params import SamplingParams
from verbatim.base.records import Drawn, Finish, TokenLogprob
from verbatim.sampling.numerics import power

Ends = Callable[[tuple[int, ...]], Finish | None]


@dataclass(frozen=True, slots=True)
class Beam:
    """Output tokens of one hypothesis. `score`: sum of log-probabilities; the final score once it
    has ended."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()  # if requested
    explain: tuple[dict[str, Any], ...] = ()  # if requested
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class _Extension:
    rank: float  # log-probability of the beam, less the diversity penalty
    parent: int  # index into the live beams of the step before
    place: int  # index into that beam's candidates
    token: int
    score: float


class _Group:
    """One beam search of `size` beams; a plain search is a single group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.live: list[Beam] = [Beam()]
        self.finished: list[Beam] = []
        self.done = False


class BeamSearch:
    def __init__(
        self,
        params: SamplingParams,
        *,
        end_ids: Sequence[int] = (),
        max_new: int,
        ends: Ends | None = None,
    ) -> None:
        """`ends(tokens)` decides whether the last output token ends a beam (end ids, stop strings);
        default: end_ids. A beam of max_new tokens always ends, with reason "length"."""
        self.params = params
        self.max_new = max_new
        self._end_ids = frozenset(end_ids)
        self._ends = ends or self._by_id
        size = params.num_beams // params.num_beam_groups
        self._candidates_per_beam = max(2, 1 + len(self._end_ids))
        self._groups = [_Group(size) for _ in range(params.num_beam_groups)]
        self._length = 0

    # ------------------------------------------------------------------------------- queries

    @property
    def needed(self) -> int:
        """Candidates needed per live beam: enough that no better extension can be missing, even
        after the diversity penalty has lowered the tokens of other groups."""
        groups = self.params.num_beam_groups
        return self._candidates_per_beam * (self.params.num_beams // groups) + (
            self.params.num_beams if groups > 1 else 0
        )

    @property
    def done(self) -> bool:
        return all(group.done for group in self._groups)

    @property
    def live(self) -> tuple[Beam, ...]:
        """The live beams, in the order of step()'s `drawn`; at first one empty beam."""
        if self._length == 0:
            return (Beam(),)
        return tuple(beam for group in self._groups if not group.done for beam in group.live)

    def results(self) -> tuple[Beam, ...]:
        """The best hypotheses, best first; a tie goes to the earlier one."""
        assert self.done, "results() before the search is done"
        found = [beam for group in self._groups for beam in group.finished]
        found.sort(key=lambda beam: -beam.score)
        return tuple(found[: self.params.num_return_sequences or 1])

    def agreed(self) -> tuple[int, ...]:
        """The common prefix of all results that are still possible: safe to stream."""
        outputs = [
            b.tokens
            for g in self._groups
            for b in ((*g.finished,) if g.done else (*g.finished, *g.live))
        ]
        if not outputs:
            return ()
        first, last = min(outputs), max(outputs)  # their common prefix is that of all
        count = 0
        while count < min(len(first), len(last)) and first[count] == last[count]:
            count += 1
        return first[:count]

    # ------------------------------------------------------------------------------ one step

    def step(self, drawn: Sequence[Drawn]) -> tuple[tuple[int, int], ...]:
        """Extend every live beam: (parent, token) for each new live beam, in the new order of
        `live`."""
        assert not self.done, "step() after the search is done"
        assert len(drawn) == len(self.live), "one Drawn for each live beam"
        chosen: Counter[int] = Counter()  # tokens chosen by earlier groups in this step
        moves: list[tuple[int, int]] = []
        offset = 0
        first = self._length == 0  # every group starts from the same single row
        self._length += 1
        for group in self._groups:
            if group.done:
                continue
            rows = drawn[offset : offset + len(group.live)]
            kept = self._step_group(group, rows, chosen)
            chosen.update(token for _, token in kept)
            if not group.done:
                moves += [(offset + parent, token) for parent, token in kept]
            offset += 0 if first else len(rows)
        return tuple(moves)

    def _step_group(
        self, group: _Group, rows: Sequence[Drawn], chosen: Counter[int]
    ) -> list[tuple[int, int]]:
        top = self._best(group, rows, chosen)
        beams = [_extended(group.live[e.parent], e, rows[e.parent]) for e in top]
        beams = [replace(beam, finish=self._finish(beam.tokens)) for beam in beams]
        for beam in beams[: group.size]:
            if beam.finish:
                self._add_hypothesis(group, beam)
        live = [(e, beam) for e, beam in zip(top, beams, strict=True) if beam.finish is None]
        live = live[: group.size]
        group.live = [beam for _, beam in live]
        group.done = not live or not self._may_improve(group)
        return [(e.parent, e.token) for e, _ in live]

    def _best(self, group: _Group, rows: Sequence[Drawn], chosen: Counter[int]) -> list[_Extension]:
        """The K best extensions of the group's live beams; a tie goes to the earlier beam, then to
        the lower id."""
        penalty = self.params.diversity_penalty
        found = [
            _Extension(
                beam.score + logprob - penalty * chosen[token],
                parent,
                place,
                token,
                beam.score + logprob,
            )
            for parent, (beam, row) in enumerate(zip(group.live, rows, strict=True))
            for place, (token, logprob) in enumerate(row.candidates)
        ]
        found.sort(key=lambda e: (-e.rank, e.parent, e.token))
        return found[: self._candidates_per_beam * group.size]

    def _add_hypothesis(self, group: _Group, beam: Beam) -> None:
        """Add an ended beam to the hypotheses, of which the group keeps its best `size`. Beams that
        end in the same step compete, also after the group is full."""
        final = beam.score / power(float(len(beam.tokens)), self.params.length_penalty)
        group.finished.append(replace(beam, score=final))
        group.finished.sort(key=lambda b: -b.score)  # stable: a tie goes to the earlier one
        del group.finished[group.size :]

    def _may_improve(self, group: _Group) -> bool:
        if len(group.finished) < group.size:
            return True
        if self.params.early_stopping is True:
            return False
        penalty = self.params.length_penalty
        length = (
            self.max_new if self.params.early_stopping == "never" and penalty > 0 else self._length
        )
        return group.live[0].score / power(float(length), penalty) > group.finished[-1].score

    def _finish(self, tokens: tuple[int, ...]) -> Finish | None:
        found = self._ends(tokens)
        if found is None and len(tokens) >= self.max_new:
            return Finish("length", "max_tokens")
        return found

    def _by_id(self, tokens: tuple[int, ...]) -> Finish | None:
        return Finish("stop", str(tokens[-1])) if tokens[-1] in self._end_ids else None


def _extended(beam: Beam, e: _Extension, row: Drawn) -> Beam:
    logprobs, explain = beam.logprobs, beam.explain
    if row.reported:
        logprobs = (*logprobs, TokenLogprob(e.token, row.reported[e.place], row.top))
    if row.explain is not None:
        mine = row.explain["candidates"][e.place]
        explain = (*explain, {**row.explain, "candidates": [], **mine, "token": e.token})
    return Beam((*beam.tokens, e.token), e.score, logprobs, explain)
