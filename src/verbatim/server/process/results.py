"""Serialises engine outputs for the wire: Delta, Completion and the model's facts come in,
WireDelta, Generated and ModelFacts go out. Runs in the engine process, which has the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from verbatim.base.errors import NOT_FINITE, OUT_OF_MEMORY
from verbatim.base.json_io import JsonObject
from verbatim.base.params import FIELDS, STRUCTURE, SamplingParams
from verbatim.base.records import Choice, Completion, Delta, Finish, TokenLogprob
from verbatim.explain.receipt import digest_of
from verbatim.server.process.messages import (
    Generated,
    ModelFacts,
    TopLogprob,
    WireChoice,
    WireDelta,
    WireFinish,
    WireLogprob,
)
from verbatim.text.reasoning.reasoning_switches import switches_of
from verbatim.text.tools.tool_format import detect_format

if TYPE_CHECKING:
    from verbatim.engine.calls.async_engine import AsyncEngine
    from verbatim.observe.roofline import CostCard, MachineLimits

# Parameters that can mask every token, the narrowest first: the first one a client should relax.
NO_BOUND = 1 << 40
MASKING = ("allowed_token_ids", "banned_token_ids", *STRUCTURE, "no_repeat_ngram", "min_tokens")


def wire_finish(finish: Finish, params: SamplingParams, stopped_by_token: bool) -> WireFinish:
    """Serialise a Finish. A stop records whether its detail is one of the request's stop strings,
    because the engine's own details (a token, the name of a grammar parameter) may look the same.
    An error names the parameters at fault: the one its text begins with, or all that mask
    tokens."""
    reason, detail = finish.reason, finish.detail
    if reason == "stop":
        structure = detail in STRUCTURE and getattr(params, detail) is not None
        by_string = detail in params.stop and not stopped_by_token and not structure
        return WireFinish(reason, detail, stop_string=by_string)
    if reason != "error":
        return WireFinish(reason, detail)
    if detail.startswith(OUT_OF_MEMORY):
        return WireFinish(reason, detail, code="unavailable")
    if detail.startswith(NOT_FINITE):
        return WireFinish(reason, detail, code="not_finite")
    named = detail.partition(":")[0]
    if named in FIELDS:
        return WireFinish(reason, detail, fields=[named])
    masking = [name for name in MASKING if getattr(params, name) != FIELDS[name].default]
    return WireFinish(reason, detail, fields=masking)


def drop_rows(records: Sequence[JsonObject]) -> None:
    """Delete the rows of logits from explanations that are sent without them. A row is 100 times as
    large as the rest of its record, and the engine holds the same records until the request ends:
    otherwise one request with 64 prompts and a receipt would hold a gigabyte."""
    for record in records:
        record["row"] = record["mask"] = None


def facts_of(engine: AsyncEngine) -> ModelFacts:
    tokenizer, template = engine.tokenizer, engine.loaded.template
    ids = range(tokenizer.vocab_size)
    spec, info = engine.loaded.backend.spec, engine.loaded.backend.info
    names = [adapter.name for adapter in engine.loaded.adapters]
    sources = "\n".join(template.sources.values()) if template is not None else ""
    return ModelFacts(
        name=engine.loaded.name,
        digest=engine.loaded.digest,
        fingerprint=engine.fingerprint,
        context=engine.context,
        vocab=tokenizer.vocab_size,
        hidden=spec.hidden,
        has_template=engine.has_template,
        template_tools=template is not None and template.takes_tools,
        template_calls=template is not None and template.takes_calls,
        template_reasoning=template is not None and template.reads_reasoning,
        tool_format=detect_format(sources),
        control=frozenset(t for t in ids if tokenizer.is_control(t)),
        space_prefix=tokenizer.space_prefix,
        adapters={name: engine.core.fingerprints[number] for number, name in enumerate(names)},
        longest_token=_longest_token(engine),
        task=engine.loaded.task,
        reasoning=engine.reasoning is not None,
        reasoning_switches=switches_of(template),
        slots=engine.config.max_running,
        device=info.name,
        numerics=info.numerics,
        family=spec.family,
        sizes={
            "block_count": len(spec.layers),
            "context_length": engine.context,
            "embedding_length": spec.hidden,
            "feed_forward_length": spec.mlp or spec.expert_mlp,
            "attention.head_count": spec.heads,
            "attention.head_count_kv": spec.kv_heads,
            "vocab_size": tokenizer.vocab_size,
        },
        template=template.source if template is not None else "",
        special_tokens=dict(tokenizer.special_tokens),
        file=asdict(engine.loaded.file),
        sampling=dict(engine.loaded.defaults.values),
        sampling_source=engine.loaded.defaults.source,
    )


def cost_of(engine: AsyncEngine) -> tuple[CostCard, MachineLimits | None]:
    """The cost of the model's tokens, and the measured limits of main memory; None: `verbatim
    bench` has not measured them, or the model is on a GPU."""
    from verbatim.hub.catalog import cache_dir
    from verbatim.observe.roofline import cost_card, load_limits

    info = engine.loaded.backend.info
    limits = load_limits(cache_dir()) if info.name != "cuda" else None
    return cost_card(engine.loaded.backend.spec, info), limits


def _longest_token(engine: AsyncEngine) -> int:
    """Bytes of text that one token may stand for. An encoder's tokenizer drops white space and
    turns a long word into one unknown token, so there is no bound."""
    if engine.loaded.task != "generate":
        return NO_BOUND
    tokenizer = engine.tokenizer
    return max((len(tokenizer.token_bytes(t)) for t in range(tokenizer.vocab_size)), default=1) or 1


class ResultEncoder:
    """`served_name` replaces the model's name in receipts, because the latter may be a path."""

    def __init__(self, engine: AsyncEngine, served_name: str) -> None:
        self._token_bytes = engine.tokenizer.token_bytes
        self._eos_ids = frozenset(engine.loaded.eos_ids)
        self._served_name = served_name

    def delta(self, delta: Delta, params: SamplingParams) -> WireDelta:
        return WireDelta(
            delta.request_id,
            delta.index,
            delta.text,
            delta.token_ids,
            None if delta.finish is None else self._finish(delta.finish, delta.token_ids, params),
            self._logprobs(delta.logprobs) if delta.logprobs else (),
            delta.explain,
            delta.reasoning,
            delta.reasoning_tokens,
        )

    def completion(
        self, completion: Completion, params: SamplingParams, embedding: list[float] | None = None
    ) -> Generated:
        return Generated(
            completion.request_id,
            choices=[self._choice(choice, params) for choice in completion.choices],
            usage=completion.usage,
            timings=completion.timings,
            seed=completion.seed,
            fingerprint=completion.fingerprint,
            warnings=completion.warnings,
            prompt_logprobs=self._prompt_logprobs(completion),
            receipt=self._receipt(completion.receipt),
            embedding=embedding,
        )

    def _choice(self, choice: Choice, params: SamplingParams) -> WireChoice:
        return WireChoice(
            choice.index,
            choice.text,
            choice.token_ids,
            self._finish(choice.finish, choice.token_ids, params),
            self._logprobs(choice.logprobs),
            choice.explain,
            choice.score,
            choice.loop,
            choice.reasoning,
        )

    def _finish(self, finish: Finish, ids: Sequence[int], params: SamplingParams) -> WireFinish:
        by_token = bool(ids) and (ids[-1] in self._eos_ids or ids[-1] in params.stop_token_ids)
        found = wire_finish(finish, params, stopped_by_token=by_token)
        if found.code == "not_finite":
            return replace(found, detail=f"model {self._served_name}: {found.detail}")
        return found

    def _logprobs(self, items: Sequence[TokenLogprob]) -> list[WireLogprob]:
        raw, out = self._token_bytes, []
        for item in items:
            top = [TopLogprob(token, logprob, raw(token)) for token, logprob in item.top]
            out.append(WireLogprob(item.token, item.logprob, raw(item.token), top))
        return out

    def _prompt_logprobs(self, completion: Completion) -> list[WireLogprob]:
        """The first token of a prompt has no log-probability: it is sent with None in its place."""
        items: list[WireLogprob] = []
        for token, item in zip(completion.prompt_ids, completion.prompt_logprobs, strict=False):
            if item is None:
                items.append(WireLogprob(token, None, self._token_bytes(token), None))
            else:
                items += self._logprobs([item])
        return items

    def _receipt(self, receipt: JsonObject | None) -> JsonObject | None:
        if receipt is None:
            return None
        named = {**receipt, "model": self._served_name}
        return {**named, "sha256": digest_of(named)}
