"""Streamed text equals the whole text, and U+FFFD appears only for invalid bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verbatim.text.decode import TextDecoder, decode_all
from verbatim.text.tokenizer import Tokenizer


class Bytes:
    """Token i is byte i; 256 is a control token."""

    space_prefix = False

    def token_bytes(self, token: int) -> bytes:
        return b"<|end|>" if token == 256 else bytes([token])

    def is_control(self, token: int) -> bool:
        return token == 256


@given(st.lists(st.integers(0, 256), max_size=40), st.booleans())
def test_bytes_of_any_kind_decode_as_the_whole_does(ids: list[int], skip: bool) -> None:
    tokenizer = Bytes()
    want = b"".join(tokenizer.token_bytes(i) for i in ids if not (skip and i == 256)).decode(
        "utf-8", errors="replace"
    )
    decoder = TextDecoder(tokenizer, skip)
    assert "".join(decoder.push(i) for i in ids) + decoder.flush() == want
    assert decode_all(tokenizer, ids, skip) == want


@given(st.text(max_size=30))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    decoder = TextDecoder(Bytes())
    out = ""
    for byte in text.encode("utf-8"):
        out += decoder.push(byte)
        assert text.startswith(out)
    assert decoder.flush() == ""
    assert out == text


@pytest.mark.model
def test_random_token_sequences(default_tokenizer: Tokenizer) -> None:
    """Half from all ids, half from ids that are partial characters, where streams usually break."""
    rng = random.Random(6)
    tokenizer = default_tokenizer
    broken = [i for i in range(tokenizer.vocab_size) if not _whole(tokenizer.token_bytes(i))]
    assert len(broken) > 100
    for turn in range(2_000):
        ids = rng.choices(broken if turn % 2 else range(tokenizer.vocab_size), k=rng.randint(1, 24))
        skip = rng.random() < 0.5
        data = b"".join(
            tokenizer.token_bytes(i) for i in ids if not (skip and tokenizer.is_control(i))
        )
        want = data.decode("utf-8", errors="replace")
        decoder = TextDecoder(tokenizer, skip)
        out = ""
        for i in ids:
            out += decoder.push(i)
            assert want.startswith(out)
        assert out + decoder.flush() == want


def test_a_skipped_control_token_does_not_break_a_character() -> None:
    decoder = TextDecoder(Bytes())
    data = "é".encode()
    assert (
        decoder.push(data[0]) + decoder.push(256) + decoder.push(data[1]) + decoder.flush() == "é"
    )


def test_one_space_before_the_first_word_is_removed() -> None:
    class Spaced(Bytes):
        space_prefix = True

        def token_bytes(self, token: int) -> bytes:
            return b"  a"

    assert decode_all(Spaced(), [0, 0], start=True) == " a  a"
    assert decode_all(Spaced(), [0, 0]) == "  a  a"


def _whole(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
