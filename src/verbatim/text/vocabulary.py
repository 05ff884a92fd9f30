"""Vocabulary: what gguf_vocab.py and hf_vocab.py read from a model's files and tokenizer.py uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

SPACE = "\u2581"  # how SentencePiece spells a space
# Ends of a turn that a model file may know only as a vocabulary entry. They end an answer wherever they are control tokens.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
)


@dataclass(frozen=True)
class Vocabulary:
    """Everything that was read from a model's files, before any of it is used. Made by gguf_vocab.py and hf_vocab.py."""

    tokens: Sequence[str]  # by id; "" where an id has no token
    plain: Any  # tokenizers.Tokenizer that knows no control token
    special: Any  # the same model, with the control tokens
    to_bytes: Callable[
        [str], bytes
    ]  # of an ordinary token; control and added tokens are literal text
    control: Mapping[str, int]
    added: Mapping[int, AddedToken]  # control and user-defined tokens with their matching rules
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()  # put before every prompt
    suffix: tuple[int, ...] = ()  # put after it
    byte_level: bool = True  # user-defined tokens are literal text; in SentencePiece they spell spaces like all others
    space_prefix: bool = (
        False  # a space is put before the first word, and taken away again when decoding
    )
    continued: Any = (
        None  # `plain` for text that does not begin the prompt, where that makes a difference
    )
    extra: Mapping[str, str] = field(
        default_factory=dict
    )  # further named special tokens, for chat templates


def _byte_alphabet() -> dict[str, int]:
    """The 256 visible characters that byte-level BPE writes bytes with: printable Latin-1 stands for itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in visible}
    hidden = [b for b in range(256) if chr(b) not in table]
    table.update({chr(0x100 + i): b for i, b in enumerate(hidden)})
    return table


BYTE_ALPHABET = _byte_alphabet()


def byte_level_bytes(text: str) -> bytes:
    """A byte-level token's bytes; a token with a character outside the alphabet is literal text, as the library has it."""
    try:
        return bytes([BYTE_ALPHABET[c] for c in text])
    except KeyError:
        return text.encode("utf-8", errors="replace")
