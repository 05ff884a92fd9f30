"""Checked reads of a GGUF file's tokenizer keys. In: the file's metadata and a key without its
prefix. Out: a value of the named type, or None where the key is missing; a ModelError otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.base.errors import ModelError

K = "tokenizer.ggml."


class TokenizerKeys:
    """The `tokenizer.ggml.…` keys of one file."""

    def __init__(self, metadata: Mapping[str, object], file: str | None) -> None:
        self.meta = metadata
        self.file = file
        self.tokens: list[str] = []  # set once read: an id outside it is an error

    def wrong(self, message: str) -> ModelError:
        return ModelError(message, file=self.file)

    def token_id(self, name: str) -> int | None:
        value = self.value(f"{name}_token_id", int)
        if value is None:
            return None
        if value == 0xFFFFFFFF or value == -1:
            return None  # some writers encode "none" this way
        if not 0 <= value < len(self.tokens):
            raise self.wrong(
                f"tokenizer.ggml.{name}_token_id is {value}, "
                f"outside the vocabulary of {len(self.tokens)}"
            )
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.value(name, bool)
        return default if value is None else bool(value)

    def value(self, name: str, kind: type) -> Any:
        value = self.meta.get(K + name)
        if value is not None and (
            not isinstance(value, kind) or (kind is int and isinstance(value, bool))
        ):
            raise self.wrong(f"{K}{name} is {type(value).__name__}, not {kind.__name__}")
        return value

    def array(self, name: str, kind: type) -> list[Any]:
        """An array of one type, as a list. Number arrays may be NumPy arrays."""
        value = self.meta.get(K + name)
        if value is None:
            return []
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise self.wrong(f"{K}{name} is {type(value).__name__}, not an array")
        allowed: set[type] = {float, int} if kind is float else {kind}
        other = set(map(type, value)) - allowed
        if other:
            raise self.wrong(
                f"{K}{name} holds {min(t.__name__ for t in other)}, not {kind.__name__}"
            )
        return list(value)
