"""How many drafts pay. In: measured step times, and how often guesses came true. Out: a draft length for each sequence, often 0.

One more draft adds a row to the step. With B sequences in a step that takes t(B), a token is worth t(B) / B. The j-th draft comes true with
probability a^j (or with the odds that the guesser states), and j drafts make the step t(B + j). The best j has the most left of

    (a + a^2 + ... + a^j) * t(B) / B  -  MARGIN * (t(B + j) - t(B) + what the guesses themselves cost)

On weights that are read once a step rows are cheap and long drafts pay; when the batch is compute-bound, no draft pays.
Worked: t(1) = 4 ms, 0.3 ms for each further row, a = 0.8: the eighth draft still adds 0.8^8 * 4 = 0.67 > 1.8 * 0.3, the ninth does not.

An estimate can be wrong, so there is a purse as well: drafts that came true fill it by the time they saved, the others empty it by the time they cost,
and a sequence that has lost what it may lose (START, and SHARE of what it wrote since; DEBT more where much was promised) drafts no more
until it has written on. However badly the guesses turn out, the loss stays within that.

Learning goes on when nothing is drafted: a guess that was only made, not submitted, is compared with what the target then wrote.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from verbatim.speculate.protocol import Draft, Proposer, SeqView

MARGIN = 1.8  # a draft must promise this much more than it costs: measured times are noisy
PATIENCE = 0.12  # weight of the newest observation in an acceptance rate
PACE, SHAPE = 0.3, 0.05  # how fast the machine's pace, and how slowly the shape of a step's cost, follow what is measured
NEAR = 3  # rows over which the price of one is averaged
LEAST, USUAL = (
    0.08,
    0.15,
)  # of a step of one row, what a further row costs: never less, whatever was measured; and before anything is known
PRIOR = 0.35  # acceptance before anything is known; long matches earn more (see Acceptance)
ALIKE = 16  # matches of this length and longer are one kind of evidence
START, SHARE = 1.2, 0.015  # what a sequence may lose by drafts, in times of a token: at first, and for each token written
CREDIT, DEBT = 3.0, 0.8  # a draft that promises so many times its cost may lose a little more than that
NEUTRAL = (3.0, 3.0)  # stated odds are believed until they are known to be wrong
LONGEST = 15  # drafts of one sequence in one step: with the token before them 16 rows, which kernels like
BEARABLE = 0.01  # how much longer a step may become by others' drafts, for a sequence that expects nothing from its own
LOOK = 0.15  # the most that one look for guesses is charged, in times of a token
REST = 8  # steps without a fresh guess after guesses stopped paying: making them costs time too
EXPLORE = (
    64  # steps after which a likely guess is submitted although it does not seem to pay: costs change, and are learnt only so
)


class Load(NamedTuple):
    """A step of plain rows, one for each sequence that writes in it."""

    running: int
    seconds: float  # 0 while nothing is known
    row: float  # what one more row adds
    least: float  # and never less, whatever was measured

    def price(self, guess_cost: float) -> float:
        """What one more draft costs, in times of a token; 0 while nothing is known."""
        return (self.row + guess_cost) * self.running / self.seconds if self.seconds else 0.0


class StepCost:
    """Seconds of a step against its rows, from what was measured: a line between the sizes nearest by.

    The machine's pace and the shape of the curve are learnt apart. Another program may halve the pace for a second, and steps of one size may not
    be seen for as long: were each size a time of its own, a slow second would make whatever was measured before it look cheap.
    The curve has steps (8 rows may fill a kernel that the 9th starts anew), so small sizes are kept one by one."""

    def __init__(self) -> None:
        self._pace = 0.0  # seconds of a step whose shape is 1
        self._shape: dict[int, tuple[float, float, int]] = {}  # size class, rising -> (mean rows, times the pace, times seen)
        self._known: dict[float, float] = {}  # seconds by rows, until more is learnt

    def learn(self, rows: int, seconds: float) -> None:
        if rows < 1 or seconds <= 0:
            return
        if not self._pace:
            self._pace = seconds / (1 + USUAL * (rows - 1))
        size = rows if rows <= 32 else 32 + rows.bit_length()
        if size not in self._shape:
            # One time is no evidence against what is usual: a size that was never seen starts with what its neighbours say.
            first = (float(rows), self._times(rows), 1)
            self._shape = dict(sorted([*self._shape.items(), (size, first)]))
        mean_rows, known, seen = self._shape[size]
        self._pace *= min(max(seconds / (self._pace * known), 0.5), 2.0) ** (PACE * min(seen, 8) / 8)
        found = min(seconds / self._pace, 2 * known)
        known += max(SHAPE, 1 / (seen + 1)) * (found - known)
        self._shape[size] = (mean_rows + PATIENCE * (rows - mean_rows), known, seen + 1)
        self._known.clear()

    def _times(self, rows: float) -> float:
        """Of the pace: on the line between the sizes on both sides, where more rows never take less; beyond the largest, what is usual."""
        at, high = 0.0, 0.0
        for where, value, _ in self._shape.values():
            below, high = high, max(high, value)
            if where > rows:
                if not at:
                    return max(high - USUAL * (where - rows), high / where)
                return below + (high - below) * (rows - at) / (where - at)
            at = where
        return high + USUAL * (rows - at) if at else 1 + USUAL * (rows - 1)

    def seconds(self, rows: float) -> float:
        """Of a step of this many rows; 0 until steps of two sizes were seen."""
        if len(self._shape) < 2:
            return 0.0
        found = self._known.get(rows)
        if found is None:
            found = self._known[rows] = self._times(rows) * self._pace
        return found

    def load(self, running: int) -> Load:
        seconds, least = self.seconds(running), LEAST * self.seconds(1)
        return Load(running, seconds, max((self.seconds(running + NEAR) - seconds) / NEAR, least), least)


def _kinds(evidence: int, count: int) -> Iterator[int]:
    """What stands behind each token of a guess: a match that every token makes longer; 0 is no match, and stays so."""
    return (min(evidence + at, ALIKE) if evidence else 0 for at in range(count))


def _prior(kind: int) -> float:
    return PRIOR + 0.07 * min(kind, 6)


class Acceptance:
    """How often guesses come true: the geometric mean of what this sequence shows, for any evidence, and of what all sequences showed for
    this kind of evidence. The first changes fast, so that a text which only seems to repeat itself stops costing after a few misses; the
    second tells a match of two tokens from one of ten. Each token that comes true makes the match longer, so the next has better evidence.
    Worked: own 0.1 after some misses, shared 0.6: 0.24, too little to draft."""

    def __init__(self) -> None:
        self._shared: dict[tuple[str, int], float] = {}
        self._own: dict[tuple[int, str], float] = {}
        self._trust: dict[
            tuple[int, str], tuple[float, float]
        ] = {}  # of stated odds: what came true, what was stated; -1: all sequences

    def chances(self, seq_id: int, draft: Draft, limit: int) -> list[float]:
        """That the first token comes true, the first two, and so on."""
        own = self._own.get((seq_id, draft.source))
        out, chance = [], 1.0
        for kind in _kinds(draft.evidence, limit):
            shared = self._shared.get((draft.source, kind), _prior(kind))
            chance *= shared if own is None else (shared * own) ** 0.5
            out.append(chance)
        return out

    def learn(self, seq_id: int, draft: Draft, written: Sequence[int]) -> None:
        """`written` are the tokens the target wrote where the draft guessed, as many as it wrote in the step."""
        mine = (seq_id, draft.source)
        for kind, guess, token in zip(_kinds(draft.evidence, len(written)), draft.tokens, written, strict=False):
            key = (draft.source, kind)
            shared = self._shared.get(key, _prior(kind))
            own = self._own.get(mine, shared)
            hit = 1.0 if guess == token else 0.0
            self._own[mine] = own + 2 * PATIENCE * (hit - own)
            self._shared[key] = shared + PATIENCE / 4 * (hit - shared)
            if not hit:
                break

    def trust(self, seq_id: int, source: str) -> float:
        """What the stated odds of this source are worth: came true / stated, of all sequences and of this one."""
        shared = self._trust.get((-1, source), NEUTRAL)
        own = self._trust.get((seq_id, source), NEUTRAL)
        return float(min(max((shared[0] / shared[1] * own[0] / own[1]) ** 0.5, 0.2), 1.2))

    def learn_odds(self, seq_id: int, draft: Draft, written: Sequence[int]) -> None:
        before = 1.0
        for guess, token, odds in zip(draft.tokens, written, draft.odds, strict=False):
            hit = 1.0 if guess == token else 0.0
            for key, memory in (((-1, draft.source), 0.995), ((seq_id, draft.source), 0.95)):
                true, stated = self._trust.get(key, NEUTRAL)
                self._trust[key] = (
                    memory * true + (1 - memory) * NEUTRAL[0] + hit,
                    memory * stated + (1 - memory) * NEUTRAL[1] + odds / before,
                )
            before = odds
            if not hit:
                break

    def relax(self, seq_id: int, source: str) -> None:
        """Forget a little of a bad record, so that a guess which is only learnt from by making it gets another chance in time."""
        own = self._own.get((seq_id, source), PRIOR)
        self._own[(seq_id, source)] = own + PATIENCE * (PRIOR - own)

    def forget(self, seq_id: int) -> None:
        for key in [k for k in self._own if k[0] == seq_id]:
            del self._own[key]
        for key in [k for k in self._trust if k[0] == seq_id]:
            del self._trust[key]


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

    purse: float = 0.0  # times of a token gained by drafts, less those lost
    saved: float = 0.0  # the same in seconds, for people
    begun: int | None = None  # length of the text when its first draft was considered
    pending: list[_Pending] = field(default_factory=list)
    resting: dict[str, int] = field(default_factory=dict)  # steps for which a proposer is not asked again


def draft_length(chances: Sequence[float], value: float, extra: Callable[[int], float]) -> int:
    """How many drafts pay best: the j that has the most left of what its first j tokens are expected to win, less MARGIN times what j rows cost.

    >>> draft_length([0.8 ** j for j in range(1, 17)], 4.0, lambda j: 0.3 * j)
    8
    """
    best, most, won = 0, 0.0, 0.0
    for j, chance in enumerate(chances, 1):
        won += chance * value
        left = won - MARGIN * extra(j)
        if left > most:
            best, most = j, left
    return best


def _came_true(guesses: Sequence[int], written: Sequence[int]) -> int:
    count = 0
    for guess, token in zip(guesses, written, strict=False):
        if guess != token:
            break
        count += 1
    return count


class Speculator:
    """Asks the proposers, cheapest first, decides how much of each guess to submit, and learns from what came."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        *,
        adaptive: bool = True,
        longest: int = LONGEST,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proposers = tuple(proposers)
        self.cost = StepCost()
        self.acceptance = Acceptance()
        self.adaptive = adaptive
        self.longest = longest
        self._clock = clock
        self._records: defaultdict[int, _Record] = defaultdict(_Record)  # by sequence id
        self._explored = 0  # steps since something was submitted
        self._barren, self._paused = 0, 0  # looks in vain while several wrote; steps since the last look

    def drafts(self, views: Sequence[SeqView], running: int | None = None) -> dict[int, tuple[int, ...]]:
        """What to submit for each sequence that is about to draw; those left out write plainly. `running` are all that write in the step."""
        running = running or len(views)
        if self._pauses(running):
            return {}
        began = self._clock()
        self._explored += 1
        for view in views:
            self._settle(view)
        out: dict[int, tuple[int, ...]] = {}
        hopes: dict[int, float] = {}
        asking = [view for view in views if view.room > 0]
        for proposer in self.proposers:
            guess_cost = proposer.token_cost
            for view, draft in self._asked(proposer, asking, running):
                count, hope = self._decide(view, draft, running, guess_cost)
                pending = _Pending(draft, len(view.tokens), count, running, guess_cost > 0)
                self._records[view.seq_id].pending.append(pending)
                if count:
                    out[view.seq_id], hopes[view.seq_id] = draft.tokens[:count], hope
            if out:
                asking = [view for view in asking if view.seq_id not in out]
            if not asking:
                break
        if self.adaptive and out and not self._fair(out, hopes, running):
            self._withdraw(views)
            out = {}
        self._barren = 0 if out or running == 1 else min(self._barren + 1, REST + 4)
        self._charge(views, running, self._clock() - began)
        return out

    def _asked(self, proposer: Proposer, asking: Sequence[SeqView], running: int) -> list[tuple[SeqView, Draft]]:
        """The guesses of one proposer, for those whom it may help."""
        able = [view for view in asking if not self._rests(view.seq_id, proposer.name)]
        floor = 0.0
        if able and proposer.token_cost and self.adaptive:
            load = self.cost.load(running)
            floor = MARGIN * load.price(proposer.token_cost)
            able = self._afford(able, load, proposer)
        found = proposer.propose(able, self.longest, floor) if able else {}
        return [(view, found[view.seq_id].until(view.ends)) for view in able if view.seq_id in found] if found else []

    def _charge(self, views: Sequence[SeqView], running: int, spent: float) -> None:
        """Looking for guesses takes time as well, whether or not anything comes of it."""
        seconds = self.cost.seconds(running) / running
        for view in views if seconds else ():
            share = min(spent / len(views), LOOK * seconds)  # more is another program's doing
            record = self._records[view.seq_id]
            record.purse -= share / seconds
            record.saved -= share

    def _pauses(self, running: int) -> bool:
        """In a batch drafts seldom pay, and looking for them costs a few per cent: after some steps in vain it is left for longer and longer."""
        if running == 1 or not self.adaptive or self._barren < REST:
            return False
        self._paused += 1
        if self._paused < REST << (self._barren - REST):
            return True
        self._paused = 0
        return False

    def _fair(self, out: dict[int, tuple[int, ...]], hopes: dict[int, float], running: int) -> bool:
        """One sequence's drafts make the step longer for all. Every one that writes in it must expect to win what it loses."""
        seconds = self.cost.seconds(running)
        if running == 1 or not seconds:
            return True
        longer = self.cost.seconds(running + sum(map(len, out.values()))) / seconds - 1
        least = min(hopes.values()) if len(hopes) == running else 0.0
        return longer <= max(least, BEARABLE)

    def _withdraw(self, views: Sequence[SeqView]) -> None:
        """Nothing is submitted after all; and what costs time to guess is not asked for again soon."""
        for view in views:
            record = self._records[view.seq_id]
            for pending in record.pending:
                pending.submitted = 0
                if pending.dear:
                    record.resting[pending.draft.source] = 4 * REST

    def _decide(self, view: SeqView, draft: Draft, running: int, guess_cost: float) -> tuple[int, float]:
        """How much of a guess is submitted, and how many tokens of it are expected to come true."""
        limit = min(len(draft.tokens), self.longest)
        if not self.adaptive:
            return limit, 0.0
        load = self.cost.load(running)
        chances = self._chances(view.seq_id, draft, limit)
        count = self._length(chances, load, guess_cost, explores=not draft.odds)
        price = load.price(guess_cost)
        if price:
            count = self._affordable(view, chances[:count], price)
        if not count and not draft.odds:  # stated odds change with every token; a match that does not pay stays so for a while
            self._records[view.seq_id].resting[draft.source] = REST
        return count, sum(chances[:count])

    def _chances(self, seq_id: int, draft: Draft, limit: int) -> list[float]:
        """That the first token comes true, the first two, and so on."""
        if draft.odds:
            trust = self.acceptance.trust(seq_id, draft.source)
            return [trust * odds for odds in draft.odds[:limit]]
        return self.acceptance.chances(seq_id, draft, limit)

    def _left(self, view: SeqView) -> float:
        """What this text may still lose by drafts, in times of a token."""
        record = self._records[view.seq_id]
        if record.begun is None:
            record.begun = len(view.tokens)
        return record.purse + START + SHARE * (len(view.tokens) - record.begun)

    def _affordable(self, view: SeqView, chances: Sequence[float], price: float) -> int:
        """As many as the purse can lose, and on credit as many as promise much more than they cost: a text that is being copied need not save for it,
        and one that turns into a copy after some bad guesses gets another chance."""
        left = self._left(view)
        count, credit, promised = min(len(chances), int(max(left, 0.0) / price)), int(max(left + DEBT, 0.0) / price), 0.0
        for rows, chance in enumerate(chances[:credit], 1):
            promised += chance
            if rows > count and promised > CREDIT * price * rows:
                count = rows
        return count

    def _afford(self, asking: Sequence[SeqView], load: Load, proposer: Proposer) -> list[SeqView]:
        """A guess that costs time is only made as long as it will be submitted: the length is decided before it is asked for. Where the
        guesser states its odds, it is asked as long as a sure guess would pay, and the purse is not empty."""
        out = []
        price = load.price(proposer.token_cost)
        for view in asking:
            if proposer.states_odds:
                pays = price * MARGIN < self.acceptance.trust(view.seq_id, proposer.name)
                count = view.room if pays and self._left(view) >= price else 0
            else:
                blind = Draft((0,) * self.longest, proposer.name, 0)
                count = self._length(self._chances(view.seq_id, blind, self.longest), load, proposer.token_cost)
            if count:
                out.append(view if count >= view.room else view._replace(room=count))
            else:
                self._records[view.seq_id].resting[proposer.name] = 4 * REST
                self.acceptance.relax(view.seq_id, proposer.name)
        return out

    def _length(self, chances: Sequence[float], load: Load, guess_cost: float, *, explores: bool = True) -> int:
        running, seconds, _, least = load
        if not seconds:  # nothing known yet: a short guess is a cheap way to learn what rows cost
            return min(len(chances), 2)
        count = draft_length(
            chances, seconds / running, lambda j: max(self.cost.seconds(running + j) - seconds, j * least) + j * guess_cost
        )
        if not explores:
            return count
        if not count and chances and chances[0] > 0.5 and running == 1 and self._explored > EXPLORE:
            count = min(len(chances), 2)
        if count:
            self._explored = 0
        return count

    def _rests(self, seq_id: int, source: str) -> bool:
        resting = self._records[seq_id].resting
        left = resting.get(source, 0)
        if left:
            resting[source] = left - 1
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
                self._account(record, pending, written)
        record.pending.clear()

    def _account(self, record: _Record, pending: _Pending, written: Sequence[int]) -> None:
        """What a guess won, less what its rows cost, in times of a token."""
        seconds = self.cost.seconds(pending.running) / pending.running
        won = _came_true(pending.draft.tokens[: pending.submitted], written)
        rows = self.cost.seconds(pending.running + pending.submitted) - self.cost.seconds(pending.running)
        gain = won - rows / seconds if seconds else 0.0
        record.purse += gain
        record.saved += gain * seconds

    def finish(self, view: SeqView) -> float:
        """Forget the sequence. What its drafts saved, in seconds, by the measured costs of steps; below zero if they cost more."""
        self._settle(view)
        self.acceptance.forget(view.seq_id)
        for proposer in self.proposers:
            proposer.finish(view)
        return self._records.pop(view.seq_id).saved

    def close(self) -> None:
        for proposer in self.proposers:
            proposer.close()
