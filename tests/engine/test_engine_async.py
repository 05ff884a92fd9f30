"""AsyncEngine: many clients on one engine; cancellation, overload, slow readers, drain, engine
failure."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import Any

import numpy as np
import pytest

from eventually import HANG_SECONDS, eventually_async
from verbatim import LLM, AsyncEngine, SamplingParams
from verbatim.base.errors import (
    BackendError,
    ContextError,
    OverloadedError,
    ParameterError,
    UnavailableError,
)
from verbatim.base.records import Completion, Delta
from verbatim.engine.calls.async_loop import IDLE_CHECK_SECONDS
from verbatim.engine.calls.fair_pool import FairThreadPool
from verbatim.testing.fakes import PacedBackend, fake_parts, server_parts

OPTIONS: dict[str, Any] = {"kv_blocks": 128, "check": True}


class GatedBackend(PacedBackend):
    """Computes a step only while its gate is open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(pause=0.002, **options)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def execute(self, plan: Any) -> Any:
        assert self.gate.wait(HANG_SECONDS)
        if self.error is not None:
            raise self.error
        return super().execute(plan)


def engine(backend: Any = None, **options: Any) -> AsyncEngine:
    """Steps sleep briefly, as real ones release the GIL: without it the readers would starve."""
    return AsyncEngine.from_loaded(
        fake_parts(backend or PacedBackend(canary=True, pause=0.0003)), **{**OPTIONS, **options}
    )


def whole(prompt: str, params: SamplingParams) -> Completion:
    return LLM.from_loaded(fake_parts(), **OPTIONS).generate(prompt, params)


async def at_rest(e: AsyncEngine) -> None:
    """Nothing runs and all blocks are free; checked on the engine's thread."""

    def check(core: Any) -> bool:
        core.check()
        return not core.busy and all(pool.used == 0 for pool in core.scheduler.cache.pools)

    await eventually_async(lambda: e.call(check), "the engine does not come to rest")


async def test_deltas_then_the_completion() -> None:
    params = SamplingParams(max_tokens=20, seed=1, n=2, logprobs=1)
    async with engine() as e:
        stream = await e.submit("hello", params, request_id="mine", tenant="t")
        items = [item async for item in stream]
        assert isinstance(items[-1], Completion)
        assert items[-1].request_id == "mine"
        deltas = [item for item in items[:-1] if isinstance(item, Delta)]
        for choice in items[-1].choices:
            mine = [d for d in deltas if d.index == choice.index]
            assert "".join(d.text for d in mine) == choice.text
            assert tuple(t for d in mine for t in d.token_ids) == choice.token_ids
            assert tuple(lp for d in mine for lp in d.logprobs) == choice.logprobs
            assert mine[-1].finish == choice.finish
        assert items[-1].choices == whole("hello", params).choices
        assert await stream.result() == items[-1]
        await at_rest(e)


async def test_many_clients_get_the_same_outputs_as_alone() -> None:
    params = [SamplingParams(max_tokens=5 + i % 20, seed=i) for i in range(60)]
    async with engine(kv_blocks=40) as e:
        streams = await asyncio.gather(*(e.submit(f"client {i}", p) for i, p in enumerate(params)))
        done = await asyncio.gather(*(s.result() for s in streams))
        await at_rest(e)
    alone = LLM.from_loaded(fake_parts(), **OPTIONS).generate(
        [f"client {i}" for i in range(60)], params
    )
    assert [d.choices for d in done] == [a.choices for a in alone]


@pytest.mark.parametrize("how", ["abort", "aclose", "async with", "cancel", "drop", "break"])
async def test_a_cancelled_stream_frees_all_blocks(how: str) -> None:
    async with engine(
        PacedBackend(canary=True, pause=0.002)
    ) as e:  # still writing when the client leaves, on any machine
        stream = await e.submit("hello", SamplingParams(seed=1, ignore_eos=True))
        await anext(stream)
        if how == "abort":
            assert e.abort(stream.request_id)
            assert (await stream.result()).finish.reason == "cancel"
            assert not e.abort(stream.request_id)
        elif how == "aclose":
            await stream.aclose()
            await stream.aclose()
        elif how == "async with":
            async with stream:
                pass
        elif how == "cancel":
            task = asyncio.create_task(stream.result())
            await asyncio.sleep(0)  # it waits for the result now
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "break":
            async for _ in stream:
                break
            await stream.aclose()
        del stream
        gc.collect()
        await at_rest(e)


