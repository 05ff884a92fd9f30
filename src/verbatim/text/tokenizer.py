"""Text becomes token ids, and ids bytes. In: a string. Out: a list of ids; for any id, its bytes.

The merging itself is the `tokenizers` library's. Two of its objects share one vocabulary here: one that knows only plain
text, one that also turns the literal text of control tokens into their ids. User text goes through the first, so that a
typed "<|im_end|>" is seven ordinary tokens; only `special=True` uses the second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from verbatim.base.errors import ModelError, RequestError
from verbatim.text import gguf_vocab, hf_vocab
from verbatim.text.control_tokens import ControlFinder
from verbatim.text.decode import decode_all
from verbatim.text.vocabulary import BYTE_ALPHABET, Vocabulary

LOST = 16  # characters that are named at most


class Tokenizer:
    """Text <-> ids. `encode` adds nothing; `encode_prompt` applies the model's rule for a beginning-of-sequence token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        v = self._vocab = vocabulary
        self.vocab_size = len(v.tokens)
        self.bos_id, self.eos_id, self.unk_id, self.pad_id = v.bos_id, v.eos_id, v.unk_id, v.pad_id
        self.eos_ids = v.eos_ids
        self.control_tokens: dict[str, int] = dict(v.control)
        self.space_prefix = v.space_prefix
        self._control_ids = frozenset(v.control.values())
        self._bytes: dict[int, bytes] = {}
        self._limit: int | None = None

    def fit(self, size: int) -> None:
        """Take the model's own number of ids. Models pad their embedding: ids beyond the vocabulary stand for no text. A few have
        fewer rows than tokens: a text that needs one of the tokens beyond is refused, because the model cannot read it."""
        self._limit = size if size < len(self._vocab.tokens) else None
        self.vocab_size = size
        self.eos_ids = tuple(i for i in self.eos_ids if i < size)

    # ------------------------------------------------------------------------------------------------------- to ids

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of the text, and nothing but the text. With `special`, literal control tokens become control ids.

        A vocabulary may have no token for some rare bytes (the default model's has none for U+0006, for instance). As in the
        published tokenizers, such bytes are then left out, or become the unknown token where there is one; `lost` tells which.
        """
        _check_text(text)
        ids = _ids(self._vocab.special, text) if special else self._plain(text, self._vocab.plain)
        return ids if self._limit is None else self._within(ids, self._limit)

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        """As `encode`, with what the model wants around every prompt (usually one token before it, or nothing).

        A prompt whose own text begins with that token (`special=True`, a rendered chat template) does not get a second one.
        """
        ids = self.encode(text, special=special)
        prefix = self._vocab.prefix
        if not (prefix and tuple(ids[: len(prefix)]) == prefix):
            ids = [*prefix, *ids]
        return [*ids, *self._vocab.suffix]

    def encode_parts(self, parts: Iterable[tuple[str, int | None]]) -> list[int]:
        """Ids of a text that was already cut at its control tokens: (text, None) is plain, (_, id) is that control token."""
        ids: list[int] = []
        first = True
        for text, control in parts:
            if control is not None:
                ids.append(control)
            elif text:
                _check_text(text)
                ids += self._plain(
                    text, self._vocab.plain if first else self._vocab.continued or self._vocab.plain
                )
            first = False
        return ids if self._limit is None else self._within(ids, self._limit)

    def _within(self, ids: list[int], limit: int) -> list[int]:
        beyond = next((i for i in ids if i >= limit), None)
        if beyond is not None:
            text = self._vocab.tokens[beyond]
            raise RequestError(
                f"the text needs the token {text!r} ({beyond}), and the model has only {limit}",
                param="prompt",
            )
        return ids

    def split_control(self, text: str) -> list[tuple[str, int | None]]:
        """Cut a text at the literal control tokens in it, by the same rules as `encode(special=True)`."""
        return self.finder.split(text)

    @cached_property
    def finder(self) -> ControlFinder:
        return ControlFinder(self.control_tokens, self._vocab.added)

    def _plain(self, text: str, encoder: Any) -> list[int]:
        ids = _ids(encoder, text)
        if self._control_ids.isdisjoint(ids):
            return ids
        return self._without_control(text, ids, encoder)

    def _without_control(self, text: str, ids: list[int], encoder: Any) -> list[int]:
        """Some vocabularies hold a control token's text as an ordinary word, reachable by merging. Cut those words in two.

        The unknown token is exempt: it stands for text that the vocabulary cannot write.
        """
        bad = {self._vocab.tokens[i] for i in ids if i in self._control_ids and i != self.unk_id}
        if not bad:
            return ids
        pattern = re.compile("|".join(re.escape(t) for t in sorted(bad, key=len, reverse=True)))
        out: list[int] = []
        for piece in _halves(text, pattern):
            out += _ids(encoder, piece)
        if not self._control_ids.isdisjoint(set(out) - {self.unk_id}):
            raise RequestError(
                f"the vocabulary cannot write this text without the control token {min(bad)!r}",
                param="prompt",
            )
        return out

    def lost(self, text: str) -> str:
        """Characters of the text that the vocabulary cannot write, each once (a text full of them: the first LOST).

        Byte-level vocabularies are looked at, some of which lack a token for a byte; SentencePiece spells any byte."""
        lacking = self._lacking
        if not lacking or len(raw := text.encode("utf-8", "surrogatepass")) == len(
            raw.translate(None, lacking)
        ):
            return ""
        suspects = (
            c
            for c in dict.fromkeys(text)
            if not set(lacking).isdisjoint(c.encode("utf-8", "surrogatepass"))
        )
        return "".join(c for c in islice(suspects, LOST) if not self._writes(c))

    def _writes(self, character: str) -> bool:
        ids = _ids(self._vocab.plain, character)
        return b"".join(self.token_bytes(i) for i in ids) == character.encode("utf-8")

    @cached_property
    def _lacking(self) -> bytes:
        """Bytes without a token of their own: merging begins with single bytes, so a text with such a byte loses it."""
        if not self._vocab.byte_level:
            return b""
        return bytes(
            byte
            for sign, byte in BYTE_ALPHABET.items()
            if self._vocab.plain.token_to_id(sign) is None
        )

    # ------------------------------------------------------------------------------------------------------ to bytes

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this id stands for; for a control token, its literal text. Half a character is possible."""
        found = self._bytes.get(token)
        if found is None:
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"token id {token} is outside the vocabulary (0 to {self.vocab_size - 1})"
                )
            text = self.token_text(token)
            literal = token in self._control_ids or (
                self._vocab.byte_level and token in self._vocab.added
            )
            found = self._bytes[token] = (
                text.encode("utf-8") if literal else self._vocab.to_bytes(text)
            )
        return found

    def is_control(self, token: int) -> bool:
        return token in self._control_ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of a whole sequence from its beginning: `decode(encode(text)) == text` where the vocabulary can write it.

        For tokenizers with `space_prefix`, that first space is taken away again. The continuation of a prompt goes
        through TextDecoder instead, which keeps it.
        """
        return decode_all(self, ids, skip_special, start=True)

    def token_text(self, token: int) -> str:
        """For reading and reports: the vocabulary's own spelling of an id."""
        return self._vocab.tokens[token] if 0 <= token < len(self._vocab.tokens) else ""

    def find(self, text: str) -> int | None:
        """The id whose vocabulary spelling is `text`, if there is one."""
        found: int | None = self._vocab.special.token_to_id(text)
        return found

    @property
    def special_tokens(self) -> dict[str, str]:
        """Names as chat templates use them (bos_token, eos_token, …) with their text."""
        named = {
            "bos_token": self.bos_id,
            "eos_token": self.eos_id,
            "unk_token": self.unk_id,
            "pad_token": self.pad_id,
        }
        texts = {name: self._vocab.tokens[i] for name, i in named.items() if i is not None}
        return {**self._vocab.extra, **texts}


