"""llama.cpp's /completion, /embedding, /props and /apply-template.

In: a checked request by llama.cpp's field names, translated into SamplingParams. Out: llama.cpp's
JSON objects, or events with one of them each. A prompt is in the model's own format, as llama.cpp
takes it: the text of a control token is that token, unless parse_special is false.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from verbatim import __version__
from verbatim.base.json_io import JsonObject
from verbatim.base.params import SamplingParams
from verbatim.server.api.common import generate, to_params
from verbatim.server.api.common.chat_request import check_tools, continued, conversation
from verbatim.server.api.common.default_params import default_params
from verbatim.server.api.common.field_rules import rules_of
from verbatim.server.api.common.prompts import embed, prompts_of, unit_vector
from verbatim.server.api.common.request_context import (
    KEEP_ALIVE,
    EventStream,
    Json,
    RequestContext,
    sse,
)
from verbatim.server.api.llamacpp.llama_fields import (
    LlamaApplyTemplate,
    LlamaCompletion,
    LlamaEmbedding,
)
from verbatim.server.problem import unsupported
from verbatim.server.process.messages import Detokenized, Generate, Generated, Tokenize, WireFinish

RULES = rules_of(LlamaCompletion)
# our parameter -> llama.cpp's field, for error messages
NAMES = {rule.param: name for name, rule in RULES.items() if rule.param and rule.param != name} | {
    "max_tokens": "n_predict",
    "logprobs": "n_probs",
}
STOP_TYPES = {"length": "limit", "loop": "eos", "cancel": "none"}


def sampling(body: JsonObject) -> JsonObject:
    values = to_params.sampling_values(body, RULES)
    values |= to_params.penalty_window(body.get("repeat_last_n"))
    if body.get("dry_penalty_last_n", -1) == 0:
        values["dry_multiplier"] = 0.0
    elif body.get("dry_penalty_last_n", -1) > 0:
        values["dry_range"] = body["dry_penalty_last_n"]
    if body.get("seed") == -1:  # the server chooses
        del values["seed"]
    if body.get("n_predict", -1) >= 0:
        values["max_tokens"] = body["n_predict"]
    if body.get("n_probs"):
        values["logprobs"] = body["n_probs"]
    bias = body.get("logit_bias")
    if bias:
        values["logit_bias"] = {str(token): value for token, value in bias if value is not False}
        values["banned_token_ids"] = [token for token, value in bias if value is False]
    return values


def generation_settings(params: SamplingParams) -> JsonObject:
    """The parameters in force by llama.cpp's names."""

    def plain(name: str) -> Any:
        value = getattr(params, name)
        return list(value) if isinstance(value, tuple) else value

    return {
        "n_predict": params.max_tokens or -1,
        "seed": -1 if params.seed is None else params.seed,
        **{name: plain(rule.param) for name, rule in RULES.items() if rule.param},
        "repeat_last_n": params.penalty_range or -1,
        "dry_penalty_last_n": params.dry_range or -1,
        "stop": plain("stop"),
        "n_probs": params.logprobs or 0,
        "logit_bias": [[token, value] for token, value in dict(params.logit_bias).items()]
        + [[token, False] for token in params.banned_token_ids],
    }


