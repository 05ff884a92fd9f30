"""Incremental detokenizer. In: one token id at a time. Out: text made of whole characters.

A token is bytes, and a character may span several tokens. Bytes are buffered until their character
is complete. Invalid bytes become U+FFFD exactly where `bytes.decode("utf-8", errors="replace")` of
the whole output puts it, so the pieces of a stream concatenate to the text of the whole output.

An output that ends inside a character (at max_tokens, or cancelled) ends before that character: the
text holds whole characters, the token ids hold every byte.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

_UTF8 = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """The tokenizer interface of the detokenizer."""

    def token_bytes(self, token: int) -> bytes: ...
    def is_control(self, token: int) -> bool: ...


class TextDecoder:
    """Detokenizer of one sequence.

    With `skip_special`, control tokens produce no text. `start`: the ids are a text from its very
    beginning, so the space that a `space_prefix` tokenizer adds before the first word is removed.
    The default is a continuation, where the model wrote a leading space itself and it stays.
    `visible`: control tokens that produce their text in any case.
    """

    __slots__ = ("_skip", "_strip", "_tokenizer", "_utf8", "_visible")

    def __init__(
        self,
        tokenizer: TokenBytes,
        skip_special: bool = True,
        *,
        start: bool = False,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self._visible = visible
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._strip = start and bool(getattr(tokenizer, "space_prefix", False))
        self._utf8 = _UTF8("replace")

    def push(self, token: int) -> str:
        if self._skip and self._tokenizer.is_control(token) and token not in self._visible:
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._strip and data and not self._tokenizer.is_control(token):
            self._strip = False
            data = data.removeprefix(b" ")
        if data.isascii() and not self._utf8.getstate()[0]:
            return data.decode()  # whole characters, and none has started: the common case
        return self._utf8.decode(data)

    def flush(self) -> str:
        """End of input: an incomplete character becomes U+FFFD. Completions do not call this."""
        return self._utf8.decode(b"", True)


def decode_all(
    tokenizer: TokenBytes, ids: Iterable[int], skip_special: bool = True, *, start: bool = False
) -> str:
    """The whole text at once; equals the concatenated pieces of a TextDecoder."""
    decoder = TextDecoder(tokenizer, skip_special, start=start)
    pieces = [decoder.push(token) for token in ids]
    return "".join(pieces) + decoder.flush()
