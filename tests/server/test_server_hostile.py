"""Hostile requests: every field against values it must reject; malformed bodies; oversized headers;
deep nesting.

Every bad request gets a 4xx that names its field, never a 5xx; no process dies; and a probe request
keeps its exact answer.
"""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import Live

from eventually import HANG_SECONDS
from verbatim.base.errors import RequestError
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.explain.receipt import digest_of, make_receipt
from verbatim.server.api.common.json_body import parse_json, too_many_values
from verbatim.server.api.common.validate import check
from verbatim.server.api.lens import lens_api
from verbatim.server.api.routes import BODIES
from verbatim.server.problem import Problem, problem_of
from verbatim.server.settings import Limits

pytestmark = pytest.mark.server

_FIELDS = json.loads(
    (Path(__file__).parents[1] / "data" / "refused_fields.json").read_text("utf-8")
)
RECEIPT = make_receipt(
    model="m",
    digest="fake",
    backend="fake",
    detail="",
    numerics="",
    fingerprint="",
    context=1,
    prompt_ids=[65],
    params=SamplingParams(max_tokens=2),
    seed=1,
    choices=[],
)
BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "m", "prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
    },
    "/v1/chat/completions/{id}": {"metadata": {"hostile": "table"}},
    "/v1/responses": {"model": "m", "input": "x", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/embeddings": {"model": "m", "input": "x"},
    "/v1/batches": {
        "input_file_id": "FILE",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
    "/v1/rerank": {"model": "m", "query": "x", "documents": ["y"]},
    "/rerank": {"model": "m", "query": "x", "documents": ["y"]},
    "/v1/score": {"model": "m", "prompt": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [65]},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    "/api/chat": {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "stream": False,
        "options": {"num_predict": 2},
    },
    "/api/generate": {"model": "m", "prompt": "x", "stream": False, "options": {"num_predict": 2}},
    "/api/embed": {"model": "m", "input": "x"},
    "/api/embeddings": {"model": "m", "prompt": "x"},
    "/api/show": {"model": "m"},
    "/api/pull": {"model": "m", "stream": False},
    "/lens/api/step": {"prompt": [65]},
    "/lens/api/replay": {"receipt": RECEIPT},
    "/completion": {"prompt": "x", "n_predict": 2},
    "/embedding": {"content": "x"},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
}
# 24 values as JSON text: Python's json cannot write some of them
NUMBERS = [
    "-1", "0", "1", "2", "-0.0", "0.5", "1.5", "-1e-9", "1e308", "-1e308", "1e999", "-1e999",
    "NaN", "Infinity", "-Infinity", "true", "false",
    '"1"', '""', "[]", "{}", "[1]", "9223372036854775808", "1" + "0" * 400,
]  # fmt: skip
# Of each kind one: for a sampling parameter on the routes after the first that has it, since all
# routes give it to the same check.
KINDS = ["-1", "1.5", "1e999", "NaN", "true", '"1"', "[]", "1" + "0" * 400]
# the fake model's ids are 0 to 259
IDS = ["-1", "260", "2147483648", "1.5", '"a"', "true", "null", "1" + "0" * 50]


@pytest.fixture(scope="module")
def probe(fake: Any) -> Iterator[Any]:
    """A request whose answer must stay the same throughout."""
    first = fake.complete("probe", max_tokens=16, seed=99)["choices"]
    yield lambda: fake.complete("probe", max_tokens=16, seed=99)["choices"] == first
    assert fake.complete("probe", max_tokens=16, seed=99)["choices"] == first
    assert fake.metrics()["verbatim_engine_restarts_total"] == 0


@functools.cache
def ranker() -> Live:
    """A server with a fake cross-encoder, for the routes that other models refuse."""
    return Live(engine="hash,rank=yes").wait_ready()


@pytest.fixture(scope="module", autouse=True)
def stop_ranker() -> Iterator[None]:
    yield
    if ranker.cache_info().currsize:
        assert ranker().stop() == 0
        ranker.cache_clear()


@functools.cache
def stored(fake: Any) -> str:
    """The id of a stored completion."""
    return str(
        fake.post("/v1/chat/completions", {**BASE["/v1/chat/completions"], "store": True}).json()[
            "id"
        ]
    )


@functools.cache
def uploaded(fake: Any) -> str:
    """The id of a file of requests."""
    files = {"file": ("in.jsonl", b'{"custom_id": "x", "url": "/v1/completions", "body": {}}')}
    made = fake.client.post("/v1/files", files=files, data={"purpose": "batch"})
    return str(made.json()["id"])


def send(fake: Any, path: str, body: str | bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    live = ranker() if path.endswith("/rerank") else fake
    path = path.replace("{id}", stored(fake)) if "{id}" in path else path
    if isinstance(body, str) and '"FILE"' in body:
        body = body.replace("FILE", uploaded(fake))
    answer = live.client.post(
        path, content=body, headers={"content-type": "application/json", **headers}
    )
    return answer.status_code, answer.json()


def words(path: str, error: dict[str, Any]) -> tuple[str, str]:
    """(param, message) from the error format of the route's protocol."""
    inner = error["error"]
    return ("", inner) if isinstance(inner, str) else (inner["param"] or "", inner["message"])


def with_field(path: str, name: str, value: str) -> str:
    """The base body with one field replaced by raw JSON text."""
    body = {k: v for k, v in BASE[path].items() if k != name}
    if name == "max_completion_tokens":
        body.pop("max_tokens")
    return json.dumps(body)[:-1] + (", " if body else "") + json.dumps(name) + ": " + value + "}"


@functools.cache
def numeric_fields() -> list[tuple[str, str]]:
    found = []
    for path in BASE:
        schema = BODIES[path].body.model_json_schema()
        for name, shape in schema["properties"].items():
            kinds = {s.get("type") for s in (shape.get("anyOf") or [shape])}
            if kinds & {"integer", "number"} and kinds <= {"integer", "number", "null"}:
                found.append((path, name))
    return found


def test_the_table_covers_the_numeric_fields() -> None:
    names = {name for _, name in numeric_fields()}
    assert {n for n, f in FIELDS.items() if f.kind in ("int", "float")} - names <= {
        "prompt_logprobs"
    }
    assert set(BASE) == {path for path, route in BODIES.items() if not route.is_form}


@pytest.mark.parametrize(("path", "name"), numeric_fields())
def test_every_numeric_field_against_24_values(fake: Any, probe: Any, path: str, name: str) -> None:
    """A value is accepted (200) or rejected by name (4xx), never 5xx. A value that is no number is
    always rejected."""
    first = next(route for route, field in numeric_fields() if field == name)
    for value in NUMBERS if path == first or name not in FIELDS else KINDS:
        status, answer = send(fake, path, with_field(path, name, value))
        assert status in (200, 400, 413), (value, status, answer)
        if value in ("NaN", "Infinity", "-Infinity"):
            assert status == 400
        elif status != 200:
            param, message = words(path, answer)
            assert name in param or name in message, (value, answer)
        nonsense = value[0] in '"[{tf' or value.startswith(("1e999", "-1e999"))
        if nonsense:
            assert status == 400, (value, answer)


def id_fields() -> list[tuple[str, str, str]]:
    """(path, field, JSON with %s where an id goes)"""
    lists = [n for n, f in FIELDS.items() if f.kind == "ids"]
    rows = [
        (p, n, "[65, %s]")
        for p in ("/v1/completions", "/v1/chat/completions", "/v1/responses")
        for n in lists
    ]
    rows += [
        (p, "logit_bias", '{"%s": 1}')
        for p in ("/v1/completions", "/v1/chat/completions", "/v1/responses")
    ]
    rows += [
        ("/v1/completions", "prompt", "[65, %s]"),
        ("/v1/completions", "prompt", "[[65], [%s]]"),
        ("/v1/embeddings", "input", "[65, %s]"),
        ("/lens/api/step", "prompt", "[65, %s]"),
        ("/lens/api/step", "output", "[%s]"),
    ]
    return [*rows, ("/v1/score", "prompt", "[65, %s]"), ("/detokenize", "tokens", "[65, %s]")]


@pytest.mark.parametrize(("path", "name", "form"), id_fields())
def test_every_id_field_against_8_values(
    fake: Any, probe: Any, path: str, name: str, form: str
) -> None:
    for value in IDS:
        inner = value.strip('"') if "{" in form else value
        status, answer = send(fake, path, with_field(path, name, form % inner))
        assert status == 400, (value, status, answer)
        param, message = words(path, answer)
        assert name in param or name in message, (value, answer)
    assert probe()


@pytest.mark.parametrize("path", list(BASE))
def test_malformed_bodies(fake: Any, probe: Any, path: str) -> None:
    whole = json.dumps(BASE[path]).encode()
    bodies = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"{}x",
        whole + b"\x00",
        b"\x00" + whole,
        whole[:-1],
        whole.replace(b'"', b"'"),
        b"\xff\xfe" + whole,
    ]
    bodies += [whole[:cut] for cut in range(1, len(whole), max(len(whole) // 12, 1))]
    bodies += [
        whole[:-1] + b', "model": "m", "model": "n"}',
        whole.replace(b'"x"', b'"\xed\xa0\x80"') if b'"x"' in whole else b"{",
        b'{"a": "\\ud800"}',
    ]
    bodies += [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' * 100 + b"1" + b"}" * 100,
        b"1" * 5000,
        b"{" + b'"k":1,' * 10_000 + b"}",
    ]
    for body in bodies:
        status, answer = send(fake, path, body)
        assert 400 <= status < 500, (body[:80], status)
        assert answer["error"]
    assert probe()


@pytest.mark.parametrize("path", list(BASE))
def test_unknown_unsupported_missing_and_null_fields(fake: Any, path: str) -> None:
    for name in ("nope", "__class__", "Temperature", "x" * 5000, "", "\u0000"):
        status, answer = send(fake, path, json.dumps({**BASE[path], name: 1}))
        assert status == 400
        assert name[:60] in words(path, answer)[1]
    for name, rule in BODIES[path].fields.items():
        if rule.kind == "refused":
            status, answer = send(fake, path, json.dumps({**BASE[path], name: {"x": [1, "y"]}}))
            assert (status, words(path, answer)[1].startswith(f"{name}:")) == (400, True), answer
        if rule.required:
            status, answer = send(
                fake, path, json.dumps({k: v for k, v in BASE[path].items() if k != name})
            )
            assert (status, words(path, answer)[1].startswith(f"{name}:")) == (400, True), answer
    nulls = {name: None for name, rule in BODIES[path].fields.items() if not rule.required}
    status, answer = send(fake, path, json.dumps({**nulls, **BASE[path]}))
    assert status == 200, answer


def test_a_body_of_a_million_small_values_does_not_block_the_server(
    fake: Any, probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing it would take the HTTP process seconds; counting its separators rejects it without
    parsing."""
    values = {
        "prompt": b"[" + b"1," * 2_000_000 + b"1]",
        "logit_bias": b"{" + b",".join(b'"%d":1' % i for i in range(400_000)) + b"}",
    }
    for name, value in values.items():
        body = b'{"model": "m", "' + name.encode() + b'": ' + value + b"}"
        status, answer = send(fake, "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "json_too_large")
        with monkeypatch.context() as patch:
            patch.setattr(json, "loads", lambda *_, **__: pytest.fail("the body is parsed"))
            with pytest.raises(Problem, match="values"):
                parse_json(body, 64, 65_536)
    commas = '","\\",[{' * 30_000
    status, answer = send(fake, "/tokenize", json.dumps({"prompt": commas}))
    assert (status, answer["error"]["code"]) == (
        400,
        "context_length_exceeded",
    ) or status == 200  # a string is one value
    assert probe()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='ab,"\\[{:', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(alphabet='ab,"\\[{', max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def count_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(count_values(v) for v in inner)


@given(json_values, st.booleans())
def test_values_are_counted_without_parsing(value: Any, spaced: bool) -> None:
    raw = json.dumps(value, separators=None if spaced else (",", ":")).encode()
    found = count_values(value)
    assert not too_many_values(raw, found)
    assert too_many_values(raw, (found - 1) // 2 - 1) or found < 5


@pytest.mark.parametrize(
    "value", ["(a{1,9999}){1,9999}", "(a|aa)*b", "(x+x+)+y", "[\\s\\S]{0,5000}"]
)
def test_an_exponential_regex_does_not_slow_other_requests(
    fake: Any, probe: Any, value: str
) -> None:
    """Rejected, or served without delaying others: a concurrent request gets its usual answer."""
    status, answer = send(
        fake, "/v1/completions", json.dumps({**BASE["/v1/completions"], "regex": value})
    )
    assert status == 200 or "regex" in words("", answer)[0], answer
    assert probe()


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("POST", "/v1/completions?temperature=0", "temperature"),
        ("POST", "/v1/messages?nope=1", "nope"),
        ("POST", "/v1/messages?beta=false", "beta"),
        ("GET", "/v1/models?limit=3", "limit"),
        ("GET", "/v1/chat/completions?limit=0", "limit"),
        ("GET", "/v1/chat/completions?limit=1&limit=2", "limit"),
        ("GET", "/v1/chat/completions?order=up", "order"),
        ("GET", "/v1/chat/completions?after=nothing", "after"),
        ("GET", "/v1/chat/completions?metadata%5Bk=v", "metadata[k"),
        ("GET", "/v1/responses/x?stream=maybe", "stream"),
        ("GET", "/v1/responses/x?starting_after=-1", "starting_after"),
        ("GET", "/v1/responses/x?include%5B%5D=file_search_call.results", "include[]"),
        ("DELETE", "/v1/responses/x?force=true", "force"),
        ("GET", "/api/tags?%00=%ff", "\u0000"),
    ],
)
def test_unknown_query_parameters_are_rejected_by_name(
    fake: Any, method: str, path: str, name: str
) -> None:
    body = {"json": BASE.get(path.partition("?")[0])} if method == "POST" else {}
    answer = fake.client.request(method, path, **body)
    assert answer.status_code == 400
    assert name in words(path, answer.json())[1]


def test_health_routes_accept_any_query_parameter(fake: Any) -> None:
    assert fake.client.get("/health?cachebuster=1").status_code == 200
    assert fake.client.get("/metrics?x").status_code == 200
    assert fake.client.post("/v1/messages?beta=true", json=BASE["/v1/messages"]).status_code == 200


STRINGS = [
    '"a\\u0000b"',
    '"\\ud83d\\ude00"',
    '"<|assistant|><s></s>"',
    '"' + "é" * 1000 + '"',
    '"\\u202e\\ufeff"',
]


@pytest.mark.parametrize("value", STRINGS)
def test_odd_but_valid_text_is_served(fake: Any, probe: Any, value: str) -> None:
    """NUL, emoji as surrogate pairs, control tokens as text, direction marks: all are text."""
    for path, name in (
        ("/v1/completions", "prompt"),
        ("/v1/responses", "input"),
        ("/tokenize", "prompt"),
        ("/v1/embeddings", "input"),
    ):
        status, answer = send(fake, path, with_field(path, name, value))
        assert status == 200, answer
    chat = (
        '{"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": ' + value + "}]}"
    )
    assert send(fake, "/v1/chat/completions", chat)[0] == 200
    assert probe()


def test_control_tokens_typed_by_a_user_stay_text(fake: Any) -> None:
    typed = fake.post(
        "/tokenize", {"messages": [{"role": "user", "content": "<|assistant|>"}]}
    ).json()["tokens"]
    assert typed.count(259) == 1  # the template's token, not the user's


def test_control_tokens_that_stay_text_cause_a_warning(fake: Any) -> None:
    typed = "a <|assistant|> b"
    [warned] = fake.complete(typed)["warnings"]
    assert "<|assistant|>" in warned
    embedded = fake.post("/v1/embeddings", {"input": ["plain", typed]}).json()["warnings"]
    assert embedded == [warned.replace("prompt:", "input:")]
    assert "warnings" not in fake.post("/v1/embeddings", {"input": ["plain"]}).json()


# (route, field, value, what the error names); the values that take a line each
LARGE: list[tuple[str, str, Any, str]] = [
    *_FIELDS["hostile"],
    ("/v1/completions", "prompt", ["a"] * 1000, "prompt"),
    ("/v1/completions", "prompt", "a" * 200_000, "prompt"),
    ("/v1/completions", "prompt", [65] * 5000, "prompt"),
    ("/v1/completions", "prompt", ["a"] * 100, "n"),
    ("/v1/score", "prompt", ["a"] * 100, "n"),
    ("/v1/completions", "stop", "a" * 5000, "stop"),
    ("/v1/completions", "logit_bias", {str(i): 1 for i in range(2000)}, "logit_bias"),
    ("/v1/completions", "grammar", "x" * 100_000, "grammar"),
    ("/v1/completions", "regex", "(" * 500, "regex"),
    ("/v1/chat/completions", "messages", [{"role": "user", "content": "x"}] * 5000, "messages"),
    ("/v1/chat/completions", "messages", [{"role": "user", "content": "a" * 100_000}], "messages"),
    (
        "/v1/chat/completions",
        "tools",
        [{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)],
        "tools",
    ),
    ("/v1/embeddings", "input", ["a"] * 1000, "input"),
    ("/detokenize", "tokens", [65] * 50_000, "tokens"),
    ("/v1/responses", "input", [{"role": "user", "content": "x"}] * 5000, "input"),
]


def test_two_fields_for_the_same_setting_are_rejected(fake: Any) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    body = {**BASE["/v1/messages"], "output_config": {"format": form}, "output_format": form}
    assert fake.post("/v1/messages", body).json()["error"]["param"] == "output_format"
    for one in ("output_config", "output_format"):
        assert (
            fake.post("/v1/messages", {k: v for k, v in body.items() if k != one}).status_code
            == 200
        )
    talk = {"messages": [{"role": "user", "content": "x"}]}
    assert (
        fake.post("/tokenize", {**talk, "add_special_tokens": False}).json()["error"]["param"]
        == "add_special_tokens"
    )
    assert fake.post("/tokenize", talk).status_code == 200


def test_a_duplicate_key_is_rejected_at_any_depth(fake: Any) -> None:
    for text in (
        '{"model": "m", "prompt": "x", "max_tokens": 1, "max_tokens": 2}',
        (
            '{"model": "m", "prompt": "x", "json_schema": {"properties": {"a": {"type": "null", '
            '"type": "string"}}}}'
        ),
        '{"model": "m", "prompt": "x", "logit_bias": {"65": 1, "65": 2}}',
        '{"model": "m", "prompt": "x", "logit_bias": {"65": 1, "065": 2}}',
        '{"model": "m", "prompt": "x", "unknown": [[{"a": 1, "\\u0061": 2}]]}',
    ):
        status, answer = send(fake, "/v1/completions", text)
        assert status == 400
        assert "twice" in answer["error"]["message"]
        assert answer["error"]["param"]


@pytest.mark.parametrize(
    ("path", "name", "value", "param"),
    LARGE,
    ids=[f"{p}-{n}-{i}" for i, (p, n, _, _) in enumerate(LARGE)],
)
def test_hostile_field_values_are_rejected_by_name(
    fake: Any, probe: Any, path: str, name: str, value: Any, param: str
) -> None:
    status, answer = send(fake, path, json.dumps({**BASE[path], name: value}))
    assert status in (400, 404), answer
    assert param in words(path, answer)[0], answer
    assert probe()


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"allowed_token_ids": [65], "regex": "b+"}, "allowed_token_ids"),
        ({"banned_token_ids": [98], "regex": "b+"}, "banned_token_ids"),
        ({"banned_token_ids": list(range(260))}, "banned_token_ids"),
        ({"allowed_token_ids": [257], "min_tokens": 3}, "allowed_token_ids"),
    ],
)
def test_masking_every_token_is_a_client_error(
    fake: Any, probe: Any, extra: dict[str, Any], param: str
) -> None:
    body = {**BASE["/v1/completions"], "max_tokens": 5, **extra}
    status, answer = send(fake, "/v1/completions", json.dumps(body))
    assert status == 400
    events = fake.events("/v1/completions", body)
    assert events[-1] == "[DONE]"
    for error in (answer["error"], events[-2]["error"]):
        assert error["message"].startswith(f"{param}: no token is left")
        assert all(name in error["message"] for name in extra)
        assert error["param"] == param
    assert probe()


def test_an_error_at_the_end_names_the_field_of_the_clients_protocol(fake: Any) -> None:
    """A schema that a banned byte makes impossible, on each route with its own field name for
    it."""
    only_b = {
        "type": "object",
        "properties": {"b": {"const": 1}},
        "required": ["b"],
        "additionalProperties": False,
    }
    ask = {**BASE["/v1/chat/completions"], "max_tokens": 50, "banned_token_ids": [98]}
    body = {
        **ask,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": only_b}},
    }
    status, answer = send(fake, "/v1/chat/completions", json.dumps(body))
    assert status == 400
    assert answer["error"]["param"] == "banned_token_ids"
    assert "(banned_token_ids, response_format)" in answer["error"]["message"]
    error = fake.events("/v1/chat/completions", body)[-2]["error"]
    assert error == answer["error"]


def test_a_prompt_that_is_too_long_names_the_field_of_the_clients_protocol(fake: Any) -> None:
    # Above the context with the template around it, below the length check before tokenisation.
    long = "x" * 4090
    for path, name, value in (
        ("/v1/completions", "prompt", long + "x" * 10),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": long}]),
        ("/v1/responses", "input", long),
        ("/v1/messages", "messages", [{"role": "user", "content": long}]),
    ):
        status, answer = send(fake, path, json.dumps({**BASE[path], name: value}))
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (
            400,
            "context_length_exceeded",
            name,
        )


SAID = [{"role": "user", "content": "hi"}]
REFUSED_LATE: list[tuple[str, dict[str, Any], str]] = [
    *_FIELDS["late"],
    ("/v1/embeddings", {"input": "x" * 4096}, "input"),
]


@pytest.mark.parametrize("wait", ["9", "0.0001"], ids=["at once", "after a keep-alive"])
def test_an_engine_error_names_the_field_of_the_clients_protocol(wait: str) -> None:
    """Also when the error comes after the response head, as an event."""
    live = Live("--keepalive-seconds", wait).wait_ready()
    try:
        for path, body, name in REFUSED_LATE:
            for more in (
                ({},) if path == "/v1/embeddings" else ({"stream": False}, {"stream": True})
            ):
                answer = live.post(path, {**body, **more})
                assert answer.status_code == 400 or more.get("stream")
                lines = [
                    line.removeprefix("data: ")
                    for line in answer.text.splitlines()
                    if '"error":' in line
                ]
                error = next(
                    found for found in (json.loads(line).get("error") for line in lines) if found
                )
                # Ollama's errors have only a message, and that of a context error names no field.
                if isinstance(error, str):
                    assert error.startswith(f"{name}: ") or "of a context of" in error
                else:
                    assert error["param"] == name, (path, body)
                    assert (
                        error["message"].startswith(f"{name}: ")
                        or error["code"] == "context_length_exceeded"
                    )
    finally:
        live.stop()


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/api/chat"],
)
def test_every_route_with_messages_limits_their_number_and_length(fake: Any, path: str) -> None:
    most = {"max_tokens": 4} if path == "/v1/messages" else {}
    for messages, code in (
        (SAID * 5000, "invalid_parameter"),
        ([{**SAID[0], "content": "x" * 10**6}], "context_length_exceeded"),
    ):
        answer = fake.post(path, {"messages": messages, **most})
        assert answer.status_code == 400
        error = answer.json()["error"]
        if path == "/api/chat":
            assert error.startswith("messages: ")
        else:
            assert (error["code"], error["param"]) == (code, "messages")


def test_input_tokens_applies_the_limits(fake: Any) -> None:
    path = "/v1/responses/input_tokens"
    tool = {"type": "function", "name": "f", "parameters": {}}
    for body, param in (
        ({"input": SAID * 5000}, "input"),
        ({"input": "x" * 10**6}, "input"),
        ({"input": "x", "tools": [tool] * 129}, "tools"),
    ):
        answer = fake.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def raw(fake: Any, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", fake.port), timeout=HANG_SECONDS) as sock:
        sock.sendall(data)
        out = b""
        try:
            while piece := sock.recv(65536):
                out += piece
        except (ConnectionResetError, TimeoutError):
            pass
        return out


def test_oversized_and_malformed_heads(fake: Any, probe: Any) -> None:
    body = json.dumps(BASE["/v1/completions"]).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nConnection: close\r\n"
    )
    assert b" 431 " in raw(fake, head + b"X: " + b"a" * 100_000 + b"\r\n\r\n")
    assert b" 431 " in raw(
        fake, head + b"".join(b"X%d: y\r\n" % i for i in range(20_000)) + b"\r\n"
    )
    assert b" 431 " in raw(
        fake, b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    for broken in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST / HTTP/9.9\r\n\r\n",
        head + b"Content-Length: -1\r\n\r\n",
        head + b"Content-Length: 1e9\r\n\r\n",
    ):
        answer = raw(fake, broken)
        assert answer[9:10] == b"4" or not answer, (broken, answer[:100])
    assert b" 413 " in raw(fake, head + b"Content-Length: 99999999999\r\n\r\n{}")
    chunked = (
        head
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%s\r\n" % (65536, b" " * 65536) for _ in range(130))
        + b"0\r\n\r\n"
    )
    assert b" 413 " in raw(fake, chunked)
    both = raw(fake, head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    assert both[9:10] == b"4" or not both
    assert b" 200 " in raw(fake, head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    assert b" 415 " in raw(
        fake,
        head.replace(b"application/json", b"text/plain")
        + b"Content-Length: %d\r\n\r\n%s" % (len(body), body),
    )
    assert probe()


def test_wrong_methods_and_paths(fake: Any) -> None:
    for method, path in (
        ("GET", "/v1/completions"),
        ("DELETE", "/v1/models/m"),
        ("PUT", "/v1/chat/completions"),
        ("POST", "/health"),
        ("TRACE", "/"),
    ):
        assert fake.client.request(method, path).status_code in (404, 405)
    for path in (
        "/v1/../health",
        "//health",
        "/health/",
        "/%2e%2e/etc/passwd",
        "/v1/models/%00",
        "/v1/chat/completions/\u00fc",
        "/docs",
        "/redoc",
    ):
        assert fake.client.get(path).status_code in (200, 404), path
    assert fake.client.options("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"model": "m", "prompt": "x", "temperature": NaN}', "temperature"),
        ('{"model": "m", "prompt": "x", "logit_bias": {"5": -Infinity}}', "logit_bias.5"),
        ('{"model": "m", "prompt": ["x", "\\ud800"]}', "prompt[1]"),
        ('{"model": "m", "metadata": {"half \\ud800": "x"}}', "metadata.half \\ud800"),
        ('{"model": "m", "prompt": "x", "seed": ' + "1" * 5000 + "}", "seed"),
        ('{"model": "m", "prompt": "x", "seed": NaN', None),  # not JSON: there is no field to name
    ],
)
def test_a_value_that_is_not_json_is_named(fake: Any, body: str, param: str | None) -> None:
    answer = fake.client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_json", param)
    assert param is None or error["message"].startswith(param + ": ")


def test_a_wrong_field_of_a_text_block_is_named() -> None:
    """A text block has a field named like its type; the path of the error once led into that
    text."""
    block = {"type": "text", "text": "x", "citations": [{}]}
    messages = [{"role": "user", "content": [block]}]
    with pytest.raises(Problem) as caught:
        check(BODIES["/v1/messages/count_tokens"], {"model": "m", "messages": messages})
    assert (caught.value.code, caught.value.param) == (
        "invalid_parameter",
        "messages[0].content[0].citations",
    )


CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
HI = [{"role": "user", "content": "hi"}]
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "one of 'system'"),
    (CHAT, {"messages": [{"content": ""}]}, "messages[0].role", "is required"),
    (CHAT, {"messages": ["hi"]}, "messages[0]", "an object (got 'hi')"),
    (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, "response_format.type", "'text'"),
    (CHAT, {"messages": HI, "stop": 5}, "stop", "a valid string or a valid list"),
    ("/v1/messages", {"messages": HI, "max_tokens": 1, "thinking": True}, "thinking", "an object"),
    (CHAT, {"messages": HI, "think": True}, "think", "did you mean reasoning_effort?"),
    ("/api/chat", {"messages": HI, "temperature": 1}, "temperature", "did you mean options?"),
    ("/tokenize", {"content": "hi"}, "content", "did you mean prompt?"),
    ("/api/chat", {"messages": HI, "think": "x"}, "think", "a valid boolean or 'low', 'medium'"),
    (CHAT, {"messages": HI, "tool_choice": ALLOWED}, "tool_choice.type", "only those tools in"),
    (RESPONSES, {"input": "", "tool_choice": {"type": []}}, "tool_choice.type", "'function' (got"),
    (RESPONSES, {"input": "", "tool_choice": ALLOWED}, "tool_choice.type", "(got 'allowed_tools')"),
    (RESPONSES, {"input": [{"type": "item_reference"}]}, "input[0].type", "previous_response_id"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type", "'function_call'"),
    (RESPONSES, {"input": [{"type": "reasoning", "role": ""}]}, "input[0].role", "unknown field"),
    (RESPONSES, {"input": [{"content": ""}]}, "input[0].role", "is required"),
    (RESPONSES, {"input": ["hi"]}, "input[0]", "an object (got 'hi')"),
]


@pytest.mark.parametrize(("route", "body", "param", "words"), WRONG)
def test_an_error_names_the_field_and_all_that_it_accepts(
    route: str, body: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(Problem) as raised:
        check(BODIES[route], {"model": "m", **body})
    assert raised.value.param == param
    assert words in raised.value.message
    assert "instance of" not in raised.value.message, "names a class of ours"


@pytest.mark.parametrize(
    "params",
    [
        {"num_beams": "x"},
        {"stop": 5},
        {"stop": None},
        {"stop_token_ids": 5},
        {"stop_token_ids": ["a"]},
        {"logit_bias": 5},
        {"logit_bias": {"a": 1.0}},
        {"json_schema": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("route", [lens_api.step, lens_api.replay])
async def test_params_of_the_lens_are_refused_by_their_type(
    route: Any, params: dict[str, Any]
) -> None:
    """No schema of the route checks them; the server's limits would compare or count them."""
    receipt = {**RECEIPT, "params": params}
    receipt["sha256"] = digest_of(receipt)

    async def body(model: Any) -> Any:
        return model.model_construct(prompt=[65], params=params, receipt=receipt)

    facts = SimpleNamespace(vocab=256, context=64)
    call: Any = SimpleNamespace(body=body, state=SimpleNamespace(limits=Limits(), facts=facts))
    with pytest.raises((Problem, RequestError)) as error:
        await route(call)
    problem = problem_of(error.value)
    assert problem.status == 400
    assert f"{next(iter(params))}: " in problem.message