class LlamaReply:
    def __init__(self, call: RequestContext, body: LlamaCompletion, params: SamplingParams) -> None:
        self.call = call
        self.body = body
        self.params = params
        self.model = call.served_model()

    def probabilities(self, logprobs: Any) -> JsonObject:
        """llama.cpp's completion_probabilities: log-probabilities in the shape of chat."""
        top = self.body.n_probs
        return {"completion_probabilities": generate.chat_logprobs(logprobs, top)} if top else {}

    def closing(self, finish: WireFinish | None) -> JsonObject:
        """Everything after the text: why it ended, settings, counts and times."""
        done = self.call.runs[0].generated
        assert done is not None
        generate.observe_latency(self.call)
        usage, times = done.usage, done.timings
        computed = usage.prompt_tokens - usage.cached_tokens
        prompt_ms = max(times.first_token - times.queued, 0) * 1e3
        predicted_ms = max(times.total - times.first_token, 0) * 1e3
        word = finish.detail if finish is not None and finish.stop_string else ""
        reason = "stop" if finish is None else finish.reason
        return {
            "id_slot": -1,
            "model": self.model,
            "tokens_predicted": usage.output_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": generation_settings(self.params),
            "has_new_line": any("\n" in choice.text for choice in done.choices),
            "truncated": False,
            "stop_type": "word" if word else STOP_TYPES.get(reason, "eos"),
            "stopping_word": word,
            "tokens_cached": usage.cached_tokens,
            "timings": {
                "prompt_n": computed,
                "prompt_ms": prompt_ms,
                "prompt_per_second": computed / prompt_ms * 1e3 if prompt_ms else 0.0,
                "predicted_n": usage.output_tokens,
                "predicted_ms": predicted_ms,
                "predicted_per_second": times.decode_rate(usage.output_tokens),
            },
            "seed": done.seed,
            "system_fingerprint": done.fingerprint,
            **generate.extra_fields(self.call),
        }

    async def full_response(self) -> Response:
        (done,) = await self.call.results(Generated)
        choice = done.choices[0]
        ids = list(choice.token_ids) if self.body.return_tokens else []
        made = {"index": 0, "content": choice.text, "tokens": ids, "stop": True}
        more = self.probabilities(choice.logprobs)
        return Json({**made, **self.closing(choice.finish), **more})

    async def events(self) -> AsyncIterator[bytes]:
        finish: WireFinish | None = None
        async for piece in generate.choice_deltas(self.call):
            if piece is None:
                yield KEEP_ALIVE
                continue
            finish = piece.finish or finish
            if piece.text or piece.logprobs:
                part = {"index": 0, "content": piece.text, "tokens": [], "stop": False}
                yield sse({**part, **self.probabilities(piece.logprobs)})
        if all(run.done is not None for run in self.call.runs):
            last = {"index": 0, "content": "", "tokens": [], "stop": True}
            yield sse({**last, **self.closing(finish)})


async def completion(call: RequestContext) -> Response:
    body = await call.body(LlamaCompletion)
    state = call.state
    stream = bool(body.stream)
    if stream and body.return_tokens:
        raise unsupported("return_tokens", "cannot be streamed")
    (prompt,) = prompts_of(body.prompt, "prompt", call)
    params = to_params.finish_params(sampling(call.given), state, names=NAMES)
    call.names = NAMES
    in_force = default_params(state, SamplingParams.from_mapping(params), call.protocol.defaults)
    made = LlamaReply(call, body, in_force)
    parse = isinstance(prompt, str) and body.parse_special is not False
    call.submit(Generate(call.next_id(), call.tenant, params, stream, prompt, parse_special=parse))
    await call.accepted()
    return EventStream(call, made.events()) if stream else await made.full_response()


async def embedding(call: RequestContext) -> Response:
    """A list with one row of vectors per text."""
    body = await call.body(LlamaEmbedding)
    call.served_model()
    results = await embed(call, "content", body.content, truncate=body.truncate)
    plain = body.embd_normalize == -1
    found = [r.embedding or [] for r in results]
    vectors = found if plain else [unit_vector(vector, None) for vector in found]
    return Json([{"index": i, "embedding": [vector]} for i, vector in enumerate(vectors)])


async def apply_template(call: RequestContext) -> Response:
    """Render the chat template; return the prompt without generating."""
    await call.body(LlamaApplyTemplate)
    call.served_model()
    tools = call.given.get("tools", [])
    check_tools(call, tools)
    messages, template = conversation(call, continued(call.given), tools, {})
    message = Tokenize(call.next_id(), call.tenant, messages=messages, template=template)
    call.submit(replace(message, render=True))
    (done,) = await call.results(Detokenized)
    return Json({"prompt": done.text, **generate.warnings_of(call)})


async def props(call: RequestContext) -> Response:
    """Facts of the server and its model. The model has its served name, never a path."""
    facts, name = call.state.facts, call.state.names()[0]
    settings = generation_settings(default_params(call.state, protocol=call.protocol.defaults))
    return Json.of(
        default_generation_settings={"n_ctx": facts.context, "params": settings},
        total_slots=facts.slots,
        model_alias=name,
        model_path=name,
        modalities={"vision": False, "audio": False},
        chat_template=facts.template,
        bos_token=facts.special_tokens.get("bos_token", ""),
        eos_token=facts.special_tokens.get("eos_token", ""),
        build_info=f"verbatim {__version__}",
        system_fingerprint=facts.fingerprint,
        numerics=facts.numerics,
    )
