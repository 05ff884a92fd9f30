"""What clients of Ollama, llama.cpp, vLLM and OpenAI send is answered as they expect."""

from __future__ import annotations

import json
import string
from typing import Any
from unittest.mock import Mock

import pytest
from live_server import Live

import verbatim
from verbatim.server.api.common.validate import check
from verbatim.server.api.routes import BODIES
from verbatim.server.problem import Problem
from verbatim.server.server_state import State
from verbatim.server.settings import Settings

pytestmark = pytest.mark.server
ASK = [{"role": "user", "content": "hi"}]
BEGUN = [*ASK, {"role": "assistant", "content": "Hello"}]


def ok(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


# -------------------------------------------------------------------------------------- ollama


def generate(fake: Live, **more: Any) -> Any:
    options = {"num_predict": 4, "seed": 1, **more.pop("options", {})}
    return fake.post("/api/generate", {"prompt": "hi", "stream": False, "options": options, **more})


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_ollama_routes_take_curls_content_type(fake: Live, kind: str | None) -> None:
    body = json.dumps({"model": "m", "prompt": "hi", "stream": False, "options": {"seed": 1}})
    headers = {} if kind is None else {"content-type": kind}
    assert ok(fake.client.post("/api/generate", content=body, headers=headers))["done"]
    # A page of another site can send these types without a preflight, but with its origin.
    foreign = {**headers, "origin": "http://elsewhere.example"}
    assert fake.client.post("/api/generate", content=body, headers=foreign).status_code == 415
    assert fake.client.post("/v1/completions", content=body, headers=headers).status_code == 415


@pytest.mark.parametrize("value", [300, -1, 0.5, "5m", "1h30m", "-1", "0s", "10ns"])
def test_any_keep_alive_leaves_the_model_loaded(fake: Live, value: Any) -> None:
    made = ok(generate(fake, keep_alive=value))
    assert made["done"]
    (warning,) = made["warnings"]
    assert warning.startswith("keep_alive: has no effect")


def test_a_request_to_unload_the_model_is_refused(fake: Live) -> None:
    for path, body in (("/api/generate", {}), ("/api/chat", {"messages": []})):
        loaded = ok(fake.post(path, {**body, "keep_alive": "5m"}))
        assert (loaded["done_reason"], len(loaded["warnings"])) == ("load", 1)
        assert "warnings" not in ok(fake.post(path, body))
        for zero in (0, "0", "0s"):
            refused = fake.post(path, {**body, "keep_alive": zero})
            assert (refused.status_code, "keep_alive" in refused.json()["error"]) == (400, True)
    assert generate(fake, keep_alive="soon").status_code == 400


def test_machine_options_change_no_token_and_are_named_in_a_warning(fake: Live) -> None:
    plain = ok(generate(fake))
    given = {"num_gpu": 1, "num_thread": 8, "use_mmap": True, "num_keep": 5, "numa": None}
    made = ok(generate(fake, options=given))
    assert made["response"] == plain["response"]
    named = [warning.partition(":")[0] for warning in made["warnings"]]
    assert named == [f"options.{name}" for name in given if name != "numa"]
    assert "warnings" not in plain
    for wrong, right in (
        ("num_gpus", "num_gpu"),
        ("tempreature", "temperature"),
        ("max_tokens", "num_predict"),
        ("repetition_penalty", "repeat_penalty"),
    ):
        said = generate(fake, options={wrong: 1}).json()["error"]
        assert f"options.{wrong}: unknown field; did you mean {right}?" in said


def test_repeat_last_n_is_the_window_of_the_penalties(fake: Live) -> None:
    """A prompt with many tokens and a strong penalty, so that every window gives another text."""
    strong = {"repeat_penalty": 9.0, "num_predict": 40}
    ask = {"prompt": string.printable * 2}
    texts = [
        ok(generate(fake, **ask, options=options))["response"]
        for options in (
            {**strong, "repeat_last_n": -1},
            {**strong, "repeat_last_n": 60},
            {**strong, "repeat_last_n": 0},
        )
    ]
    assert len(set(texts)) == 3
    assert texts[0] == ok(generate(fake, **ask, options=strong))["response"]
    assert texts[2] == ok(generate(fake, **ask, options={"num_predict": 40}))["response"]


def test_ollama_embeddings(fake: Live) -> None:
    openai = ok(fake.post("/v1/embeddings", {"input": ["a", "b"]}))["data"]
    made = ok(fake.post("/api/embed", {"input": ["a", "b"]}))
    assert made["embeddings"] == [row["embedding"] for row in openai]
    assert made["prompt_eval_count"] == 4  # two texts, each with its BOS
    one = ok(fake.post("/api/embed", {"input": "a", "dimensions": 2, "options": {"num_gpu": 0}}))
    assert len(one["embeddings"][0]) == 2
    assert one["warnings"]
    (old,) = ok(fake.post("/api/embeddings", {"prompt": "a"})).values()
    scale = openai[0]["embedding"][0] / old[0]
    assert [x * scale for x in old] == pytest.approx(openai[0]["embedding"])
    for more in ({"options": {"temperature": 1.0}}, {"truncate": 1}, {"dimensions": 1000}):
        assert fake.post("/api/embed", {"input": "a", **more}).status_code == 400


def test_the_lists_of_models_are_filled_in(real: Live) -> None:
    (first, *_), (loaded, *_) = (ok(real.client.get(f"/api/{r}"))["models"] for r in ("tags", "ps"))
    details = {
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "134.52M",
        "parent_model": "",
    }
    for row in (first, loaded):
        assert row["details"] == details | {
            "quantization_level": row["details"]["quantization_level"]
        }
        assert row["details"]["quantization_level"].startswith("Q")
        assert row["size"] > 50_000_000
    shown = ok(real.post("/api/show", {}))
    assert "<|im_start|>" in shown["template"]
    assert shown["model_info"]["llama.block_count"] == 30
    assert shown["model_info"]["general.parameter_count"] == 134_515_008
    assert shown["modified_at"] == first["modified_at"]


def test_ollamas_management_routes_name_the_command(fake: Live) -> None:
    assert ok(fake.post("/api/pull", {"stream": False})) == {"status": "success"}, "it is served"
    answer = fake.post("/api/pull", {"model": "another"})
    assert answer.status_code == 404
    assert "verbatim pull" in answer.json()["error"]


# -------------------------------------------------------------------------------- continuation


def rendered(fake: Live, messages: Any, **more: Any) -> str:
    return str(ok(fake.post("/apply-template", {"messages": messages, **more}))["prompt"])


def test_a_last_message_of_the_assistant_is_continued(fake: Live) -> None:
    begun = rendered(fake, BEGUN)
    new_turn = rendered(fake, BEGUN, add_generation_prompt=True)
    assert begun.endswith("Hello")
    assert rendered(fake, BEGUN, add_generation_prompt=False) == begun  # it has no end of a turn
    assert new_turn == begun + "<|assistant|>"
    assert rendered(fake, BEGUN, continue_final_message=True) == begun
    assert rendered(fake, BEGUN, continue_final_message=False) == new_turn
    assert rendered(fake, ASK, add_generation_prompt=False) + "<|assistant|>" == rendered(fake, ASK)
    ask = {"max_tokens": 6, "seed": 2}
    for more, prompt in (({"continue_final_message": False}, new_turn), ({}, begun)):
        plain = {"prompt": prompt, "parse_special": True, "add_special_tokens": False}
        tokens = ok(fake.post("/tokenize", plain))["tokens"]
        assert ok(fake.post("/tokenize", {"messages": BEGUN, **more}))["tokens"] == tokens
        chat = ok(fake.post("/v1/chat/completions", {"messages": BEGUN, **ask, **more}))
        raw = fake.complete(tokens, **ask)
        assert chat["choices"][0]["message"]["content"] == raw["choices"][0]["text"]
    ollama = ok(
        fake.post(
            "/api/chat",
            {"messages": BEGUN, "stream": False, "options": {"num_predict": 6, "seed": 2}},
        )
    )
    assert ollama["prompt_eval_count"] == len(tokens)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": ASK, "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": BEGUN, "response_format": {"type": "json_object"}}, "messages"),
    ],
)
def test_a_continuation_that_is_not_possible_is_refused(
    fake: Live, more: dict[str, Any], field: str
) -> None:
    answer = fake.post("/v1/chat/completions", more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


# ------------------------------------------------------------------------- openai, vLLM, llama.cpp


def test_a_response_is_stored_by_default(fake: Live) -> None:
    body = {"input": "hi", "max_output_tokens": 4, "seed": 3}
    first = ok(fake.post("/v1/responses", body))
    assert first["store"] is True
    second = ok(fake.post("/v1/responses", {**body, "previous_response_id": first["id"]}))
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    unstored = ok(fake.post("/v1/responses", {**body, "store": False}))
    assert unstored["store"] is False
    assert fake.client.get(f"/v1/responses/{unstored['id']}").status_code == 404


def test_minus_one_means_no_limit(fake: Live) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        ask = {**body, "seed": 5, "stop": ["e"]}
        limited = ok(fake.post(path, {**ask, "max_tokens": 512}))["choices"]
        assert ok(fake.post(path, {**ask, "max_tokens": -1}))["choices"] == limited
        assert ok(fake.post(path, {**ask, "max_tokens": 512, "top_k": -1}))["choices"] == limited
        for wrong in ({"max_tokens": -2}, {"top_k": -2}):
            refused = fake.post(path, {**ask, **wrong}).json()["error"]
            assert refused["param"] == next(iter(wrong))


def test_json_object_with_a_schema(fake: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_object", "schema": schema}
    made = ok(fake.post("/v1/chat/completions", {"messages": ASK, "response_format": form}))
    assert json.loads(made["choices"][0]["message"]["content"]) == {"a": 7}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_running_usage_in_every_chunk(fake: Live, path: str) -> None:
    body = {"messages": ASK} if "chat" in path else {"prompt": "hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = fake.events(
        path, {**body, "max_tokens": 5, "seed": 1, "ignore_eos": True, "stream_options": options}
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 5
    assert {c["usage"]["prompt_tokens"] for c in chunks} == {last["usage"]["prompt_tokens"]}
    assert all(c["usage"]["total_tokens"] for c in chunks)
    alone = {**body, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert fake.post(path, alone).status_code == 400


def test_llama_cpp_completion(fake: Live) -> None:
    ask = {"prompt": "<|user|>hi", "n_predict": 6, "seed": 4, "ignore_eos": True}
    whole = ok(fake.post("/completion", {**ask, "return_tokens": True, "n_probs": 2}))
    raw = fake.complete(ask["prompt"], max_tokens=6, seed=4, ignore_eos=True, parse_special=True)
    assert whole["content"] == raw["choices"][0]["text"]
    assert len(whole["tokens"]) == whole["tokens_predicted"] == 6
    assert len(whole["completion_probabilities"]) == 6
    assert (whole["stop"], whole["stop_type"]) == (True, "limit")
    *parts, last = fake.events("/completion", ask)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert (last["stop"], last["timings"]["predicted_n"]) == (True, 6)
    word = whole["content"][2]
    ended = ok(fake.post("/completion", {**ask, "stop": [word]}))
    assert (ended["stop_type"], ended["stopping_word"]) == ("word", word)
    biased = ok(fake.post("/completion", {**ask, "logit_bias": [[120, 100], [121, False]]}))
    assert biased["content"] == "x" * 6
    for wrong in ({"repeat_last_n": -2}, {"mirostat": 2}, {"zzz": 1}, {"n_predict": -2}):
        refused = fake.post("/completion", {**ask, **wrong})
        assert refused.json()["error"]["param"] == next(iter(wrong))


def test_llama_cpp_properties(fake: Live) -> None:
    props = ok(fake.client.get("/props"))
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["total_slots"] > 0
    assert "messages" in props["chat_template"]
    assert props["model_path"] == "m"


def test_tokenizer_info_serves_lm_evals_remote_tokenizer(real: Live) -> None:
    """The calls of lm_eval.utils.RemoteTokenizer."""
    info = ok(real.client.get("/tokenizer_info"))
    assert {"eos_token", "bos_token", "pad_token", "chat_template"} <= set(info)

    def encode(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return list(ok(real.client.post("/tokenize", json=body))["tokens"])

    assert encode(info["eos_token"]) == [2]
    assert encode(info["bos_token"]) == [1]
    ids = encode("Name the capital of France.")
    assert ok(real.client.post("/detokenize", json={"tokens": ids}))["prompt"].endswith("France.")
    assert len(encode("<|im_end|>!")) > 2  # inside a text it stays text
    assert (
        encode(info["eos_token"])
        != ok(real.client.post("/tokenize", json={"prompt": "<|im_end|>", "parse_special": False}))[
            "tokens"
        ]
    )


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "zzz": 1}]}]},
         "messages[0].content[0].zzz"),
        ({"response_format": {"type": "json_schema", "zzz": 1, "json_schema": {"name": "a"}}},
         "response_format.zzz"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "zzz": 1}}},
         "response_format.json_schema.zzz"),
        ({"tools": [{"type": "function", "function": {"name": "a", "zzz": 1}}]},
         "tools[0].function.zzz"),
    ],
)  # fmt: skip
def test_an_unknown_field_is_named_by_its_own_name(more: dict[str, Any], field: str) -> None:
    with pytest.raises(Problem) as caught:
        check(BODIES["/v1/chat/completions"], {"model": "m", "messages": ASK, **more})
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", field)


