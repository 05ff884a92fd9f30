"""A suffix automaton: the longest suffix of the text that occurred before, of any length, and what followed it.

In: a sequence's tokens (and, where a tenant opted in, recent answers of the same model to the same tenant). Out: the continuation
of the longest match. Longer matches than prompt lookup's five tokens are better evidence, and are learnt apart.

The automaton of Blumer et al. (1985): one state for each set of positions that some substring ends at; adding a token costs amortised
O(1) steps. Each state remembers the latest position at which its substrings ended.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from verbatim.speculate.ngram import unroll
from verbatim.speculate.proposer import Draft, SeqView

SHORTEST = 2  # a match of one token is no evidence
LONG = 16  # matches longer than this count as one kind of evidence
BITE = 4096  # tokens of a long prompt that are read in one step: about 10 ms
NEWEST = 16  # suffixes whose latest end is kept exact
REMEMBERED = 16  # recent answers kept for a tenant that opted in
REMEMBERED_TOKENS = 1024  # of each
TENANTS = 256  # whose answers are kept, those who came last: at most 64 KB of each
BARRIER = -1  # no token has this id, so no match runs from one answer into the next


class SuffixAutomaton:
    """Tokens in; for any moment, the longest suffix that occurred earlier.

    >>> a = SuffixAutomaton()
    >>> for t in [1, 2, 3, 9, 1, 2, 3]: a.add(t)
    >>> a.match()          # "1 2 3" ended before at position 3, so tokens[3:] is the guess
    (3, 3)
    """

    __slots__ = ("_current", "_end", "_length", "_link", "_next", "_previous", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._end: list[int] = [
            0
        ]  # latest end position of the state's substrings, before the newest token
        self._current = 0
        self._previous: tuple[int, int] = (0, 0)

    def add(self, token: int) -> None:
        self.extend((token,))

    def extend(self, tokens: Iterable[int]) -> None:
        """In one piece, because it runs for each token of every prompt."""
        text, follows, links, lengths, ends = (
            self.tokens,
            self._next,
            self._link,
            self._length,
            self._end,
        )
        for token in tokens:
            text.append(token)
            now = len(text)
            p, new = self._current, len(links)
            follows.append({})
            links.append(0)
            lengths.append(now)
            ends.append(now)
            while p != -1 and token not in follows[p]:
                follows[p][token] = new
                p = links[p]
            state = links[new] = 0 if p == -1 else self._target(p, token)
            self._current = new
            # The longest suffix that occurred before is the suffix link of the whole text; note where it ended, then move that forward.
            self._previous = (ends[state], lengths[state]) if state else (0, 0)
            left = NEWEST  # these suffixes have just occurred again; deep chains (aaaa…) keep an older, equally true end
            while state and left:
                ends[state] = now
                state = links[state]
                left -= 1

    def _target(self, p: int, token: int) -> int:
        """The state that the new one links to; split it where its substrings are longer than what is shared."""
        follows, links, lengths = self._next, self._link, self._length
        q = follows[p][token]
        if lengths[p] + 1 == lengths[q]:
            return q
        clone = len(links)
        follows.append(dict(follows[q]))
        links.append(links[q])
        lengths.append(lengths[p] + 1)
        self._end.append(self._end[q])
        links[q] = clone
        while p != -1 and follows[p].get(token) == q:
            follows[p][token] = clone
            p = links[p]
        return clone

    def match(self) -> tuple[int, int]:
        """(end of a late earlier occurrence, its length), (0, 0) if there is none."""
        return self._previous


class _Text:
    """One sequence's automaton, behind the remembered answers that are read into it first."""

    __slots__ = ("automaton", "before")

    def __init__(self, answers: Iterable[Iterable[int]]) -> None:
        self.automaton = SuffixAutomaton()
        self.before = [token for answer in answers for token in (*answer, BARRIER)]

    def follow(self, tokens: Sequence[int]) -> bool:
        """Read on, a bite at a time: others' answers wait meanwhile. False: there is more to read."""
        at, first = len(self.automaton.tokens), len(self.before)
        if at < first:
            self.automaton.extend(self.before[at : at + BITE])
        self.automaton.extend(tokens[max(at - first, 0) : max(at + BITE - first, 0)])
        return at + BITE >= first + len(tokens)


class SuffixProposer:
    name = "suffix"
    token_cost = 0.0
    states_odds = False

    def __init__(self, *, remember: frozenset[str] = frozenset()) -> None:
        """`remember` names the tenants whose recent answers may serve their own later requests ("*": each tenant's)."""
        self._texts: dict[int, _Text] = {}
        self._remember = remember
        self._recent: OrderedDict[str, deque[array[int]]] = (
            OrderedDict()
        )  # the tenant who came last is the last
        self._most = max(TENANTS, len(remember))

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        out: dict[int, Draft] = {}
        for view in views:
            text = self._texts.get(view.seq_id)
            if text is None:
                text = self._texts[view.seq_id] = _Text(self._recent.get(view.tenant, ()))
                if view.tenant in self._recent:
                    self._recent.move_to_end(view.tenant)
            if not text.follow(view.tokens):
                continue
            end, length = text.automaton.match()
            if length >= SHORTEST:
                guess = unroll(text.automaton.tokens, end, min(limit, view.room))
                if BARRIER in guess:  # a remembered answer went no further
                    guess = guess[: guess.index(BARRIER)]
                if guess:
                    out[view.seq_id] = Draft(guess, self.name, min(length, LONG))
        return out

    def finish(self, view: SeqView) -> None:
        self._texts.pop(view.seq_id, None)
        if view.tenant in self._remember or "*" in self._remember:
            recent = self._recent.setdefault(view.tenant, deque(maxlen=REMEMBERED))
            recent.append(array("i", view.tokens[view.prompt_len :][:REMEMBERED_TOKENS]))
            self._recent.move_to_end(view.tenant)
            if len(self._recent) > self._most:
                self._recent.popitem(last=False)

    def close(self) -> None:
        self._texts.clear()
        self._recent.clear()
