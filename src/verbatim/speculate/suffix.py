"""Suffix decoding: draft what followed the longest suffix of the sequence that occurred before.

In: a sequence's tokens and, for a tenant that opted in, its recent completions. Out: the
continuation of the longest match, which is more reliable than prompt lookup's five tokens.

The index is the suffix automaton of Blumer et al. (1985): one state per set of end positions, O(1)
amortised per token. Each state stores the latest position at which its substrings ended.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from verbatim.speculate.ngram import unroll
from verbatim.speculate.proposer import Draft, SeqView

MIN_MATCH = 2  # tokens; a match of one token predicts nothing
CHUNK = 4096  # tokens read per sequence and step: about 10 ms
EXACT_ENDS = 16  # suffixes per token whose latest end is updated
ANSWERS_PER_TENANT = 16  # recent completions kept for a tenant that opted in
ANSWER_TOKENS = 1024  # first tokens kept of each completion
MAX_TENANTS = 256  # LRU; at most 64 KB each
BARRIER = -1  # not a token id, so no match extends over the end of a completion


class SuffixAutomaton:
    """Tokens in; at any time, the longest suffix that occurred earlier.

    >>> a = SuffixAutomaton()
    >>> for t in [1, 2, 3, 9, 1, 2, 3]: a.add(t)
    >>> a.match()          # "1 2 3" ended before at position 3, so tokens[3:] is the draft
    (3, 3)
    """

    __slots__ = ("_current", "_end", "_length", "_link", "_next", "_previous", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._end: list[int] = [0]  # latest end of the state's substrings before the newest token
        self._current = 0
        self._previous: tuple[int, int] = (0, 0)

    def add(self, token: int) -> None:
        self.extend((token,))

    def extend(self, tokens: Iterable[int]) -> None:
        """One loop without calls, because it runs for each token of every prompt."""
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
            # The suffix link of the whole sequence is the longest suffix that occurred before.
            self._previous = (ends[state], lengths[state]) if state else (0, 0)
            left = EXACT_ENDS  # deep chains (aaaa…) keep an older end, which is valid too
            while state and left:
                ends[state] = now
                state = links[state]
                left -= 1

    def _target(self, p: int, token: int) -> int:
        """The suffix link of the new state; splits a state whose substrings are longer than the
        shared suffix."""
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
        """(end of a recent earlier occurrence, its length); (0, 0) if there is none."""
        return self._previous


class _SequenceText:
    """The automaton of one sequence, which reads the tenant's remembered completions first."""

    __slots__ = ("automaton", "remembered")

    def __init__(self, answers: Iterable[Iterable[int]]) -> None:
        self.automaton = SuffixAutomaton()
        self.remembered = [token for answer in answers for token in (*answer, BARRIER)]

    def catch_up(self, tokens: Sequence[int]) -> bool:
        """Read at most CHUNK tokens, because other sequences wait meanwhile. False: more remain."""
        at, first = len(self.automaton.tokens), len(self.remembered)
        if at < first:
            self.automaton.extend(self.remembered[at : at + CHUNK])
        self.automaton.extend(tokens[max(at - first, 0) : max(at + CHUNK - first, 0)])
        return at + CHUNK >= first + len(tokens)


class SuffixProposer:
    name = "suffix"
    token_cost = 0.0
    states_probs = False

    def __init__(self, *, remember: frozenset[str] = frozenset()) -> None:
        """`remember`: tenants whose recent completions serve their own later requests ("*": every
        tenant)."""
        self._sequences: dict[int, _SequenceText] = {}
        self._remember = remember
        # By tenant, least recently used first.
        self._recent: OrderedDict[str, deque[array[int]]] = OrderedDict()
        self._max_tenants = max(MAX_TENANTS, len(remember))

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        out: dict[int, Draft] = {}
        for view in views:
            text = self._sequences.get(view.seq_id)
            if text is None:
                text = self._sequences[view.seq_id] = _SequenceText(
                    self._recent.get(view.tenant, ())
                )
                if view.tenant in self._recent:
                    self._recent.move_to_end(view.tenant)
            if not text.catch_up(view.tokens):
                continue
            end, length = text.automaton.match()
            if length >= MIN_MATCH:
                draft = unroll(text.automaton.tokens, end, min(limit, view.max_drafts))
                if BARRIER in draft:  # the end of a remembered completion
                    draft = draft[: draft.index(BARRIER)]
                if draft:
                    out[view.seq_id] = Draft(draft, self.name, length)
        return out

    def finish(self, view: SeqView) -> None:
        self._sequences.pop(view.seq_id, None)
        if view.tenant in self._remember or "*" in self._remember:
            recent = self._recent.setdefault(view.tenant, deque(maxlen=ANSWERS_PER_TENANT))
            recent.append(array("i", view.tokens[view.prompt_len :][:ANSWER_TOKENS]))
            self._recent.move_to_end(view.tenant)
            if len(self._recent) > self._max_tenants:
                self._recent.popitem(last=False)

    def close(self) -> None:
        self._sequences.clear()
        self._recent.clear()
