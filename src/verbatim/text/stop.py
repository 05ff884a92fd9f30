"""Stop strings. In: pieces of text in order. Out: text that cannot be part of a stop string, and
the stop string that ended it.

Each stop string has its own Knuth-Morris-Pratt automaton: one step per stop string and character,
and a match may span pieces. Invariant: the text held back is exactly the longest suffix so far that
is a prefix of some stop string, so no part of a stop string is ever sent.

The stop string that is complete at the earliest character wins; of several that end there, the
longest. Text before it is kept, text after it is discarded.

>>> matcher = StopMatcher(["\\n\\n", "END"])
>>> matcher.push("the E"), matcher.push("ast\\n"), matcher.push("\\nmore")
(('the ', None), ('East', None), ('', '\\n\\n'))
"""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Holds back text that may become a stop string. With `include`, the text ends with it."""

    __slots__ = ("_fails", "_firsts", "_held", "_include", "_skip", "_states", "_stops", "matched")

    def __init__(self, stops: Iterable[str] = (), include: bool = False) -> None:
        self._stops = list(dict.fromkeys(s for s in stops if s))
        self._fails = [_failure(s) for s in self._stops]
        self._states = [0] * len(self._stops)  # per stop: characters of it that the text ends with
        self._firsts = frozenset(s[0] for s in self._stops)
        self._held = ""
        self._skip = 0  # characters of the held text that are not returned
        self._include = include
        self.matched: str | None = None

    def skip(self, text: str) -> None:
        """Begin after `text`, which is sent already: a stop string may start in it. One that is
        complete in it does not count.

        >>> matcher = StopMatcher(["abc"])
        >>> matcher.skip("xab")
        >>> matcher.push("ab"), matcher.push("c")
        (('', None), ('', 'abc'))
        """
        if self._stops:
            for char in text[-max(map(len, self._stops)) :]:  # earlier ones change no state
                self._advance(char)
            self._skip = max(self._states)
            self._held = text[len(text) - self._skip :]

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Returns the text that may be sent, and the stop string once one is complete;
        after that, no more text."""
        if self.matched is not None:
            return "", self.matched
        if not self._held and self._firsts.isdisjoint(text):
            return text, None  # the common case: no stop string has started
        buffer = self._held + text
        for at in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[at])
            if stop is not None:
                self.matched, self._held = stop, ""
                end = at + 1
                return self._new(buffer[: end if self._include else end - len(stop)]), stop
        keep = max(self._states)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return self._new(buffer[:cut]), None

    def flush(self) -> str:
        """End of the text: return what was held back."""
        rest, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return self._new(rest)

    def _new(self, text: str) -> str:
        """`text` without what was skipped."""
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        return text[skipped:]

    def _advance(self, char: str) -> str | None:
        """Advance every automaton by one character. Returns the longest stop that ends with it."""
        found: str | None = None
        states = self._states
        for i, stop in enumerate(self._stops):
            k = states[i]
            if k or stop[0] == char:
                fail = self._fails[i]
                while k and stop[k] != char:
                    k = fail[k - 1]
                if stop[k] == char:
                    k += 1
                if k == len(stop):
                    if found is None or len(stop) > len(found):
                        found = stop
                    k = fail[k - 1]
                states[i] = k
        return found


def _failure(stop: str) -> list[int]:
    """fail[k]: length of the longest proper suffix of stop[: k + 1] that is also its prefix.

    >>> _failure("abab")
    [0, 0, 1, 2]
    """
    fail = [0] * len(stop)
    k = 0
    for i in range(1, len(stop)):
        while k and stop[k] != stop[i]:
            k = fail[k - 1]
        if stop[k] == stop[i]:
            k += 1
        fail[i] = k
    return fail
