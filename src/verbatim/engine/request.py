"""A request: what was asked, checked against the model. Raw prompts and parameters come in; a Request that can run goes
out, or an error naming the field."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from verbatim.base.errors import ContextError, ParameterError, UnsupportedError
from verbatim.base.params import STRUCTURE, SamplingParams
from verbatim.engine.loaded_model import LoadedModel, Tokenizer
from verbatim.grammar.compile_pool import Busy, never_busy

MAX_REPORTED = 2_000_000  # alternatives in one answer: some 200 MB
POOLINGS = ("mean", "cls", "last")
SPECULATE = ("off", "ngram", "suffix", "head", "draft", "auto")


class EncodedText(list[int]):
    """Token ids that were made of a text before the request was, with what of the text they could not hold, and the text itself
    where its control tokens were read as text."""

    lost: str = ""
    plain: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to go on from it. `seed` is the request's own, or the one it was given."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    tenant: str = ""
    arrival: float = field(default_factory=time.perf_counter)
    structure: Any = None  # sampling.grammar.Structure: the compiled grammar
    breakers: tuple[tuple[int, ...], ...] = ()
    warnings: tuple[str, ...] = ()
    hidden: bool = False  # also collect the final hidden state of every prompt token
    pooling: str = "mean"  # how those become one vector


def make_request(
    parts: LoadedModel,
    context: int,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    *,
    request_id: str | None = None,
    tenant: str = "",
    hidden: bool = False,
    engine_busy: Busy = never_busy,
    deadline: float | None = None,
) -> Request:
    """Tokenise and check. May take a while (a long text, a grammar to compile): never called on the engine's thread.
    `engine_busy` and `deadline` are for the grammar compile (grammar/matcher.py)."""
    arrival = time.perf_counter()
    params = params or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ParameterError("params", f"{type(params).__name__} is not a SamplingParams")
    if hidden and parts.pooling not in POOLINGS:
        raise UnsupportedError(
            "pooling_type",
            f"{parts.name} says {parts.pooling!r}; embeddings are made by {', '.join(POOLINGS)}; use it for text instead",
        )
    ids, told = read_prompt(parts, prompt)
    _check_ids(params, parts.backend.spec.vocab)
    _check_length(len(ids), params, context)
    _check_reports(len(ids), params, context)
    if params.speculate is not None and params.speculate not in SPECULATE:
        raise ParameterError(
            "speculate", f"{params.speculate!r} is not one of {', '.join(SPECULATE)}"
        )
    return Request(
        id=request_id or f"req-{secrets.token_hex(8)}",
        prompt_ids=ids,
        params=params,
        seed=secrets.randbits(32) if params.seed is None else params.seed,
        tenant=tenant,
        arrival=arrival,
        structure=_structure(params, parts.tokenizer, engine_busy, deadline),
        breakers=_breakers(params.dry_breakers, parts.tokenizer) if params.dry_multiplier else (),
        warnings=(*_warnings(params), *told),
        hidden=hidden,
        pooling=parts.pooling,
    )


def read_prompt(
    parts: LoadedModel, prompt: str | Sequence[int]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Its token ids, and what the caller should know about how it was read."""
    if isinstance(prompt, str):
        ids = tuple(parts.tokenizer.encode_prompt(prompt))
    else:
        ids = _prompt_ids(prompt, parts.backend.spec.vocab)
    return ids, (*_lost(parts.tokenizer, prompt), *typed_control(parts.tokenizer, prompt))


def _prompt_ids(prompt: Sequence[int], vocab: int) -> tuple[int, ...]:
    if isinstance(prompt, (bytes, bytearray)):
        raise ParameterError(
            "prompt", "bytes are neither text nor token ids; decode them, or give a list of ids"
        )
    try:
        ids = tuple(prompt)
    except TypeError:
        raise ParameterError(
            "prompt", f"{type(prompt).__name__} is neither a string nor a list of token ids"
        ) from None
    for token in ids:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise ParameterError("prompt", f"{token!r:.40} is not a token id")
        if not 0 <= token < vocab:
            raise ParameterError(
                "prompt", f"{token} is not a token id of this model (0 to {vocab - 1})"
            )
    return tuple(int(token) for token in ids)


