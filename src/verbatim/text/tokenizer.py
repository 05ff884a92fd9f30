"""Tokenizer. In: a string. Out: a list of token ids; for any id, its bytes.

The `tokenizers` library does the merging. Two of its encoders share one vocabulary: a plain one,
and one that also turns the literal text of control tokens into their ids. User text goes through
the plain one, so a typed "<|im_end|>" stays ordinary text tokens; only `special=True` uses the
other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import ModelError, RequestError
from verbatim.base.migration_hints import attribute
from verbatim.text import gguf_vocab, hf_vocab
from verbatim.text.control_tokens import ControlFinder
from verbatim.text.decode import decode_all
from verbatim.text.vocabulary import BYTE_ALPHABET, PairTemplate, Vocabulary

MAX_LOST = 16  # characters that `lost` reports at most; enough for a warning


class Tokenizer:
    """Text to ids and back. `encode` adds no token; `encode_prompt` adds the model's prefix
    (BOS)."""

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

    if not TYPE_CHECKING:  # a type checker reports unknown names itself

        def __getattr__(self, name: str) -> object:
            raise attribute(self, name, "tokenizer")

    def fit(self, size: int) -> None:
        """Set the number of ids to the rows of the model's embedding. Most models pad it: ids
        beyond the vocabulary decode to no text. A few have fewer rows than tokens: a text that
        needs a token beyond them is rejected."""
        self._limit = size if size < len(self._vocab.tokens) else None
        self.vocab_size = size
        self.eos_ids = tuple(i for i in self.eos_ids if i < size)

    # -------------------------------------------------------------------------------- encode

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of the text alone. With `special`, literal control tokens become control ids.

        A vocabulary may lack tokens for rare bytes (the default model's has none for U+0006). As in
        the published tokenizers, such bytes are dropped, or become the unknown token if there is
        one; `lost` reports them.
        """
        _check_text(text)
        ids = _ids(self._vocab.special, text) if special else self._plain(text, self._vocab.plain)
        return ids if self._limit is None else self._check_within(ids, self._limit)

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        """`encode`, plus the model's prompt prefix (BOS, or nothing) and suffix.

        A prompt that already starts with the prefix (`special=True`, a rendered chat template) does
        not get it twice.
        """
        ids = self.encode(text, special=special)
        prefix = self._vocab.prefix
        if not (prefix and tuple(ids[: len(prefix)]) == prefix):
            ids = [*prefix, *ids]
        return [*ids, *self._vocab.suffix]

    def truncated(self, ids: list[int], limit: int) -> list[int]:
        """The first tokens of `encode_prompt`'s ids and the model's suffix, `limit` in all."""
        suffix = self._vocab.suffix
        return [*ids[: limit - len(suffix)], *suffix] if len(ids) > limit else ids

    @property
    def pair(self) -> PairTemplate | None:
        """How two texts become one input of a cross-encoder, where the file says."""
        return self._vocab.pair

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> list[int]:
        """Ids of two texts in one input. With `limit` the longer text is cut first."""
        pair = self._vocab.pair
        assert pair is not None, "the caller checks that there is a pair template"
        texts = [self.encode(first), self.encode(second)]
        if limit is not None:
            lengths = pair.lengths(len(texts[0]), len(texts[1]), limit)
            texts = [ids[:length] for ids, length in zip(texts, lengths, strict=True)]
        return [*pair.before, *texts[0], *pair.between, *texts[1], *pair.after]

    def encode_parts(self, parts: Iterable[tuple[str, int | None]]) -> list[int]:
        """Ids of a text that is split at its control tokens: (text, None) is plain text, (_, id) a
        control token."""
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
        return ids if self._limit is None else self._check_within(ids, self._limit)

    def _check_within(self, ids: list[int], limit: int) -> list[int]:
        beyond = next((i for i in ids if i >= limit), None)
        if beyond is not None:
            text = self._vocab.tokens[beyond]
            raise RequestError(
                f"the text needs the token {text!r} ({beyond}), and the model has only {limit}",
                param="prompt",
            )
        return ids

    def split_control(self, text: str) -> list[tuple[str, int | None]]:
        """Split a text at its literal control tokens, by the rules of `encode(special=True)`."""
        return self.finder.split(text)

    @cached_property
    def finder(self) -> ControlFinder:
        return ControlFinder(self.control_tokens, self._vocab.added)

    def _plain(self, text: str, encoder: object) -> list[int]:
        ids = _ids(encoder, text)
        if self._control_ids.isdisjoint(ids):
            return ids
        return self._without_control(text, ids, encoder)

    def _without_control(self, text: str, ids: list[int], encoder: object) -> list[int]:
        """In some vocabularies merging can produce a control token. Encode such text in two halves.

        The unknown token is exempt: it stands for text that the vocabulary cannot encode.
        """
        bad = {self._vocab.tokens[i] for i in ids if i in self._control_ids and i != self.unk_id}
        if not bad:
            return ids
        pattern = re.compile("|".join(re.escape(t) for t in sorted(bad, key=len, reverse=True)))
        out: list[int] = []
        for piece in _split_matches(text, pattern):
            out += _ids(encoder, piece)
        if not self._control_ids.isdisjoint(set(out) - {self.unk_id}):
            raise RequestError(
                f"the vocabulary cannot write this text without the control token {min(bad)!r}",
                param="prompt",
            )
        return out

    def lost(self, text: str) -> str:
        """Characters of the text that the vocabulary cannot encode, each once, at most MAX_LOST.

        Only byte-level vocabularies may lack a token for a byte; SentencePiece has byte
        fallback."""
        missing = self._missing_bytes
        if not missing or len(raw := text.encode("utf-8", "surrogatepass")) == len(
            raw.translate(None, missing)
        ):
            return ""
        suspects = (
            c
            for c in dict.fromkeys(text)
            if not set(missing).isdisjoint(c.encode("utf-8", "surrogatepass"))
        )
        return "".join(c for c in islice(suspects, MAX_LOST) if not self._can_encode(c))

    def _can_encode(self, character: str) -> bool:
        ids = _ids(self._vocab.plain, character)
        return b"".join(self.token_bytes(i) for i in ids) == character.encode("utf-8")

    @cached_property
    def _missing_bytes(self) -> bytes:
        """Bytes without their own token. Merging starts from single bytes, so they are lost."""
        if not self._vocab.byte_level:
            return b""
        return bytes(
            byte
            for sign, byte in BYTE_ALPHABET.items()
            if self._vocab.plain.token_to_id(sign) is None
        )

    # -------------------------------------------------------------------------------- decode

    def token_bytes(self, token: int) -> bytes:
        """Bytes of an id; for a control token, its literal text. May be part of a character."""
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
        """Text of a whole sequence: `decode(encode(text)) == text` if the vocabulary can encode it.

        Removes the first space that a `space_prefix` tokenizer adds. Continuations of a prompt use
        TextDecoder, which keeps it.
        """
        return decode_all(self, ids, skip_special, start=True)

    def token_text(self, token: int) -> str:
        """The vocabulary's own spelling of an id, for reports."""
        return self._vocab.tokens[token] if 0 <= token < len(self._vocab.tokens) else ""

    def find(self, text: str) -> int | None:
        """The id whose vocabulary spelling is `text`, if there is one."""
        found: int | None = self._vocab.special.token_to_id(text)
        return found

    @property
    def special_tokens(self) -> dict[str, str]:
        """Text of the special tokens, by the names that chat templates use (bos_token, …)."""
        named = {
            "bos_token": self.bos_id,
            "eos_token": self.eos_id,
            "unk_token": self.unk_id,
            "pad_token": self.pad_id,
        }
        texts = {name: self._vocab.tokens[i] for name, i in named.items() if i is not None}
        return {**self._vocab.extra, **texts}


