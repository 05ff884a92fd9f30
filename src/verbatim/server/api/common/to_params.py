"""Convert a protocol's validated fields to SamplingParams, and apply the server's limits.

In: a validated body (validate.py), the limits, the model's facts. Out: the mapping that
SamplingParams takes, or a Problem that names the client's field.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence

from verbatim.base.errors import RequestError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.params import FIELDS, STRUCTURE, SamplingParams
from verbatim.server.api.common.field_rules import Rule
from verbatim.server.problem import Problem, check_limit, invalid, problem_of
from verbatim.server.process.messages import ModelFacts, WireFinish
from verbatim.server.server_state import State
from verbatim.server.settings import Limits

MESSAGE_KEY = re.compile(r"messages\[(\d+)\]\.(\w+)").fullmatch
ANY_MESSAGE = "messages[].name"  # a warning about the messages of a role


def sampling_values(body: JsonMapping, table: Mapping[str, Rule]) -> JsonObject:
    """The fields that map directly to SamplingParams, plus seed and stop."""
    values = {rule.param: body[name] for name, rule in table.items() if rule.param and name in body}
    if values.get("top_k") == -1:  # vLLM's clients: off
        values["top_k"] = 0
    if "seed" in body:
        values["seed"] = positive_seed(body["seed"])
    for name in ("stop", "thinking_budget"):
        if name in body:
            values[name] = body[name]
    return values


def penalty_window(last_n: int | None) -> JsonObject:
    """llama.cpp's and Ollama's repeat_last_n: -1 is all tokens, 0 turns the penalties off."""
    if last_n == 0:
        return {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    return {"penalty_range": last_n} if last_n and last_n > 0 else {}


def positive_seed(seed: int) -> int:
    """Map OpenAI's signed seed to 63 bits, modulo 2**63, so that different seeds stay different."""
    return seed % 2**63


def fresh_seed() -> int:
    return secrets.randbelow(2**53)  # JavaScript and jq round larger integers


def count_seeds() -> None:
    """For tests: requests without a seed get 1, 2, 3 and so on, so that a test sees the same
    answers in every run. With random seeds some of them end at their first token."""
    global fresh_seed
    fresh_seed = itertools.count(1).__next__


def for_each_prompt(
    params: JsonObject, body: JsonMapping, prompts: int, state: State
) -> list[JsonObject]:
    """The parameters of each prompt of a list.

    Without a seed in the request each prompt gets its own: noise depends on seed and position, so
    equal prompts with one seed get equal outputs. A seed in the request, or the server's default
    seed, applies to all prompts."""
    given = "seed" in body or state.settings.default_seed is not None
    # seed None: beam search draws nothing
    if prompts == 1 or given or params.get("seed") is None:
        return [params] * prompts
    return [{**params, "seed": fresh_seed()} for _ in range(prompts)]


def finish_params(
    values: JsonObject, state: State, *, prompts: int = 1, names: Mapping[str, str] | None = None
) -> JsonObject:
    """Apply the limits, check token ids, and validate with SamplingParams."""
    try:
        _check_limits(values, state.limits, state.facts, prompts)
        longest = state.limits.max_output_tokens
        if longest:
            check_limit("max_tokens", values.get("max_tokens") or 0, longest)
        if longest and "max_tokens" not in values:
            values["max_tokens"] = longest
        # Choose the seed here: the first chunk of a stream reports it. Beam search draws nothing.
        if values.get("num_beams", 1) == 1:
            seed = state.settings.default_seed
            values.setdefault("seed", fresh_seed() if seed is None else seed)
        return SamplingParams.from_mapping(values).to_mapping()
    except (RequestError, Problem) as error:
        raise with_client_names(problem_of(error), names or {}) from None