def _check_ids(params: SamplingParams, vocab: int) -> None:
    """Every id a request names must exist: one outside would write into a neighbour's logits."""
    named: dict[str, Any] = {
        "logit_bias": dict(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
        "banned_token_ids": params.banned_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in named.items():
        for token in ids:
            if token >= vocab:
                raise ParameterError(
                    name, f"{token} is not a token id of this model (0 to {vocab - 1})"
                )


def _check_length(prompt: int, params: SamplingParams, context: int) -> None:
    if prompt == 0:
        raise ParameterError("prompt", "is empty; give at least one token")
    asked = params.max_tokens
    least = max(1 if asked is None else asked, params.min_tokens)
    if prompt + least <= context:
        return
    has = f"the prompt has {prompt} tokens"
    if (
        prompt + min(least, 1) > context
    ):  # whatever is asked for, not one token of an answer has room
        room = "" if prompt > context else ", which leaves no room for an answer"
        short = prompt + min(least, 1) - context
        raise ContextError(
            f"{has} and the context holds {context}{room}; shorten it by at least {short}",
            param="prompt",
        )
    raise ContextError(
        f"{has}, and with {least} tokens of answer it needs {prompt + least} of a context of {context}; "
        f"shorten the prompt or ask for at most {context - prompt}",
        param="max_tokens",
    )


def _check_reports(prompt: int, params: SamplingParams, context: int) -> None:
    """What a request reports must fit in memory, times all its positions: a thousand alternatives for each of a hundred
    thousand tokens do not."""
    written = params.width * (context - prompt if params.max_tokens is None else params.max_tokens)
    for name, positions, weight in (
        ("prompt_logprobs", prompt, 1),
        ("logprobs", written, 1),
        ("explain", written, 8),
    ):
        asked = getattr(params, name)
        if asked and positions * asked * weight > MAX_REPORTED:
            most = MAX_REPORTED // weight // positions
            fewer = "give a shorter text" if name == "prompt_logprobs" else "set a lower max_tokens"
            if params.width > 1 and name != "prompt_logprobs":
                fewer += " or n"
            remedy = f"ask for at most {most}, or {fewer}" if most else fewer
            raise ParameterError(
                name,
                f"{asked} alternatives for {positions} tokens are too many to report; {remedy}",
            )


def _structure(
    params: SamplingParams, tokenizer: Tokenizer, engine_busy: Busy, deadline: float | None
) -> Any:
    if not params.structured:
        return None
    try:
        from verbatim.grammar.matcher import compile_structure
    except ImportError:  # the extra is not installed
        named = next(f for f in STRUCTURE if getattr(params, f) is not None)
        raise UnsupportedError(
            named,
            "structured output needs the extra 'grammar': pip install '.[grammar]' in the checkout",
        ) from None
    return compile_structure(params, tokenizer, engine_busy=engine_busy, deadline=deadline)


def _breakers(strings: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Walks the vocabulary, so it is kept: most requests use the same strings."""
    from verbatim.sampling.dry_breakers import breakers_of

    kept = _BREAKERS.setdefault(tokenizer, {})
    if tuple(strings) not in kept:
        if len(kept) >= 64:
            kept.clear()
        kept[tuple(strings)] = breakers_of(strings, tokenizer)
    return kept[tuple(strings)]


_BREAKERS: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], tuple[tuple[int, ...], ...]]] = (
    WeakKeyDictionary()
)


def lost_in(tokenizer: Tokenizer, text: str) -> str:
    """The characters of a text that never reach the model. Not every tokenizer loses any (those of verbatim.testing do not)."""
    look = getattr(tokenizer, "lost", None)
    return "" if look is None else str(look(text))


def encoded(
    tokenizer: Tokenizer, text: str, *, special: bool = False, bare: bool = False
) -> EncodedText:
    """A plain prompt's ids. `special`: the text of a control token becomes that token; `bare`: nothing is put around it."""
    ids = EncodedText(
        (tokenizer.encode if bare else tokenizer.encode_prompt)(text, special=special)
    )
    ids.lost, ids.plain = lost_in(tokenizer, text), "" if special else text
    return ids


def _lost(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> tuple[str, ...]:
    lost = lost_in(tokenizer, prompt) if isinstance(prompt, str) else getattr(prompt, "lost", "")
    if not lost:
        return ()
    named = ", ".join(f"U+{ord(character):04X}" for character in lost)
    it, stands = ("it", "it stands") if len(lost) == 1 else ("them", "they stand")
    return (
        f"prompt: the model's vocabulary cannot write {named}, so the model does not read {it} as {stands}",
    )


def typed_control(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> tuple[str, ...]:
    """Typed control tokens stay text, which surprises whoever wrote a prompt in the model's own format: so they are told. Asked of a prompt
    that is no longer than the context."""
    finder, text = (
        getattr(tokenizer, "finder", None),
        prompt if isinstance(prompt, str) else getattr(prompt, "plain", ""),
    )
    token = finder.first(text) if finder is not None and text else None
    if token is None:
        return ()
    return (
        f"prompt: the text of the control token {token!r} was read as plain text; parse_special makes it the token",
    )


def _warnings(params: SamplingParams) -> tuple[str, ...]:
    try:
        from verbatim.sampling.warnings import warnings_for
    except ImportError:
        return ()
    return tuple(warnings_for(params))
