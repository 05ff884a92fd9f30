"""Draft policy: how many drafts to verify. In: step costs and acceptance. Out: a draft length.

Each draft adds a row to the step. With B sequences in a step that takes t(B), a token is worth
t(B) / B. The first j drafts are accepted with probability p_j (a^j, or as the proposer states), and
j drafts make the step take t(B + j). The best j maximises

    (p_1 + p_2 + ... + p_j) * t(B) / B  -  MARGIN * (t(B + j) - t(B) + cost of drafting)

While a step is bound by reading weights, rows are cheap and long drafts pay; when it is
compute-bound, none pays. Example: t(1) = 4 ms, 0.3 ms per further row, a = 0.8: the ninth draft
adds 0.8^9 * 4 = 0.54 > 1.5 * 0.3, the tenth does not.

t comes from step_cost.py, a from acceptance.py. Lookups that fail are repeated after exponentially
more steps, and a batch in which rows are expensive drafts nothing. A draft that was made but not
submitted is compared with the target's tokens too. ADR 18 compares this rule with a larger one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from verbatim.speculate.acceptance import POOR_RATE, AcceptanceRates
from verbatim.speculate.proposer import Draft, Proposer, SeqView
from verbatim.speculate.step_cost import StepCost

log = logging.getLogger("verbatim.engine")

MARGIN = 1.5  # a draft must gain this many times its cost, because measured times are noisy
MAX_DRAFTS = 15  # per sequence and step; with the token before them 16 rows, a full kernel tile
MAX_BATCH_PRICE = 0.5  # tokens per row: a batch in which a row costs more drafts nothing
# Most slowdown (fraction of a step) that other sequences' drafts may cost one that drafts nothing
MAX_SLOWDOWN = 0.01
MAX_BACKOFF = 32  # steps
EMPTY_LOOKUPS = 3  # lookups of a batch without a draft, after which it computes no states for them


@dataclass(slots=True)
class _Pending:
    """A draft to be compared with the tokens that the target draws from position `start` on."""

    draft: Draft
    start: int
    submitted: int
    running: int  # sequences of that step


@dataclass(slots=True)
class _Record:
    """State of one sequence."""

    pending: list[_Pending] = field(default_factory=list)
    misses: dict[str, int] = field(default_factory=dict)  # consecutive, by source
    backoff: dict[str, int] = field(default_factory=dict)  # steps until the next query, by source
    drafted: int = 0  # the view's counts at the last _account()
    accepted: int = 0
    saved: float = 0.0  # seconds


def draft_length(
    probs: Sequence[float], value: float, rows: Sequence[float], draft_cost: float = 0.0
) -> int:
    """The number of drafts with the largest expected net gain: `value` per accepted token, less
    MARGIN times the cost of the rows and of drafting.

    >>> draft_length([0.8 ** j for j in range(1, 17)], 4.0, [0.3 * j for j in range(1, 17)])
    9
    """
    best, most, won = 0, 0.0, 0.0
    for j, prob in enumerate(probs, 1):
        won += prob * value
        left = won - MARGIN * (rows[j - 1] + j * draft_cost)
        if left > most:
            best, most = j, left
    return best


class Speculator:
    """Queries the proposers, cheapest first, decides how much of each draft to submit, and learns
    from the result."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        *,
        adaptive: bool = True,
        max_drafts: int = MAX_DRAFTS,
        vocab: int = 1 << 31,
    ) -> None:
        self.proposers = tuple(proposers)
        self.cost = StepCost()
        self.rates = AcceptanceRates()
        self.off: set[str] = set()  # proposers that are switched off
        self.adaptive = adaptive
        self.max_drafts = max_drafts
        self._vocab = vocab
        self._records: defaultdict[int, _Record] = defaultdict(_Record)  # by sequence id
        self._empty_lookups = 0  # consecutive lookups of a batch that submitted nothing
        self._skip = 0  # steps until the next lookup of a batch

    @property
    def gave_up(self) -> bool:
        """Whether the last lookups of a batch found no draft worth its row."""
        return self.adaptive and self._empty_lookups >= EMPTY_LOOKUPS

    def should_draft(self, running: int) -> bool:
        """Whether to look for drafts in this step. In a batch they seldom pay, and a lookup costs
        about a per cent."""
        if running == 1 or not self.adaptive:
            return True
        if self.cost.price(running) >= MAX_BATCH_PRICE:
            return False
        self._skip = max(self._skip - 1, 0)
        return not self._skip

    def drafts(
        self, views: Sequence[SeqView], running: int | None = None
    ) -> dict[int, tuple[int, ...]]:
        """Tokens to submit, by sequence; sequences left out decode without drafts. `running`: the
        number of sequences in the step."""
        running = running or len(views)
        for view in views:
            self._settle(view)
        out: dict[int, tuple[int, ...]] = {}
        gains: dict[int, float] = {}  # expected accepted drafts
        candidates = [view for view in views if view.max_drafts > 0]
        for proposer in self.proposers:
            decided = set()
            for view, draft in self._propose(proposer, candidates, running):
                probs = self.rates.probs(view.seq_id, draft, self.max_drafts)
                count = self._length(probs, running, proposer.token_cost)
                tokens = draft.useful(count, view.end_ids)
                pending = _Pending(draft, len(view.tokens), len(tokens), running)
                self._records[view.seq_id].pending.append(pending)
                if tokens:
                    out[view.seq_id], gains[view.seq_id] = tokens, sum(probs[: len(tokens)])
                if count:  # also when the draft is only an end token: then tokens is empty
                    decided.add(view.seq_id)
            candidates = [view for view in candidates if view.seq_id not in decided]
            if not candidates:
                break
        if running > 1 and self.adaptive:
            if out and not self._fair_to_batch(out, gains, running):
                self._withdraw(views)
                out = {}
            self._empty_lookups = 0 if out else self._empty_lookups + 1
            self._skip = _backoff(self._empty_lookups)
        return out

    def _propose(
        self, proposer: Proposer, candidates: Sequence[SeqView], running: int
    ) -> Iterator[tuple[SeqView, Draft]]:
        """The drafts of one proposer, for the sequences that are not in back-off."""
        floor = 0.0
        if self.adaptive and proposer.token_cost:
            floor = MARGIN * self.cost.price(running, proposer.token_cost, proposer.states_probs)
            if self.rates.is_poor(proposer.name) and proposer.name not in self.off:
                self.off.add(proposer.name)
                log.warning(
                    "speculate: %s is switched off: fewer than %.0f %% of its drafts were accepted",
                    *(proposer.name, 100 * POOR_RATE),
                )
            if proposer.name in self.off or not 0 < floor < 1:
                return  # no step is measured yet, or not even a certain draft pays
        asked = []
        for view in candidates:
            backoff = self._records[view.seq_id].backoff
            if backoff.get(proposer.name, 0) > 0:
                backoff[proposer.name] -= 1
            else:
                asked.append(self._affordable(view, proposer, running))
        found = proposer.propose(asked, self.max_drafts, floor) if asked else {}
        for view in asked:
            draft = found.get(view.seq_id)
            if draft is not None:
                draft = draft.truncated(view.end_ids, self._vocab)
                if draft.tokens:
                    yield view, draft

    def _affordable(self, view: SeqView, proposer: Proposer, running: int) -> SeqView:
        """The view with as many drafts as pay by the rate so far, where drafting costs time. If
        none pays, one draft as a probe, which only teaches the rate, and then a back-off."""
        if not (self.adaptive and proposer.token_cost):
            return view
        rate = self.rates.rate(view.seq_id, proposer.name, proposer.states_probs)
        limit = min(view.max_drafts, self.max_drafts)
        if proposer.states_probs:  # certain drafts
            count = limit * bool(self._length([rate] * limit, running, proposer.token_cost))
        else:
            probs = [rate**j for j in range(1, limit + 1)]
            count = self._length(probs, running, proposer.token_cost)
        if not count:
            self._records[view.seq_id].backoff[proposer.name] = MAX_BACKOFF
        return view._replace(max_drafts=min(max(count, 1), view.max_drafts), probe=not count)

    def _length(self, probs: Sequence[float], running: int, draft_cost: float) -> int:
        if not self.adaptive:
            return len(probs)
        step = self.cost.seconds(running)
        if not step:  # no step is measured yet
            return 0
        rows = [self.cost.with_drafts(running + j) - step for j in range(1, len(probs) + 1)]
        return draft_length(probs, step / running, rows, draft_cost)

    def _fair_to_batch(
        self, out: dict[int, tuple[int, ...]], gains: dict[int, float], running: int
    ) -> bool:
        """Drafts of one sequence lengthen the step for all. Every sequence in it must expect to
        gain what it loses."""
        rows = running + sum(map(len, out.values()))
        slowdown = self.cost.with_drafts(rows) / self.cost.seconds(running) - 1
        least = min(gains.values()) if len(gains) == running else 0.0
        return slowdown <= max(least, MAX_SLOWDOWN)

    def _withdraw(self, views: Sequence[SeqView]) -> None:
        for view in views:
            for pending in self._records[view.seq_id].pending:
                pending.submitted = 0

    def source(self, seq_id: int) -> str:
        """The proposer whose draft was submitted last; empty if none is pending."""
        record = self._records.get(seq_id)
        names = [p.draft.source for p in record.pending if p.submitted] if record else []
        return names[-1] if names else ""

    def _settle(self, view: SeqView) -> None:
        """Compare the pending drafts with what the target drew."""
        record = self._records[view.seq_id]
        for pending in record.pending:
            draft, written = pending.draft, view.tokens[pending.start :]
            if pending.submitted:
                self._account(record, pending, view)
            if not written:
                continue
            self.rates.learn(view.seq_id, draft, written)
            # A false match tends to stay false.
            if self.adaptive and pending.submitted and draft.match_length:
                missed = draft.tokens[0] != written[0]
                misses = record.misses.get(draft.source, 0) + 1 if missed else 0
                record.misses[draft.source] = misses
                record.backoff[draft.source] = _backoff(misses - 1)
        record.pending.clear()

    def _account(self, record: _Record, pending: _Pending, view: SeqView) -> None:
        """Add the net gain of a draft. The scheduler's counts are used: it may have submitted fewer
        drafts, and a sequence that ends with a drafted token would have ended in that step
        anyway."""
        step = self.cost.seconds(pending.running)
        rows, won = view.drafted - record.drafted, view.accepted - record.accepted
        record.drafted, record.accepted = view.drafted, view.accepted
        record.saved += won * step / pending.running
        record.saved -= self.cost.with_drafts(pending.running + rows) - step if rows else 0.0

    def finish(self, view: SeqView) -> float:
        """Forget the sequence. Returns the seconds that its drafts saved, by measured step costs;
        negative if they cost more."""
        self._settle(view)
        self.rates.forget(view.seq_id)
        for proposer in self.proposers:
            proposer.finish(view)
        return self._records.pop(view.seq_id).saved

    def close(self) -> None:
        for proposer in self.proposers:
            proposer.close()


def _backoff(failures: int) -> int:
    """Steps to wait after this many consecutive failures: 0, 2, 4, 8 ... MAX_BACKOFF."""
    return min(1 << min(failures, 16), MAX_BACKOFF) if failures > 0 else 0
