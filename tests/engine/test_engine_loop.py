"""The loop detector against a definition that tries every period and every length."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim.engine.loop_detector import (
    INTERVAL,
    MAX_NGRAM,
    MIN_REPEATS,
    MIN_TOKENS,
    LoopDetector,
    loop_length,
)


def by_definition(tokens: list[int]) -> int:
    """The shortest n such that the last max(64, 4 n) tokens repeat with period n."""
    for n in range(1, MAX_NGRAM + 1):
        size = max(MIN_TOKENS, MIN_REPEATS * n)
        tail = tokens[-size:]
        if len(tail) == size and all(a == b for a, b in zip(tail, tail[n:], strict=False)):
            return n
    return 0


@settings(max_examples=300)
@given(
    head=st.lists(st.integers(0, 3), max_size=30),
    gram=st.lists(st.integers(0, 3), min_size=1, max_size=70),
    length=st.integers(0, 320),
    tail=st.lists(st.integers(0, 3), max_size=2),
)
def test_loop_length_agrees_with_the_definition(
    head: list[int], gram: list[int], length: int, tail: list[int]
) -> None:
    tokens = head + (gram * 320)[:length] + tail
    assert loop_length(tokens) == by_definition(tokens)


def test_what_counts_as_a_loop() -> None:
    assert loop_length([5] * 63) == 0
    assert loop_length([5] * 64) == 1
    assert loop_length(list(range(50)) * 4) == 50
    assert loop_length(list(range(50)) * 3 + list(range(49))) == 0
    assert loop_length(list(range(65)) * 9) == 0
    assert loop_length([1, 2] * 40 + [3]) == 0


def test_the_detector_checks_at_fixed_positions() -> None:
    detector, text = LoopDetector(), [7] * 200
    seen = [i for i in range(200) if detector.look(text[: i + 1])]
    assert seen == [i for i in range(200) if (i + 1) % INTERVAL == 0 and i + 1 >= MIN_TOKENS]
    assert detector.length == 1
    for token in range(40):
        text.append(token)
        detector.look(text)
    assert detector.length == 1  # what was seen stays in the report
