"""Typed control tokens: one scan finds the first one that split() finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from verbatim.text.control_tokens import ControlFinder

PIECES = [*"<|x>!", "<|a|>", "<|a|", "<|ab|>", "word", "!!", " ", "é"]


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_the_first_typed_control_token_is_the_first_split(text: str) -> None:
    """Among tokens of one character, tokens with a common prefix, and one that matches whole
    words only."""
    crowded = AddedToken("word", single_word=True)
    finder = ControlFinder({"<|a|>": 0, "<|ab|>": 1, "!": 2, "!!": 3, "word": 4}, {4: crowded})
    assert finder.first(text) == next(
        (part for part, control in finder.split(text) if control is not None), None
    )
    assert ControlFinder({}).first(text) is None