def test_the_reference_page_lists_every_route_and_fetches_nothing(fake: Live) -> None:
    answer = fake.client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path, methods in ok(fake.client.get("/openapi.json"))["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code></h2>" in answer.text
    assert verbatim.__version__ in answer.text
    assert "continue_final_message" in answer.text
    assert "<script" not in answer.text
    assert "src=" not in answer.text


def test_a_model_that_does_not_exist_is_named_before_the_server_listens() -> None:
    with pytest.raises(AssertionError, match="did not start") as failed:
        Live("--model", "none", engine=None)
    assert "no file, directory or model 'none'" in str(failed.value)
    assert "listening" not in str(failed.value)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/embeddings/", "/v1/embeddings"),
        ("/api/generat", "/api/generate"),
        ("/wp-login.php", None),
    ],
)
def test_a_misspelt_route_gets_the_nearest_one(fake: Live, path: str, meant: str | None) -> None:
    answer = fake.post(path, {"model": "m"})
    assert answer.status_code == 404
    message = str(answer.json()["error"])
    assert ("did you mean" in message) == (meant is not None)
    assert meant is None or f"did you mean {meant}?" in message


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/responses/resp_1/cancel", "disconnect"),
        ("/v1/responses/compact", "send a shorter input"),
        ("/v1/conversations", "previous_response_id"),
        ("/v1/uploads", "/v1/files"),
        ("/v1/audio/speech", "only text"),
        ("/v1/messages/batches", "/v1/batches"),
    ],
)
def test_a_route_that_is_not_here_says_what_is(fake: Live, path: str, instead: str) -> None:
    answer = fake.post(path, {"model": "m"})
    assert answer.status_code == 404
    assert instead in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "route", "said"),
    [
        ("guided_json", "/v1/messages", "did you mean output_config?"),
        ("guided_json", "/api/chat", "did you mean format?"),
        ("skip_special_tokens", "/v1/chat/completions", "write skip_special"),
        ("include_stop_str_in_output", "/v1/completions", "write include_stop"),
        ("bad_words", "/v1/chat/completions", "write banned_token_ids, or logit_bias"),
    ],
)
def test_a_field_of_vllm_gets_the_name_here(fake: Live, field: str, route: str, said: str) -> None:
    answer = fake.post(route, {field: 1})
    assert answer.status_code == 400
    message = str(answer.json()["error"])
    assert f"{field}: {route} has no such field" in message
    assert said in message