class WatchedLock:
    """A lock that records which threads acquire it."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.takers: list[int] = []

    def __enter__(self) -> None:
        self.takers.append(threading.get_ident())
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


async def test_a_garbage_collected_stream_takes_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run in a thread that already holds one of the locks."""
    async with engine(PacedBackend(canary=True, pause=0.002)) as e:
        held = [await e.submit("hello", SamplingParams(seed=1, ignore_eos=True))]
        await anext(held[0])
        lock = WatchedLock(e._lock)
        with monkeypatch.context() as patch:
            patch.setattr(e, "_lock", lock)
            # an Event has a lock inside
            patch.setattr(e._awake, "set", lambda: lock.takers.append(threading.get_ident()))
            held.clear()
            gc.collect()
        assert threading.get_ident() not in lock.takers
        await at_rest(e)


class Hold:
    """Blocks the engine's thread between two steps until it is released."""

    def __init__(self) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()

    async def __call__(self, e: AsyncEngine, then: Any = lambda core: None) -> asyncio.Task[Any]:
        def work(core: Any) -> Any:
            self.begun.set()
            assert self.gate.wait(HANG_SECONDS)
            return then(core)

        task = asyncio.create_task(e.call(work))
        assert await asyncio.to_thread(self.begun.wait, HANG_SECONDS)
        return task


async def test_a_late_drop_does_not_abort_a_later_request_of_the_same_id() -> None:
    async with engine(PacedBackend(canary=True, pause=0.002)) as e:
        stream = await e.submit("hello", SamplingParams(seed=1, ignore_eos=True), request_id="same")
        await anext(stream)
        hold, ended = Hold(), threading.Event()

        def end(core: Any) -> None:
            core.abort("same")
            e._send(core.step())
            ended.set()
            assert again.wait(HANG_SECONDS)

        again = threading.Event()
        held = await hold(e, end)
        del stream
        gc.collect()
        hold.gate.set()
        assert await asyncio.to_thread(ended.wait, HANG_SECONDS)
        second = await e.submit(
            "hello", SamplingParams(seed=1, ignore_eos=True, max_tokens=7), request_id="same"
        )
        again.set()
        await held
        assert (await second.result()).finish.reason == "length"


async def test_a_cancelled_call_is_skipped() -> None:
    async with engine() as e:
        hold = Hold()
        first = await hold(e)
        later = asyncio.create_task(e.call(lambda core: core.stats()))
        await asyncio.sleep(0)  # now it is in the inbox
        first.cancel()
        later.cancel()
        hold.gate.set()
        assert await asyncio.wait_for(e.call(lambda core: 7), HANG_SECONDS) == 7
        assert e.error is None
        for task in (first, later):
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_calls_queued_when_the_loop_fails_get_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    e = engine(PacedBackend(pause=0.002))
    stream = await e.submit("hello", SamplingParams(seed=1, ignore_eos=True))
    hold = Hold()
    first = await hold(e)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(e.core, "abort", fail)
    e.abort(stream.request_id)
    left = asyncio.create_task(e.call(lambda core: 7))
    waiting = asyncio.create_task(e.call(lambda core: 7))
    await asyncio.sleep(0)
    left.cancel()
    hold.gate.set()
    await first
    with pytest.raises(BackendError, match="out of luck"):
        await asyncio.wait_for(waiting, HANG_SECONDS)
    with pytest.raises(BackendError, match="out of luck"):
        await stream.result()
    e.close()


