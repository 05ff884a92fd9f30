"""Fields that other servers' clients send: accepted with a warning where they change nothing,
honoured or refused by name where they do; and the warnings of every protocol, streamed and
whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import Live

from verbatim.server.api.routes import BODIES

pytestmark = pytest.mark.server
HI = [{"role": "user", "content": "hi"}]
NAMED = [{"role": "user", "content": "hi", "name": "planner"}]
SCHEMA = {"type": "boolean", "x-order": 1}
# A request of each streaming route whose schema has a keyword that asserts nothing
SCHEMAS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "json_schema": SCHEMA},
    "/v1/chat/completions": {
        "messages": HI,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    "/v1/responses": {
        "input": "hi",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": HI,
        "max_tokens": 64,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/api/chat": {"messages": HI, "format": SCHEMA},
    "/api/generate": {"prompt": "hi", "format": SCHEMA},
    "/completion": {"prompt": "hi", "json_schema": SCHEMA},
}
STREAMED = [path for path, route in BODIES.items() if "stream" in route.fields]
STREAMED.remove("/api/pull")  # progress of a download, without an answer


def ok(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusal(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


def parts_of(fake: Live, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a streamed or whole answer."""
    lines = fake.post(route, body).text.splitlines()
    found = [line.removeprefix("data: ") for line in lines if line and line[0] in "d{"]
    return [json.loads(line) for line in found if line != "[DONE]"]


def warnings_in(parts: list[dict[str, Any]]) -> list[str]:
    """The warnings of an answer, which it has once."""
    inner = [part["response"] for part in parts if isinstance(part.get("response"), dict)]
    (warnings,) = [part["warnings"] for part in (*parts, *inner) if "warnings" in part]
    return list(warnings)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", STREAMED)
def test_every_protocol_reports_warnings_streamed_and_whole(
    fake: Live, route: str, stream: bool
) -> None:
    parts = parts_of(fake, route, {**SCHEMAS[route], "stream": stream})
    assert any("x-order" in line for line in warnings_in(parts)), parts
    for part in parts:
        if "warnings" in part and "choices" in part:  # no client reads a chunk without choices
            assert part["choices"][0]["finish_reason"], part


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}])
def test_the_last_chunk_with_a_finish_reason_has_the_warnings(
    fake: Live, extra: dict[str, Any]
) -> None:
    for route in ("/v1/chat/completions", "/v1/completions"):
        parts = parts_of(fake, route, {**SCHEMAS[route], "stream": True, **extra})
        ends = [part for part in parts if part["choices"] and part["choices"][0]["finish_reason"]]
        assert len(ends) == extra.get("n", 1)
        assert ["warnings" in part for part in ends] == [*[False] * (len(ends) - 1), True]
        assert warnings_in(parts)


# ------------------------------------------------------------------------- fields without an effect

HINTS = {"service_tier": "flex", "prompt_cache_retention": "24h", "prompt_cache_key": "k",
         "cache_prompt": False, "client_metadata": {"a": "b"}}  # fmt: skip
# (route, fields, the warnings' fields if they have other names)
IGNORED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/chat/completions", {**HINTS, "verbosity": "low", "prediction": {"type": "content"}}, []),
    ("/v1/chat/completions", {"enable_thinking": False, "reasoning_effort": "low"}, []),
    ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}},
     ["chat_template_kwargs.enable_thinking"]),
    ("/v1/completions", {**HINTS, "guided_decoding_backend": "xgrammar", "store": True}, []),
    ("/v1/completions", {"metadata": {"a": "b"}}, []),
    ("/v1/responses", {**HINTS, "truncation": "auto", "max_tool_calls": 3}, []),
    ("/v1/responses", {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}},
     ["text.verbosity", "reasoning.effort"]),
    ("/v1/responses", {"input": NAMED}, ["input[].name"]),
    ("/v1/messages", {"cache_control": {"type": "ephemeral"}, "speed": "fast"}, []),
    ("/v1/messages", {"output_config": {"effort": "low"}}, ["output_config.effort"]),
    ("/v1/messages", {"messages": NAMED}, ["messages[].name"]),
    ("/v1/messages", {"messages": [{**HI[0], "cache_control": {}}]}, ["messages[0].cache_control"]),
    ("/api/chat", {"keep_alive": "5m", "truncate": True, "shift": True}, []),
    ("/api/chat", {"messages": NAMED}, ["messages[].name"]),
    ("/api/chat", {"messages": [{**HI[0], "cache_control": {}}]}, ["messages[0].cache_control"]),
    ("/api/chat", {"think": "low", "options": {"num_gpu": 1, "mirostat_tau": 5.0}},
     ["options.num_gpu", "options.mirostat_tau", "think"]),
    ("/api/generate", {"options": {"draft_num_predict": 4, "num_gqa": 1}},
     ["options.draft_num_predict", "options.num_gqa"]),
    ("/completion", {"cache_prompt": False, "id_slot": 0, "n_keep": 3}, []),
]  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("route", "fields", "names"), IGNORED)
def test_a_field_that_changes_nothing_is_accepted_with_a_warning(
    fake: Live, route: str, fields: dict[str, Any], names: list[str], stream: bool
) -> None:
    short = {"seed": 1, "max_tokens": 64} if route == "/v1/completions" else {}
    body = {**SCHEMAS[route], **short, **fields, "stream": stream}
    named = [line for line in warnings_in(parts_of(fake, route, body)) if "x-order" not in line]
    assert all(": has no effect; " in line for line in named)
    assert sorted(line.partition(":")[0] for line in named) == sorted(names or fields)


