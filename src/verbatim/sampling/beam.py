"""Beam search: pure bookkeeping over candidate lists; no arrays, no cache, no text.

In comes, step by step, one Drawn for each live beam, whose `candidates` are the best ids of the processed row with their
log-probabilities (DrawSpec.beam = search.needed). Out comes which live beam each new one continues and with which token,
then the finished hypotheses. The engine forks sequences (block tables) accordingly:

    search = BeamSearch(params, end_ids=(eos,), max_new=64, ends=ends)
    live = [prompt sequence]                       # before the first step there is one beam, the prompt itself
    while not search.done:
        drawn = the Drawn of each live sequence, in order
        moves = search.step(drawn)                 # ((parent, token), ...): new beam i extends live[parent] by token
        live = [fork(live[parent]) + token for parent, token in moves]      # the rest of the old ones are dropped
        stream search.agreed()                     # tokens that every possible answer begins with
    answers = search.results()                     # best first, num_return_sequences of them

The rules are those of transformers 5 (a test compares sequences and scores):
- each step looks at the K = max(2, 1 + end ids) * beams best extensions over all live beams; those that end and are among the
  first `beams` become hypotheses, the best that do not end live on;
- a hypothesis scores (sum of log-probabilities) / (tokens written, the end included) ^ length_penalty;
- early_stopping True ends when there are `beams` hypotheses; False when the best live beam, at its present length, cannot
  beat the worst of them; "never" when it could not even at max_new tokens (for length_penalty > 0).

One difference: bias, bans and penalties act on the logits, and the log-softmax comes after them, so a score is the log-probability
under the distribution asked for; transformers takes the log-softmax first and does not normalise again.

Diverse groups (Vijayakumar et al., "Diverse beam search", 2016): the groups step one after another; in group g an
extension by a token is ranked by its log-probability less diversity_penalty for each time that the groups before g have
just chosen that token. The penalty ranks; it is not part of the score. (transformers 5 no longer has groups; version 4 added
the penalty to the scores for good.)
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
    """One line of tokens after the prompt. `score` is the sum of log-probabilities until it ends, then the final score."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()  # where asked for
    explain: tuple[dict[str, Any], ...] = ()  # where asked for
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class _Extension:
    rank: float  # log-probability of the line, less the diversity penalty
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
        """`ends(tokens)` says whether a line of output tokens ends with its last one (end ids, stop strings); when left
        out, end_ids end it. A line of max_new tokens always ends, with reason "length"."""
        self.params = params
        self.max_new = max_new
        self._end_ids = frozenset(end_ids)
        self._ends = ends or self._by_id
        size = params.num_beams // params.num_beam_groups
        self._wide = max(2, 1 + len(self._end_ids))
        self._groups = [_Group(size) for _ in range(params.num_beam_groups)]
        self._length = 0

    # ------------------------------------------------------------------------------------------------ what one asks it

    @property
    def needed(self) -> int:
        """How many candidates each live beam must bring: enough that no better extension can be missing, even after
        the tokens that other groups chose have been pushed down."""
        groups = self.params.num_beam_groups
        return self._wide * (self.params.num_beams // groups) + (
            self.params.num_beams if groups > 1 else 0
        )

    @property
    def done(self) -> bool:
        return all(group.done for group in self._groups)

    @property
    def live(self) -> tuple[Beam, ...]:
        """The live beams, in the order in which step() wants their Drawn; before the first step the prompt alone."""
        if self._length == 0:
            return (Beam(),)
        return tuple(beam for group in self._groups if not group.done for beam in group.live)

    def results(self) -> tuple[Beam, ...]:
        """The best hypotheses, best first; ties to the earlier one."""
        assert self.done, "results() before the search is done"
        found = [beam for group in self._groups for beam in group.finished]
        found.sort(key=lambda beam: -beam.score)
        return tuple(found[: self.params.num_return_sequences or 1])

    def agreed(self) -> tuple[int, ...]:
        """Tokens with which every answer that can still be returned begins: what may be streamed."""
        lines = [
            b.tokens
            for g in self._groups
            for b in ((*g.finished,) if g.done else (*g.finished, *g.live))
        ]
        if not lines:
            return ()
        first, last = min(lines), max(lines)  # the common prefix of the extremes is that of all
        count = 0
        while count < min(len(first), len(last)) and first[count] == last[count]:
            count += 1
        return first[:count]

    # ------------------------------------------------------------------------------------------------------- one step

    def step(self, drawn: Sequence[Drawn]) -> tuple[tuple[int, int], ...]:
        """Extend every live beam: (parent, token) for each new live beam, in the new order of `live`."""
        assert not self.done, "step() after the search is done"
        assert len(drawn) == len(self.live), "one Drawn for each live beam"
        chosen: Counter[int] = Counter()  # tokens that earlier groups took in this step
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
        lines = [_extended(group.live[e.parent], e, rows[e.parent]) for e in top]
        lines = [replace(line, finish=self._finish(line.tokens)) for line in lines]
        for line in lines[: group.size]:
            if line.finish:
                self._keep(group, line)
        going = [(e, line) for e, line in zip(top, lines, strict=True) if line.finish is None][
            : group.size
        ]
        group.live = [line for _, line in going]
        group.done = not going or not self._may_improve(group)
        return [(e.parent, e.token) for e, _ in going]

    def _best(self, group: _Group, rows: Sequence[Drawn], chosen: Counter[int]) -> list[_Extension]:
        """The K best extensions over the group's live beams; ties to the earlier beam, then the lower id."""
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
        return found[: self._wide * group.size]

    def _keep(self, group: _Group, line: Beam) -> None:
        """A line that ended joins the hypotheses; the group keeps its best `size`. Lines that end in the same step as the one that
        fills the group still count: the better of them stay."""
        final = line.score / power(float(len(line.tokens)), self.params.length_penalty)
        group.finished.append(replace(line, score=final))
        group.finished.sort(key=lambda beam: -beam.score)  # stable: ties to the earlier one
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
