"""How many drafts pay. In: measured step times, and how often guesses came true. Out: a draft length for each sequence, often 0.

One more draft adds a row to the step. With B sequences in a step that takes t(B), a token is worth t(B) / B. The j-th draft comes true with
probability a^j (or with the odds that the guesser states), and j drafts make the step t(B + j). The best j has the most left of

    (a + a^2 + ... + a^j) * t(B) / B  -  MARGIN * (t(B + j) - t(B) + what the guesses themselves cost)

On weights that are read once a step rows are cheap and long drafts pay; when the batch is compute-bound, no draft pays.
Worked: t(1) = 4 ms, 0.3 ms for each further row, a = 0.8: the eighth draft still adds 0.8^8 * 4 = 0.67 > 1.8 * 0.3, the ninth does not.

t comes from cost.py, a from acceptance.py; what all of a sequence's drafts together may lose is bounded by purse.py.

Learning goes on when nothing is drafted: a guess that was only made, not submitted, is compared with what the target then wrote.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from verbatim.speculate.acceptance import Acceptance
from verbatim.speculate.draft_budget import Purse
from verbatim.speculate.proposer import Draft, Proposer, SeqView
from verbatim.speculate.step_cost import Load, StepCost

MARGIN = 1.8  # a draft must promise this much more than it costs: measured times are noisy
LONGEST = (
    15  # drafts of one sequence in one step: with the token before them 16 rows, which kernels like
)
BEARABLE = 0.01  # how much longer a step may become by others' drafts, for a sequence that expects nothing from its own
REST = 8  # steps without a fresh guess after guesses stopped paying: making them costs time too
NAP = 7  # steps without any look at a text that has lost what it may lose: a look takes some per cent of a step
EXPLORE = 64  # steps until a likely guess is submitted although it does not seem to pay: what rows cost is learnt only so


@dataclass(slots=True)
class _Pending:
    """A guess that waits to be compared with what the target writes from position `start` on."""

    draft: Draft
    start: int
    submitted: int
    running: int  # sequences of that step
    dear: bool  # making it costs time


@dataclass(slots=True)
class _Record:
    """What is kept of a sequence as long as it is written."""

    purse: Purse = field(default_factory=Purse)
    pending: list[_Pending] = field(default_factory=list)
    drafted: int = 0  # of the view's counts, what was accounted for
    accepted: int = 0
    asleep: int = 0  # steps until it is looked at again


def draft_length(
    chances: Sequence[float], value: float, rows: Sequence[float], guess_cost: float = 0.0
) -> int:
    """How many drafts pay best: the j that has the most left of what its first j tokens are expected to win, less MARGIN times what j rows and j
    guesses cost.

    >>> draft_length([0.8 ** j for j in range(1, 17)], 4.0, [0.3 * j for j in range(1, 17)])
    8
    """
    best, most, won = 0, 0.0, 0.0
    for j, chance in enumerate(chances, 1):
        won += chance * value
        left = won - MARGIN * (rows[j - 1] + j * guess_cost)
        if left > most:
            best, most = j, left
    return best


class Speculator:
    """Asks the proposers, cheapest first, decides how much of each guess to submit, and learns from what came."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        *,
        adaptive: bool = True,
        longest: int = LONGEST,
        vocab: int = 1 << 31,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proposers = tuple(proposers)
        self.cost = StepCost()
        self.acceptance = Acceptance()
        self.adaptive = adaptive
        self.longest = longest
        self._vocab = vocab
        self._clock = clock
        self._records: defaultdict[int, _Record] = defaultdict(_Record)  # by sequence id
        self._resting: defaultdict[str, dict[int, int]] = defaultdict(
            dict
        )  # by proposer and sequence: steps for which it is not asked again
        self._explored = 0  # steps since something was submitted
        self._barren, self._paused = (
            0,
            0,
        )  # looks in vain while several wrote; steps since the last look

    def looks(self, running: int) -> bool:
        """Whether guesses are looked for in this step. In a batch they seldom pay, and looking costs a per cent: it is left where not even a sure
        guess would pay, and after some steps in vain for longer and longer."""
        if running == 1 or not self.adaptive:
            return True
        if MARGIN * self.cost.load(running).price(0.0) >= 1:
            return False
        if self._barren < REST:
            return True
        self._paused += 1
        if self._paused < REST << (self._barren - REST):
            return False
        self._paused = 0
        return True

    def awake(self, seq_id: int) -> bool:
        """Whether this sequence is looked at in this step."""
        record = self._records.get(seq_id)
        if record is None or not record.asleep:
            return True
        record.asleep -= 1
        return False

    def drafts(
        self, views: Sequence[SeqView], running: int | None = None
    ) -> dict[int, tuple[int, ...]]:
        """What to submit for each sequence that is about to draw; those left out write plainly. `running` are all that write in the step."""
        running = running or len(views)
        began = self._clock()
        self._explored += 1
        load = self.cost.load(running)
        for view in views:
            self._settle(view)
        out: dict[int, tuple[int, ...]] = {}
        hopes: dict[int, float] = {}
        asking = [view for view in views if view.room > 0]
        for proposer in self.proposers:
            guess_cost = proposer.token_cost
            found = self._asked(proposer, asking, load)
            if not found:
                continue
            guessed = set()
            for view, draft in found:
                record = self._records[view.seq_id]
                count, tokens, hope = self._decide(view, record, draft, load, guess_cost)
                record.pending.append(
                    _Pending(draft, len(view.tokens), len(tokens), running, guess_cost > 0)
                )
                if tokens:
                    out[view.seq_id], hopes[view.seq_id] = tokens, hope
                if count:  # where the guess is that the text ends here, nobody else is asked either
                    guessed.add(view.seq_id)
            asking = [view for view in asking if view.seq_id not in guessed]
            if not asking:
                break
        if running > 1 and self.adaptive and out and not self._fair(out, hopes, load):
            self._withdraw(views)
            out = {}
        self._barren = 0 if out or running == 1 else min(self._barren + 1, REST + 4)
        self._charge(views, out, load, self._clock() - began)
        return out

    def _asked(
        self, proposer: Proposer, asking: Sequence[SeqView], load: Load
    ) -> list[tuple[SeqView, Draft]]:
        """The guesses of one proposer, for those whom it may help."""
        resting, guess_cost, floor = self._resting[proposer.name], proposer.token_cost, 0.0
        if resting:
            asking = [view for view in asking if not self._rests(view.seq_id, resting)]
        if guess_cost and self.adaptive:
            price = load.price(guess_cost)
            floor = MARGIN * price
            asking = self._afford(asking, load, price, proposer)
        found = proposer.propose(asking, self.longest, floor) if asking else {}
        if not found:
            return []
        out = []
        for view in asking:
            draft = found.get(view.seq_id)
            if draft is not None:
                draft = draft.until(view.ends, self._vocab)
                if draft.tokens:
                    out.append((view, draft))
        return out

    def _charge(
        self, views: Sequence[SeqView], out: Container[int], load: Load, spent: float
    ) -> None:
        """Looking for guesses takes time as well, whether or not anything comes of it. Who cannot pay for one more row is left alone for a while."""
        if not load.seconds:
            return
        price = load.price(0.0)
        for view in views:
            record = self._records[view.seq_id]
            record.purse.pay_for_looking(spent / len(views), load.seconds / load.running)
            if (
                self.adaptive
                and view.seq_id not in out
                and record.purse.left(len(view.tokens)) < price
            ):
                record.asleep = NAP

    def _fair(self, out: dict[int, tuple[int, ...]], hopes: dict[int, float], load: Load) -> bool:
        """One sequence's drafts make the step longer for all. Every one that writes in it must expect to win what it loses."""
        if not load.seconds:
            return True
        longer = self.cost.seconds(load.running + sum(map(len, out.values()))) / load.seconds - 1
        least = min(hopes.values()) if len(hopes) == load.running else 0.0
        return longer <= max(least, BEARABLE)

    def _withdraw(self, views: Sequence[SeqView]) -> None:
        """Nothing is submitted after all; and what costs time to guess is not asked for again soon."""
        for view in views:
            for pending in self._records[view.seq_id].pending:
                pending.submitted = 0
                if pending.dear:
                    self._resting[pending.draft.source][view.seq_id] = 4 * REST

    def _decide(
        self, view: SeqView, record: _Record, draft: Draft, load: Load, guess_cost: float
    ) -> tuple[int, tuple[int, ...], float]:
        """How much of a guess is worth its rows, the tokens of that to submit, and how many of them are expected to be gained."""
        limit = min(len(draft.tokens), self.longest)
        if not self.adaptive:
            return limit, draft.gaining(limit, view.ends), 0.0
        chances = self._chances(view.seq_id, draft, limit)
        count = self._length(chances, load, guess_cost, explores=not draft.odds)
        price = load.price(guess_cost)
        if price:
            count = record.purse.affordable(len(view.tokens), chances[:count], price)
        if (
            not count and not draft.odds
        ):  # stated odds change with every token; a match that does not pay stays so for a while
            self._resting[draft.source][view.seq_id] = REST
        tokens = draft.gaining(count, view.ends)
        return count, tokens, sum(chances[: len(tokens)])

    def _chances(self, seq_id: int, draft: Draft, limit: int) -> list[float]:
        """That the first token comes true, the first two, and so on."""
        if draft.odds:
            trust = self.acceptance.trust(seq_id, draft.source)
            return [trust * odds for odds in draft.odds[:limit]]
        return self.acceptance.chances(seq_id, draft, limit)

    def _afford(
        self, asking: Sequence[SeqView], load: Load, price: float, proposer: Proposer
    ) -> list[SeqView]:
        """A guess that costs time is only made as long as it will be submitted: the length is decided before it is asked for. Where the
        guesser states its odds, it is asked as long as a sure guess would pay, and the purse is not empty."""
        out = []
        for view in asking:
            if proposer.states_odds:
                pays = price * MARGIN < self.acceptance.trust(view.seq_id, proposer.name)
                left = self._records[view.seq_id].purse.left(len(view.tokens))
                count = view.room if pays and left >= price else 0
            else:
                blind = Draft((0,) * self.longest, proposer.name, 0)
                count = self._length(
                    self._chances(view.seq_id, blind, self.longest), load, proposer.token_cost
                )
            if count:
                out.append(view if count >= view.room else view._replace(room=count))
            else:
                self._resting[proposer.name][view.seq_id] = 4 * REST
                self.acceptance.relax(view.seq_id, proposer.name)
        return out

    def _length(
        self, chances: Sequence[float], load: Load, guess_cost: float, *, explores: bool = True
    ) -> int:
        running, seconds, _, _ = load
        if (
            not seconds
        ):  # nothing known yet: short guesses of two sizes are a cheap way to learn what rows cost
            return min(len(chances), 1 if self.cost.sizes else 2)
        count = draft_length(
            chances, seconds / running, self.cost.further(load, len(chances)), guess_cost
        )
        if not explores:
            return count
        if not count and chances and chances[0] > 0.5 and running == 1 and self._explored > EXPLORE:
            count = min(len(chances), 2)
        if count:
            self._explored = 0
        return count

    def _rests(self, seq_id: int, resting: dict[int, int]) -> bool:
        left = resting.pop(seq_id, 0)
        if left > 1:
            resting[seq_id] = left - 1
        return left > 0

    def _settle(self, view: SeqView) -> None:
        """Compare what was guessed with what the target wrote."""
        record = self._records[view.seq_id]
        for pending in record.pending:
            written = view.tokens[pending.start :]
            if pending.draft.odds:
                self.acceptance.learn_odds(view.seq_id, pending.draft, written)
            else:
                self.acceptance.learn(view.seq_id, pending.draft, written)
            if pending.submitted:
                self._account(record, pending, view)
        record.pending.clear()

    def _account(self, record: _Record, pending: _Pending, view: SeqView) -> None:
        """What a guess won, less what its rows cost, in times of a token. The scheduler's counts say it: there may have been no room for all of it,
        and a text that ends with a guessed token would have ended in that step anyway."""
        step = self.cost.seconds(pending.running)
        rows, won = view.drafted - record.drafted, view.accepted - record.accepted
        record.drafted, record.accepted = view.drafted, view.accepted
        record.purse.settle(
            won, self.cost.seconds(pending.running + rows) - step, step / pending.running
        )

    def finish(self, view: SeqView) -> float:
        """Forget the sequence. What its drafts saved, in seconds, by the measured costs of steps; below zero if they cost more."""
        self._settle(view)
        self.acceptance.forget(view.seq_id)
        for resting in self._resting.values():
            resting.pop(view.seq_id, None)
        for proposer in self.proposers:
            proposer.finish(view)
        return self._records.pop(view.seq_id).purse.saved

    def close(self) -> None:
        for proposer in self.proposers:
            proposer.close()
