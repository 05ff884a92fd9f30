"""The engine process: an OutputSink gets the outputs of a step in one call, an abort frees the
queue, and the step threads are pinned to cores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eventually import HANG_SECONDS, eventually_async
from verbatim import LLM, AsyncEngine, EngineConfig, SamplingParams
from verbatim.backend import open_backend
from verbatim.base.errors import BackendError, VerbatimError
from verbatim.base.records import Completion, Delta
from verbatim.engine.calls.async_stream import OutputSink
from verbatim.server.process.cpu_affinity import native_threads, pin_threads
from verbatim.server.process.engine_session import EngineSession
from verbatim.server.process.messages import Generate, Start
from verbatim.testing.fakes import FakeBackend, fake_parts
from verbatim.testing.tiny_models import tiny_model

CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1

PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)


class GatedBackend(FakeBackend):
    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.fails = False

    def execute(self, plan: Any) -> Any:
        assert self.gate.wait(HANG_SECONDS)
        if self.fails:
            raise RuntimeError("a kernel failed")
        return super().execute(plan)


def test_a_sink_gets_deltas_in_order_and_one_end_per_request() -> None:
    names = [f"r{i}" for i in range(9)]
    news: dict[str, list[Any]] = defaultdict(list)

    async def main() -> None:
        over = asyncio.Event()

        def take(items: list[tuple[str, Any]]) -> None:
            assert threading.current_thread() is threading.main_thread()
            for name, item in items:
                news[name].append(item)
            if sum(isinstance(v[-1], Completion) for v in news.values()) == len(names):
                over.set()

        async with AsyncEngine.from_loaded(fake_parts(), kv_blocks=256) as engine:
            feed = OutputSink(take)
            for name in names:
                await engine.submit_to(feed, name, f"prompt of {name}", PARAMS)
            await asyncio.wait_for(over.wait(), HANG_SECONDS)

    asyncio.run(main())
    with LLM.from_loaded(fake_parts(), kv_blocks=256) as llm:
        for name in names:
            *deltas, last = news[name]
            assert isinstance(last, Completion)
            assert all(isinstance(d, Delta) for d in deltas)
            alone = llm.generate(f"prompt of {name}", PARAMS)
            assert "".join(d.text for d in deltas) == last.text == alone.text


def test_the_outputs_of_one_step_arrive_in_one_call() -> None:
    async def main() -> list[int]:
        calls: list[int] = []
        backend = GatedBackend()
        async with AsyncEngine.from_loaded(fake_parts(backend), kv_blocks=256) as engine:
            feed = OutputSink(lambda items: calls.append(len(items)))
            for i in range(9):
                await engine.submit_to(
                    feed, f"r{i}", "x", SamplingParams(max_tokens=3, seed=i, ignore_eos=True)
                )
            backend.gate.set()

            async def all_received() -> bool:
                return sum(calls) >= 9 * 4  # three deltas and one end each

            await eventually_async(all_received, "outputs are missing")
        return calls

    assert len(asyncio.run(main())) <= 5  # the first may start before the others arrive


def test_a_sink_gets_an_error_when_the_engine_dies() -> None:
    async def main() -> list[tuple[str, Any]]:
        found: asyncio.Future[list[tuple[str, Any]]] = asyncio.get_running_loop().create_future()
        backend = GatedBackend()
        engine = AsyncEngine.from_loaded(fake_parts(backend), kv_blocks=64)
        try:
            await engine.submit_to(OutputSink(found.set_result), "a", "hello", PARAMS)
            backend.fails = True
            backend.gate.set()
            return await asyncio.wait_for(found, HANG_SECONDS)
        finally:
            engine.close()

    ((name, error),) = asyncio.run(main())
    assert name == "a"
    assert isinstance(error, BackendError)


def test_a_rejected_request_never_reaches_the_sink() -> None:
    async def main() -> None:
        async with AsyncEngine.from_loaded(fake_parts(), kv_blocks=64) as engine:
            over, names = asyncio.Event(), set()

            def take(items: list[tuple[str, Any]]) -> None:
                names.update(name for name, _ in items)
                if isinstance(items[-1][1], Completion):
                    over.set()

            feed = OutputSink(take)
            with pytest.raises(VerbatimError):
                await engine.submit_to(feed, "refused", [10**6], PARAMS)
            # its outputs would come after those of the rejected request
            await engine.submit_to(feed, "next", "x", PARAMS)
            await asyncio.wait_for(over.wait(), HANG_SECONDS)
            assert names == {"next"}

    asyncio.run(main())


async def test_the_requests_behind_an_aborted_wide_one_start() -> None:
    """A wide request waits for slots, and those behind it must not overtake it. When its client
    disconnects they start at once, not when another request comes or ends."""
    backend = GatedBackend()
    outbox: Any = SimpleNamespace(put=lambda message: None)
    async with AsyncEngine.from_loaded(fake_parts(backend), max_running=1) as engine:
        session = EngineSession(engine, outbox, Start("m", None, True, {}, "", "m", 1.0))
        for name, n in (("long", 1), ("wide", 8), ("small", 1)):
            session.submit(Generate(name, "", {"n": n, "max_tokens": 2}, False, prompt="a"))
        long, wide, small = session._open.values()

        async def queued() -> bool:
            return small.scheduled is not None

        await eventually_async(queued)
        assert small.scheduled is not None
        assert not small.scheduled.done()
        session.abort("wide")
        await asyncio.gather(*filter(None, [wide.task]))
        started = small.scheduled.done()
        backend.gate.set()
        await asyncio.gather(*filter(None, [long.task, small.task]))
        assert started


# ------------------------------------------------------------------------------------ CPU affinity


def allowed(pid: int) -> list[str]:
    """The allowed cores of each thread."""
    out = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(
            FileNotFoundError, ProcessLookupError
        ):  # a thread may end in the meantime
            rows = (task / "status").read_text().splitlines()
            out.append(next(row for row in rows if row.startswith("Cpus_allowed_list")).split()[1])
    return out


@pytest.mark.server
@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="there is no affinity to look at")
def test_each_step_thread_is_pinned_to_a_core_of_its_own(real: Any) -> None:
    """If there are as many threads as cores (the default without hyperthreading); otherwise the
    kernel places them."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = sorted(int(p) for p in allowed(real.engine_pid()) if p.isdigit())
    if len(cores) == 1:  # every thread may use that core only
        assert "pinned to a core of its own" not in real.log_text()
    elif "pinned to a core of its own" in real.log_text():
        assert pinned == cores
    else:  # a thread that started meanwhile made the count differ: none is pinned, never a part
        assert pinned in ([], cores)


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="there is no affinity to look at")
@pytest.mark.skipif(CORES < 2, reason="one core: no thread has another one to go to")
def test_as_many_threads_as_cores_are_pinned_one_to_each() -> None:
    async def main() -> list[set[int]] | None:
        before = native_threads()
        model = tiny_model("llama", type="q8_0")
        backend = open_backend(model, EngineConfig(backend="cpu", threads=CORES))
        loaded = replace(fake_parts(), backend=backend)
        async with AsyncEngine.from_loaded(loaded, kv_blocks=64) as engine:
            if not pin_threads(engine, before):
                return None
            assert engine.step_thread is not None
            threads = [engine.step_thread, *(native_threads() - before)]
            return [os.sched_getaffinity(thread) for thread in threads]

    found = None
    for _ in range(3):  # a library may start threads of its own, once; then none is pinned
        found = found or asyncio.run(main())
    assert found is not None
    assert sorted(found, key=min) == [{core} for core in sorted(os.sched_getaffinity(0))]


def test_threads_are_not_pinned_if_a_core_is_free() -> None:
    async def main() -> None:
        before = native_threads()
        async with AsyncEngine.from_loaded(fake_parts(), kv_blocks=64) as engine:
            assert not pin_threads(engine, before)  # the fake has one thread

    asyncio.run(main())
    assert len(os.sched_getaffinity(0)) >= 1
