"""Replicas behind one gateway, without Ray: one answer from any replica, a dead replica costs only
its own requests, the router's hashes are the engine's."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from replicas_without_ray import Gateway, LocalService, settings_of

from eventually import HANG_SECONDS, eventually_async
from verbatim import LLM, SamplingParams
from verbatim.scale.cluster import Cluster, Listener
from verbatim.scale.routes.routing import HASH_BYTES
from verbatim.server.problem import Problem
from verbatim.server.process import wire
from verbatim.server.process.message_codec import decode_from_engine, encode
from verbatim.server.process.messages import Generate, Generated
from verbatim.server.process.running import Signal
from verbatim.testing.fakes import server_parts

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]
ALL = "1000000"  # engine steps
PREFIX = "a prefix that several requests have in common, longer than three blocks: "


async def open_gateway() -> Gateway:
    settings = settings_of()
    service = LocalService(settings)
    await asyncio.gather(*(service.add(name) for name in ("a", "b")))
    return await Gateway(settings, service).start()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """Two replicas that live as long as the tests of this file."""
    made = await open_gateway()
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def gated_replica(gate: Path) -> AsyncIterator[Gateway]:
    """One replica, to which the gateway listens, with as many engine steps as the gate allows."""
    settings = replace(settings_of(), test_engine=f"pipeline,gate={gate}")
    gate.write_text("0")
    service = LocalService(settings)
    await service.add("a")
    gateway = await Gateway(settings, service).start()
    await eventually_async(is_true(lambda: bool(service.replicas["a"]._channels)))
    yield gateway
    gate.write_text(ALL)
    await gateway.close()


def listeners(cluster: Cluster) -> list[Listener]:
    return list(cluster._listeners.values())


def is_true(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return condition()

    return check


def expected(prompts: list[str], **params: Any) -> list[str]:
    llm = LLM.from_loaded(server_parts("pipeline"))
    sampling = SamplingParams(**{"max_tokens": 8, "seed": 7, **params})
    return [answer.text for answer in llm.generate(prompts, sampling)]


async def test_an_error_of_the_client_is_the_same_as_without_replicas(gateway: Gateway) -> None:
    before = gateway.cluster.ledger.states["refused"]
    status, body = await gateway.complete("x" * 5000)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    status, body = await gateway.complete("x", temperature=-1)
    assert (status, body["error"]["param"]) == (400, "temperature")
    # The second never left the gateway.
    assert gateway.cluster.ledger.states["refused"] == before + 1


async def test_the_routers_hashes_are_those_of_the_engines_prefix_cache(gateway: Gateway) -> None:
    await gateway.complete(PREFIX)
    await gateway.service.report()
    joined = b"".join(r["hashes"] for r in gateway.service.latest.values())
    reported = {joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)}
    hashes = gateway.service.start()
    assert hashes is not None
    plain = await hashes.route(Generate("r", "", {}, False, prompt=PREFIX))
    assert len(plain.hashes) >= 3
    assert set(plain.hashes) <= reported
    other = await hashes.route(Generate("r", "tenant", {}, False, prompt=PREFIX))
    salted = await hashes.route(Generate("r", "", {"cache_salt": "s"}, False, prompt=PREFIX))
    assert not set(plain.hashes) & {*other.hashes, *salted.hashes}
    chat = [{"role": "user", "content": PREFIX}]
    talk = await hashes.route(Generate("r", "", {}, False, messages=chat))
    assert talk.tokens > len(PREFIX)
    broken = await hashes.route(Generate("r", "", {}, False, messages=[{"role": 7}]))
    assert (broken.hashes, broken.tokens) == ((), 0)


async def test_repeats_go_where_their_prefix_is(gateway: Gateway) -> None:
    before = gateway.service.routing()
    prompts = [f"{i} {PREFIX}" for i in range(8)]
    for _ in range(3):
        await asyncio.gather(*(gateway.complete(prompt) for prompt in prompts))
        await gateway.service.report()
    _, body = await gateway.complete(prompts[0])
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    after = gateway.service.routing()
    routing = {name: after[name] - before[name] for name in after}
    assert routing == {"requests": 25, "prefix_possible": 17, "prefix_found": 17}


async def test_a_request_that_is_closed_at_once_leaves_nothing_behind(gateway: Gateway) -> None:
    """asyncio never runs a task that is cancelled before its first step."""
    cluster = gateway.cluster
    before = cluster.ledger.states["cancel"]
    running = cluster.submit(Generate("at once", "", {"max_tokens": 4}, True, prompt="x"))
    task = cluster._relays["at once"]
    running.close()
    await asyncio.wait((task,))
    await asyncio.sleep(0)  # callbacks of the task
    assert "at once" not in cluster._relays
    assert "at once" not in cluster._running
    assert cluster.ledger.states["cancel"] == before + 1


async def test_a_client_that_leaves_aborts_its_request_on_the_replica(tmp_path: Path) -> None:
    """The engine makes one step per poll, so it cannot end the request before the abort arrives."""
    gate = tmp_path / "gate"
    gate.write_text("1")
    settings = replace(settings_of(), test_engine=f"pipeline,gate={gate}")
    service = LocalService(settings)
    await service.add("a")
    gateway = await Gateway(settings, service).start()
    ledgers = (gateway.cluster.ledger, service.supervisor("a").ledger)
    params = {"max_tokens": 3000, "ignore_eos": True}
    running = gateway.cluster.submit(Generate("long", "", params, True, prompt="x"))
    await running.wait_accepted()
    running.close()

    async def settled() -> bool:
        gate.write_text(str(int(gate.read_text()) + 1))
        return not any(ledger.running for ledger in ledgers)

    await eventually_async(settled)
    assert [ledger.states["cancel"] for ledger in ledgers] == [1, 1]
    # The result of the aborted request reaches the gateway after its end there.
    await eventually_async(is_true(lambda: ledgers[0].usage == ledgers[1].usage != {}))
    gate.write_text("100000")
    await gateway.close()


async def test_the_tokens_of_all_streams_of_a_step_leave_in_one_message(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with gated_replica(gate) as gateway:
        params = {"max_tokens": 24, "ignore_eos": True}
        signals = [Signal() for _ in range(8)]
        running = [
            gateway.cluster.submit(Generate(f"r{i}", "", params, True, prompt="x"), signal)
            for i, signal in enumerate(signals)
        ]
        service = gateway.service
        await eventually_async(is_true(lambda: service.supervisor("a").open_requests >= 8))
        gate.write_text(ALL)
        for one in running:
            await one.result()
        tokens = sum(len(delta.token_ids) for one in running for delta in one.take())
        assert tokens == 8 * 24
        assert service.batches < tokens / 2


async def test_a_replica_that_leaves_sends_the_rest_of_its_streams(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with gated_replica(gate) as gateway:
        cluster, service = gateway.cluster, gateway.service
        params = {"max_tokens": 24, "ignore_eos": True}
        running = cluster.submit(Generate("r", "", params, True, prompt="x"))
        gate.write_text("4")
        await running.wait_accepted()
        await eventually_async(is_true(lambda: bool(listeners(cluster)[0].requests)))
        service.latest = {}  # as when Serve drains a replica
        await eventually_async(
            is_true(lambda: any(one.polls_gone > 2 for one in listeners(cluster)))
        )
        assert cluster.open_requests == 1
        gate.write_text(ALL)
        done = await running.result()
        assert isinstance(done, Generated)
        assert done.usage.output_tokens == 24
        # No call is open then, so Serve can stop the replica.
        await eventually_async(is_true(lambda: not listeners(cluster)))
        await eventually_async(is_true(lambda: not service.replicas["a"]._channels))


async def test_a_request_that_comes_before_the_gateway_listens_is_answered() -> None:
    service = LocalService(settings_of())
    await service.add("a")
    replica = service.replicas["a"]
    frame = encode(Generate("r", "", {"max_tokens": 8, "seed": 7}, False, prompt="x"))
    bodies = [body async for part in replica.run(frame, "g") for body in wire.split(part)]
    done = decode_from_engine(bodies[-1])
    assert isinstance(done, Generated)
    assert [choice.text for choice in done.choices] == expected(["x"])
    await service.close()


async def test_a_replica_in_a_long_step_still_reports(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with gated_replica(gate) as gateway:
        replica = gateway.service.replicas["a"]
        params = {"max_tokens": 8, "ignore_eos": True}
        running = gateway.cluster.submit(Generate("r", "", params, True, prompt="x"))
        await eventually_async(is_true(lambda: replica._open == 1))
        for _ in range(3):  # the engine answers no question during its first step
            assert (await replica.record_routing_stats())["up"]
        # The reports have one question open, and autoscaling counts none.
        assert replica._supervisor.open_requests <= 2
        assert (await replica.record_autoscaling_stats())["open"] == 1
        gate.write_text(ALL)
        await running.result()
        await eventually_async(is_true(lambda: replica._open == 0))


async def test_a_channel_that_breaks_ends_its_requests(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with gated_replica(gate) as gateway:
        cluster, supervisor = gateway.cluster, gateway.service.supervisor("a")
        params = {"max_tokens": 3000, "ignore_eos": True}
        running = cluster.submit(Generate("r", "", params, True, prompt="x"))
        await eventually_async(is_true(lambda: bool(listeners(cluster)[0].requests)))
        [listener] = listeners(cluster)
        assert listener.task is not None
        listener.task.cancel()
        with pytest.raises(Problem, match="the replica that ran this request died"):
            await running.result()
        assert cluster.ledger.states["engine_died"] == 1
        gate.write_text(ALL)
        await eventually_async(is_true(lambda: not supervisor.ledger.running))
        await eventually_async(is_true(lambda: bool(listeners(cluster))))  # listens again
        assert (await gateway.complete("x"))[0] == 200


async def test_a_stream_that_loses_its_replica_before_the_first_token_has_an_error_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its 200 has left when the engine accepted it; an answer in one piece is a 503."""
    caplog.set_level("INFO", "verbatim.scale")
    async with gated_replica(tmp_path / "gate") as gateway:
        statuses = []

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            async def note(message: Any) -> None:
                statuses.extend([message["status"]] if "status" in message else ())
                await send(message)

            await gateway.app(scope, receive, note)

        transport = httpx.ASGITransport(app=watched)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"model": "m", "prompt": "x", "max_tokens": 8}
            sent = [
                asyncio.create_task(http.post("/v1/completions", json={**body, "stream": stream}))
                for stream in (True, False)
            ]
            running = gateway.cluster._running
            await eventually_async(
                is_true(lambda: len(running) == 2 and all(r.accepted for r in running.values()))
            )
            await eventually_async(is_true(lambda: statuses == [200]))
            await gateway.service.kill("a")
            streamed, whole = await asyncio.gather(*sent)
        await eventually_async(is_true(lambda: not gateway.cluster.engines()))
    assert streamed.status_code == 200
    assert '"engine_died"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "engine_died")
    assert whole.headers["retry-after"] == "1"
    assert "replicas: 1, before: 0; open requests: 0" in caplog.text
    assert "replicas: 0, before: 1; open requests: " in caplog.text


