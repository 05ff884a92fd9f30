"""The API routes of a live server with the fake engine: response formats, streams, echo,
log-probabilities, stored answers, errors."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Live
from streams import stream

from eventually import HANG_SECONDS
from verbatim import LLM, SamplingParams

pytestmark = pytest.mark.server
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3}


def test_completion_has_seed_fingerprint_and_usage(fake: Any) -> None:
    answer = fake.complete()
    assert answer["object"] == "text_completion"
    assert answer["seed"] == 7
    assert answer["system_fingerprint"]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] == 6 + 8
    assert {"cached_tokens"} <= usage["prompt_tokens_details"].keys()
    assert {"accepted_prediction_tokens", "rejected_prediction_tokens"} <= usage[
        "completion_tokens_details"
    ].keys()


def test_the_reported_seed_repeats_the_answer(fake: Any) -> None:
    first = fake.post("/v1/completions", {"prompt": "x", "max_tokens": 20}).json()
    again = fake.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 20, "seed": first["seed"]}
    ).json()
    other = fake.post("/v1/completions", {"prompt": "x", "max_tokens": 20}).json()
    assert first["choices"] == again["choices"]
    assert first["seed"] != other["seed"]


def test_the_default_seed_is_that_of_requests_without_one() -> None:
    live = Live("--default-seed", "5").wait_ready()
    try:
        texts = {"prompt": ["x", "x"], "max_tokens": 20, "temperature": 1}
        first, again = (live.post("/v1/completions", texts).json() for _ in range(2))
        assert first["seed"] == 5
        assert first["choices"] == again["choices"]
        assert first["choices"][0]["text"] == first["choices"][1]["text"]
        assert live.complete(seed=6)["seed"] == 6
    finally:
        live.stop()


SAME = ["Once upon a time"] * 3


def test_equal_prompts_of_a_list_without_a_seed_get_different_seeds(fake: Any) -> None:
    """The seed reported in each choice repeats that choice alone."""
    answer = fake.post(
        "/v1/completions", {"prompt": SAME, "max_tokens": 20, "n": 2, "ignore_eos": True}
    ).json()
    assert answer["seed"] is None
    choices = answer["choices"]
    assert [c["index"] for c in choices] == list(range(6))
    assert len({c["text"] for c in choices}) == 6
    assert len({c["seed"] for c in choices}) == 3
    for prompt in range(3):
        again = fake.complete(
            SAME[prompt], max_tokens=20, n=2, ignore_eos=True, seed=choices[2 * prompt]["seed"]
        )
        assert [c["text"] for c in again["choices"]] == [
            c["text"] for c in choices[2 * prompt : 2 * prompt + 2]
        ]
    beams = fake.post("/v1/completions", {"prompt": SAME, "max_tokens": 5, "num_beams": 2}).json()
    assert len({c["text"] for c in beams["choices"]}) == 1  # beam search samples nothing
    assert not any("seed" in c for c in beams["choices"])


def test_a_streamed_list_of_prompts_reports_each_seed(fake: Any) -> None:
    events = [
        e
        for e in fake.events(
            "/v1/completions", {"prompt": SAME, "max_tokens": 12, "ignore_eos": True}
        )
        if e != "[DONE]"
    ]
    assert {e["seed"] for e in events} == {None}
    seeds, texts = {}, dict.fromkeys(range(3), "")
    for choice in (c for e in events for c in e["choices"]):
        assert seeds.setdefault(choice["index"], choice["seed"]) == choice["seed"]
        texts[choice["index"]] += choice["text"]
    assert len(set(texts.values())) == 3
    assert texts == {
        i: fake.complete(SAME[0], max_tokens=12, ignore_eos=True, seed=seeds[i])["choices"][0][
            "text"
        ]
        for i in range(3)
    }


def test_a_list_with_a_seed_samples_as_in_the_library(fake: Any) -> None:
    from verbatim.testing.fakes import server_parts

    answer = fake.complete(SAME, max_tokens=20)
    assert answer["seed"] == 7
    with LLM.from_loaded(server_parts("pipeline")) as llm:
        made = [c.text for c in llm.generate(SAME, SamplingParams(seed=7, max_tokens=20))]
        free = [c.text for c in llm.generate(SAME, SamplingParams(max_tokens=20, ignore_eos=True))]
    assert [c["text"] for c in answer["choices"]] == made
    assert (len(set(made)), len(set(free))) == (1, 3)


GREEDY = {"temperature": 0, "max_tokens": 3}
SEED_PLACES = {
    "/v1/completions": ({"prompt": "x", **GREEDY}, lambda e: e["seed"]),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "x"}], **GREEDY},
        lambda e: e["seed"],
    ),
    "/v1/responses": (
        {"input": "x", "temperature": 0, "max_output_tokens": 3},
        lambda e: e.get("response", e)["seed"],
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "x"}], **GREEDY},
        lambda e: e["seed"],
    ),
}


@pytest.mark.parametrize("route", SEED_PLACES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"temperature": 1}])
def test_the_chosen_seed_is_in_every_answer_and_survives_javascript(
    fake: Any, route: str, stream: bool, more: Any
) -> None:
    body, seed_of = SEED_PLACES[route]
    if stream:
        events = [e for e in fake.events(route, {**body, **more}) if e != "[DONE]"]
        answers = [e for e in events if "seed" in e.get("response", e)]
    else:
        answers = [fake.post(route, {**body, **more}).json()]
    seeds = {seed_of(answer) for answer in answers}
    assert len(seeds) == 1
    seed = seeds.pop()
    assert isinstance(seed, int)
    assert 0 <= seed < 2**53


def test_an_unknown_previous_response_id_is_rejected(fake: Any) -> None:
    answer = fake.post("/v1/responses", {"input": "x", "previous_response_id": "resp_none"})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "previous_response_id"


def test_tool_choice_required_without_tools_is_rejected(fake: Any) -> None:
    error = fake.post("/v1/chat/completions", {**CHAT, "tool_choice": "required"}).json()["error"]
    assert error["param"] == "tool_choice"
    assert "no tools" in error["message"]


def test_negative_seeds_are_distinct_and_repeatable(fake: Any) -> None:
    texts = [fake.complete(seed=s, max_tokens=24)["choices"][0]["text"] for s in (-1, -1, -2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 3},
        {"temperature": 0},
        {"top_k": 5, "min_p": 0.01},
        {"stop": ["a", "e"]},
        {"logprobs": 2},
    ],
)
def test_streamed_completions_concatenate_to_the_whole(fake: Any, body: dict[str, Any]) -> None:
    # the number of drafts depends on measured times
    plain = {"max_tokens": 40, "speculate": "off", **body}
    whole = fake.complete(**plain)
    events = fake.events(
        "/v1/completions",
        {"prompt": "hello", "seed": 7, "stream_options": {"include_usage": True}, **plain},
    )
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": events[-2]["usage"]["prompt_tokens_details"],
    }
    for choice in whole["choices"]:
        mine = [c for e in events[:-2] for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        if body.get("logprobs"):
            assert [x for c in mine for x in c["logprobs"]["token_logprobs"]] == choice["logprobs"][
                "token_logprobs"
            ]


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 3}])
def test_streamed_chat_concatenates_to_the_whole(fake: Any, body: dict[str, Any]) -> None:
    whole = fake.post("/v1/chat/completions", {**CHAT, **body}).json()
    events = fake.events("/v1/chat/completions", {**CHAT, **body})
    assert events[-1] == "[DONE]"
    for choice in whole["choices"]:
        mine = [c for e in events[:-1] for c in e["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        assert (
            "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]
        )
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        if body.get("logprobs"):
            found = [x for c in mine if c["logprobs"] for x in c["logprobs"]["content"]]
            assert found == choice["logprobs"]["content"]
            assert all(len(x["top_logprobs"]) == 3 for x in found)


def test_prompts_in_all_four_formats(fake: Any) -> None:
    text = fake.complete("hello")["choices"][0]["text"]
    ids = fake.post("/tokenize", {"prompt": "hello"}).json()["tokens"]
    assert fake.complete(ids)["choices"][0]["text"] == text
    assert [c["text"] for c in fake.complete(["hello", "hello"])["choices"]] == [text, text]
    assert [c["index"] for c in fake.complete([ids, ids], n=2)["choices"]] == [0, 1, 2, 3]


def test_echo_puts_the_prompt_before_the_answer(fake: Any) -> None:
    plain, echoed = fake.complete("hello"), fake.complete("hello", echo=True)
    assert echoed["choices"][0]["text"] == "hello" + plain["choices"][0]["text"]
    scored = fake.complete("hello", echo=True, logprobs=1, max_tokens=0)["choices"][0]["logprobs"]
    assert scored["token_logprobs"][0] is None
    assert len(scored["tokens"]) == len(scored["token_logprobs"]) == 6
    streamed = fake.events(
        "/v1/completions", {"prompt": "hello", "max_tokens": 8, "seed": 7, "echo": True}
    )
    assert "".join(e["choices"][0]["text"] for e in streamed[:-1]) == echoed["choices"][0]["text"]


def test_text_offsets_count_characters_of_the_text(fake: Any) -> None:
    """The fake's tokens are bytes: a character of several tokens counts once, and hidden text
    counts 0."""
    asked = {"regex": "é€z", "logprobs": 1, "max_tokens": 9}
    prompt = [0, 0, 1, 1, 2, 3, 3, 3, 4]  # <s>, then h é l € o
    whole = fake.complete("hél€o", echo=True, **asked)["choices"][0]
    assert whole["text"] == "hél€oé€z"
    assert whole["logprobs"]["tokens"][:2] == ["<s>", "h"]
    assert whole["logprobs"]["text_offset"] == [*prompt, 5, 5, 6, 6, 6, 7]
    events = fake.events("/v1/completions", {"prompt": "hello", "seed": 7, **asked})
    assert [at for e in events[:-1] for at in e["choices"][0]["logprobs"]["text_offset"]] == [
        0,
        0,
        1,
        1,
        1,
        2,
    ]
    shown = fake.complete([256, 104, 256, 105], echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert shown["text"] == "<s>h<s>i"
    assert shown["logprobs"]["text_offset"] == [0, 3, 4, 7]


@pytest.fixture(scope="module")
def drafting() -> Iterator[Live]:
    """A server that drafts. Drafting depends on measured times; here every step has a fixed wait
    that exceeds the cost of its rows, so drafts always pay."""
    live = Live("--speculate", "ngram", engine="pipeline,pause=0.005").wait_ready()
    yield live
    assert live.stop() == 0, live.log_text()


def until_drafted(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """On a busy machine one request may not draft; of thirty, some draft and some drafts are
    accepted."""
    reported: dict[str, Any] = {}
    for _ in range(30):
        reported = ask()
        if reported.get("accepted_tokens") or reported.get("accepted_prediction_tokens"):
            break
    return reported


def test_usage_reports_drafted_and_accepted_tokens(drafting: Live) -> None:
    asked = {"prompt": "abcabcabcabcabcabc", "regex": "(abc){40}", "max_tokens": 130, "seed": 7}

    def whole(speculate: str) -> dict[str, Any]:
        usage = drafting.post("/v1/completions", {**asked, "speculate": speculate}).json()["usage"]
        reported = dict(usage["completion_tokens_details"])
        steps = usage["completion_tokens"] - reported["accepted_prediction_tokens"]
        assert reported["mean_accepted_length"] == round(usage["completion_tokens"] / steps, 3)
        assert isinstance(reported["saved_seconds"], float)
        return reported

    def streamed() -> dict[str, Any]:
        body = {**asked, "speculate": "ngram", "stream_options": {"include_usage": True}}
        return dict(
            drafting.events("/v1/completions", body)[-2]["usage"]["completion_tokens_details"]
        )

    assert whole("off")["mean_accepted_length"] == 1
    assert until_drafted(lambda: whole("ngram"))["mean_accepted_length"] > 1
    assert until_drafted(streamed)["mean_accepted_length"] > 1


def test_other_protocols_report_drafts_if_there_were_any(fake: Any, drafting: Live) -> None:
    word = {"type": "string", "enum": ["abc" * 20]}
    tool = {
        "name": "t",
        "input_schema": {"type": "object", "properties": {"w": word}, "required": ["w"]},
    }
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    asked = {
        "/v1/messages": {
            **talk,
            "max_tokens": 200,
            "tools": [tool],
            "tool_choice": {"type": "any"},
        },
        "/api/chat": {**talk, "stream": False, "format": word},
    }
    for route, body in asked.items():
        assert "speculation" not in fake.post(route, {**body, "speculate": "off"}).json()

        def ask(route: str = route, body: dict[str, Any] = body) -> dict[str, Any]:
            return dict(drafting.post(route, body).json().get("speculation", {}))

        reported = until_drafted(ask)
        assert reported.keys() == {
            "drafted_tokens",
            "accepted_tokens",
            "mean_accepted_length",
            "saved_seconds",
        }
        assert 0 < reported["accepted_tokens"] <= reported["drafted_tokens"]


def test_best_of_returns_the_best_and_is_rejected_in_a_stream(fake: Any) -> None:
    answer = fake.complete(n=2, best_of=5)
    assert len(answer["choices"]) == 2
    refused = fake.post("/v1/completions", {"prompt": "x", "best_of": 3, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


def test_http_answers_are_the_librarys_token_for_token(fake: Any) -> None:
    from verbatim.testing.fakes import server_parts

    with LLM.from_loaded(server_parts("pipeline")) as llm:
        for values in (
            {"seed": 11},
            {"seed": 12, "temperature": 0.7, "top_p": 0.9},
            {"temperature": 0.0, "seed": 1},
            {"seed": 5, "n": 3},
        ):
            params = SamplingParams(max_tokens=48, **values)
            ours = llm.generate("the same tokens", params)
            theirs = fake.complete("the same tokens", max_tokens=48, **values)
            assert [c.text for c in ours.choices] == [c["text"] for c in theirs["choices"]]
            chat = fake.post(
                "/v1/chat/completions", {"messages": CHAT["messages"], "max_tokens": 48, **values}
            ).json()
            assert [c.text for c in llm.chat(CHAT["messages"], params).choices] == [
                c["message"]["content"] for c in chat["choices"]
            ]


ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "seed": 1},
    {"seed": 2, "temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    {"seed": 3, "n": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"seed": 4, "stop": ["."], "top_k": 40},
    {"seed": 5, "regex": "[a-z ]{20,60}", "speculate": "ngram"},
    {"num_beams": 3},
]
TALK = [{"role": "user", "content": "Tell me about the sea."}]
LONGEST = 8  # tokens of an answer


async def over_http(live: Any, together: bool) -> list[Any]:
    """The tokens of every request in ASKED, as a completion and as a chat; one by one, or
    concurrently, and then also streamed."""
    async with httpx.AsyncClient(base_url=live.url, timeout=HANG_SECONDS) as client:

        async def ids(path: str, body: dict[str, Any], stream: bool) -> Any:
            streamed = stream and "num_beams" not in body
            answer = await client.post(
                path,
                json={
                    "model": "m",
                    "max_tokens": LONGEST,
                    "receipt": True,
                    "stream": streamed,
                    **body,
                },
            )
            assert answer.status_code == 200, answer.text
            made = json.loads(answer.text.split("data: ")[-2]) if streamed else answer.json()
            return [(c["token_ids"], c["finish"]) for c in made["receipt"]["choices"]]

        def works(stream: bool) -> list[Any]:
            return [
                *(ids("/v1/completions", {"prompt": "The sea is", **v}, stream) for v in ASKED),
                *(ids("/v1/chat/completions", {"messages": TALK, **v}, stream) for v in ASKED),
            ]

        if together:
            return await asyncio.gather(*works(False), *works(True))
        return [await work for work in works(False)]


@pytest.mark.model
@pytest.mark.slow
def test_answers_of_the_default_model_are_the_librarys_alone_and_under_load(
    real: Any, default_model: Any
) -> None:
    with LLM(str(default_model)) as llm:
        asked = [
            SamplingParams(max_tokens=LONGEST, **{**values, "stop": tuple(values.get("stop", ()))})
            for values in ASKED
        ]
        done = llm.generate(["The sea is"] * len(asked), asked) + [
            llm.chat(TALK, params) for params in asked
        ]
        library = [
            [(list(c.token_ids), [c.finish.reason, c.finish.detail]) for c in each.choices]
            for each in done
        ]
    assert asyncio.run(over_http(real, together=False)) == library

    async def under_load() -> None:
        heads, all_run = 0, asyncio.Event()

        def head_came() -> None:
            nonlocal heads
            heads += 1
            if heads == 8:
                all_run.set()

        others = [
            asyncio.create_task(
                stream(
                    real.port,
                    "/v1/completions",
                    {
                        "prompt": "word " * 9 * n,
                        "max_tokens": 24,
                        "stream": True,
                        "ignore_eos": True,
                    },
                    on_head=head_came,
                )
            )
            for n in range(1, 9)
        ]
        await asyncio.wait_for(all_run.wait(), HANG_SECONDS)
        assert await over_http(real, together=True) == library * 2
        assert all(other.finished for other in await asyncio.gather(*others))

    asyncio.run(under_load())


def test_models_lists_the_served_names(fake: Any) -> None:
    names = [m["id"] for m in fake.client.get("/v1/models").json()["data"]]
    assert "m" in names
    assert fake.client.get("/v1/models/m").json()["id"] == "m"
    for name in ("nope", "../../etc/passwd", "/etc/passwd", "http://localhost/x"):
        assert fake.client.get(f"/v1/models/{name}").status_code == 404
        refused = fake.post("/v1/completions", {"model": name, "prompt": "x"})
        assert (
            refused.status_code,
            refused.json()["error"]["code"],
            refused.json()["error"]["param"],
        ) == (404, "model_not_found", "model")


def test_stored_chats_can_be_read_changed_and_deleted(fake: Any) -> None:
    made = fake.post("/v1/chat/completions", {**CHAT, "store": True, "metadata": {"k": "v"}}).json()
    path = f"/v1/chat/completions/{made['id']}"
    assert fake.client.get(path).json()["choices"] == made["choices"]
    assert (
        fake.client.get("/v1/chat/completions", params={"metadata[k]": "v"}).json()["data"][0]["id"]
        == made["id"]
    )
    two = {"metadata[k]": "v", "metadata[other]": "x"}
    assert fake.client.get("/v1/chat/completions", params=two).json()["data"] == []
    for limit in (1, 20):
        found = fake.client.get(path + "/messages", params={"limit": limit}).json()
        assert (len(found["data"]), found["has_more"]) == (1, False)
    assert fake.client.post(path, json={"metadata": {"k": "w"}}).json()["metadata"] == {"k": "w"}
    assert fake.client.get(path + "/messages").json()["data"][0]["content"] == "hi"
    assert fake.client.delete(path).json()["deleted"] is True
    assert fake.client.get(path).status_code == 404


def test_responses_stream_ends_in_the_whole_response(fake: Any) -> None:
    body = {"input": "hi", "max_output_tokens": 10, "seed": 3}
    whole = fake.post("/v1/responses", body).json()
    events = fake.events("/v1/responses", body)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    last = events[-1]["response"]
    text = whole["output"][0]["content"][0]["text"]
    assert last["output"][0]["content"][0]["text"] == text
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == text
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_responses_continue_a_stored_one(fake: Any) -> None:
    first = fake.post(
        "/v1/responses", {"input": "hi", "max_output_tokens": 6, "seed": 3, "store": True}
    ).json()
    second = fake.post(
        "/v1/responses",
        {"input": "and?", "previous_response_id": first["id"], "max_output_tokens": 6, "seed": 3},
    ).json()
    text = first["output"][0]["content"][0]["text"]
    same = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "and?"},
    ]
    direct = fake.post("/v1/responses", {"input": same, "max_output_tokens": 6, "seed": 3}).json()
    assert second["output"][0]["content"] == direct["output"][0]["content"]
    assert second["usage"]["input_tokens"] == direct["usage"]["input_tokens"]
    counted = fake.post("/v1/responses/input_tokens", {"input": same}).json()
    assert counted["input_tokens"] == direct["usage"]["input_tokens"]
    assert len(fake.client.get(f"/v1/responses/{first['id']}/input_items").json()["data"]) == 1
    assert fake.client.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True


@pytest.mark.parametrize(
    "more", [{}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"tools": True}]
)
def test_a_stored_response_can_be_streamed_again(fake: Any, more: dict[str, Any]) -> None:
    """The same event types in the same order; the deltas of a text are merged into one."""
    body = {
        "input": "hi",
        "max_output_tokens": 200 if more.get("tools") else 8,
        "seed": 3,
        "store": True,
        **more,
    }
    if more.get("tools"):
        schema = {
            "type": "object",
            "properties": {"city": {"enum": ["Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        }
        body |= {
            "tools": [{"type": "function", "name": "f", "parameters": schema}],
            "tool_choice": "required",
        }
    first = fake.events("/v1/responses", body)
    made = first[-1]["response"]
    again = [
        json.loads(line[6:])
        for line in fake.client.get(f"/v1/responses/{made['id']}?stream=true").text.splitlines()
        if line.startswith("data: ")
    ]
    kinds = [k for k, _ in itertools.groupby(e["type"] for e in first)]
    assert [e["type"] for e in again] == kinds
    assert [e["sequence_number"] for e in again] == list(range(len(again)))
    assert again[-1]["response"] == made == fake.client.get(f"/v1/responses/{made['id']}").json()
    for kind, field in (
        ("response.output_text.delta", "delta"),
        ("response.function_call_arguments.delta", "delta"),
    ):
        said = ["".join(e[field] for e in events if e["type"] == kind) for events in (first, again)]
        assert said[0] == said[1]
    assert set(again[0]) == set(first[0])
    late = fake.client.get(
        f"/v1/responses/{made['id']}?stream=true&starting_after=2&include_obfuscation=true"
    ).text
    assert '"sequence_number":2,' not in late
    assert '"sequence_number":3,' in late
    refused = fake.client.get(f"/v1/responses/{made['id']}?starting_after=2")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")


def test_a_stored_answer_is_found_under_its_own_kind_only(fake: Any) -> None:
    chat = fake.post("/v1/chat/completions", {**CHAT, "store": True}).json()["id"]
    response = fake.post(
        "/v1/responses", {"input": "hi", "max_output_tokens": 2, "store": True}
    ).json()["id"]
    for path in (
        f"/v1/responses/{chat}",
        f"/v1/responses/{chat}/input_items",
        f"/v1/chat/completions/{response}",
    ):
        assert fake.client.get(path).status_code == 404
    assert fake.client.delete(f"/v1/responses/{chat}").status_code == 404
    assert (
        fake.post("/v1/responses", {"input": "x", "previous_response_id": chat}).status_code == 404
    )
    assert fake.client.get(f"/v1/chat/completions/{chat}").status_code == 200


def test_embeddings_are_unit_vectors_in_both_encodings(fake: Any) -> None:
    import base64
    import struct

    plain = fake.post("/v1/embeddings", {"input": ["a", "b"]}).json()
    vectors = [d["embedding"] for d in plain["data"]]
    assert all(abs(sum(x * x for x in v) - 1) < 1e-6 for v in vectors)
    assert vectors[0] != vectors[1]
    coded = fake.post(
        "/v1/embeddings", {"input": "a", "encoding_format": "base64", "dimensions": 4}
    ).json()["data"][0]["embedding"]
    short = struct.unpack("<4f", base64.b64decode(coded))
    norm = sum(x * x for x in vectors[0][:4]) ** 0.5
    assert short == pytest.approx([x / norm for x in vectors[0][:4]], abs=1e-6)
    assert (
        fake.post("/v1/embeddings", {"input": "a", "dimensions": 10**6}).json()["error"]["param"]
        == "dimensions"
    )


def test_alternatives_that_are_parts_of_characters_have_names_of_their_own(fake: Any) -> None:
    """All of them are U+FFFD as text. OpenAI's names: bytes:\\xe2\\x82."""
    parts = list(range(128, 256))
    asked = {"logprobs": 5, "allowed_token_ids": parts, "logprobs_mode": "processed", "echo": True}
    found = fake.complete("é", temperature=0, **asked)["choices"][0]["logprobs"]
    assert found["tokens"][:3] == ["<s>", "bytes:\\xc3", "bytes:\\xa9"]
    for token, logprob, top in list(
        zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    )[3:]:
        assert len(top) == 5
        assert top[token] == logprob == max(top.values())


