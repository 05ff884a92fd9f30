"""The loop detector: periods against a definition that tries every period and every length, and
outputs that repeat themselves without a period."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim.base.records import STALE_LOOP
from verbatim.engine.loop_detector import (
    INTERVAL,
    MAX_NGRAM,
    MIN_REPEATS,
    MIN_TOKENS,
    STALE_INTERVAL,
    LoopDetector,
    is_stale,
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


def rows(values: range, count: int, counted: bool = False) -> list[int]:
    """Rows of 22 equal tokens and one of the values, as a JSON object whose members return; with a
    number of its own per row if counted."""
    r = random.Random(0)
    return [
        token
        for row in range(count)
        for token in (*range(22), r.choice(values), *([1000 + row] if counted else []))
    ]


def found_at(tokens: list[int]) -> int:
    """Tokens after which the detector stops an output without a period; 0: it does not."""
    detector = LoopDetector()
    for end in range(1, len(tokens) + 1):
        if detector.look(tokens[:end]):
            assert detector.length == STALE_LOOP
            return end
    return 0


def test_an_output_with_nothing_new_is_a_loop_without_a_period() -> None:
    end = found_at(rows(range(100, 104), 60))
    assert STALE_LOOP < end < 800
    assert end % STALE_INTERVAL == 0
    r = random.Random(0)
    paragraph = [r.randrange(80) for _ in range(100)]
    assert found_at(paragraph * 9), "a period that is too long for the other rule"
    page = [r.randrange(80) for _ in range(STALE_LOOP)]
    assert [is_stale(page * copies) for copies in (2, 3)] == [False, True], "twice before"


def test_an_output_with_something_new_per_row_is_no_loop() -> None:
    assert not found_at(rows(range(100, 104), 90, counted=True))
    assert not is_stale(rows(range(100, 900), 90)), "a name per row"
    r = random.Random(0)
    program = [r.randrange(60) for _ in range(600)]
    assert not is_stale(program * 2), "printed a second time"
    assert not is_stale([*program, *program[:300], 7, *program[300:]])
    assert not is_stale([r.choice((0, 1)) for _ in range(2000)]), "random digits"