def test_values_that_hold_anyway_get_no_warning(fake: Live) -> None:
    same = {"service_tier": "auto", "verbosity": "medium", "cache_prompt": True, "store": False,
            "include_reasoning": True, "prompt_cache_retention": "in_memory"}  # fmt: skip
    assert "warnings" not in ok(fake.post("/v1/chat/completions", {"messages": HI, **same}))
    disabled = ok(fake.post("/v1/responses", {"input": "hi", "truncation": "disabled"}))
    assert "warnings" not in disabled
    auto = ok(fake.post("/v1/responses", {"input": "hi", "truncation": "auto"}))
    assert (disabled["truncation"], auto["truncation"]) == ("disabled", "auto")
    same = {"safety_identifier": "s", "store": False, "user": "u"}
    assert "warnings" not in ok(fake.post("/v1/completions", {"prompt": "hi", **same}))
    same = {"include_reasoning": True, "top_logprobs": 0, "max_tool_calls": None,
            "background": False, "safety_identifier": "s"}  # fmt: skip
    assert "warnings" not in ok(fake.post("/v1/responses", {"input": "hi", **same}))
    same = {"container": None, "mcp_servers": [], "metadata": {"user_id": "u"}}
    assert "warnings" not in ok(
        fake.post("/v1/messages", {"messages": HI, "max_tokens": 4, **same})
    )
    for wrong in ("medium", 3):
        body = {"input": "hi", "truncation": wrong}
        assert refusal(fake.post("/v1/responses", body))["param"] == "truncation"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_stream_options_hold_for_streams_alone(fake: Live, route: str) -> None:
    options = {**SCHEMAS[route], "stream_options": {"include_usage": True}}
    found = warnings_in(parts_of(fake, route, options))
    assert "stream_options: has no effect; only with stream: true" in found
    streamed = parts_of(fake, route, {**options, "stream": True})
    assert not any("stream_options" in line for line in warnings_in(streamed))
    assert any(part.get("usage") or part.get("response", {}).get("usage") for part in streamed)


def test_a_prompt_that_does_not_fit_is_refused_whatever_truncation_says(fake: Live) -> None:
    body = {"input": "x " * 200_000, "truncation": "auto"}
    error = refusal(fake.post("/v1/responses", body))
    assert error["code"] == "context_length_exceeded"
    assert error["message"].endswith("; truncation: auto does not cut the prompt on this server")
    plain = refusal(fake.post("/v1/responses", {"input": "x " * 200_000}))
    assert plain["message"] == error["message"].partition("; truncation")[0]
    ollama = {"messages": [{"role": "user", "content": "x " * 200_000}], "truncate": True}
    assert fake.post("/api/chat", ollama).status_code == 400


SWITCH = {"enable_thinking": True}


@pytest.mark.parametrize("think", [SWITCH, {"chat_template_kwargs": SWITCH}])
def test_reasoning_of_a_model_that_has_none_is_refused(fake: Live, think: dict[str, Any]) -> None:
    error = refusal(fake.post("/v1/chat/completions", {"messages": HI, **think}))
    assert error["param"] == next(iter(think))


# ------------------------------------------------------------------ what each client library sends

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
}
BREAK = {"type": "ephemeral"}
AUTOGEN = {  # autogen-ext 0.7: a name in every message, also beside tool calls
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "hi", "name": "user"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "name": "agent"},
        {"role": "tool", "content": "22 C", "tool_call_id": "call_1"},
        {"role": "user", "content": [{"type": "text", "text": "again"}], "name": "planner"},
    ],
    "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": False}}],
    "tool_choice": "auto",
}
CREWAI = {  # crewAI 1.15: the name of the function in a tool's message
    "messages": [
        {"role": "system", "content": "You are Researcher."},
        {"role": "user", "content": "\nCurrent Task: hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "22 C"},
    ],
    "tools": [WEATHER],
    "stop": ["\nObservation:"],
}
LITELLM = {  # cache breakpoints in messages, parts and tools
    "messages": [
        {
            "role": "system",
            "content": [{"type": "text", "text": "Be short.", "cache_control": BREAK}],
        },
        {"role": "user", "content": "hi", "cache_control": BREAK},
    ],
    "tools": [{**WEATHER, "cache_control": BREAK}],
}  # fmt: skip
PLAIN = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "user", "content": "hi"},
    ],
    "tools": [WEATHER],
}