def test_beams_report_a_score_of_zero_and_no_seed(fake: Any) -> None:
    """They draw nothing, and refuse a seed."""
    beams = {"num_beams": 2, "allowed_token_ids": [97], "max_tokens": 2, "seed": None}
    options = {"stream_options": {"include_usage": True}}
    asked = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        body = {field: asked[field], **beams}
        whole, events = fake.post(path, body).json(), fake.events(path, {**body, **options})
        assert whole["choices"][0]["score"] == 0.0
        assert events[-2]["scores"] == [0.0]
        assert {whole["seed"], *(event["seed"] for event in events[:-1])} == {None}


def test_score_agrees_with_echoed_logprobs(fake: Any) -> None:
    scored = fake.post("/v1/score", {"prompt": "hello", "top_logprobs": 2}).json()["data"][0]
    echoed = fake.complete("hello", echo=True, logprobs=1, max_tokens=0)["choices"][0]["logprobs"][
        "token_logprobs"
    ]
    assert [t["logprob"] for t in scored["tokens"]] == echoed
    assert scored["total"] == pytest.approx(sum(echoed[1:]))


def test_tokenize_and_detokenize_are_inverse(fake: Any) -> None:
    text = "grüße \u0000 \U0001f9e1"
    ids = fake.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert fake.post("/detokenize", {"tokens": ids}).json()["prompt"] == text
    chat = fake.post("/tokenize", {"messages": CHAT["messages"]}).json()
    assert chat["count"] == fake.post("/v1/chat/completions", CHAT).json()["usage"]["prompt_tokens"]


