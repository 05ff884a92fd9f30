"""OpenAI's routes: completions, chat completions, responses, models, embeddings."""

from __future__ import annotations

import re

from verbatim.server.api.common.route import ApiProtocol, ApiRoute, Query, queued
from verbatim.server.api.openai import (
    batches,
    chat_completions,
    completions,
    embeddings,
    openai_fields,
    responses,
    served_models,
    stored,
)

_PAGE = {
    "after": Query("the id after which the page starts"),
    "limit": Query("maximum entries per page, 1 to 100; missing: 20", "[1-9][0-9]?|100"),
    "order": Query("asc or desc, by age", "asc|desc"),
}
_CHATS = {
    **_PAGE,
    "model": Query("only responses of this model"),
    "metadata[KEY]": Query("only responses whose metadata has this value under KEY"),
}
_INCLUDE = Query(
    "message.output_text.logprobs: always included if the request had them",
    "message\\.output_text\\.logprobs",
)
_REPLAY = {
    "include[]": _INCLUDE,
    "stream": Query("true: as stream events", "true|false"),
    "starting_after": Query("with stream: only events with a higher sequence number", "[0-9]{1,9}"),
    "include_obfuscation": Query("with stream: pad the deltas", "true|false"),
}
_FILES = {
    **_PAGE,
    "limit": Query("maximum entries per page, 1 to 10000; missing: 10000", "[1-9][0-9]{0,3}|10000"),
    "purpose": Query("only files of this purpose: batch or batch_output", "batch|batch_output"),
}
_BATCHES = {name: _PAGE[name] for name in ("after", "limit")}
_FILE, _BATCH = "/v1/files", "/v1/batches"
_CHAT, _RESPONSE = "/v1/chat/completions", "/v1/responses"
# Routes that are not here (regular expressions) -> what is there instead
_ABSENT = {
    "/v1/responses/compact": "nothing is compacted; send a shorter input",
    "/v1/responses/[^/]+/cancel": "no response runs in the background; to cancel one, disconnect",
    "/v1/conversations": "use previous_response_id of /v1/responses",
    "/v1/uploads": "send the whole file to /v1/files",
    "/v1/(audio|images|videos)": "only text input and output are supported",
    "/v1/messages/batches": "send the requests in OpenAI's form to /v1/batches",
}


def _absent(path: str) -> str | None:
    whys = (why for pattern, why in _ABSENT.items() if re.match(pattern, path))
    return next((f"no such route; {why}" for why in whys), None)


PROTOCOL = ApiProtocol(
    (
        queued("/v1/completions", completions.completions, openai_fields.Completions),
        queued(_CHAT, chat_completions.chat, openai_fields.ChatCompletions),
        ApiRoute(_CHAT, stored.list_chats, method="GET", queries=_CHATS),
        ApiRoute(f"{_CHAT}/{{id}}", stored.get_chat, method="GET"),
        ApiRoute(f"{_CHAT}/{{id}}", stored.update_chat, openai_fields.ChatCompletionUpdate),
        ApiRoute(f"{_CHAT}/{{id}}", stored.delete_chat, method="DELETE"),
        ApiRoute(f"{_CHAT}/{{id}}/messages", stored.chat_messages, method="GET", queries=_PAGE),
        queued(_RESPONSE, responses.create, openai_fields.Responses),
        queued(f"{_RESPONSE}/input_tokens", responses.count, openai_fields.ResponsesInputTokens),
        ApiRoute(f"{_RESPONSE}/{{id}}", stored.get_response, method="GET", queries=_REPLAY),
        ApiRoute(f"{_RESPONSE}/{{id}}", stored.delete_response, method="DELETE"),
        ApiRoute(
            f"{_RESPONSE}/{{id}}/input_items",
            stored.input_items,
            method="GET",
            queries={**_PAGE, "include[]": _INCLUDE},
        ),
        ApiRoute("/v1/models", served_models.models, method="GET"),
        ApiRoute("/v1/models/{id:path}", served_models.model, method="GET"),
        queued("/v1/embeddings", embeddings.embeddings, openai_fields.Embeddings),
        ApiRoute(_FILE, batches.upload, openai_fields.FileUpload, is_form=True),
        ApiRoute(_FILE, batches.list_files, method="GET", queries=_FILES),
        ApiRoute(f"{_FILE}/{{id}}", batches.get_file, method="GET"),
        ApiRoute(f"{_FILE}/{{id}}", batches.delete_file, method="DELETE"),
        ApiRoute(f"{_FILE}/{{id}}/content", batches.content, method="GET"),
        ApiRoute(_BATCH, batches.create, openai_fields.BatchCreate, loads_nothing=lambda *_: True),
        ApiRoute(_BATCH, batches.list_batches, method="GET", queries=_BATCHES),
        ApiRoute(f"{_BATCH}/{{id}}", batches.get_batch, method="GET"),
        ApiRoute(f"{_BATCH}/{{id}}/cancel", batches.cancel),
    ),
    absent_route=_absent,
)
