"""Vocabulary: the record that gguf_vocab.py and hf_vocab.py read from a model's files, and that
tokenizer.py uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

SPACE = "\u2581"  # SentencePiece's space
# End-of-turn tokens that a model file may hold without declaring them. Where they are control
# tokens, they end a completion.
END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>"),
    "<|tool_response>",  # Gemma 4 writes it behind a tool call
    *("<eos>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
)


def end_of_turn(control: Mapping[str, int]) -> list[int]:
    """The end-of-turn tokens among a model's control tokens. In the harmony format `<|end|>` ends a
    message, not the turn."""
    harmony = "<|channel|>" in control and "<|return|>" in control
    names = [name for name in END_OF_TURN if not (harmony and name == "<|end|>")]
    names += ["<|return|>", "<|call|>"] if harmony else []
    return [control[name] for name in names if name in control]


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """Token ids around the two texts of a pair: [CLS] query [SEP] document [SEP]."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    typed: bool  # tokens behind the first of `between` have token type 1

    def lengths(self, first: int, second: int, limit: int) -> tuple[int, int]:
        """Tokens of two texts that fit an input of `limit` tokens: the longer one is cut to the
        length of the shorter, then both alike ("longest first" of the `tokenizers` library)."""
        room = max(limit - len(self.before) - len(self.between) - len(self.after), 0)
        if first + second <= room:
            return first, second
        short = min(first, second)
        long = max(short, room - short)
        if short + long > room:
            short = room // 2
            long = short + room % 2
        return (long, short) if first > second else (short, long)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens, encoders and special ids of one model."""

    tokens: Sequence[str]  # by id; "" where an id has no token
    plain: Any  # tokenizers.Tokenizer without the control tokens
    special: Any  # the same with the control tokens
    to_bytes: Callable[[str], bytes]  # ordinary tokens only; control tokens are literal text
    control: Mapping[str, int]
    added: Mapping[int, AddedToken]  # control and user-defined tokens with their matching rules
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()  # ids before every prompt
    suffix: tuple[int, ...] = ()  # ids after every prompt
    # Byte-level BPE: user-defined tokens are literal text. In SentencePiece they use U+2581 too.
    byte_level: bool = True
    space_prefix: bool = False  # encoding adds a space before the first word, decoding removes it
    continued: Any = None  # `plain` for text after the start of a prompt, if it differs
    extra: Mapping[str, str] = field(default_factory=dict)  # more special tokens, for templates
    pair: PairTemplate | None = None  # how two texts become one input of a cross-encoder


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters to which byte-level BPE maps bytes: printable Latin-1 maps to itself, the
    rest to U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in visible}
    hidden = [b for b in range(256) if chr(b) not in table]
    table.update({chr(0x100 + i): b for i, b in enumerate(hidden)})
    return table


BYTE_ALPHABET = _byte_alphabet()


def byte_level_bytes(text: str) -> bytes:
    """Bytes of a byte-level token. A token with a character outside the alphabet is literal text,
    as in the library."""
    try:
        return bytes([BYTE_ALPHABET[c] for c in text])
    except KeyError:
        return text.encode("utf-8", errors="replace")
