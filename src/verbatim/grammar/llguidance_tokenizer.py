"""llguidance's view of a tokenizer: a trie over the vocabulary, built once per tokenizer.

In: a tokenizer of ours. Out: an llguidance.LLTokenizer. The library is an optional dependency
(extra `grammar`) and is imported on first use.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from verbatim.base.errors import UnsupportedError


class GrammarTokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...
    def token_bytes(self, token: int) -> bytes: ...
    def is_control(self, token: int) -> bool: ...
    def encode(self, text: str, *, special: bool = False) -> list[int]: ...


def import_llguidance(field: str) -> Any:
    """The library, imported on first use. UnsupportedError for `field` if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise not_installed(field, "llguidance") from None
    return llguidance


def not_installed(field: str, package: str) -> UnsupportedError:
    return UnsupportedError(
        field,
        f"structured output needs {package}, which is not installed; "
        "install the extra 'grammar': pip install '.[grammar]' in the checkout",
    )


class _Wrapper:
    """Adapter from our tokenizer to the interface of llguidance.LLTokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = ref(tokenizer)  # weak: _TOKENIZERS must not keep its own key alive
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = tokenizer.eos_ids[0]
        # Unless marked as special, a control token would match its literal text in a grammar.
        self.special_token_ids = [i for i in ids if tokenizer.is_control(i)]
        self.tokens = [tokenizer.token_bytes(i) for i in ids]

    def __call__(self, text: str) -> list[int]:
        tokenizer = self._tokenizer()
        return [] if tokenizer is None else tokenizer.encode(text)


_TOKENIZERS: WeakKeyDictionary[GrammarTokenizer, Any] = WeakKeyDictionary()
_LOCK = threading.Lock()


def llguidance_tokenizer(lib: Any, tokenizer: GrammarTokenizer) -> Any:
    """The LLTokenizer of a tokenizer (a trie over the vocabulary), built once."""
    with _LOCK:
        found = _TOKENIZERS.get(tokenizer)
        if found is None:
            if not tokenizer.eos_ids:
                raise UnsupportedError(
                    "structure",
                    "this model has no end-of-sequence token to end a structured answer with",
                )
            found = lib.LLTokenizer(
                _Wrapper(tokenizer), n_vocab=tokenizer.vocab_size, eos_token=list(tokenizer.eos_ids)
            )
            _TOKENIZERS[tokenizer] = found
        return found


class _Bytes:
    """A vocabulary of single bytes, the smallest with which llguidance builds its lexer."""

    is_tokenizer_wrapper = True
    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"\xff<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@functools.cache
def byte_tokenizer() -> Any:
    from llguidance import LLTokenizer

    vocabulary: Any = _Bytes()
    return LLTokenizer(vocabulary, n_vocab=257, eos_token=256, slices=[])


def byte_matcher(grammar: str) -> Any:
    from llguidance import LLMatcher

    return LLMatcher(byte_tokenizer(), grammar, log_level=0)


@functools.lru_cache(256)
def string_matcher(keyword: str, value: str) -> Any:
    """A matcher of JSON strings with this `pattern` or `format`; copy it before use."""
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", keyword: value})
    return byte_matcher(LLMatcher.grammar_from_json_schema(schema))


def completions(
    matcher: Any, start: bytes, follow: Callable[[bytes], bool]
) -> Iterator[str | None]:
    """The strings that a matcher over single bytes can write which has read the quotation mark and
    the part `start`. None stands for all strings with a part that `follow` rejects; there is one,
    because a mask never leads nowhere."""
    at, open_parts = len(start), [start]
    while open_parts:
        part = open_parts.pop()
        if len(part) > len(start):
            matcher.rollback(at - len(part) + 1)
            matcher.consume_token(part[-1])
        at = len(part)
        escape = (at - len(part.rstrip(b"\\"))) % 2 == 1
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        for byte in (i for i in range(256) if mask >> i & 1):
            more = part + bytes([byte])
            if byte == 0x22 and not escape:
                yield json.loads(b'"' + more)
            elif follow(more):
                open_parts.append(more)  # the highest is next: models count upwards
            else:
                yield None
