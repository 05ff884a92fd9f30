"""Prompts that are no conversation: the four forms of a list of prompts, and their embeddings.

Every text is one request of the engine, so that its numbers do not depend on the other texts of the
call.
"""

from __future__ import annotations

import math
from typing import cast

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common import to_params
from verbatim.server.api.common.request_context import RequestContext
from verbatim.server.api.common.schemas import Prompt
from verbatim.server.problem import check_limit, invalid
from verbatim.server.process.messages import Generate, Generated


def prompts_of(
    value: Prompt, name: str, call: RequestContext, *, truncate: bool = False
) -> list[str | list[int]]:
    """The four forms of `prompt` as a list. Prompts that are empty, too long (unless the engine may
    `truncate` them) or have invalid token ids are rejected here, before they reach the engine."""
    many = isinstance(value, list) and not isinstance(value[0], int)
    prompts = cast(list[str | list[int]], value if many else [value])
    check_limit(name, len(prompts), call.state.limits.max_prompts, "prompts are")
    for i, prompt in enumerate(prompts):
        where = f"{name}[{i}]" if many else name
        if not prompt:
            raise invalid(where, "is empty; give at least one character or token")
        if isinstance(prompt, str):
            if not truncate:
                to_params.check_text_length(where, prompt, call.state.facts)
        else:
            if not truncate:
                to_params.check_id_count(where, prompt, call.state.facts)
            to_params.check_vocabulary(where, prompt, call.state.facts)
    return prompts


def parses_special(parse: bool | None, prompts: list[str | list[int]]) -> bool:
    if parse and not isinstance(prompts[0], str):
        raise invalid("parse_special", "only with text; token ids are not parsed")
    return bool(parse)


async def embed(
    call: RequestContext,
    name: str,
    prompt: Prompt,
    *,
    dimensions: int | None = None,
    truncate: bool | None = None,
    prompt_name: str | None = None,
) -> list[Generated]:
    """Results that carry the embedding of each text in the field `name` of the client's request."""
    hidden = call.state.facts.hidden
    if (dimensions or 1) > hidden:
        raise invalid("dimensions", f"{dimensions} is above the model's {hidden}")
    prompts = prompts_of(prompt, name, call, truncate=bool(truncate))
    call.names = {"prompt": name}
    more = {"prompt_name": prompt_name, "truncate": bool(truncate)}
    return await run_embeddings(call, [{"prompt": prompt, **more} for prompt in prompts])


async def run_embeddings(call: RequestContext, inputs: list[JsonObject]) -> list[Generated]:
    state = call.state
    params = to_params.finish_params({"max_tokens": 0, "temperature": 0.0}, state)
    for given in inputs:
        call.submit(Generate(call.next_id(), call.tenant, params, False, embedding=True, **given))
    return await call.results(Generated)


def unit_vector(vector: list[float], dimensions: int | None) -> list[float]:
    """The first `dimensions` numbers (None: all), scaled to length 1."""
    kept = vector[:dimensions]
    length = math.sqrt(sum(x * x for x in kept))
    return [x / length for x in kept] if length else kept


def prompt_usage(results: list[Generated]) -> dict[str, int]:
    total = sum(r.usage.prompt_tokens for r in results)
    return {"prompt_tokens": total, "total_tokens": total}