def test_anthropic_stream_equals_the_whole(fake: Any) -> None:
    long = "hi " * 20  # the second request finds blocks of it in the prefix cache
    body = {"messages": [{"role": "user", "content": long}], "max_tokens": 9, "temperature": 0.0}
    whole = fake.post("/v1/messages", body).json()
    events = fake.events("/v1/messages", body)
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "message_stop"
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert last["cache_read_input_tokens"] > 0
    assert first["input_tokens"] == last["input_tokens"] + last["cache_read_input_tokens"]
    assert (
        "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
        == whole["content"][0]["text"]
    )
    assert (
        whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
        == fake.post("/v1/messages/count_tokens", {"messages": body["messages"]}).json()[
            "input_tokens"
        ]
    )
    refused = fake.post(
        "/v1/messages", {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    )
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"
    assert "thinking" in refused.json()["error"]["message"]


def test_the_seed_that_anthropics_route_reports_gives_the_same_tokens(fake: Any) -> None:
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "temperature": 1.0}
    first = fake.post("/v1/messages", ask).json()
    again = fake.post("/v1/messages", {**ask, "seed": first["seed"]}).json()
    other = fake.post("/v1/messages", {**ask, "seed": first["seed"] + 1}).json()
    assert (again["content"], again["seed"]) == (first["content"], first["seed"])
    assert other["content"] != first["content"]
    negative = fake.post("/v1/messages", {**ask, "seed": -3}).json()
    assert negative["seed"] == 2**63 - 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_final_assistant_message_is_continued(fake: Any, stream: bool) -> None:
    """Anthropic's prefill: the tokens equal the library's continue_final, and the answer is what
    follows."""
    from verbatim.testing.fakes import server_parts

    ask = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, I"}]
    body = {"messages": ask, "max_tokens": 9, "temperature": 0}
    with LLM.from_loaded(server_parts("pipeline")) as llm:
        ids = llm.encode_chat(ask, continue_final=True)
        alone = llm.generate(ids, SamplingParams(max_tokens=9, temperature=0)).text
        other = llm.chat(ask, SamplingParams(max_tokens=9, temperature=0)).text
    assert alone != other
    if stream:
        events = fake.events("/v1/messages", body)
        text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    else:
        text = fake.post("/v1/messages", body).json()["content"][0]["text"]
    assert text == alone
    counted = fake.post("/v1/messages/count_tokens", {"messages": ask}).json()
    assert counted["input_tokens"] == len(ids)
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    refused = fake.post("/v1/messages", {**body, "output_config": {"format": schema}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


_FILE = Path(__file__).parents[1] / "data" / "refused_fields.json"
MEDIA = json.loads(_FILE.read_text("utf-8"))["media"]  # route, body, field, what it is


@pytest.mark.parametrize(("route", "body", "where", "what"), MEDIA)
def test_an_image_is_rejected_with_a_clear_message(
    fake: Any, route: str, body: Any, where: str, what: str
) -> None:
    answer = fake.post(route, body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (
        error if isinstance(error, str) else error["message"]
    ) == f"only text input is supported; {where} is {what}"
    assert isinstance(error, str) or error["param"] == where


def test_ollama_lines_equal_the_whole(fake: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "options": {"num_predict": 9, "seed": 3},
    }
    whole = fake.post("/api/chat", {**body, "stream": False}).json()
    lines = [json.loads(line) for line in fake.post("/api/chat", body).text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert lines[-1]["done"] is True
    assert lines[-1]["eval_count"] == 9
    assert fake.post(
        "/api/generate", {"prompt": "hi", "stream": False, "options": {"num_predict": 9, "seed": 3}}
    ).json()["response"]
    refused = fake.post("/api/chat", {**body, "options": {"num_gpus": 1}})
    assert refused.status_code == 400
    assert "num_gpu" in refused.json()["error"]
    assert any(m["name"] == "m" for m in fake.client.get("/api/tags").json()["models"])
    (loaded, *_) = fake.client.get("/api/ps").json()["models"]
    assert (loaded["model"], loaded["context_length"]) == ("m", 4096)


OLLAMA_ASKS = {
    "chat": ("/api/chat", {"messages": [{"role": "user", "content": "hello"}]}),
    "generate": ("/api/generate", {"prompt": "hello"}),
    "raw": ("/api/generate", {"prompt": "hello", "raw": True}),
    "parsed": ("/api/generate", {"prompt": "<|user|>hello", "raw": True, "parse_special": True}),
}


@pytest.mark.parametrize("kind", OLLAMA_ASKS)
def test_num_ctx_bounds_prompt_and_answer_together(fake: Any, kind: str) -> None:
    route, body = OLLAMA_ASKS[kind]

    def ask(**options: int) -> httpx.Response:
        return fake.post(route, {**body, "stream": False, "options": {"seed": 3, **options}})  # type: ignore[no-any-return]

    free = ask(num_predict=40).json()
    prompt = free["prompt_eval_count"]
    for open_end in ({}, {"num_predict": -1}):
        held = ask(num_ctx=prompt + 9, **open_end).json()
        assert (held["prompt_eval_count"], held["eval_count"], held["done_reason"]) == (
            prompt,
            9,
            "length",
        )
        text, whole = (
            a["message"]["content"] if kind == "chat" else a["response"] for a in (held, free)
        )
        assert text
        assert whole.startswith(text)  # the same sampled tokens, ended earlier
    assert ask(num_ctx=prompt + 9, num_predict=9).json()["eval_count"] == 9
    for refused, words in (
        (ask(num_ctx=prompt + 9, num_predict=10), "ask for at most 9"),
        (ask(num_ctx=prompt), "leaves no room"),
        (ask(num_ctx=4097), "options.num_ctx: 4097 is above this server's context of 4096"),
        (ask(num_ctx=0), "options.num_ctx"),
    ):
        assert refused.status_code == 400
        assert words in refused.json()["error"]
        assert "num_ctx" in refused.json()["error"]


@pytest.mark.parametrize("kind", ["chat", "generate", "raw"])
def test_ollamas_logprobs_are_those_of_every_token(fake: Any, kind: str) -> None:
    route, body = OLLAMA_ASKS[kind]
    body = {**body, "options": {"num_predict": 9, "seed": 3}, "logprobs": True, "top_logprobs": 2}
    whole = fake.post(route, {**body, "stream": False}).json()
    lines = [json.loads(line) for line in fake.post(route, body).text.splitlines()]
    assert [row for line in lines for row in line.get("logprobs", ())] == whole["logprobs"]
    assert [len(row["top_logprobs"]) for row in whole["logprobs"]] == [2] * 9
    assert "logprobs" not in fake.post(route, {**body, "stream": False} | OFF).json()
    alone = fake.post(route, {**body, "logprobs": False})
    assert (alone.status_code, alone.json()["error"]) == (400, "top_logprobs: needs logprobs: true")


OFF = {"logprobs": False, "top_logprobs": 0}


def test_ollamas_seed_of_minus_one_is_chosen_by_the_server(fake: Any) -> None:
    body = {"prompt": "hi", "stream": False, "options": {"seed": -1, "num_predict": 20}}
    first, second = (fake.post("/api/generate", body).json() for _ in range(2))
    assert first["seed"] != second["seed"]
    assert first["response"] != second["response"]


TYPED = "<|user|>hi<|assistant|>"


def test_control_tokens_in_a_prompt_cause_a_warning_or_are_parsed(fake: Any) -> None:
    """Plain text by default, control tokens with parse_special; both equal to prompts of token
    ids."""
    plain = fake.complete(TYPED, receipt=True)
    parsed = fake.complete(TYPED, receipt=True, parse_special=True)
    (warning,) = plain["warnings"]
    assert "'<|user|>' was read as plain text; parse_special" in warning
    assert "warnings" not in parsed
    assert plain["receipt"]["prompt_ids"] == [256, *TYPED.encode()]
    assert parsed["receipt"]["prompt_ids"] == [256, 258, *b"hi", 259]
    assert parsed["choices"] == fake.complete([256, 258, *b"hi", 259])["choices"]
    assert fake.complete("<s>hi", receipt=True, parse_special=True)["receipt"]["prompt_ids"] == [
        256,
        *b"hi",
    ]
    assert "warnings" not in fake.complete("a < b |> c <|us er|>")
    assert fake.complete(["x", TYPED, TYPED])["warnings"] == [warning]


def test_every_route_returns_the_warning_about_control_tokens(fake: Any) -> None:
    raw = {"prompt": TYPED, "raw": True, "options": {"num_predict": 3}}
    for route, body in (
        ("/v1/score", {"prompt": TYPED}),
        ("/tokenize", {"prompt": TYPED}),
        ("/api/generate", {**raw, "stream": False}),
    ):
        answer = fake.post(route, body).json()
        assert "'<|user|>' was read as plain text" in answer["warnings"][0], route
        assert "warnings" not in fake.post(route, {**body, "parse_special": True}).json(), route
    assert (
        "plain text"
        in json.loads(fake.post("/api/generate", raw).text.splitlines()[-1])["warnings"][0]
    )
    chunks = fake.events("/v1/completions", {"prompt": TYPED, "max_tokens": 2})
    assert "plain text" in chunks[-2]["warnings"][0]
    read = {"prompt": TYPED, "parse_special": True}
    assert fake.post("/tokenize", read).json()["tokens"] == [256, 258, *b"hi", 259]
    assert fake.post("/tokenize", {**read, "add_special_tokens": False}).json()["tokens"] == [
        258,
        *b"hi",
        259,
    ]
    assert [t["id"] for t in fake.post("/v1/score", read).json()["data"][0]["tokens"]] == [
        256,
        258,
        *b"hi",
        259,
    ]


@pytest.mark.parametrize("prompt", [TYPED, "hi<|user|>x", "<s>hi<|user|>"])
def test_offsets_of_an_echoed_prompt_count_its_own_control_tokens(fake: Any, prompt: str) -> None:
    answer = fake.complete(prompt, parse_special=True, echo=True, logprobs=0, max_tokens=4)[
        "choices"
    ][0]
    assert answer["text"].startswith(prompt)
    tokens, offsets = answer["logprobs"]["tokens"], answer["logprobs"]["text_offset"]
    shown = [(t, at) for t, at in zip(tokens, offsets, strict=True) if at < len(prompt)]
    for token, at in shown[0 if prompt.startswith("<s>") else 1 :]:
        assert prompt.startswith(token, at)
    assert offsets[0] == 0
    assert offsets[-4] == len(prompt)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": [256, 104]}),
        ("/v1/score", {"prompt": [[256, 104]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
        ("/api/generate", {"prompt": "x"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_parse_special_is_rejected_where_it_has_no_effect(fake: Any, route: str, body: Any) -> None:
    answer = fake.post(route, {**body, "parse_special": True})
    assert answer.status_code == 400
    assert "parse_special: " in answer.text


def test_openapi_names_every_route_and_resolves_every_reference(fake: Any) -> None:
    import json

    from verbatim.server.api.routes import ROUTES

    document = fake.client.get("/openapi.json").json()
    for route in ROUTES:
        assert route.method.lower() in document["paths"][route.shown_path]
    names = document["components"]["schemas"]
    for reference in set(_references(json.loads(json.dumps(document)))):
        assert reference.removeprefix("#/components/schemas/") in names


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [r for v in value.values() for r in _references(v)]
    return [r for v in value for r in _references(v)] if isinstance(value, list) else []


def end_of(answer: Any, stream: bool) -> dict[str, Any]:
    """The object of /v1/messages that has the stop_reason."""
    lines = [line[6:] for line in answer.text.splitlines() if stream and '"stop_reason"' in line]
    return dict(json.loads(lines[-1])["delta"] if stream else answer.json())


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence_is_reported_only_if_the_text_matched_it(fake: Any, stream: bool) -> None:
    """The engine's own finish details are not stop sequences of the client."""
    ask = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500, "stream": stream}
    only = {
        "type": "object",
        "properties": {"b": {"const": "a eos"}},
        "required": ["b"],
        "additionalProperties": False,
    }
    form = {"output_config": {"format": {"type": "json_schema", "schema": only}}}
    for stops, reported in ((["eos"], "eos"), (["eos?", "json_schema"], None)):
        answer = fake.post("/v1/messages", {**ask, **form, "stop_sequences": stops})
        end = end_of(answer, stream)
        reason = "stop_sequence" if reported else "end_turn"
        assert (end["stop_reason"], end["stop_sequence"]) == (reason, reported)


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_the_eos_token_is_never_reported_as_a_stop_sequence(real: Any, stream: bool) -> None:
    ask = {
        "messages": [{"role": "user", "content": "Say hi"}],
        "max_tokens": 60,
        "temperature": 0,
        "stream": stream,
    }
    answer = real.post("/v1/messages", {**ask, "stop_sequences": ["eos"]})
    end = end_of(answer, stream)
    assert (end["stop_reason"], end["stop_sequence"]) == ("end_turn", None)


def test_text_after_a_tool_call_keeps_its_position(fake: Any) -> None:
    """A client sends the server's output back in the next turn: any order of blocks is accepted,
    and none is moved."""
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    said: dict[str, Any] = {"type": "text", "text": "and so"}
    tokens = []
    for blocks in ([said, call], [call, said]):
        talk = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": blocks},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "1"}],
            },
        ]
        answer = fake.post("/v1/messages", {"messages": talk, "max_tokens": 2})
        assert answer.status_code == 200
        tokens.append(answer.json()["usage"]["input_tokens"])
    assert tokens[0] != tokens[1]  # two assistant messages instead of one


def test_a_client_system_message_equal_to_the_instructions_is_kept(fake: Any) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
    ask = {"input": said, "max_output_tokens": 4, "seed": 1, "store": True}
    plain = fake.post("/v1/responses", ask).json()
    reported = fake.post("/v1/responses", {**ask, "instructions": "Be brief."}).json()
    for first in (plain, reported):
        text = first["output"][0]["content"][0]["text"]
        follow = {"previous_response_id": first["id"], "input": "y"}
        whole = [*said, {"role": "assistant", "content": text}, {"role": "user", "content": "y"}]
        counted, expected = (
            fake.post("/v1/responses/input_tokens", body).json()
            for body in (follow, {"input": whole})
        )
        assert counted == expected


def test_a_streamed_answer_is_stored_like_a_whole_one(fake: Any) -> None:
    ask = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4,
        "seed": 1,
        "store": True,
        "receipt": True,
        "metadata": {"a": "b"},
    }
    kept = []
    for name in (
        fake.post("/v1/chat/completions", ask).json()["id"],
        fake.events("/v1/chat/completions", ask)[0]["id"],
    ):
        kept.append(fake.client.get(f"/v1/chat/completions/{name}").json())
    for name in ("id", "created", "usage"):
        assert kept[0].pop(name)
        assert kept[1].pop(name)
    assert kept[0]["receipt"]
    assert kept[0].keys() == kept[1].keys()
    assert kept[0]["choices"] == kept[1]["choices"]


@pytest.mark.parametrize("protocol", ["openai", "anthropic", "ollama"])
def test_an_exception_in_a_stream_becomes_an_error_event_and_is_logged(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    import asyncio
    from collections.abc import AsyncIterator
    from types import SimpleNamespace

    from verbatim.server.api.anthropic import anthropic
    from verbatim.server.api.common import request_context
    from verbatim.server.api.ollama import ollama

    async def events() -> AsyncIterator[bytes]:
        yield b"one"
        raise TypeError("unhashable secret")

    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body"))

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays connected

    state = SimpleNamespace(limits=SimpleNamespace(request_seconds=600), clock=lambda: 0.0)
    of: Any = SimpleNamespace(
        id="req_1", arrived=0.0, runs=[], state=state, close=lambda: None, deadline=None
    )
    failed = {
        "openai": request_context.error_event,
        "anthropic": anthropic.error_event,
        "ollama": ollama.error_line,
    }[protocol]
    asyncio.run(request_context.EventStream(of, events(), failed)({}, receive, send))
    assert sent[1] == b"one"
    assert sent[-1] == b""  # the body ends properly
    (reported,) = sent[2:-1]
    assert b"error" in reported
    assert b"log has the details" in reported
    assert b"secret" not in reported
    assert reported.endswith(
        {"openai": b"data: [DONE]\n\n", "anthropic": b"\n\n", "ollama": b"}\n"}[protocol]
    )
    assert "req_1" in caplog.text
