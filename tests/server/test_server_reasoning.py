"""Reasoning of a reasoning model over every chat protocol: streamed and whole are equal, no marker
leaks, and the switches of each protocol are honoured or refused by name."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from live_server import Live

from verbatim.server.api.openai.responses_input import as_chat, chat_messages, earlier_messages
from verbatim.server.problem import Problem

pytestmark = pytest.mark.server
ASK = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def reasoner() -> Iterator[Live]:
    live = Live("--max-output-tokens", "512", engine="pipeline,think=yes").wait_ready()
    yield live
    assert live.stop() == 0, live.log_text()


def lines(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = live.post(path, body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines() if line]


def chat(live: Live, body: dict[str, Any]) -> tuple[str, str]:
    whole = live.post("/v1/chat/completions", body).json()
    message = whole["choices"][0]["message"]
    events = live.events("/v1/chat/completions", {**body, "stream": True})
    deltas = [e["choices"][0]["delta"] for e in events if isinstance(e, dict) and e["choices"]]
    reasoning = "".join(d.get("reasoning_content") or "" for d in deltas)
    text = "".join(d.get("content") or "" for d in deltas)
    assert (reasoning, text) == (message.get("reasoning_content", ""), message["content"])
    counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (counted > 0) == bool(reasoning)
    return reasoning, text


def responses(live: Live, body: dict[str, Any]) -> tuple[str, str]:
    body = {"input": "hi", **body}
    whole = live.post("/v1/responses", body).json()
    events = [e for e in live.events("/v1/responses", {**body, "stream": True}) if e != "[DONE]"]
    parts = {
        kind: "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text")
    }
    items = [[item["type"], item["content"][0]["text"]] for item in whole["output"]]
    last = events[-1]["response"]["output"]
    assert [[item["type"], item["content"][0]["text"]] for item in last] == items
    found = dict(items)
    assert (found.get("reasoning", ""), found.get("message", "")) == tuple(parts.values())
    return parts["reasoning_text"], parts["output_text"]


def anthropic(live: Live, body: dict[str, Any]) -> tuple[str, str]:
    whole = live.post("/v1/messages", {"messages": ASK, **body}).json()
    found = {block["type"]: block.get("thinking", block.get("text")) for block in whole["content"]}
    events = live.events("/v1/messages", {"messages": ASK, **body, "stream": True})
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    reasoning = "".join(d.get("thinking", "") for d in deltas)
    text = "".join(d.get("text", "") for d in deltas)
    assert (reasoning, text) == (found.get("thinking", ""), found.get("text", ""))
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == [block["type"] for block in whole["content"]]
    return reasoning, text


def ollama(live: Live, body: dict[str, Any]) -> tuple[str, str]:
    body = {"messages": ASK, **body}
    (whole,) = lines(live, "/api/chat", {**body, "stream": False})
    found = [line["message"] for line in lines(live, "/api/chat", {**body, "stream": True})]
    reasoning = "".join(m.get("thinking", "") for m in found)
    text = "".join(m["content"] for m in found)
    assert (reasoning, text) == (whole["message"].get("thinking", ""), whole["message"]["content"])
    return reasoning, text


# (protocol, a structured answer after reasoning of at most 7 tokens, thinking switched off)
CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (
        chat,
        {"messages": ASK, "response_format": FORMAT, "thinking_budget": 7, "seed": 1},
        {"reasoning_effort": "none", "thinking_budget": None},
    ),
    (
        responses,
        {
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "thinking_budget": 7,
            "seed": 1,
        },
        {"reasoning": {"effort": "none"}, "thinking_budget": None},
    ),
    (
        anthropic,
        {
            "max_tokens": 300,
            "output_format": {"type": "json_schema", "schema": SCHEMA},
            "thinking": {"type": "enabled", "budget_tokens": 7},
            "temperature": 0,
        },
        {"thinking": {"type": "disabled"}},
    ),
    (ollama, {"format": SCHEMA, "options": {"seed": 1, "num_predict": 500}}, {"think": False}),
]


def test_log_probabilities_of_reasoning(reasoner: Live) -> None:
    """Chat completions has those of every token, Responses those of the answer."""
    more = {"thinking_budget": 7, "seed": 1, "top_logprobs": 1}
    body = {"messages": ASK, "max_tokens": 40, "logprobs": True, **more}
    whole = reasoner.post("/v1/chat/completions", body).json()
    rows, usage = whole["choices"][0]["logprobs"]["content"], whole["usage"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert (reasoning > 7, len(rows)) == (True, usage["completion_tokens"])
    assert "</think>" in [row["token"] for row in rows[:reasoning]]
    made = reasoner.post("/v1/responses", {"input": "hi", "max_output_tokens": 40, **more}).json()
    assert made["output"][-1]["content"][0]["logprobs"] == rows[reasoning:]


def test_ollama_lists_thinking_as_a_capability(reasoner: Live, fake: Live) -> None:
    shown = [live.post("/api/show", {}).json()["capabilities"] for live in (reasoner, fake)]
    assert shown == [["completion", "tools", "embedding", "thinking"], shown[0][:3]]


@pytest.mark.parametrize(("protocol", "body", "off"), CASES)
def test_reasoning_and_structured_answer(
    reasoner: Live, protocol: Any, body: dict[str, Any], off: dict[str, Any]
) -> None:
    if protocol is not ollama:  # Ollama has no budget: the random model may think to the end
        reasoning, text = protocol(reasoner, body)
        assert reasoning
        assert json.loads(text) == {}
        assert "think>" not in reasoning + text
    reasoning, text = protocol(reasoner, {k: v for k, v in (body | off).items() if v is not None})
    assert (reasoning, json.loads(text)) == ("", {})


@pytest.mark.parametrize("seed", range(4))
def test_vllm_44012_text_format_of_responses_constrains_the_message(
    reasoner: Live, seed: int
) -> None:
    """The document was written into the unconstrained reasoning item. Here it is the message, after
    reasoning and without one, and the reasoning is free."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    body = {"text": text, "seed": seed, "temperature": 1}
    reasoning, answer = responses(reasoner, {**body, "thinking_budget": 9})
    assert reasoning
    assert not reasoning.startswith("{")
    assert json.loads(answer)["n"] in (1, 2, 3)
    reasoning, answer = responses(reasoner, {**body, "reasoning": {"effort": "none"}})
    assert reasoning == ""
    assert json.loads(answer)["n"] in (1, 2, 3)