def test_names_on_ollamas_routes_ignore_case(fake: Live) -> None:
    for name in ("GPT-6-Astra", "gpt-6-astra:latest", "Gpt-6-ASTRA:LATEST"):
        for path, more in (
            ("/api/generate", {"prompt": "hi", "stream": False}),
            ("/api/chat", {"messages": ASK, "stream": False}),
            ("/api/embed", {"input": "hi"}),
            ("/api/pull", {"stream": False}),
            ("/api/show", {}),
        ):
            made = ok(fake.post(path, {"model": name, **more}))
            assert made.get("model", "gpt-6-astra") == "gpt-6-astra"
    assert fake.post("/api/show", {"model": "GPT-6"}).status_code == 404
    # OpenAI's names are exact
    assert fake.post("/v1/completions", {"model": "M", "prompt": "hi"}).status_code == 404


def test_ollamas_names_of_the_default_model_are_known() -> None:
    state = State(Settings(model="smollm2"), Mock())
    for name in ("smollm2", "smollm2:latest", "smollm2:135m"):
        assert state.check_model(name) == "smollm2"
    with pytest.raises(Problem, match="/api/tags"):
        state.check_model("smollm2:1.7b")
    assert state.served_case("SmolLM2:135M") == "smollm2"
    by_tag = State(Settings(model="smollm2:135m"), Mock())
    assert by_tag.check_model("smollm2:135m") == "smollm2:135m"