async def test_random_arrivals_and_cancellations() -> None:
    rng = random.Random(1)
    watched = SamplingParams(max_tokens=100, seed=3, ignore_eos=True)

    async def client(e: AsyncEngine, i: int) -> str:
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)  # the others come first
        leaves = i % 3 != 0
        params = SamplingParams(
            max_tokens=600 if leaves else 30, ignore_eos=leaves, n=rng.choice((1, 3)), seed=i
        )
        stream = await e.submit(f"{i}" * rng.randrange(1, 30), params)
        if not leaves:
            return (await stream.result()).finish.reason
        for _ in range(rng.randrange(12)):
            if isinstance(
                await anext(stream), Completion
            ):  # a client that the machine keeps from reading gets it all
                break
        await stream.aclose()
        return "left"

    async with engine(kv_blocks=48, step_tokens=32) as e:
        stream = await e.submit("the one who stays", watched)
        ends = await asyncio.gather(*(client(e, i) for i in range(120)))
        assert (await stream.result()).choices == whole("the one who stays", watched).choices
        assert "cancel" not in ends  # a client that stays gets its whole answer
        await at_rest(e)


async def test_a_slow_reader_holds_one_delta_per_choice() -> None:
    params = SamplingParams(max_tokens=300, seed=1, ignore_eos=True, n=2)
    async with engine() as e:
        stream = await e.submit("hello", params)

        async def over() -> bool:
            return stream.completion is not None

        await eventually_async(over, "the answer does not end")
        assert len(stream._pending) == 2
        items = [item async for item in stream]
        assert len(items) == 3
        assert items[-1].choices == whole("hello", params).choices
        assert [items[0].text, items[1].text] == [c.text for c in items[-1].choices]


async def test_the_queue_is_bounded() -> None:
    backend = GatedBackend()
    async with engine(backend, max_waiting=3, max_running=1) as e:
        backend.gate.clear()
        first = await e.submit("first", SamplingParams(max_tokens=2))

        async def begun() -> bool:
            return bool(e.core.scheduler.running)

        await eventually_async(begun, "the first request does not begin")
        queued = [await e.submit("next", SamplingParams(max_tokens=2)) for _ in range(3)]
        with pytest.raises(OverloadedError) as caught:
            await e.submit("one too many", SamplingParams(max_tokens=2))
        assert caught.value.status == 429
        assert caught.value.retry_after > 0
        backend.gate.set()
        for stream in (first, *queued):
            assert (await stream.result()).usage.output_tokens > 0
        assert e.stats()["requests_refused_total"] == 1


async def test_invalid_requests_are_rejected_at_once() -> None:
    async with engine() as e:
        with pytest.raises(ParameterError) as caught:
            await e.submit([1, 2, 999])
        assert caught.value.param == "prompt"
        with pytest.raises(ParameterError, match="logit_bias"):
            await e.submit("x", SamplingParams(logit_bias={5000: 1}))
        stream = await e.submit(
            "x", SamplingParams(max_tokens=500, ignore_eos=True), request_id="same"
        )
        with pytest.raises(ParameterError, match="request_id"):
            await e.submit("y", request_id="same")
        assert not e.abort("nobody")
        await stream.aclose()
        await at_rest(e)


async def test_drain_finishes_running_requests_and_rejects_new_ones() -> None:
    async with engine() as e:
        streams = [await e.submit(f"{i}", SamplingParams(max_tokens=40, seed=i)) for i in range(5)]
        assert await e.drain()
        assert not e.alive
        for stream in streams:
            assert (await stream.result()).finish.reason in ("length", "stop")
        with pytest.raises(UnavailableError) as caught:
            await e.submit("late")
        assert caught.value.status == 503