def test_reasoning_are_streamed_as_they_come(reasoner: Live) -> None:
    body = {"messages": ASK, "max_tokens": 40, "seed": 3, "thinking_budget": 20}
    reasoning, _ = chat(reasoner, body)
    assert reasoning
    ollama(reasoner, {"options": {"seed": 3, "num_predict": 30}, "think": True})


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            "/v1/messages",
            {"messages": ASK, "max_tokens": 9, "thinking": {"type": "enabled"}},
            "thinking",
        ),
        ("/api/chat", {"messages": ASK, "think": True}, "think"),
        ("/v1/chat/completions", {"messages": ASK, "thinking_budget": 3}, "thinking_budget"),
    ],
)
def test_a_model_without_reasoning_refuses_the_switch_by_name(
    fake: Live, path: str, body: dict[str, Any], field: str
) -> None:
    answer = fake.post(path, body)
    assert answer.status_code == 400
    assert field in answer.text


def test_off_is_accepted_where_there_is_nothing_to_switch_off(fake: Live) -> None:
    body = {"messages": ASK, "reasoning_effort": "none", "max_tokens": 2}
    assert fake.post("/v1/chat/completions", body).status_code == 200
    assert fake.post("/api/chat", {"messages": ASK, "think": False}).status_code == 200


def test_a_switch_that_nothing_reads_is_refused(reasoner: Live) -> None:
    raw = reasoner.post("/api/generate", {"prompt": "hi", "raw": True, "think": True})
    off = {"type": "disabled", "budget_tokens": 1024}
    budget = reasoner.post("/v1/messages", {"messages": ASK, "max_tokens": 2, "thinking": off})
    for answer, field in ((raw, "think: only without raw"), (budget, "thinking.budget_tokens: ")):
        assert answer.status_code == 400
        assert field in answer.text


def test_a_contradiction_with_the_template_variable_is_refused(reasoner: Live) -> None:
    body = {"messages": ASK, "reasoning_effort": "none"}
    answer = reasoner.post(
        "/v1/chat/completions", {**body, "chat_template_kwargs": {"enable_thinking": True}}
    )
    assert answer.status_code == 400
    assert "chat_template_kwargs.enable_thinking" in answer.text


def test_earlier_reasoning_are_passed_to_the_template(reasoner: Live) -> None:
    turn = {"type": "thinking", "thinking": "So.", "signature": ""}
    history = [
        *ASK,
        {"role": "assistant", "content": [turn, {"type": "text", "text": "Four."}]},
        *ASK,
    ]
    body = {"messages": history, "max_tokens": 4}
    assert reasoner.post("/v1/messages", body).status_code == 200
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]}
    answer = {"type": "message", "role": "assistant", "content": "Four."}
    ask = {"type": "message", "role": "user", "content": "hi"}
    body = {"input": [ask, item, answer, ask], "max_output_tokens": 4}
    made = reasoner.post("/v1/responses", {**body, "store": True})
    assert made.status_code == 200, made.text
    more = {"input": "on", "previous_response_id": made.json()["id"], "max_output_tokens": 4}
    assert reasoner.post("/v1/responses", more).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_include_reasoning_false_leaves_the_reasoning_out(reasoner: Live, stream: bool) -> None:
    body = {"messages": ASK, "max_tokens": 24, "seed": 3, "stream": stream}
    with_it, without = (
        reasoner.post("/v1/chat/completions", {**body, "include_reasoning": shown}).text
        for shown in (True, False)
    )
    assert ("reasoning_content" in with_it, "reasoning_content" in without) == (True, False)


