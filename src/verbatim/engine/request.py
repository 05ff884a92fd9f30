"""Request: a prompt and its parameters, validated against the model.

A raw prompt and SamplingParams come in; a Request that can run goes out, or an error that names the
field. A Request is immutable; running_request.py holds the state of its run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from verbatim.base.config import SPECULATE
from verbatim.base.defaults import GENERATE, GENERATE_TOKENS, resolve
from verbatim.base.errors import ContextError, ParameterError, UnsupportedError
from verbatim.base.params import STRUCTURE, SamplingParams
from verbatim.engine.calls.fair_pool import mask_threads
from verbatim.engine.canvas_request import CanvasRules, canvas_rules, whole_blocks
from verbatim.engine.embed_input import EmbedInput, check_task
from verbatim.engine.loaded_model import EngineTokenizer, LoadedModel
from verbatim.engine.read_prompt import read_embed_input, read_prompt
from verbatim.engine.reasoning_matcher import ReasoningMatcher, check_supported
from verbatim.engine.reasoning_tracker import make_tracker
from verbatim.engine.request_structure import (
    check_output_prefix,
    compiled_structure,
    dry_breakers_of,
    matcher_after_prefix,
)
from verbatim.model.embedding import EmbeddingSpec
from verbatim.text.reasoning.reasoning_format import ReasoningFormat
from verbatim.text.tools.tool_use import ToolUse

AnyPrompt = str | Sequence[int] | EmbedInput
MAX_REPORTED = 2_000_000  # reported alternatives per completion, about 200 MB


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its parameters. `seed` is the caller's, or a random one."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    tenant: str = ""
    arrival: float = field(default_factory=time.perf_counter)
    structure: Any = None  # grammar.matcher.Structure: the compiled grammar
    prefix_matcher: Any = None  # its matcher after the output_prefix; None: without one
    breakers: tuple[tuple[int, ...], ...] = ()
    warnings: tuple[str, ...] = ()
    hidden: bool = False  # also collect the final hidden state of every prompt token
    embedding: EmbeddingSpec = field(default_factory=EmbeddingSpec)  # how they become one vector
    reasoning: ReasoningFormat | None = None  # set for a chat with a reasoning model
    tools: ToolUse | None = None  # set for a chat with tools
    adapter: int = -1  # number of the LoRA adapter in LoadedModel.adapters; -1: the base model
    adapter_digest: str = ""  # what identifies the adapter also after a restart
    canvas: CanvasRules | None = None  # rules of a diffusion model

    def grammar_matcher(self) -> Any:
        """A new grammar matcher at the first token to draw; None without a grammar."""
        if self.prefix_matcher is not None:
            return self.prefix_matcher.copy()
        return None if self.structure is None else self.structure.start()

    def matcher(self, tokenizer: EngineTokenizer, stop_ids: Mapping[int, str]) -> Any:
        """A new matcher for one sequence; None without a grammar and without a reasoning budget."""
        inner = self.grammar_matcher()
        if inner is not None:
            inner.submit = lambda work: mask_threads().submit(self.tenant, work)
        budget = self.params.thinking_budget
        if self.reasoning is None or (inner is None and budget is None):
            return inner
        tracker = make_tracker(self.reasoning, tokenizer, self.params.skip_special)
        close = self.reasoning.close_ids
        return ReasoningMatcher(
            inner, tracker, tokenizer.vocab_size, tuple(stop_ids), budget, close
        )


class RequestOptions(TypedDict, total=False):
    request_id: str | None
    tenant: str
    hidden: bool
    deadline: float | None  # bounds the grammar compile, on the clock of time.monotonic


def _check_speculate(params: SamplingParams) -> None:
    if params.speculate is not None and params.speculate not in SPECULATE:
        raise ParameterError(
            "speculate", f"{params.speculate!r} is not one of {', '.join(SPECULATE)}"
        )


def make_request(
    loaded: LoadedModel,
    context: int,
    prompt: AnyPrompt,
    params: SamplingParams | None = None,
    *,
    defaults: str = "model",
    request_id: str | None = None,
    tenant: str = "",
    hidden: bool = False,
    deadline: float | None = None,
) -> Request:
    """Tokenise and validate. A long text or a grammar compile takes long, so servers never call
    this on the engine's thread. `defaults` is EngineConfig's. `deadline` bounds the grammar
    compile (grammar/compiler.py)."""
    arrival = time.perf_counter()
    params = params or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ParameterError("params", f"{type(params).__name__} is not a SamplingParams")
    params = resolve(params, loaded.defaults, defaults)
    pair = isinstance(prompt, EmbedInput) and prompt.document is not None
    check_task(loaded, hidden=hidden, pair=pair)
    if isinstance(prompt, EmbedInput):
        ids, prompt_warnings = read_embed_input(loaded, prompt, context)
    else:
        ids, prompt_warnings = read_prompt(loaded, prompt)
    params = _with_length(params, context - len(ids))
    params, canvas = canvas_rules(params, loaded.backend.spec.diffusion, hidden=hidden)
    context = whole_blocks(context, canvas, len(ids))
    _check_ids(params, loaded.backend.spec.vocab)
    _check_length(len(ids), params, context)
    _check_reports(len(ids), params, context)
    _check_speculate(params)
    adapter = _adapter(loaded, params.adapter)
    reasoning = getattr(prompt, "reasoning", None)
    _check_reasoning(params, reasoning, loaded.tokenizer)
    check_output_prefix(params, ids, reasoning)
    structure = compiled_structure(params, loaded.tokenizer, deadline)
    return Request(
        reasoning=reasoning,
        tools=getattr(prompt, "tools", None),
        id=request_id or f"req-{secrets.token_hex(8)}",
        prompt_ids=ids,
        params=params,
        seed=new_seed() if params.seed is None else params.seed,
        tenant=tenant,
        arrival=arrival,
        structure=structure,
        prefix_matcher=matcher_after_prefix(structure, params, ids, loaded.tokenizer),
        breakers=dry_breakers_of(params.dry_breakers, loaded.tokenizer)
        if params.dry_multiplier
        else (),
        warnings=(*_warnings(params), *prompt_warnings, *getattr(structure, "warnings", ())),
        hidden=hidden,
        embedding=loaded.embedding,
        adapter=adapter,
        adapter_digest=loaded.adapters[adapter].digest if adapter >= 0 else "",
        canvas=canvas,
    )


def _with_length(params: SamplingParams, room: int) -> SamplingParams:
    """The max_tokens of generate(), where it has none and the context has that much room."""
    if dict(params.origins).get("max_tokens") != GENERATE or room <= GENERATE_TOKENS:
        return params
    return params.with_origins({}, checked={"max_tokens": GENERATE_TOKENS})


def new_seed() -> int:
    """The seed of a request that has none."""
    return secrets.randbits(32)


def _adapter(loaded: LoadedModel, name: str) -> int:
    """The number of the adapter that a request names; -1: none."""
    if not name:
        return -1
    names = [adapter.name for adapter in loaded.adapters]
    if name not in names:
        known = f"loaded are {', '.join(names[:10])}" if names else "none is loaded"
        raise ParameterError("adapter", f"{name!r:.60} is not a loaded adapter; {known}")
    return names.index(name)


def _check_reasoning(
    params: SamplingParams, reasoning: ReasoningFormat | None, tokenizer: EngineTokenizer
) -> None:
    if params.thinking_budget is not None and reasoning is None:
        raise UnsupportedError(
            "thinking_budget",
            "only a chat with a reasoning model has reasoning; this chat template marks none",
        )
    if reasoning is None:
        return
    if params.thinking_budget is not None and reasoning.start == "closed":
        raise UnsupportedError(
            "thinking_budget", "thinking is switched off in this chat; leave one of them out"
        )
    for field_name in ("thinking_budget", *STRUCTURE):
        if getattr(params, field_name) is not None:
            check_supported(reasoning, field_name)
            # Finds the tokens of the markers now, so that no engine step waits for it.
            make_tracker(reasoning, tokenizer, params.skip_special)


def _check_ids(params: SamplingParams, vocab: int) -> None:
    """Every id that a request names must exist: an id beyond the vocabulary would write into the
    next row of logits."""
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
    needed = max(
        1 if params.max_tokens is None else params.max_tokens,
        params.min_tokens - params.output_prefix,
    )
    if prompt + needed <= context:
        return
    has = f"the prompt has {prompt} tokens"
    if prompt + min(needed, 1) > context:  # not even one output token fits
        room = "" if prompt > context else ", which leaves no room for an answer"
        excess = prompt + min(needed, 1) - context
        raise ContextError(
            f"{has} and the context holds {context}{room}; shorten it by at least {excess}",
            param="prompt",
        )
    raise ContextError(
        f"{has}, and with {needed} tokens of answer it needs {prompt + needed} of a context of "
        f"{context}; shorten the prompt or ask for at most {context - prompt}",
        param="max_tokens",
    )


def _check_reports(prompt: int, params: SamplingParams, context: int) -> None:
    """The alternatives that a request reports over all positions must fit in memory. Weights: an
    `explain` entry is about eight times as large as a log-probability."""
    outputs = params.width * (context - prompt if params.max_tokens is None else params.max_tokens)
    for name, positions, weight in (
        ("prompt_logprobs", prompt, 1),
        ("logprobs", outputs, 1),
        ("explain", outputs, 8),
    ):
        count = getattr(params, name)
        if count and positions * count * weight > MAX_REPORTED:
            limit = MAX_REPORTED // weight // positions
            fewer = "give a shorter text" if name == "prompt_logprobs" else "set a lower max_tokens"
            if params.width > 1 and name != "prompt_logprobs":
                fewer += " or n"
            remedy = f"ask for at most {limit}, or {fewer}" if limit else fewer
            raise ParameterError(
                name,
                f"{count} alternatives for {positions} tokens are too many to report; {remedy}",
            )


def _warnings(params: SamplingParams) -> tuple[str, ...]:
    try:
        from verbatim.sampling.warnings import warnings_for
    except ImportError:
        return ()
    return tuple(warnings_for(params))
