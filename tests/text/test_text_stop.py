"""Stop strings against a brute-force definition: the first complete stop wins, then the longest;
only a possible prefix of a stop is held back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from verbatim.text.stop import StopMatcher


def whole(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The specification: try every end, take the longest stop there."""
    for end in range(1, len(text) + 1):
        here = [s for s in stops if text[:end].endswith(s)]
        if here:
            stop = max(here, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def held(text: str, stops: list[str]) -> int:
    return max((k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])), default=0)


def pieces_of(text: str, rng: random.Random) -> list[str]:
    out, at = [], 0
    while at < len(text):
        size = rng.choice([0, 1, 1, 2, 3, 7])
        out.append(text[at : at + size])
        at += size
    return out


def test_random_texts_match_brute_force() -> None:
    rng = random.Random(20)
    matched = 0
    for _ in range(2_000):
        alphabet = rng.choice(["ab", "abc", "aé😀", "xyz\n"])
        stops = [
            "".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))
        ]
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 30)))
        include = rng.random() < 0.3
        want, which = whole(text, stops, include)
        matcher = StopMatcher(stops, include)
        out, seen, found = "", "", None
        for piece in pieces_of(text, rng):
            safe, found = matcher.push(piece)
            out += safe
            seen += piece
            assert want.startswith(out), "text left that is not part of the answer"
            if found:
                break
            assert out == seen[: len(seen) - held(seen, stops)], "held back too much or too little"
        if not found:
            out += matcher.flush()
        assert (out, found) == (want, which)
        matched += found is not None
    assert matched > 600  # the texts do exercise matches


def test_a_stop_string_across_pieces_and_a_partial_match() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == ("Hello", None)
    assert matcher.push("\nUs") == ("", None)
    assert matcher.push("ing") == ("\n\nUsing", None)
    assert matcher.push("\n\nUser") == ("", None)
    assert matcher.push(": more") == ("", "\n\nUser:")
    assert matcher.push("anything") == ("", "\n\nUser:")
    assert matcher.flush() == ""


def test_earliest_end_wins_then_the_longest() -> None:
    assert StopMatcher(["bcd", "c"]).push("abcd") == ("ab", "c")  # c is complete before bcd
    assert StopMatcher(["d", "bcd"]).push("abcd") == ("a", "bcd")  # both end at d: the longer one
    assert StopMatcher(["d", "bcd"], include=True).push("abcdef") == ("abcd", "bcd")


def test_without_stops_text_passes_untouched() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.push("") == ("", None)
    assert matcher.flush() == ""


def test_an_overlap_inside_one_stop_is_found() -> None:
    matcher = StopMatcher(["aab"])
    assert "".join(matcher.push(c)[0] for c in "aaa") == "a"
    assert matcher.push("b") == ("", "aab")


class Counted(str):
    """A stop string that counts the accesses to its characters."""

    looks = 0

    def __getitem__(self, at: Any) -> str:
        Counted.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("text", ["a" * 5_000, ("a" * 1023 + "c") * 5])
def test_sixty_four_long_stops_stay_linear(text: str) -> None:
    """The worst case of a naive matcher. A Knuth-Morris-Pratt automaton reads a stop at most
    three times per character of text (the first one, the failures on average, the match); a
    naive one a thousand times."""
    stops = [Counted("a" * 1000 + f"{i:02d}" + "b" * 22) for i in range(64)]
    matcher = StopMatcher(stops)
    Counted.looks = 0
    out = (
        "".join(matcher.push(text[i : i + 4])[0] for i in range(0, len(text), 4)) + matcher.flush()
    )
    assert out == text
    assert Counted.looks <= 3 * len(text) * len(stops)
