"""POST /v1/responses: OpenAI's Responses API.

In: a checked request, translated into chat fields for `ChatRequest` (responses_input.py). Out: a
response object with output items (responses_object.py), or a stream of typed events
(responses_stream.py).
"""

from __future__ import annotations

from dataclasses import replace

from starlette.responses import Response

from verbatim.server.api.common.chat_request import ChatRequest, count_tokens
from verbatim.server.api.common.generate import warnings_of
from verbatim.server.api.common.request_context import EventStream, Json, RequestContext
from verbatim.server.api.openai.openai_fields import Responses, ResponsesInputTokens
from verbatim.server.api.openai.responses_input import NAMES, as_chat
from verbatim.server.api.openai.responses_object import ResponsesReply
from verbatim.server.api.openai.responses_stream import ResponseEvents
from verbatim.server.problem import problem_of


async def create(call: RequestContext) -> Response:
    try:
        return await _answer(call)
    except Exception as error:
        problem = problem_of(error)
        cut = problem.code == "context_length_exceeded" and call.given.get("truncation") == "auto"
        if not cut:
            raise
        why = f"{problem.message}; truncation: auto does not cut the prompt on this server"
        raise replace(problem, message=why) from None


async def _answer(call: RequestContext) -> Response:
    given = await call.body(Responses)
    body, model = call.given, call.served_model()
    call.state.store.check_enabled(bool(given.store))
    ask = ChatRequest(call, await as_chat(call, body), call.route.fields, NAMES)
    answer = ResponsesReply(ask, body, model)
    stream = bool(given.stream)
    ask.submit(stream)
    await call.accepted()
    pad = given.stream_options is not None and bool(given.stream_options.include_obfuscation)
    made = ResponseEvents(answer, pad)
    if stream:
        return EventStream(call, made.events(), made.failed)
    return Json(await made.full_response())


async def count(call: RequestContext) -> Response:
    await call.body(ResponsesInputTokens)
    call.served_model()
    count = await count_tokens(call, await as_chat(call, call.given), NAMES)
    return Json({"object": "response.input_tokens", "input_tokens": count, **warnings_of(call)})