def test_a_receipt_of_reasoning_replays_in_the_lens(reasoner: Live) -> None:
    body = {
        "messages": ASK,
        "thinking_budget": 6,
        "max_tokens": 60,
        "seed": 3,
        "receipt": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"enum": ["x", "y"]}},
        },
    }
    receipt = reasoner.post("/v1/chat/completions", body).json()["receipt"]
    assert receipt["thinks"] is True
    found = reasoner.client.post("/lens/api/replay", json={"receipt": receipt}).json()
    assert found["identical"], found


def test_log_probabilities_of_a_response_are_those_of_its_answer(reasoner: Live) -> None:
    body = {
        "input": "hi",
        "thinking_budget": 6,
        "max_output_tokens": 40,
        "seed": 3,
        "include": ["message.output_text.logprobs"],
    }
    whole = reasoner.post("/v1/responses", body).json()
    events = [e for e in reasoner.events("/v1/responses", body) if e != "[DONE]"]
    streamed = events[-1]["response"]
    found, same = (
        next(item for item in answer["output"] if item["type"] == "message")["content"][0]
        for answer in (whole, streamed)
    )
    assert found["text"]
    assert found == same
    tokens = whole["usage"]
    reasoning = tokens["output_tokens_details"]["reasoning_tokens"]
    assert reasoning > 0
    assert len(found["logprobs"]) == tokens["output_tokens"] - reasoning


def test_a_stored_response_with_reasoning_can_be_streamed_again(reasoner: Live) -> None:
    """The same event types in the same order; the deltas of a text are merged into one."""
    sealed = {"include": ["reasoning.encrypted_content"], "store": True}
    body = {"input": "hi", "thinking_budget": 6, "max_output_tokens": 40, "seed": 3, **sealed}
    first = [e for e in reasoner.events("/v1/responses", body) if e != "[DONE]"]
    made = first[-1]["response"]
    assert [item["type"] for item in made["output"]] == ["reasoning", "message"]
    replay = reasoner.client.get(f"/v1/responses/{made['id']}?stream=true").text.splitlines()
    again = [json.loads(line[6:]) for line in replay if line.startswith("data: ")]
    assert [e["type"] for e in again] == [k for k, _ in groupby(e["type"] for e in first)]
    assert again[-1]["response"] == made
    for kind in ("response.output_item.added", "response.reasoning_text.done"):
        found = [
            [{k: v for k, v in e.items() if k != "sequence_number"} for e in events]
            for events in ([e for e in some if e["type"] == kind] for some in (first, again))
        ]
        assert found[0] == found[1]


def test_anthropics_thinking_may_be_omitted(reasoner: Live) -> None:
    body = {
        "messages": ASK,
        "max_tokens": 40,
        "seed": 3,
        "thinking": {"type": "enabled", "budget_tokens": 6, "display": "omitted"},
    }
    whole = reasoner.post("/v1/messages", body).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert whole["content"][0]["thinking"] == ""
    events = reasoner.events("/v1/messages", body)
    kinds = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert kinds == ["thinking", "text"]
    assert "thinking_delta" not in json.dumps(events)


OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize("switch", [{"reasoning_effort": "none"}, OFF])
def test_a_budget_is_refused_where_thinking_is_off(switch: dict[str, Any], reasoner: Live) -> None:
    body = {"messages": ASK, "max_tokens": 4, "thinking_budget": 5, **switch}
    answer = reasoner.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "thinking_budget"


def test_a_beam_search_counts_reasoning_and_refuses_a_budget(reasoner: Live) -> None:
    body = {"messages": ASK, "max_tokens": 6, "num_beams": 2}
    found = reasoner.post("/v1/chat/completions", body).json()
    assert found["choices"][0]["message"]["reasoning_content"]
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    refused = reasoner.post("/v1/chat/completions", {**body, "thinking_budget": 2})
    assert refused.json()["error"]["param"] == "thinking_budget"


def test_a_switch_of_the_template_is_no_text(reasoner: Live) -> None:
    body = {"messages": ASK, "chat_template_kwargs": {"enable_thinking": "false"}}
    answer = reasoner.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs.enable_thinking"


