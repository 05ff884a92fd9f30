"""The request fields of /v1/rerank, and of vLLM's /tokenize and /v1/score (see
common/field_rules.py)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from verbatim.server.api.common import field_rules as shared
from verbatim.server.api.common.field_rules import Refused, RequestBody, honoured, refused
from verbatim.server.api.common.schemas import (
    Alternatives,
    Label,
    Length,
    Message,
    Prompt,
    RankDocument,
    Text,
    TokenId,
)


class Rerank(RequestBody):
    model: Label = shared.MODEL
    query: Text = honoured("a text", required=True)
    documents: Annotated[list[Text | RankDocument], Field(min_length=1)] = honoured(
        "a list of texts, or of objects with a text", required=True
    )
    top_n: Length | None = honoured("return only this many documents, the best")
    return_documents: bool | None = honoured(
        "true: each result has its document; missing: only its index"
    )
    truncate: bool | None = shared.TRUNCATE
    max_chunks_per_doc: Refused = refused("a document is scored whole; see truncate")
    max_tokens_per_doc: Refused = refused("a document is scored whole; see truncate")
    rank_fields: Refused = refused("a document is a text")
    truncate_prompt_tokens: Refused = refused("use truncate")
    user: Label | None = shared.USER


class LlamaRerank(Rerank):
    """The same, under llama.cpp's path."""


class TokenizeBody(RequestBody):
    model: Label | None = honoured("missing: the served model")
    prompt: Text | None = honoured("a text")
    messages: Annotated[list[Message], Field(min_length=1)] | None = honoured(
        "instead of prompt: a conversation for the chat template, under the rules of "
        "/v1/chat/completions"
    )
    add_generation_prompt: bool | None = shared.ADD_PROMPT
    continue_final_message: bool | None = shared.CONTINUE
    add_special_tokens: bool | None = honoured("add the special tokens of a prompt (default true)")
    parse_special: bool | None = honoured(
        f"{shared.PARSE_TEXT}; a prompt that is the text of one special token (bos_token, "
        "eos_token, ...) and nothing else is that token, unless this is false"
    )
    return_token_strs: bool | None = honoured("also return each token's text")


class DetokenizeBody(RequestBody):
    model: Label | None = honoured("missing: the served model")
    tokens: list[TokenId] = honoured("token ids", required=True)


class ScoreBody(RequestBody):
    model: Label = shared.MODEL
    prompt: Prompt = honoured(
        "a string, a list of strings, token ids, or a list of lists of them", required=True
    )
    top_logprobs: Alternatives | None = honoured("alternatives for each token")
    parse_special: bool | None = shared.PARSE
    user: Label | None = shared.USER