def _ids(encoder: Any, text: str) -> list[int]:
    """What the library makes of a text. Where a file's own rules fail on it (a pattern without end, an unknown token that is
    missing), the library raises, or panics, which is no Exception; both are the model's fault."""
    try:
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise ModelError(
            f"the model's tokenizer fails on a text of {len(text)} characters: {str(error)[:200]}"
        ) from error


def _halves(text: str, pattern: re.Pattern[str]) -> Iterable[str]:
    at = 0
    for match in pattern.finditer(text):
        cut = match.start() + max(1, len(match.group()) // 2)
        yield text[at:cut]
        at = cut
    yield text[at:]


def _check_text(text: str) -> None:
    """A lone surrogate is half a character of UTF-16: it has no UTF-8, so no bytes and no tokens."""
    if not isinstance(text, str):
        raise RequestError(f"a prompt is text, not {type(text).__name__}", param="prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; it is not valid Unicode",
            param="prompt",
        ) from None


def from_gguf(metadata: Mapping[str, Any], *, file: str | None = None) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes."""
    return Tokenizer(gguf_vocab.read_vocabulary(metadata, file=file))


def from_directory(path: str | Path) -> Tokenizer:
    """The tokenizer in a model directory: tokenizer.json, with tokenizer_config.json where there is one."""
    return Tokenizer(hf_vocab.read_vocabulary(Path(path)))
