"""Typed control tokens: found by one scan, where the cutter would find them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from verbatim.text.control_tokens import ControlFinder

PIECES = [*"<|x>!", "<|a|>", "<|a|", "<|ab|>", "word", "!!", " ", "é"]


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_the_first_typed_control_token_is_the_first_cut(text: str) -> None:
    """Among tokens of one character, of one beginning, and one that counts only as a word of its own."""
    crowded = AddedToken("word", single_word=True)
    finder = ControlFinder({"<|a|>": 0, "<|ab|>": 1, "!": 2, "!!": 3, "word": 4}, {4: crowded})
    assert finder.first(text) == next(
        (part for part, control in finder.split(text) if control is not None), None
    )
    assert ControlFinder({}).first(text) is None
