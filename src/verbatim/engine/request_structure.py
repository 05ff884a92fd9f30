"""Structure of a request: its compiled grammar, the matcher behind an output prefix, DRY breakers.

In: checked parameters and the prompt's ids. Out: what the steps of the request need, made before
the first one; the errors name the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.params import STRUCTURE, SamplingParams
from verbatim.engine.loaded_model import EngineTokenizer
from verbatim.engine.reasoning_matcher import allows
from verbatim.text.reasoning.reasoning_format import ReasoningFormat


def compiled_structure(
    params: SamplingParams, tokenizer: EngineTokenizer, deadline: float | None
) -> object:
    if not params.structured:
        return None
    try:
        from verbatim.grammar.compiler import compile_structure
    except ImportError:  # the extra is not installed
        named = next(f for f in STRUCTURE if getattr(params, f) is not None)
        raise UnsupportedError(
            named,
            "structured output needs the extra 'grammar': pip install '.[grammar]' in the checkout",
        ) from None
    return compile_structure(params, tokenizer, deadline=deadline)


def check_output_prefix(
    params: SamplingParams, ids: Sequence[int], reasoning: ReasoningFormat | None
) -> None:
    count = params.output_prefix
    if count > len(ids):
        raise ParameterError(
            "output_prefix", f"{count} is more than the prompt's {len(ids)} tokens"
        )
    if count and reasoning is not None:
        raise UnsupportedError("output_prefix", "is not supported in a chat with a reasoning model")


def matcher_after_prefix(
    structure: Any, params: SamplingParams, ids: Sequence[int], tokenizer: EngineTokenizer
) -> Any:
    """The grammar's matcher after the output prefix, with its first mask; None without either. It
    is computed here, so that no engine step waits for it."""
    if structure is None or not params.output_prefix:
        return None
    matcher = structure.start()
    for index, token in enumerate(ids[len(ids) - params.output_prefix :]):
        if matcher.finished:
            break
        if not allows(matcher.mask(), token):
            text = tokenizer.token_bytes(token).decode("utf-8", "replace")
            raise ParameterError(
                "output_prefix",
                f"the {structure.field} does not allow {text!r:.60} (id {token}) as token "
                f"{index + 1} of the output",
            )
        matcher.advance(token)
    if matcher.finished:
        raise ParameterError(
            "output_prefix", f"the {structure.field} is complete with it, so no token may follow"
        )
    matcher.mask()
    return matcher


def dry_breakers_of(
    strings: Sequence[str], tokenizer: EngineTokenizer
) -> tuple[tuple[int, ...], ...]:
    """DRY sequence breakers as token ids. Cached: it walks the vocabulary, and most requests use
    the same strings."""
    from verbatim.sampling.dry_breakers import breakers_of

    cache = _BREAKERS.setdefault(tokenizer, {})
    if tuple(strings) not in cache:
        if len(cache) >= 64:
            cache.clear()
        cache[tuple(strings)] = breakers_of(strings, tokenizer)
    return cache[tuple(strings)]


_BREAKERS: WeakKeyDictionary[
    EngineTokenizer, dict[tuple[str, ...], tuple[tuple[int, ...], ...]]
] = WeakKeyDictionary()