@pytest.mark.parametrize(
    ("body", "starts"),
    [
        (AUTOGEN, ["messages[].name: has no effect; "]),
        (CREWAI, []),
        (LITELLM, ["messages[0].content[0].cache_control: has no effect; "]),
    ],
)
def test_messages_of_client_libraries_are_accepted(
    fake: Live, body: dict[str, Any], starts: list[str]
) -> None:
    made = ok(fake.post("/v1/chat/completions", {**body, "max_tokens": 4}))
    found = made.get("warnings", [])
    assert [line[: len(start)] for line, start in zip(found, starts, strict=True)] == starts
    streamed = {**body, "max_tokens": 4, "stream": True}
    if starts:
        assert warnings_in(parts_of(fake, "/v1/chat/completions", streamed)) == found


def test_a_cache_breakpoint_is_not_in_the_prompt(fake: Live) -> None:
    """A chat template prints a tool as it is."""
    made, plain = (ok(fake.post("/apply-template", body)) for body in (LITELLM, PLAIN))
    assert made["prompt"] == plain["prompt"]
    assert len(made["warnings"]) == 1
    assert "warnings" not in plain
    anthropic = {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "hi", "cache_control": BREAK}]}]}  # fmt: skip
    assert ok(fake.post("/v1/messages/count_tokens", anthropic))["warnings"]


def test_every_route_with_messages_reports_names(fake: Live) -> None:
    for route in ("/tokenize", "/apply-template", "/v1/chat/completions"):
        (warning,) = ok(fake.post(route, {"messages": NAMED}))["warnings"]
        assert warning.endswith("does not read the name of user messages"), route


# ------------------------------------------------------------------ fields under another name here


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        (
            {
                "structured_outputs": {
                    "regex": "[ab]{3}",
                    "structural_tag": None,
                    "disable_fallback": False,
                    "disable_any_whitespace": False,
                    "whitespace_pattern": None,
                }
            },
            {"regex": "[ab]{3}"},
        ),
        ({"structured_outputs": {"choice": ["left", "right"]}}, {"choice": ["left", "right"]}),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, {"grammar": 'start: "x" | "y"'}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
        ({"guided_regex": "[ab]{3}"}, {"regex": "[ab]{3}"}),
        ({"guided_choice": ["left", "right"]}, {"choice": ["left", "right"]}),
        ({"guided_grammar": 'start: "x" | "y"'}, {"grammar": 'start: "x" | "y"'}),
        ({"repeat_penalty": 1.9}, {"repetition_penalty": 1.9}),
    ],
)
def test_fields_of_vllm_and_llama_cpp_are_honoured(
    fake: Live, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    for route, body in (
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 24}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 24}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 24}),
    ):
        made, same = (ok(fake.post(route, {**body, "seed": 3, "receipt": True, **more}))
                      for more in (theirs, ours))  # fmt: skip
        assert made["receipt"]["params"] == same["receipt"]["params"]
        if "repeat_penalty" not in theirs:
            plain = ok(fake.post(route, {**body, "seed": 3, "receipt": True}))
            assert plain["receipt"]["params"] != same["receipt"]["params"]


def test_n_probs_reports_log_probabilities(fake: Live) -> None:
    chat = {"messages": HI, "max_tokens": 2, "seed": 3}
    made = ok(fake.post("/v1/chat/completions", {**chat, "n_probs": 3}))["choices"]
    same = ok(fake.post("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 3}))
    assert made == same["choices"]
    assert len(made[0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    text = {"prompt": "hi", "max_tokens": 2, "seed": 3}
    made = ok(fake.post("/v1/completions", {**text, "n_probs": 3}))["choices"]
    assert made == ok(fake.post("/v1/completions", {**text, "logprobs": 3}))["choices"]
    assert made[0]["logprobs"]["top_logprobs"]
    made = ok(fake.post("/v1/chat/completions", {**chat, "n_probs": 0}))["choices"]
    assert made[0]["logprobs"] is None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": ""}},
         "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": {"type": 3}}, "guided_json"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
        ({"guided_json": {}, "json_schema": {"type": "object"}}, "guided_json"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"repeat_penalty": -1.0}, "repeat_penalty"),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.6}, "repeat_penalty"),
        ({"n_probs": 10_000}, "n_probs"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_under_the_clients_name(
    fake: Live, more: dict[str, Any], param: str
) -> None:
    for route, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        error = refusal(fake.post(route, {**body, **more}))
        assert error["param"] == param, error
        assert error["message"].startswith(f"{param}:"), error