def _ids(encoder: Any, text: str) -> list[int]:
    """Encode with the library. Where the model file's rules fail on a text (a runaway pattern, a
    missing unknown token), the library raises or panics; a Rust panic is no Exception. Both are
    faults of the model file."""
    try:
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise ModelError(
            f"the model's tokenizer fails on a text of {len(text)} characters: {str(error)[:200]}"
        ) from error


def _split_matches(text: str, pattern: re.Pattern[str]) -> Iterable[str]:
    at = 0
    for match in pattern.finditer(text):
        cut = match.start() + max(1, len(match.group()) // 2)
        yield text[at:cut]
        at = cut
    yield text[at:]


def _check_text(text: str) -> None:
    """A lone surrogate is half of a UTF-16 pair: it has no UTF-8 encoding, so no tokens."""
    if not isinstance(text, str):
        raise RequestError(f"a prompt is text, not {type(text).__name__}", param="prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}; it is not valid Unicode",
            param="prompt",
        ) from None


def from_gguf(metadata: Mapping[str, object], *, file: str | None = None) -> Tokenizer:
    """Tokenizer from a GGUF file's metadata."""
    return Tokenizer(gguf_vocab.read_vocabulary(metadata, file=file))


def from_directory(path: str | Path) -> Tokenizer:
    """Tokenizer from a model directory: tokenizer.json, and tokenizer_config.json if present."""
    return Tokenizer(hf_vocab.read_vocabulary(Path(path)))