@pytest.mark.parametrize("reads", [True, False])
def test_a_stored_reasoning_is_left_out_where_the_template_reads_none(reads: bool) -> None:
    said = {"role": "assistant", "content": "4", "reasoning_content": "So 4."}

    async def get(*key: str) -> dict[str, Any]:
        return {"messages": [said]}

    store = SimpleNamespace(get=get)
    state = SimpleNamespace(store=store, facts=SimpleNamespace(template_reasoning=reads))
    call: Any = SimpleNamespace(state=state, tenant="t")
    (found,) = asyncio.run(earlier_messages(call, "resp_1"))
    assert ("reasoning_content" in found) == reads
    assert said["reasoning_content"], "the stored message is unchanged"
    ask = {"type": "message", "role": "user", "content": "hi"}
    asked = {"instructions": "x", "previous_response_id": "resp_1", "input": [ask]}
    asyncio.run(as_chat(call, asked))
    assert call.places == ["instructions", "previous_response_id", "input[0]"]  # for errors


def test_reasoning_without_an_answer_reaches_the_template() -> None:
    """An output that max_output_tokens cut inside the reasoning has no message behind it."""
    user, answer = ({"role": role, "content": role[0]} for role in ("user", "assistant"))
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}

    def found(*items: dict[str, Any] | str) -> list[tuple[str, str, int]]:
        """Content, thought and number of calls of each message; a text is reasoning."""
        given = [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": item}]}
            if isinstance(item, str)
            else item
            for item in items
        ]
        messages, places = chat_messages(given)
        assert len(places) == len(messages)
        return [
            (m["content"], m.get("reasoning_content", ""), len(m.get("tool_calls", ())))
            for m in messages
        ]

    assert found(user, "A", answer) == [("u", "", 0), ("a", "A", 0)]
    assert found(user, "A") == [("u", "", 0), ("", "A", 0)]
    assert found("A", user, answer) == [("", "A", 0), ("u", "", 0), ("a", "", 0)]
    assert found("A", "B", answer) == [("", "A", 0), ("a", "B", 0)]
    assert found("A", call, call, "B", call) == [("", "A", 2), ("", "B", 1)]
    assert found(call, "", call) == [("", "", 2)]


def test_a_sealed_reasoning_with_an_unpaired_surrogate_is_refused() -> None:
    """Neither the wire nor a tokenizer can encode one."""
    item = {"type": "reasoning", "encrypted_content": base64.b64encode(b"\xed\xa0\x80").decode()}
    with pytest.raises(Problem) as error:
        chat_messages([item])
    assert error.value.param == "input[0].encrypted_content"


def test_reasoning_travel_with_a_client_that_stores_nothing(reasoner: Live, fake: Live) -> None:
    """reasoning.encrypted_content: what agents ask for, and send back in the next turn."""
    body = {
        "input": "hi",
        "thinking_budget": 6,
        "max_output_tokens": 40,
        "seed": 3,
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    whole = reasoner.post("/v1/responses", body).json()
    streamed = [e for e in reasoner.events("/v1/responses", body) if e != "[DONE]"][-1]["response"]
    reasoning, message = whole["output"]
    assert reasoning["encrypted_content"] == streamed["output"][0]["encrypted_content"]
    assert "logprobs" not in message["content"][0] or not message["content"][0]["logprobs"]
    back = {key: reasoning[key] for key in ("type", "id", "summary", "encrypted_content")}
    turns = [{"role": "user", "content": "hi"}, back, message, {"role": "user", "content": "so?"}]
    plain = [turns[0], {k: v for k, v in reasoning.items() if k != "encrypted_content"}, *turns[2:]]
    counts = [
        reasoner.post("/v1/responses/input_tokens", {"input": items}).json()["input_tokens"]
        for items in (turns, plain, [turns[0], *turns[2:]])
    ]
    assert counts[0] == counts[1] > counts[2]
    # a template that reads no reasoning: the server's own are left out
    assert fake.post("/v1/responses", {"input": turns, "max_output_tokens": 2}).status_code == 200
    wrong = [turns[0], {**back, "encrypted_content": "!"}, *turns[2:]]
    refused = reasoner.post("/v1/responses", {"input": wrong})
    assert refused.json()["error"]["param"] == "input[1].encrypted_content"


def test_anthropics_effort_is_that_of_the_template_or_has_no_effect(
    reasoner: Live, fake: Live
) -> None:
    body = {"messages": ASK, "max_tokens": 4, "seed": 3}
    asked = {**body, "output_config": {"effort": "low"}}
    on, off = (
        reasoner.post("/v1/messages", values).json()["usage"]["input_tokens"]
        for values in (asked, {**body, "thinking": {"type": "disabled"}})
    )
    assert on != off
    (warning,) = fake.post("/v1/messages", asked).json()["warnings"]
    assert warning == "output_config.effort: has no effect; this model does not reason"