def with_client_names(
    problem: Problem, names: Mapping[str, str], shift: int = 0, places: Sequence[str] = ()
) -> Problem:
    """The error under the client's field name: max_completion_tokens for max_tokens, for example.

    `shift` is the number of messages that the server put before the client's; `places` are the
    client's fields behind its messages, where these are not messages[0], messages[1] and so on."""
    field_name = problem.param and names.get(problem.param)
    if problem.param == ANY_MESSAGE:
        field_name = f"{names.get('messages', 'messages')}[].name"
    elif problem.param and (place := MESSAGE_KEY(problem.param)):
        index = int(place[1]) - shift
        key = names.get(f"messages.{place[2]}", place[2])
        field_name = places[index] if index < len(places) else f"messages[{index}].{key}"
    if not field_name or field_name == problem.param:
        return problem
    message = problem.message.replace(f"{problem.param}:", f"{field_name}:", 1)
    return Problem(problem.code, message, field_name, problem.retry_after)


def wants_logit_rows(body: JsonMapping, params: JsonMapping, prompts: int = 1) -> bool:
    """Whether explanations include rows of logits. Raises if the request cannot produce them."""
    if not body.get("explain_rows"):
        return False
    if not params.get("explain") or not params.get("receipt"):
        raise invalid("explain_rows", "needs explain and receipt: true")
    if SamplingParams.from_mapping(params).width * prompts > 1:
        why = "needs one prompt and one choice; leave out n, best_of and num_beams"
        raise invalid("explain_rows", why)
    return True


def check_finish(finish: WireFinish | None, names: Mapping[str, str]) -> None:
    """Raise the Problem of a choice that ended in an error.

    It is a client error found late (bans and a grammar that mask every token, for example), or the
    server has too little memory, or the model computes no finite numbers."""
    if finish is None or finish.reason != "error":
        return
    if finish.code:
        retry = 1 if finish.code == "unavailable" else None
        raise Problem(finish.code, finish.detail, retry_after=retry)
    why, fields = finish.detail or "the request could not be completed", finish.fields
    if not fields:
        raise Problem("invalid_request", why)
    if len(fields) > 1:
        why += f" ({', '.join(names.get(field, field) for field in fields)}); relax one of them"
    message = why if why.startswith(f"{fields[0]}: ") else f"{fields[0]}: {why}"
    raise with_client_names(Problem("invalid_parameter", message, fields[0]), names)


def _check_limits(values: JsonMapping, limits: Limits, facts: ModelFacts, prompts: int) -> None:
    for name in ("logprobs", "prompt_logprobs", "explain"):
        check_limit(name, values.get(name) or 0, limits.max_logprobs)
    stop = values.get("stop", ())
    if not isinstance(stop, str):
        check_limit("stop", len(stop), limits.max_stop, "strings are")
    for name in ("n", "best_of", "num_beams"):
        if (values.get(name) or 1) * prompts > limits.max_width:
            asked = f"{values.get(name, 1)}" + (f" times {prompts} prompts" if prompts > 1 else "")
            raise invalid(name, f"{asked} is above this server's limit of {limits.max_width}")
    for name in STRUCTURE:
        value = values.get(name, "")
        text = value if isinstance(value, str) else json.dumps(value)
        check_limit(name, len(text.encode()), limits.max_schema_bytes, "bytes are")
    _check_ids(values, limits, facts)


def _check_ids(values: JsonMapping, limits: Limits, facts: ModelFacts) -> None:
    for name, rule in FIELDS.items():
        if rule.kind not in ("ids", "bias") or not values.get(name):
            continue
        ids = values[name]
        check_limit(name, len(ids), limits.max_bias, "entries are")
        check_vocabulary(name, [int(i) for i in ids], facts)


def check_vocabulary(name: str, ids: list[int], facts: ModelFacts) -> None:
    size = facts.vocab
    for token in ids:
        if not 0 <= token < size:
            raise invalid(name, f"{token} is not a token id of this model (0 to {size - 1})")


def check_id_count(name: str, ids: list[int], facts: ModelFacts) -> None:
    if len(ids) > facts.context:
        message = f"{name}: {len(ids)} tokens are more than the context of {facts.context}"
        raise Problem("context_length_exceeded", message, name)


def check_text_length(name: str, text: str, facts: ModelFacts) -> None:
    """Reject a text that cannot fit, before tokenising: it has more bytes than the longest token
    times the context."""
    max_bytes = facts.context * facts.longest_token
    if len(text) > max_bytes or len(text.encode()) > max_bytes:
        why = f"the text has more bytes than {facts.context} tokens of this model can hold"
        raise Problem("context_length_exceeded", f"{name}: {why}", name)
