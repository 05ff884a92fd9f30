"""Compiles the grammar of a request. In: json_schema, regex, grammar or choice. Out: a Structure.

    structure = compile_structure(params, tokenizer)  # not on the engine's thread
    matcher = structure.start()                       # one matcher per sequence (matcher.py)

A worker process of the compile pool translates the grammar and proves that it compiles within its
limits; then it is compiled again in this process. Input size, parser states and compile time are
bounded; an unsupported assertion is an error, never ignored. Results are cached per tokenizer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from verbatim.base.errors import OverloadedError, ParameterError, UnsupportedError
from verbatim.base.params import STRUCTURE, SamplingParams
from verbatim.grammar.compile_pool import CompilePool, PoolBusy, TooExpensive
from verbatim.grammar.document_check import DocumentCheck
from verbatim.grammar.embedded_check import Document, EmbeddedCheck
from verbatim.grammar.grammar_cache import GrammarCache, digest
from verbatim.grammar.llguidance_tokenizer import (
    GrammarTokenizer,
    import_llguidance,
    llguidance_tokenizer,
    not_installed,
)
from verbatim.grammar.matcher import LIMITS, Structure
from verbatim.grammar.translate import Translation, choice_text

# Seconds from arrival to the end of both compiles. The pool's CPU limit is the real bound; this
# one only ends a request on an overloaded machine. One and a half times the pool's timeout.
ARRIVAL_TIMEOUT = 30.0
MAX_TEXT = 256 * 1024  # characters of a grammar, or all choices together
MAX_SIZES = {"json_schema": 1 << 20, "regex": 16 * 1024}  # characters of other structures
MAX_INLINE_CHOICES = 64 * 1024  # characters; a shorter choice list compiles in 40 ms, in process


def compile_structure(
    params: SamplingParams, tokenizer: GrammarTokenizer, *, deadline: float | None = None
) -> Structure | None:
    """The compiled grammar of a request; None if it has none. Do not call on the engine's thread.

    Raises ParameterError (invalid), UnsupportedError (unsupported, or too expensive to compile), or
    OverloadedError (not compiled before `deadline`, on the clock of time.monotonic); each names the
    field."""
    for field in STRUCTURE:
        value = getattr(params, field)
        if value is not None:
            limit = MAX_SIZES.get(field, MAX_TEXT)
            size = sum(map(len, value)) if field == "choice" else len(value)
            if size > limit:
                raise ParameterError(field, f"{size} characters are more than {limit}")
            lib = import_llguidance(field)
            # once per model, so outside the request's time
            ours = llguidance_tokenizer(lib, tokenizer)
            deadline = time.monotonic() + ARRIVAL_TIMEOUT if deadline is None else deadline
            cache = _CACHES.setdefault(tokenizer, GrammarCache())
            try:
                make = partial(_compile, field, value, lib, ours, tokenizer, deadline)
                structure: Structure = cache.get(digest(field, value), deadline, make)
                return structure
            except TooExpensive as reason:
                raise UnsupportedError(field, f"{reason}; make it simpler") from None
            except PoolBusy:
                raise busy(field) from None
    return None


def busy(field: str) -> OverloadedError:
    """The grammar was not compiled in time. That says nothing about it: a retry may succeed."""
    why = f"could not be compiled within {ARRIVAL_TIMEOUT:g} seconds beside what else runs here"
    return OverloadedError(
        f"{field}: {why}; try again, or make it simpler", param=field, retry_after=2.0
    )


def prepare(tokenizer: GrammarTokenizer) -> None:
    """Build llguidance's tokenizer at start-up: for a large vocabulary it holds the GIL for some
    tenths of a second. Without llguidance, or without an end token, this does nothing; a request
    with a grammar then gets the error."""
    with contextlib.suppress(UnsupportedError):
        llguidance_tokenizer(import_llguidance("structure"), tokenizer)


def _compile(
    field: str, value: Any, lib: Any, ours: Any, tokenizer: GrammarTokenizer, deadline: float
) -> Structure:
    """Compile in a worker process, which can be killed; then again in this process."""
    pool = shared_pool()
    with pool.slot(deadline):
        if field == "choice" and sum(map(len, value)) <= MAX_INLINE_CHOICES:
            translation = Translation(choice_text(value))
        else:
            translation = pool.translate(field, value, deadline)
        check = _document_check(field, translation.check, tokenizer)
        return Structure(
            partial(_matcher, lib, ours, translation.grammar),
            field,
            tokenizer.eos_ids,
            check,
            translation.warnings,
        )


def _document_check(field: str, check: Any, tokenizer: GrammarTokenizer) -> DocumentCheck | None:
    if check is None:
        return None
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    try:
        if field == "grammar":
            documents = [Document(*document) for document in check]
            return EmbeddedCheck(documents, tokens, tokenizer.eos_ids)
        schema, names = check
        return DocumentCheck(schema, tokens, tokenizer.eos_ids, names)
    except ImportError:
        raise not_installed(field, "jsonschema") from None


def _matcher(lib: Any, ours: Any, written: str, limits: dict[str, Any]) -> Any:
    return lib.LLMatcher(ours, written, log_level=0, limits=lib.LLParserLimits(**limits))


def shared_pool() -> CompilePool:
    """One pool per process, shared by all engines in it."""
    global _pool
    with _POOL_LOCK:
        _pool = _pool or CompilePool(LIMITS)
    return _pool


_pool: CompilePool | None = None
_POOL_LOCK = threading.Lock()
_CACHES: WeakKeyDictionary[GrammarTokenizer, GrammarCache] = WeakKeyDictionary()
