"""/v1/score, /tokenize and /detokenize: text or token ids in, numbers out."""

from __future__ import annotations

import math
from dataclasses import replace

from starlette.responses import Response

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common import to_params
from verbatim.server.api.common.chat_request import continued, conversation
from verbatim.server.api.common.generate import (
    extra_fields,
    floor,
    observe_latency,
    token_text,
    usage_of,
    warnings_of,
)
from verbatim.server.api.common.prompts import parses_special, prompts_of
from verbatim.server.api.common.request_context import Json, RequestContext
from verbatim.server.api.native.native_fields import DetokenizeBody, ScoreBody, TokenizeBody
from verbatim.server.problem import invalid
from verbatim.server.process.messages import (
    Detokenize,
    Detokenized,
    Generate,
    Generated,
    Tokenize,
    Tokenized,
)


async def score(call: RequestContext) -> Response:
    """Teacher-forced log-probability of every prompt token, and the perplexity."""
    body = await call.body(ScoreBody)
    model = call.served_model()
    prompts = prompts_of(body.prompt, "prompt", call)
    parse = parses_special(body.parse_special, prompts)
    values = {"max_tokens": 0, "prompt_logprobs": body.top_logprobs or 0, "temperature": 0.0}
    names = call.names = {"prompt_logprobs": "top_logprobs"}
    state = call.state
    params = to_params.finish_params(values, state, prompts=len(prompts), names=names)
    for prompt in prompts:
        message = Generate(call.next_id(), call.tenant, params, False, prompt, parse_special=parse)
        call.submit(message)
    results = await call.results(Generated)
    observe_latency(call)
    return Json.of(
        object="list",
        model=model,
        system_fingerprint=call.fingerprint,
        data=[_scored(i, r) for i, r in enumerate(results)],
        usage=usage_of(call.runs),
        **extra_fields(call),
    )


def _scored(index: int, done: Generated) -> JsonObject:
    tokens: list[JsonObject] = []
    for item in done.prompt_logprobs:
        logprob = None if item.logprob is None else floor(item.logprob)
        tokens.append({"id": item.token, "token": token_text(item.raw), "logprob": logprob})
        if item.top:
            tokens[-1]["top_logprobs"] = [
                {"id": t, "token": token_text(r), "logprob": floor(lp)} for t, lp, r in item.top
            ]
    known = [t["logprob"] for t in tokens if t["logprob"] is not None]
    total = math.fsum(known)
    perplexity = math.exp(min(-total / len(known), 700)) if known else None
    scored = {"tokens": tokens, "total": total, "perplexity": perplexity}
    return {"object": "score", "index": index, **scored}


async def tokenize(call: RequestContext) -> Response:
    body = await call.body(TokenizeBody)
    call.served_model()
    given = call.given
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    for name in ("add_generation_prompt", "continue_final_message"):
        if body.prompt is not None and name in given:
            raise invalid(name, "only with messages")
    for name in ("add_special_tokens", "parse_special"):
        if body.messages is not None and name in given:
            raise invalid(name, "only with prompt; the chat template adds its own special tokens")
    if body.prompt is not None:
        to_params.check_text_length("prompt", body.prompt, call.state.facts)
        # lm-eval asks for the id of a special token by its text
        alone = body.prompt in call.state.facts.special_tokens.values()
        parse = given.get("parse_special", alone)
        special = given.get("add_special_tokens", True)
        message = Tokenize(call.next_id(), call.tenant, body.prompt, add_special=special)
        message = replace(message, parse_special=parse)
    else:
        messages, template = conversation(call, continued(given), [], {})
        message = Tokenize(call.next_id(), call.tenant, messages=messages, template=template)
    call.submit(message)
    (done,) = await call.results(Tokenized)
    ids, context = done.token_ids, call.state.facts.context
    answer: JsonObject = {"tokens": ids, "count": len(ids), "max_model_len": context}
    answer |= warnings_of(call)
    if body.return_token_strs:
        answer["token_strs"] = [token_text(raw) for raw in done.raw]
    return Json(answer)


async def detokenize(call: RequestContext) -> Response:
    body = await call.body(DetokenizeBody)
    call.served_model()
    if len(body.tokens) > 8 * call.state.facts.context:
        raise invalid("tokens", "more than eight times the context")
    to_params.check_vocabulary("tokens", body.tokens, call.state.facts)
    call.submit(Detokenize(call.next_id(), call.tenant, body.tokens))
    (done,) = await call.results(Detokenized)
    return Json({"prompt": done.text})
