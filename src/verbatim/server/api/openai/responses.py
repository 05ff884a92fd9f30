"""POST /v1/responses: OpenAI's Responses API.

In: a checked request, translated into chat fields for `ChatRequest` (responses_input.py). Out: a
response object with output items (responses_object.py), or a stream of typed events
(responses_stream.py).
"""

from __future__ import annotations

from starlette.responses import Response

from verbatim.server.api.common.chat_request import ChatRequest, count_tokens
from verbatim.server.api.common.generate import warnings_of
from verbatim.server.api.common.request_context import EventStream, Json, RequestContext
from verbatim.server.api.openai.responses_input import NAMES, as_chat
from verbatim.server.api.openai.responses_object import ResponsesReply
from verbatim.server.api.openai.responses_stream import ResponseEvents
from verbatim.server.problem import Problem


async def create(call: RequestContext) -> Response:
    body = await call.body()
    model = call.state.check_model(body.get("model"))
    call.state.store.check_enabled(bool(body.get("store")))
    if "stream_options" in body and not body.get("stream"):
        raise Problem(
            "invalid_parameter", "stream_options: only with stream: true", "stream_options"
        )
    ask = ChatRequest(call, as_chat(call, body), call.route.fields, NAMES)
    answer = ResponsesReply(ask, body, model)
    stream = bool(body.get("stream"))
    ask.submit(stream)
    await call.accepted()
    if stream:
        pad = bool((body.get("stream_options") or {}).get("include_obfuscation"))
        made = ResponseEvents(answer, pad)
        return EventStream(call, made.events(), made.failed)
    return await answer.full_response()


async def count(call: RequestContext) -> Response:
    body = await call.body()
    call.state.check_model(body.get("model"))
    count = await count_tokens(call, as_chat(call, body), NAMES)
    return Json({"object": "response.input_tokens", "input_tokens": count, **warnings_of(call)})
