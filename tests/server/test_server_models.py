"""Several models behind one port: loaded when a request names them, unloaded when others need the
place, pinned by a flag; with the answers of a server that has the model alone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from live_server import Live
from starlette.requests import Request

from eventually import HANG_SECONDS, eventually_async
from tiny_encoders import POSITIONS, write_encoder
from verbatim.base.errors import ModelError, ParameterError
from verbatim.cli.commands.serve import read_models
from verbatim.convert.export_model import model_metadata, model_tensors
from verbatim.files.gguf_write import write_gguf
from verbatim.hub import catalog
from verbatim.hub.hub import HubRef
from verbatim.observe.merge_metrics import add_counters, merge
from verbatim.server import model_pool
from verbatim.server.api.common.request_context import ClientDisconnected, RequestContext
from verbatim.server.api.openai.protocol import PROTOCOL
from verbatim.server.model_pool import ModelPool
from verbatim.server.problem import Problem
from verbatim.server.server_state import State
from verbatim.server.settings import NamedModel, Settings
from verbatim.testing.tiny_models import tiny_model
from verbatim.text.vocabulary import BYTE_ALPHABET

MODELS = ("--model", "a=first", "--model", "b=second", "--model", "c=third")
SETTINGS = ("--model-setting", "b.context=512", "--model-setting", "c.context=256")


def start(*flags: str, engine: str = "pipeline") -> Live:
    return Live(*MODELS, *SETTINGS, *flags, names=(), engine=engine).wait_ready()


def loaded(live: Live) -> list[str]:
    return [model["name"] for model in live.client.get("/api/ps").json()["models"]]


def complete(live: Live, model: str | None, **more: Any) -> Any:
    body = {"prompt": "hello", "max_tokens": 8, "seed": 7, **more}
    return live.client.post("/v1/completions", json={**body, **({"model": model} if model else {})})


@pytest.fixture(scope="module")
def two() -> Iterator[Live]:
    """At most two of three models are loaded."""
    live = start("--max-loaded-models", "2")
    yield live
    assert live.stop() == 0, live.log_text()


def test_a_model_is_loaded_when_a_request_names_it(two: Live, fake: Live) -> None:
    listed = [model["id"] for model in two.client.get("/v1/models").json()["data"]]
    assert listed == ["a", "b", "c"]
    assert loaded(two) == ["a"]
    alone = fake.complete(max_tokens=8)["choices"][0]["text"]
    for name in ("b", "a"):
        answer = complete(two, name).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name, alone)
    assert sorted(loaded(two)) == ["a", "b"]


def test_the_least_recently_used_model_leaves(two: Live) -> None:
    for name in ("a", "b", "c", "b", "a"):
        assert complete(two, name).status_code == 200
        assert name in loaded(two)
    # The order of use was … c, b, a: so c has left.
    assert sorted(loaded(two)) == ["a", "b"]
    assert "unloading the model 'c' to make room for 'a'" in two.log_text()


def test_settings_and_facts_are_those_of_the_model(two: Live) -> None:
    for name, context in (("a", 4096), ("b", 512), ("c", 256)):
        assert complete(two, name).status_code == 200
        assert two.client.get(f"/v1/models/{name}").json()["context_length"] == context
    refused = complete(two, "c", max_tokens=300)
    assert refused.status_code == 400
    assert complete(two, "b", max_tokens=300).status_code == 200


def test_an_unknown_model_loads_nothing(two: Live) -> None:
    before = loaded(two)
    answer = complete(two, "d")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert loaded(two) == before


def test_every_protocol_chooses_the_model(two: Live) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 4}),
        ("/v1/messages", {"messages": messages, "max_tokens": 4}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
        ("/api/chat", {"messages": messages, "stream": False, "options": {"num_predict": 4}}),
        ("/tokenize", {"prompt": "hi"}),
        ("/completion", {"prompt": "hi", "n_predict": 4}),
    ):
        for name in ("c", "a"):
            answer = two.client.post(path, json={**body, "model": name})
            assert answer.status_code == 200, (path, name, answer.text)
            assert name in loaded(two), path


def test_metrics_have_one_group_per_name_and_a_label(two: Live) -> None:
    text = two.client.get("/metrics").text
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(names) == len(set(names))
    assert sorted(loaded(two)) == ["a", "c"]
    for name, there in (("a", 1), ("b", 0), ("c", 1)):
        assert f'verbatim_model_loaded{{model="{name}"}} {there}' in text
        assert (f'verbatim_engine_up{{model="{name}"}} 1' in text) == bool(there)
        assert f'verbatim_engine_up{{model="{name}"}} 0' not in text, "not loaded is no fault"


def test_counters_of_a_model_only_grow(two: Live) -> None:
    def unload() -> dict[str, float]:
        answer = two.client.post("/api/generate", json={"model": "b", "keep_alive": 0})
        assert answer.status_code == 200
        return two.metrics()

    counters = ('verbatim_requests_total{model="b"}', 'verbatim_output_tokens_total{model="b"}')
    before = unload()
    for number in (1, 2):
        assert complete(two, "b").status_code == 200
        current = two.metrics()
        after = unload()
        for name, each in zip(counters, (1, 8), strict=True):
            start = before.get(name, 0)
            assert start + (number - 1) * each <= current[name] <= after[name]
            assert after[name] == start + number * each


def test_ollamas_load_duration_is_the_time_of_the_load(two: Live) -> None:
    absent = next(name for name in ("a", "b", "c") if name not in loaded(two))
    body = {"prompt": "hi", "stream": False, "options": {"num_predict": 2}, "model": absent}
    first, second = (two.client.post("/api/generate", json=body).json() for _ in range(2))
    assert 0 < first["load_duration"] < first["total_duration"]
    assert second["load_duration"] == 0
    there = loaded(two)
    absent = next(name for name in ("a", "b", "c") if name not in there)
    answer = two.client.post("/api/pull", json={"model": absent, "stream": False})
    assert (answer.json(), loaded(two)) == ({"status": "success"}, there), "nothing is loaded"


def test_ollama_unloads_with_keep_alive_zero(two: Live) -> None:
    assert complete(two, "b").status_code == 200
    answer = two.client.post("/api/generate", json={"model": "b", "keep_alive": 0})
    assert answer.json()["done_reason"] == "unload"
    assert "warnings" not in answer.json()
    assert "b" not in loaded(two)


def test_keep_alive_zero_with_an_input_embeds(two: Live) -> None:
    absent = next(name for name in ("a", "b", "c") if name not in loaded(two))
    for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        body = {"model": absent, field: "the cat", "keep_alive": 0}
        two.client.post("/api/generate", json={"model": absent, "keep_alive": 0})
        answer = two.client.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        assert absent in loaded(two)


def test_a_request_that_unloads_or_asks_for_facts_loads_nothing(two: Live) -> None:
    for name in ("b", "a", "c"):
        assert complete(two, name).status_code == 200
    before = loaded(two)
    assert "b" not in before
    answer = two.client.post("/api/generate", json={"model": "b", "keep_alive": 0})
    assert answer.json()["done_reason"] == "unload"
    assert two.client.post("/api/show", json={"model": "b"}).status_code == 200
    assert loaded(two) == before


@pytest.fixture(scope="module")
def adapted() -> Iterator[Live]:
    """The adapter x belongs to the second of two models."""
    flags = ("--model", "a=first", "--model", "b=second", "--model-setting", "b.context=512")
    flags += ("--model-setting", "b.adapters=x=unused")
    live = Live(*flags, names=(), engine="pipeline,adapters=x").wait_ready()
    yield live
    assert live.stop() == 0, live.log_text()


@pytest.mark.parametrize("route", ["/api/generate", "/api/chat"])
def test_an_adapter_is_loaded_and_unloaded_with_its_model(adapted: Live, route: str) -> None:
    assert loaded(adapted) == ["a"]
    assert complete(adapted, "x").status_code == 200
    contexts = {
        model["name"]: model["context_length"]
        for model in adapted.client.get("/api/ps").json()["models"]
    }
    assert contexts == {"a": 4096, "b": 512, "x": 512}
    empty = {"messages": []} if route == "/api/chat" else {}
    for _ in range(2):  # the second one has nothing to unload
        answer = adapted.client.post(route, json={"model": "x", "keep_alive": 0, **empty})
        assert (answer.json()["model"], answer.json()["done_reason"]) == ("x", "unload")
        assert loaded(adapted) == ["a"]


def test_the_longest_context_bounds_the_values_of_a_body() -> None:
    flags = ("--model", "a=first", "--model", "b=second", "--max-json-values", "100")
    live = Live(*flags, "--model-setting", "a.context=64", names=()).wait_ready()
    try:
        body = {"model": "b", "tokens": [65] * 2000}
        refused = live.client.post("/detokenize", json=body)
        assert refused.json()["error"]["code"] == "json_too_large"  # b was never loaded
        assert complete(live, "b").status_code == 200
        assert live.client.post("/detokenize", json=body).json() == {"prompt": "A" * 2000}
    finally:
        assert live.stop() == 0, live.log_text()


def test_an_adapter_of_one_of_several_models_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_models(None, ("a=x", "b=y"), (), ("a.adapters=r=P", "a.adapters=s=Q"))
    assert read[0].engine == {"adapters": ("r=P", "s=Q")}

    async def names() -> tuple[str, ...]:
        monkeypatch.setattr(model_pool, "Supervisor", FakeSupervisor)
        settings = Settings(models=read)
        pool = ModelPool(settings, lambda: 0.0)
        return State(settings, pool.first.supervisor, pool=pool).names()

    assert asyncio.run(names()) == ("a", "b", "r", "s")


def test_a_pinned_model_stays_and_a_model_in_use_too(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.write_text("2")
    live = start("--max-loaded-models", "2", "--pin", "b", engine=f"pipeline,gate={gate}")
    try:
        assert complete(live, "c", max_tokens=1).status_code == 200
        assert loaded(live) == ["b", "c"]
        body = {"model": "c", "prompt": "x", "max_tokens": 9, "stream": True, "ignore_eos": True}
        with live.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)  # c has made its second step and waits for the gate
            refused = complete(live, "a")
            assert refused.status_code == 503
            assert "--max-loaded-models" in refused.json()["error"]["message"]
            gate.write_text("1000")
            assert "data: [DONE]" in list(lines)
        assert complete(live, "a").status_code == 200
        assert loaded(live) == ["a", "b"]
    finally:
        assert live.stop() == 0, live.log_text()


class FakeSupervisor:
    """Ready at once; `fatal` for a model named "broken"."""

    def __init__(self, settings: Settings, clock: Any, ledger: Any) -> None:
        self.settings, self.facts, self.closed = settings, None, False
        self.ready, self.ended = asyncio.Event(), asyncio.Event()
        self.fatal: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        if self.settings.model == "broken":
            self.fatal.set_result("no such file")
        else:
            self.ready.set()

    async def close(self) -> None:
        self.crash()
        self.closed = True

    def continue_counters(self, earlier: FakeSupervisor) -> None:
        pass

    def crash(self) -> None:
        self.ready.clear()
        self.ended.set()


def make_pool(monkeypatch: pytest.MonkeyPatch, memory: list[int], **settings: Any) -> ModelPool:
    """A pool of models whose files have 100 bytes; `memory` is what is available with none."""
    monkeypatch.setattr(model_pool, "Supervisor", FakeSupervisor)
    monkeypatch.setattr(model_pool, "file_bytes", lambda model: 100)
    monkeypatch.setattr(model_pool, "check_load", lambda *args, **options: None)
    models = tuple(NamedModel(name, name) for name in ("a", "b", "c", "broken"))
    pool = ModelPool(Settings(models=models, **settings), lambda: float(next(ticks)))
    ticks = count()
    monkeypatch.setattr(model_pool, "available_memory", lambda: memory[0] - 100 * len(pool.loaded))
    return pool


async def test_models_leave_when_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(monkeypatch, [310])  # two fit; a third needs 125
    pool.start()
    for name, expected in (("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc"), ("b", "bc")):
        await pool.hold(name, 60)
        pool.release(name)
        assert "".join(sorted(model.name for model in pool.loaded)) == expected
    for name in ("b", "c"):
        await pool.hold(name, 60)
    await pool.hold("a", 60)  # both others are in use: it is loaded all the same, with a warning
    assert len(pool.loaded) == 3
    await pool.close()
    assert not pool.loaded


async def test_a_model_that_fails_to_load_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(monkeypatch, [10_000])
    for _ in range(2):
        with pytest.raises(Problem, match="the server's log says why"):
            await pool.hold("broken", 60)
        assert not pool.loaded
    assert pool.models["broken"].users == 0


async def hold_third(third: NamedModel) -> tuple[list[str], str]:
    """The models that are loaded after a request for the third, of which two may be; and the error,
    if it was not loaded. Its files are checked as in a server."""
    models = (NamedModel("a", "a"), NamedModel("b", "b"), third)
    pool = ModelPool(Settings(models=models, max_loaded_models=2), lambda: 0.0)
    pool.start()
    await pool.hold("b", 60)
    pool.release("b")
    error = ""
    try:
        await pool.hold(third.name, 60)
    except Problem as problem:
        error = str(problem)
    found = [model.name for model in pool.loaded]
    await pool.close()
    return found, error


def tiny_file(path: Path) -> bytes:
    """A GGUF file of a tiny model with a tokenizer of bytes."""
    model = tiny_model("llama", vocab_size=256)
    metadata, extra = model_metadata(model, "tiny")
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*BYTE_ALPHABET],
        "tokenizer.ggml.token_type": [1] * 256,
    }
    write_gguf(path, metadata, [*extra, *model_tensors(model)])
    return path.read_bytes()


def test_facts_are_true_and_stay_known_after_a_failed_load(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.gguf" for name in ("a", "b")}
    flags = [word for name, file in files.items() for word in ("--model", f"{name}={file}")]
    for file in files.values():
        tiny_file(file)
    live = Live(*flags, "--model-setting", "b.pooling=mean", names=(), engine=None).wait_ready()
    ask = live.client.post
    try:
        for name, more in (("a", []), ("b", ["embedding"])):
            shown = ask("/api/show", json={"model": name}).json()
            assert shown["capabilities"] == ["completion", *more]
            vectors = ask("/api/embed", json={"model": name, "input": "x"})
            assert vectors.status_code == (200 if more else 400)
        assert ask("/api/generate", json={"model": "a", "keep_alive": 0}).status_code == 200
        files["a"].unlink()
        assert "could not be loaded" in complete(live, "a").json()["error"]["message"]
        shown = ask("/api/show", json={"model": "a"})
        assert (shown.status_code, live.client.get("/props").status_code) == (200, 200), shown.text
    finally:
        assert live.stop() == 0, live.log_text()


LIMIT = "the limit of memory is 1000 bytes"
DOOMED: dict[str, tuple[Callable[[bytes], bytes] | None, dict[str, Any], str]] = {
    "missing": (None, {}, "no file, directory or model"),
    "no GGUF file": (lambda whole: b"PK" * 1000, {}, "GGUF"),
    "cut": (lambda whole: whole[:-4000], {}, "tensor"),
    "unknown family": (lambda whole: whole.replace(b"llama", b"marsi"), {}, "marsi"),
    "unknown tokenizer": (lambda whole: whole.replace(b"gpt2", b"gpt9"), {}, "gpt9"),
    "no adapter": (bytes, {"adapters": ("x=/no/such/adapter",)}, "no such adapter"),
    "no draft": (bytes, {"speculate": "draft:/no/such.gguf"}, "no file, directory or model"),
    "no head": (bytes, {"speculate": "head:/no/such.gguf"}, "/no/such.gguf"),
    "no tensor": (
        lambda whole: whole.replace(b"blk.0.attn_q.", b"blk.0.attn_z."),
        {},
        "tensor blk.0.attn_q.weight is missing",
    ),
    "packed": (bytes, {"quant": "packed"}, "'packed' is for quantised safetensors"),
    LIMIT: (bytes, {}, "its file has"),
}


@pytest.mark.parametrize("kind", DOOMED)
async def test_a_load_that_cannot_succeed_unloads_no_model(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, engine, why = DOOMED[kind]
    monkeypatch.setattr(model_pool, "Supervisor", FakeSupervisor)
    if kind == LIMIT:
        monkeypatch.setattr(model_pool, "memory_limit", lambda: 1000)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "c.gguf"
    whole = tiny_file(tmp_path / "whole.gguf")
    if change is not None:
        file.write_bytes(change(whole))
    found, error = await hold_third(NamedModel("c", str(file), engine))
    assert found == ["a", "b"]
    assert "the server's log says why" in error
    assert why in caplog.text


async def test_a_missing_file_with_the_form_of_a_hub_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_pool, "Supervisor", FakeSupervisor)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert (await hold_third(NamedModel("c", "models/c.gguf")))[0] == ["a", "b"]
    assert (await hold_third(NamedModel("c", "models")))[0] == ["a", "b"]  # no config.json


async def test_a_hub_model_leaves_the_others_unless_the_hub_lists_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_pool, "Supervisor", FakeSupervisor)
    asked = []

    def hub(ref: HubRef) -> None:
        asked.append(str(ref))
        if ref.repo == "org/none":
            raise ModelError("no such repository")

    monkeypatch.setattr(catalog, "check_on_hub", hub)
    assert await hold_third(NamedModel("c", "org/name:Q4_K_M")) == (["b", "c"], "")
    assert (await hold_third(NamedModel("c", "org/none")))[0] == ["a", "b"]
    assert asked == ["org/name:Q4_K_M", "org/none"]


@pytest.mark.parametrize("engine", [{}, {"quant": "q8_0"}], ids=str)
async def test_a_load_that_can_succeed_unloads_one_model(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_pool, "Supervisor", FakeSupervisor)
    if engine:  # quantised, a model needs less than its file
        monkeypatch.setattr(model_pool, "memory_limit", lambda: 1000)
    tiny_file(file := tmp_path / "c.gguf")
    assert await hold_third(NamedModel("c", str(file), engine)) == (["b", "c"], "")


async def test_a_pinned_model_that_fails_to_load_is_not_shown_as_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(monkeypatch, [10_000])
    pool.models["broken"].pinned = True
    pool.start()

    async def dropped() -> bool:
        return [model.name for model in pool.loaded] == ["a"]

    await eventually_async(dropped)
    assert "the model 'broken' was not loaded" in caplog.text
    await pool.close()


async def test_an_engine_that_does_not_come_up_is_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = make_pool(monkeypatch, [10_000])
    monkeypatch.setattr(FakeSupervisor, "start", lambda self: None)
    with pytest.raises(Problem, match="not loaded in time"):
        await pool.hold("a", 0)
    assert pool.models["a"].users == 0


async def test_a_model_that_a_request_waits_for_is_not_unloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = make_pool(monkeypatch, [10_000])
    monkeypatch.setattr(FakeSupervisor, "start", lambda self: None)
    waiting = asyncio.ensure_future(pool.hold("c", HANG_SECONDS))

    async def loading() -> bool:
        return pool.models["c"].loaded

    await eventually_async(loading)
    assert not await pool.unload("c")
    pool.models["c"].supervisor.ready.set()
    assert (await waiting).loaded
    assert not await pool.unload("c")
    pool.release("c")
    assert await pool.unload("c")
    assert not pool.loaded


@pytest.mark.parametrize("when", ["in the first load", "later"])
async def test_an_engine_that_restarts_is_unavailable_and_keeps_no_place(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(monkeypatch, [10_000], max_loaded_models=1)
    with monkeypatch.context() as patch:
        if when == "in the first load":
            patch.setattr(FakeSupervisor, "start", FakeSupervisor.crash)
        else:
            (await pool.hold("b", HANG_SECONDS)).supervisor.crash()  # type: ignore[attr-defined]
            pool.release("b")
        with pytest.raises(Problem, match="is being restarted") as caught:
            await pool.hold("b", HANG_SECONDS)
    assert (caught.value.code, caught.value.retry_after) == ("unavailable", 2)
    assert [model.name for model in pool.loaded] == ["b"]
    await pool.hold("c", HANG_SECONDS)
    assert [model.name for model in pool.loaded] == ["c"]
    await pool.close()


@pytest.mark.parametrize("restarts", [False, True])
async def test_an_idle_model_is_unloaded(monkeypatch: pytest.MonkeyPatch, restarts: bool) -> None:
    pool = make_pool(monkeypatch, [10_000], model_idle_seconds=0.001)
    if restarts:  # its engine process died and is started again
        monkeypatch.setattr(FakeSupervisor, "start", FakeSupervisor.crash)
    pool.start()
    task = asyncio.create_task(pool.unload_idle())

    async def unloaded() -> bool:
        return not pool.loaded

    await eventually_async(unloaded)
    task.cancel()


async def test_a_client_that_disconnects_during_the_load_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = make_pool(monkeypatch, [10_000])
    monkeypatch.setattr(FakeSupervisor, "start", lambda self: None)  # the load does not end
    own = {"verbatim.id": "r", "verbatim.tenant": "", "verbatim.arrived": 0.0}
    scope = {"type": "http", "method": "POST", "headers": [], **own}

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    state = State(Settings(), pool.first.supervisor, lambda: 0.0, pool)
    call = RequestContext(Request(scope, receive), state, PROTOCOL.routes[0], PROTOCOL)
    with pytest.raises(ClientDisconnected):
        await call.choose_model("b")
    call.close()
    assert pool.models["b"].users == 0
    await pool.close()


def test_flags_are_read_or_refused_by_name() -> None:
    assert read_models(None, ("x.gguf",), (), ()) == (NamedModel("", "x.gguf"),)
    assert read_models("a=x", ("b=y",), ("b",), ("b.context=64",)) == (
        NamedModel("a", "x"),
        NamedModel("b", "y", {"context": 64}, True),
    )
    assert [m.name for m in read_models(None, ("smollm2", "org/name"), (), ())] == [
        "smollm2",
        "org/name",
    ]
    for given, pinned, settings, named in (
        (("a=x", "a=y"), (), (), "model"),
        (("a=x",), ("z",), (), "pin"),
        (("a=x",), (), ("a.temperature=1",), "model_setting"),
        (("a=x",), (), ("z.context=1",), "model_setting"),
        (("a=x",), (), ("a.context=many",), "context"),
        (("a=x",), (), ("a.context=9", "a.context=8"), "model_setting"),
    ):
        with pytest.raises(ParameterError) as caught:
            read_models(None, given, pinned, settings)
        assert caught.value.param == named
    two = (NamedModel("a", "x", pinned=True), NamedModel("b", "y", pinned=True))
    with pytest.raises(ParameterError, match="pinned"):
        Settings(models=two, max_loaded_models=1)
    assert Settings(models=two, max_loaded_models=2)
    with pytest.raises(ParameterError, match="pinned"):
        Settings(models=(NamedModel("a", "x", pinned=True), NamedModel("b", "y")),
                 max_loaded_models=1)  # fmt: skip


def test_metrics_of_engines_are_merged() -> None:
    one = '# HELP x h\n# TYPE x counter\nx{k="1"} 2\n# HELP y h\n# TYPE y gauge\ny 3\n'
    assert merge("model", {"a": one, "b": one, "c": ""}) == (
        '# HELP x h\n# TYPE x counter\nx{model="a",k="1"} 2\nx{model="b",k="1"} 2\n'
        '# HELP y h\n# TYPE y gauge\ny{model="a"} 3\ny{model="b"} 3\n'
    )


async def test_the_size_of_a_model_is_that_of_the_files_that_a_load_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_pool, "Supervisor", FakeSupervisor)
    folder = tmp_path / "folder"
    folder.mkdir()
    files = {"m-00001-of-00002.gguf": 3, "m-00002-of-00002.gguf": 5, "one.gguf": 7}
    files |= {"folder/x.safetensors": 11, "folder/y.safetensors": 13}
    files |= {"folder/consolidated.safetensors": 24}
    for name, size in files.items():
        (tmp_path / name).write_bytes(bytes(size))
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors", "c": "x.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def size(name: str) -> int:
        pool = ModelPool(Settings(models=(NamedModel("m", str(tmp_path / name)),)), lambda: 0.0)
        return model_pool.file_bytes(pool.first)

    assert [size(name) for name in files][:3] == [8, 8, 7]
    assert size("folder") == 24
    (folder / "y.safetensors").unlink()
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    assert size("folder") == size("m-00001-of-00002.gguf") == 0  # the load fails


def test_counters_of_engine_processes_are_added() -> None:
    counter = "# HELP x h\n# TYPE x counter\n"
    buckets = '# HELP y h\n# TYPE y histogram\ny_bucket{le="0.5"} 1\ny_sum 0.25\n'
    gauges = "# HELP z h\n# TYPE z gauge\nz 7\n"
    earlier = f'{counter}x{{k="a b"}} 2\nx{{k="c"}} 1\n{buckets}{gauges}'
    now = f'{buckets}{gauges}{counter}x{{k="c"}} 4\n'
    assert add_counters("", now) == now
    assert add_counters(earlier, now) == (
        '# HELP y h\n# TYPE y histogram\ny_bucket{le="0.5"} 2\ny_sum 0.5\n'
        f'{gauges}{counter}x{{k="c"}} 5\nx{{k="a b"}} 2\n'
    )


def test_a_setting_for_all_models_skips_an_encoder_on_which_it_has_no_effect(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    engine = {"kv_memory": 64, "threads": 1}
    encoder, chat = NamedModel("encoder", str(tmp_path)), NamedModel("chat", "none.gguf")
    assert model_pool.shared_settings(encoder, engine) == {"threads": 1}
    assert model_pool.shared_settings(chat, engine) == engine


def test_settings_for_all_models_that_an_encoder_cannot_follow(tmp_path: Path) -> None:
    embeds = NamedModel("a", str(write_encoder(tmp_path / "a")))
    ranks = NamedModel("b", str(write_encoder(tmp_path / "b", scores=True)))
    engine = {"cache_dir": "x", "pooling": "mean", "context": POSITIONS + 1, "threads": 1}
    assert model_pool.shared_settings(embeds, engine) == {"pooling": "mean", "threads": 1}
    assert model_pool.shared_settings(ranks, engine) == {"threads": 1}
    assert model_pool.shared_settings(ranks, {"context": 9}) == {"context": 9}


@pytest.mark.parametrize("fault", ["config", "cut", "tensor"])
async def test_an_encoder_that_cannot_be_loaded_unloads_no_model(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_pool, "Supervisor", FakeSupervisor)
    folder = write_encoder(tmp_path / "e", **({"hidden_act": "x"} if fault == "config" else {}))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    if fault == "cut":
        file.write_bytes(whole[:-100])
    elif fault == "tensor":
        file.write_bytes(
            whole.replace(b"layer.0.attention.self.key.", b"layer.0.attention.self.kez.")
        )
    assert (await hold_third(NamedModel("c", str(folder))))[0] == ["a", "b"]
    write_encoder(folder)
    assert await hold_third(NamedModel("c", str(folder))) == (["b", "c"], "")