async def test_drain_cancels_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of the running request ends only after the drain has cancelled it."""
    backend = GatedBackend()
    async with engine(backend) as e:
        stream = await e.submit("x", SamplingParams(max_tokens=1000, ignore_eos=True))
        await anext(stream)
        backend.gate.clear()
        post = e._post

        def then_let_the_step_end(what: str, value: Any) -> None:
            post(what, value)
            if what == "cancel":
                backend.gate.set()

        monkeypatch.setattr(e, "_post", then_let_the_step_end)
        assert not await e.drain(timeout=0.05)
        done = await stream.result()
        assert done.finish.reason == "cancel"
        assert done.finish.detail == "shutdown"


async def test_an_engine_failure_ends_every_request_with_an_error() -> None:
    backend = GatedBackend()
    e = engine(backend)
    backend.gate.clear()
    streams = [await e.submit(f"{i}", SamplingParams(max_tokens=50)) for i in range(4)]
    backend.error = RuntimeError("out of luck")
    backend.gate.set()
    for stream in streams:
        with pytest.raises(BackendError, match="out of luck"):
            await stream.result()
    assert isinstance(e.error, RuntimeError)
    assert not e.alive
    with pytest.raises(BackendError):
        await e.submit("x")
    with pytest.raises(BackendError):
        await e.call(lambda core: None)
    assert await e.drain(timeout=HANG_SECONDS)
    e.close()


async def test_an_idle_engine_checks_once_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle engine checks its accounting once, then waits for the next request without a
    timeout."""
    async with engine() as e:
        waits: list[float | None] = []
        checks: list[int] = []
        wait, check = e._awake.wait, e.core.check

        def watched_wait(timeout: float | None = None) -> bool:
            waits.append(timeout)
            return wait(timeout)

        def watched_check() -> None:
            checks.append(len(waits))
            check()

        monkeypatch.setattr(e._awake, "wait", watched_wait)
        monkeypatch.setattr(e.core, "check", watched_check)
        await (await e.submit("x", SamplingParams(max_tokens=3))).result()

        async def asleep() -> bool:
            return waits[-1:] == [None]

        await eventually_async(asleep, "the engine does not come to rest")
        assert waits[-2:] == [IDLE_CHECK_SECONDS, None]
        assert checks[-1] == len(waits) - 1  # between these two waits


async def test_embed() -> None:
    async with engine() as e:
        vector, tokens = await e.embed("hello")
        assert tokens == 6
        np.testing.assert_array_equal(
            vector, LLM.from_loaded(fake_parts(), **OPTIONS).embed("hello")
        )
        await at_rest(e)


async def test_rerank_takes_more_documents_than_the_queue() -> None:
    parts, documents = server_parts("hash,rank=yes"), [f"document {i}" for i in range(50)]
    with LLM.from_loaded(parts) as llm:
        want = llm.rerank("q", documents)
    async with AsyncEngine.from_loaded(parts, max_waiting=4) as e:
        assert await e.rerank("q", documents) == want
        with pytest.raises(ContextError):  # the error itself, not a group of errors
            await e.rerank("q", [*documents, "x" * 5000])


async def test_metrics_add_up() -> None:
    async with engine(speculate="off") as e:
        done = [
            await (await e.submit(f"{i}", SamplingParams(max_tokens=9, seed=i))).result()
            for i in range(5)
        ]
        stats = e.stats()
        assert stats["requests_total"] == 5
        assert stats["prompt_tokens_total"] == sum(d.usage.prompt_tokens for d in done)
        assert stats["output_tokens_total"] == sum(d.usage.output_tokens for d in done)
        assert stats["computed_tokens_total"] == sum(
            d.usage.prompt_tokens + d.usage.output_tokens - 1 for d in done
        )
        assert stats["running"] == stats["waiting"] == stats["blocks_used"] == 0
        assert stats["first_token_seconds_count"] == 5
        text = e.metrics()
        assert "# TYPE verbatim_first_token_seconds histogram" in text
        assert 'verbatim_first_token_seconds_bucket{le="+Inf"} 5' in text


async def test_close_cancels_running_requests() -> None:
    e = engine(PacedBackend(pause=0.002))
    stream = await e.submit("x", SamplingParams(max_tokens=1000, ignore_eos=True))
    await anext(stream)
    await asyncio.to_thread(e.close)
    assert (await stream.result()).finish.reason == "cancel"
    assert e.loaded.backend.closed
    e.close()
    with pytest.raises(UnavailableError):
        await e.submit("x")


