"""Draft policy: how many drafts to verify. In: step costs and acceptance. Out: a draft length.

Each draft adds a row to the step. With B sequences in a step that takes t(B), a token is worth
t(B) / B. The first j drafts are accepted with probability a^j (or as the proposer states), and j
drafts make the step take t(B + j). The best j maximises

    (a + a^2 + ... + a^j) * t(B) / B  -  MARGIN * (t(B + j) - t(B) + cost of drafting)

While a step is bound by reading weights, rows are cheap and long drafts pay; when it is
compute-bound, none pays. Example: t(1) = 4 ms, 0.3 ms per further row, a = 0.8: the eighth draft
adds 0.8^8 * 4 = 0.67 > 1.8 * 0.3, the ninth does not.

t comes from step_cost.py, a from acceptance.py; draft_budget.py bounds the total loss of a
sequence. A draft that was made but not submitted is compared with the target's tokens too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from verbatim.speculate.acceptance import Acceptance
from verbatim.speculate.draft_budget import DraftBudget
from verbatim.speculate.proposer import Draft, Proposer, SeqView
from verbatim.speculate.step_cost import StepCost, StepLoad

MARGIN = 1.8  # a draft must gain this many times its cost, because measured times are noisy
MAX_DRAFTS = 15  # per sequence and step; with the token before them 16 rows, a full kernel tile
MAX_SLOWDOWN = 0.01  # of a step by drafts of others, for a sequence that expects no gain itself
PROPOSER_BACKOFF = 8  # steps without a proposer whose drafts stopped paying: drafting costs time
BUDGET_BACKOFF = 7  # steps without a lookup for a sequence whose budget is empty
# After this many steps without drafts, submit one likely draft even if the model says it does not
# pay: the cost of extra rows is measured only in steps that have them.
EXPLORE_STEPS = 64


@dataclass(slots=True)
class _Pending:
    """A draft to be compared with the tokens that the target draws from position `start` on."""

    draft: Draft
    start: int
    submitted: int
    running: int  # sequences of that step
    costly: bool  # the proposer's token_cost is not 0


@dataclass(slots=True)
class _Record:
    """State of one sequence."""

    budget: DraftBudget = field(default_factory=DraftBudget)
    pending: list[_Pending] = field(default_factory=list)
    drafted: int = 0  # the view's counts at the last _account()
    accepted: int = 0
    backoff: int = 0  # steps until the next lookup


def draft_length(
    probs: Sequence[float], value: float, rows: Sequence[float], draft_cost: float = 0.0
) -> int:
    """The number of drafts with the largest expected net gain: `value` per accepted token, less
    MARGIN times the cost of the rows and of drafting.

    >>> draft_length([0.8 ** j for j in range(1, 17)], 4.0, [0.3 * j for j in range(1, 17)])
    8
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proposers = tuple(proposers)
        self.cost = StepCost()
        self.acceptance = Acceptance()
        self.adaptive = adaptive
        self.max_drafts = max_drafts
        self._vocab = vocab
        self._clock = clock
        self._records: defaultdict[int, _Record] = defaultdict(_Record)  # by sequence id
        # proposer -> sequence -> steps for which it is not queried
        self._backoff: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._steps_since_submit = 0
        self._empty_lookups = 0  # consecutive lookups of a batch that submitted nothing
        self._skipped_steps = 0  # since the last lookup

    def should_draft(self, running: int) -> bool:
        """Whether to look for drafts in this step. In a batch they seldom pay, and a lookup costs
        about a per cent. So it is skipped where not even a certain draft would pay, and after
        lookups without a result for exponentially longer."""
        if running == 1 or not self.adaptive:
            return True
        if MARGIN * self.cost.load(running).price(0.0) >= 1:
            return False
        if self._empty_lookups < PROPOSER_BACKOFF:
            return True
        self._skipped_steps += 1
        if self._skipped_steps < PROPOSER_BACKOFF << (self._empty_lookups - PROPOSER_BACKOFF):
            return False
        self._skipped_steps = 0
        return True

    def is_active(self, seq_id: int) -> bool:
        """False while the sequence backs off because its budget is empty."""
        record = self._records.get(seq_id)
        if record is None or not record.backoff:
            return True
        record.backoff -= 1
        return False

    def drafts(
        self, views: Sequence[SeqView], running: int | None = None
    ) -> dict[int, tuple[int, ...]]:
        """Tokens to submit, by sequence; sequences left out decode without drafts. `running`: the
        number of sequences in the step."""
        running = running or len(views)
        began = self._clock()
        self._steps_since_submit += 1
        load = self.cost.load(running)
        for view in views:
            self._settle(view)
        out: dict[int, tuple[int, ...]] = {}
        expected_gains: dict[int, float] = {}
        candidates = [view for view in views if view.max_drafts > 0]
        for proposer in self.proposers:
            draft_cost = proposer.token_cost
            found = self._propose(proposer, candidates, load)
            if not found:
                continue
            decided = set()
            for view, draft in found:
                record = self._records[view.seq_id]
                count, tokens, expected_gain = self._decide(view, record, draft, load, draft_cost)
                record.pending.append(
                    _Pending(draft, len(view.tokens), len(tokens), running, draft_cost > 0)
                )
                if tokens:
                    out[view.seq_id], expected_gains[view.seq_id] = tokens, expected_gain
                if count:  # also when the draft is only an end token: then tokens is empty
                    decided.add(view.seq_id)
            candidates = [view for view in candidates if view.seq_id not in decided]
            if not candidates:
                break
        if (
            running > 1
            and self.adaptive
            and out
            and not self._fair_to_batch(out, expected_gains, load)
        ):
            self._withdraw(views)
            out = {}
        self._empty_lookups = (
            0 if out or running == 1 else min(self._empty_lookups + 1, PROPOSER_BACKOFF + 4)
        )
        self._charge(views, out, load, self._clock() - began)
        return out

    def _propose(
        self, proposer: Proposer, candidates: Sequence[SeqView], load: StepLoad
    ) -> list[tuple[SeqView, Draft]]:
        """The drafts of one proposer, for the sequences that are not in back-off."""
        backoff, draft_cost, floor = self._backoff[proposer.name], proposer.token_cost, 0.0
        if backoff:
            candidates = [view for view in candidates if not self._backed_off(view.seq_id, backoff)]
        if draft_cost and self.adaptive:
            price = load.price(draft_cost)
            floor = MARGIN * price
            candidates = self._affordable(candidates, load, price, proposer)
        found = proposer.propose(candidates, self.max_drafts, floor) if candidates else {}
        if not found:
            return []
        out = []
        for view in candidates:
            draft = found.get(view.seq_id)
            if draft is not None:
                draft = draft.truncated(view.end_ids, self._vocab)
                if draft.tokens:
                    out.append((view, draft))
        return out

    def _charge(
        self, views: Sequence[SeqView], out: Container[int], load: StepLoad, spent: float
    ) -> None:
        """Charge the lookup time. A sequence that cannot pay for one more row backs off."""
        if not load.seconds:
            return
        price = load.price(0.0)
        for view in views:
            record = self._records[view.seq_id]
            record.budget.charge_lookup(spent / len(views), load.seconds / load.running)
            if (
                self.adaptive
                and view.seq_id not in out
                and record.budget.remaining(len(view.tokens)) < price
            ):
                record.backoff = BUDGET_BACKOFF

    def _fair_to_batch(
        self, out: dict[int, tuple[int, ...]], expected_gains: dict[int, float], load: StepLoad
    ) -> bool:
        """Drafts of one sequence lengthen the step for all. Every sequence in it must expect to
        gain what it loses."""
        if not load.seconds:
            return True
        longer = self.cost.seconds(load.running + sum(map(len, out.values()))) / load.seconds - 1
        least = min(expected_gains.values()) if len(expected_gains) == load.running else 0.0
        return longer <= max(least, MAX_SLOWDOWN)

    def _withdraw(self, views: Sequence[SeqView]) -> None:
        """Submit nothing after all; proposers that cost time back off."""
        for view in views:
            for pending in self._records[view.seq_id].pending:
                pending.submitted = 0
                if pending.costly:
                    self._backoff[pending.draft.source][view.seq_id] = 4 * PROPOSER_BACKOFF

    def _decide(
        self, view: SeqView, record: _Record, draft: Draft, load: StepLoad, draft_cost: float
    ) -> tuple[int, tuple[int, ...], float]:
        """(number of drafts worth their cost, the draft tokens to submit, expected accepted)."""
        limit = min(len(draft.tokens), self.max_drafts)
        if not self.adaptive:
            return limit, draft.useful(limit, view.end_ids), 0.0
        probs = self._acceptance_probs(view.seq_id, draft, limit)
        count = self._length(probs, load, draft_cost, explore=not draft.probs)
        price = load.price(draft_cost)
        if price:
            count = record.budget.affordable(len(view.tokens), probs[:count], price)
        # Stated probs change with every token; a match that does not pay stays so for a while.
        if not count and not draft.probs:
            self._backoff[draft.source][view.seq_id] = PROPOSER_BACKOFF
        tokens = draft.useful(count, view.end_ids)
        return count, tokens, sum(probs[: len(tokens)])

    def _acceptance_probs(self, seq_id: int, draft: Draft, limit: int) -> list[float]:
        """The probability that the first token is accepted, the first two, and so on."""
        if draft.probs:
            calibration = self.acceptance.calibration(seq_id, draft.source)
            return [calibration * prob for prob in draft.probs[:limit]]
        return self.acceptance.acceptance_probs(seq_id, draft, limit)

    def _affordable(
        self, candidates: Sequence[SeqView], load: StepLoad, price: float, proposer: Proposer
    ) -> list[SeqView]:
        """A draft that costs time is made only at the length that will be submitted, so the length
        is decided first. A proposer that states probs is queried while a certain draft would pay
        and the budget is not empty."""
        out = []
        for view in candidates:
            if proposer.states_probs:
                pays = price * MARGIN < self.acceptance.calibration(view.seq_id, proposer.name)
                left = self._records[view.seq_id].budget.remaining(len(view.tokens))
                count = view.max_drafts if pays and left >= price else 0
            else:
                placeholder = Draft((0,) * self.max_drafts, proposer.name, 0)
                count = self._length(
                    self._acceptance_probs(view.seq_id, placeholder, self.max_drafts),
                    load,
                    proposer.token_cost,
                )
            if count:
                out.append(view if count >= view.max_drafts else view._replace(max_drafts=count))
            else:
                self._backoff[proposer.name][view.seq_id] = 4 * PROPOSER_BACKOFF
                self.acceptance.relax(view.seq_id, proposer.name)
        return out

    def _length(
        self,
        probs: Sequence[float],
        load: StepLoad,
        draft_cost: float,
        *,
        explore: bool = True,
    ) -> int:
        running, seconds, _, _ = load
        if not seconds:  # nothing measured yet: short drafts of two sizes teach what rows cost
            return min(len(probs), 1 if self.cost.sizes else 2)
        count = draft_length(
            probs,
            seconds / running,
            self.cost.extra_seconds(load, len(probs)),
            draft_cost,
        )
        if not explore:
            return count
        if (
            not count
            and probs
            and probs[0] > 0.5
            and running == 1
            and self._steps_since_submit > EXPLORE_STEPS
        ):
            count = min(len(probs), 2)
        if count:
            self._steps_since_submit = 0
        return count

    def _backed_off(self, seq_id: int, backoff: dict[int, int]) -> bool:
        left = backoff.pop(seq_id, 0)
        if left > 1:
            backoff[seq_id] = left - 1
        return left > 0

    def source(self, seq_id: int) -> str:
        """The proposer whose draft was submitted last; empty if none is pending."""
        record = self._records.get(seq_id)
        names = [p.draft.source for p in record.pending if p.submitted] if record else []
        return names[-1] if names else ""

    def _settle(self, view: SeqView) -> None:
        """Compare the pending drafts with what the target drew."""
        record = self._records[view.seq_id]
        for pending in record.pending:
            written = view.tokens[pending.start :]
            if pending.draft.probs:
                self.acceptance.learn_stated(view.seq_id, pending.draft, written)
            else:
                self.acceptance.learn(view.seq_id, pending.draft, written)
            if pending.submitted:
                self._account(record, pending, view)
        record.pending.clear()

    def _account(self, record: _Record, pending: _Pending, view: SeqView) -> None:
        """Add the net gain of a draft to the budget. The scheduler's counts are used: it may have
        submitted fewer drafts, and a sequence that ends with a drafted token would have ended in
        that step anyway."""
        step = self.cost.seconds(pending.running)
        rows, won = view.drafted - record.drafted, view.accepted - record.accepted
        record.drafted, record.accepted = view.drafted, view.accepted
        record.budget.settle(
            won, self.cost.seconds(pending.running + rows) - step, step / pending.running
        )

    def finish(self, view: SeqView) -> float:
        """Forget the sequence. Returns the seconds that its drafts saved, by measured step costs;
        negative if they cost more."""
        self._settle(view)
        self.acceptance.forget(view.seq_id)
        for backoff in self._backoff.values():
            backoff.pop(view.seq_id, None)
        for proposer in self.proposers:
            proposer.finish(view)
        return self._records.pop(view.seq_id).budget.saved

    def close(self) -> None:
        for proposer in self.proposers:
            proposer.close()
