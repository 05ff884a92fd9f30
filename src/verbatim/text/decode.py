"""Token ids become text. In: one token id at a time. Out: text made of whole characters.

A token is bytes, and a character may be spread over several tokens. Bytes wait here until their character is whole; bytes
that can never become one turn into U+FFFD, exactly where `bytes.decode("utf-8", errors="replace")` of the whole would put
it. So the pieces of a stream join to the text of the whole answer, and U+FFFD never appears for a character that was merely late.

An answer that ends inside a character (max_tokens cut it, a reader cancelled it) simply ends before that character: its text holds
whole characters only, its token ids hold every byte. Nobody wrote the mark that decoding the ids by themselves would show there.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

_UTF8 = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """What decoding needs of a tokenizer."""

    def token_bytes(self, token: int) -> bytes: ...
    def is_control(self, token: int) -> bool: ...


class TextDecoder:
    """The text of one sequence, piece by piece.

    With `skip_special`, control tokens leave no text. `start` is for tokenizers that put a space before the first word
    (`space_prefix`): a text decoded from its very beginning loses that space again. The default is a continuation,
    where a leading space is the model's own and stays.
    """

    __slots__ = ("_skip", "_strip", "_tokenizer", "_utf8")

    def __init__(
        self, tokenizer: TokenBytes, skip_special: bool = True, *, start: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._strip = start and bool(getattr(tokenizer, "space_prefix", False))
        self._utf8 = _UTF8("replace")

    def push(self, token: int) -> str:
        if self._skip and self._tokenizer.is_control(token):
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._strip and data and not self._tokenizer.is_control(token):
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """These ids are all there is, and an unfinished character at their end becomes U+FFFD. Answers do without it: see above."""
        return self._utf8.decode(b"", True)


def decode_all(
    tokenizer: TokenBytes, ids: Iterable[int], skip_special: bool = True, *, start: bool = False
) -> str:
    """The whole text at once; equal to joining the pieces of a TextDecoder."""
    decoder = TextDecoder(tokenizer, skip_special, start=start)
    pieces = [decoder.push(token) for token in ids]
    return "".join(pieces) + decoder.flush()