@pytest.mark.parametrize("what", ["prepare", "encode"])
async def test_close_waits_for_running_work_items(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread in native code at interpreter exit would crash the process."""
    begun, gate = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> list[int]:
        begun.set()
        assert gate.wait(HANG_SECONDS)
        return [1]

    loaded = fake_parts()
    if what == "prepare":
        monkeypatch.setattr("verbatim.engine.calls.async_engine.prepare", slow)
    else:
        monkeypatch.setattr(loaded.tokenizer, "encode", slow)
    e = AsyncEngine.from_loaded(loaded, **OPTIONS)
    # more than there are threads
    asking = [asyncio.create_task(e.submit("x")) for _ in range(6 if what == "encode" else 0)]
    await asyncio.sleep(0)  # each has its place now, and some are not begun
    assert await asyncio.to_thread(begun.wait, HANG_SECONDS)
    closing = threading.Thread(target=e.close)
    closing.start()
    # a close that does not wait closes the backend meanwhile
    await asyncio.to_thread(closing.join, 0.2)
    assert not e.loaded.backend.closed
    gate.set()
    await asyncio.to_thread(closing.join)
    assert e.loaded.backend.closed
    for task in asking:
        with pytest.raises(UnavailableError):
            await task


def test_a_closed_thread_pool_has_no_threads() -> None:
    workers, begun, gate = FairThreadPool(2, "test-workers"), threading.Event(), threading.Event()
    first = workers.submit("", lambda: begun.set() or gate.wait(HANG_SECONDS))
    second = workers.submit("", list)  # of the same caller: waits for the first
    assert begun.wait(HANG_SECONDS)
    closing = threading.Thread(target=workers.close)
    closing.start()
    closing.join(0.2)  # a close that does not wait returns meanwhile
    gate.set()
    closing.join()
    assert first.done()
    assert first.result()
    assert second.cancelled()
    assert workers.submit("", list).cancelled()
    assert not any(thread.name.startswith("test-workers") for thread in threading.enumerate())


@pytest.mark.parametrize("ask", ["call", "submit"])
async def test_a_submit_during_close_is_answered(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed between the open check and the post to the inbox: completed, cancelled or rejected,
    but never left waiting."""
    e = engine()
    check, closing = e._check_open, threading.Thread(target=e.close)

    def closed_behind() -> None:
        check()
        if threading.current_thread() is threading.main_thread() and not closing.is_alive():
            closing.start()
            # the engine's thread has ended by then; if not, the request is in time
            closing.join(0.3)

    if ask == "call":
        monkeypatch.setattr(e, "_check_open", closed_behind)
        assert await asyncio.wait_for(e.call(lambda core: 7), HANG_SECONDS) == 7
    else:
        reserve = e._reserve

        def then_close(request_id: str, tenant: str) -> None:
            reserve(request_id, tenant)
            monkeypatch.setattr(e, "_check_open", closed_behind)

        monkeypatch.setattr(e, "_reserve", then_close)
        stream = await e.submit("x", SamplingParams(max_tokens=5))
        assert (await asyncio.wait_for(stream.result(), HANG_SECONDS)).finish.reason in (
            "cancel",
            "length",
            "eos",
        )
    await asyncio.to_thread(closing.join)


async def test_an_output_cut_inside_a_character_ends_before_it() -> None:
    """The server's responses rely on it: the Deltas and the Completion agree, and neither has
    part of a character."""
    async with engine() as e:
        for length in range(1, 7):
            wanted = "é🙂".encode()[:length]
            stream = await e.submit("x", SamplingParams(max_tokens=length, choice=("é🙂",)))
            pieces = [item async for item in stream]
            assert isinstance(pieces[-1], Completion)
            assert bytes(pieces[-1].token_ids[:length]) == wanted
            assert pieces[-1].text == wanted.decode("utf-8", "ignore")
            assert "".join(d.text for d in pieces if isinstance(d, Delta)) == pieces[-1].text


async def test_llm_and_async_engine_open_a_model_alike() -> None:
    """LLM and AsyncEngine share their constructor and properties (engine/calls/engine_base.py)."""
    from verbatim.engine.calls.engine_base import EngineBase

    for name in (
        *("__init__", "tokenizer", "context", "has_template", "fingerprint", "encode_chat"),
        "stats",
    ):
        assert getattr(LLM, name) is getattr(AsyncEngine, name) is getattr(EngineBase, name), name
    async with engine() as e:
        with LLM.from_loaded(fake_parts(), **OPTIONS) as llm:
            assert (e.context, e.fingerprint, e.has_template) == (
                llm.context,
                llm.fingerprint,
                llm.has_template,
            )
            assert set(e.stats()) == set(llm.stats())