async def test_metrics_name_the_replica(gateway: Gateway) -> None:
    await gateway.complete("x")
    await gateway.service.report()

    async def settled() -> bool:
        return not (
            len(gateway.cluster.engines()) < 2 or "verbatim_blocks" not in gateway.cluster.metrics
        )

    await eventually_async(settled)
    text = gateway.state.metrics.text({"m": gateway.cluster}, 0, 0)
    families = {f.name: f for f in text_string_to_metric_families(text)}
    types = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(types) == len(set(types))
    for name in ("requests_waiting", "requests_running", "kv_cache_usage_ratio", "engine_up"):
        labels = {s.labels["replica"] for s in families[f"verbatim_{name}"].samples}
        assert labels == {"a", "b"}, name


async def test_a_killed_replica_costs_only_its_requests_and_answers_stay_equal() -> None:
    gateway = await open_gateway()
    prompts = [f"{PREFIX}{i % 5}" for i in range(40)]

    async def one(prompt: str) -> tuple[str, int, dict[str, Any]]:
        return prompt, *await gateway.complete(prompt, max_tokens=24)

    tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
    while gateway.cluster.ledger.states.total() < 4:  # in the middle
        await asyncio.sleep(0)
    await gateway.service.kill("a")
    await gateway.service.add("c")
    tasks += [asyncio.create_task(one(prompt)) for prompt in prompts[:10]]
    answers = await asyncio.gather(*tasks)
    right = dict(zip(prompts, expected(prompts, max_tokens=24), strict=True))
    good = [(prompt, body) for prompt, status, body in answers if status == 200]
    lost = [body["error"]["code"] for _, status, body in answers if status != 200]
    assert len(good) >= 10
    assert all(body["choices"][0]["text"] == right[prompt] for prompt, body in good)
    assert set(lost) <= {"engine_died"}
    states = gateway.cluster.ledger.states
    assert states.total() == 50 == gateway.cluster.ledger.opened
    assert states["engine_died"] == len(lost) > 0
    # Without any replica the service answers 503, until there is one again.
    await gateway.service.kill("b")
    await gateway.service.kill("c")

    async def settled() -> bool:
        return not (gateway.cluster.ready.is_set())

    await eventually_async(settled)
    status, body = await gateway.complete("x")
    assert (status, body["error"]["code"]) == (503, "unavailable")
    await gateway.service.add("d")
    await gateway.cluster.ready.wait()
    assert (await gateway.complete("x"))[0] == 200
    await gateway.close()


async def test_a_gateway_closes_while_its_replicas_load() -> None:
    """As after Ctrl-C: start() ends because stop() was called, and not the other way round."""
    stopped = threading.Event()
    service = LocalService(settings_of())
    service.start = stopped.wait  # type: ignore[method-assign,assignment]
    service.stop = stopped.set  # type: ignore[method-assign]
    cluster = Cluster(settings_of(), service=service)
    cluster.start()
    await asyncio.sleep(0)
    await asyncio.wait_for(cluster.close(), HANG_SECONDS)
    assert stopped.is_set()
    assert not cluster.fatal.done()
