"""Stop strings. In: pieces of text in order. Out: text that can no longer be part of a stop string, and which stop ended it.

Each stop string runs its own Knuth-Morris-Pratt automaton, so the work is one step for each stop and character, whatever
the text, and a match is found across any boundary between pieces. What is held back is exactly the longest suffix of
the text so far that is the beginning of some stop string: nothing more waits, and no part of a stop ever leaves.

Which stop wins: the one that is complete first, that is, at the earliest character; of several that end at the same
character, the longest (which began first). Text before its beginning is kept, text after its end never existed.

>>> matcher = StopMatcher(["\\n\\n", "END"])
>>> matcher.push("the E"), matcher.push("ast\\n"), matcher.push("\\nmore")
(('the ', None), ('East', None), ('', '\\n\\n'))
"""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Holds back what could become a stop string. With `include`, the stop itself is the end of the text."""

    __slots__ = ("_fails", "_firsts", "_held", "_include", "_states", "_stops", "matched")

    def __init__(self, stops: Iterable[str] = (), include: bool = False) -> None:
        self._stops = list(dict.fromkeys(s for s in stops if s))
        self._fails = [_failure(s) for s in self._stops]
        self._states = [0] * len(
            self._stops
        )  # how many characters of each stop the text so far ends with
        self._firsts = frozenset(s[0] for s in self._stops)
        self._held = ""
        self._include = include
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """More text. Returns what may leave now, and the stop string if one is complete: then nothing comes after it."""
        if self.matched is not None:
            return "", self.matched
        if not self._held and self._firsts.isdisjoint(text):
            return text, None  # the common case: no stop has begun, none begins here
        buffer = self._held + text
        for at in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[at])
            if stop is not None:
                self.matched, self._held = stop, ""
                end = at + 1
                return buffer[: end if self._include else end - len(stop)], stop
        keep = max(self._states)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """The text is over: what was held back is no stop string after all, and leaves."""
        rest, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return rest

    def _advance(self, char: str) -> str | None:
        """One character through every automaton; the longest stop that ends with it, if any."""
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
