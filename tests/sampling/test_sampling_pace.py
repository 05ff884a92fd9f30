"""A structure that takes long to compile costs its own request, and no other stream a step. Events are counted, no clock decides."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from verbatim import SamplingParams
from verbatim.base.errors import UnsupportedError
from verbatim.engine.aio import AsyncEngine
from verbatim.sampling import grammar
from verbatim.sampling import guard as guard_module
from verbatim.sampling.guard import Guard
from verbatim.testing import fake_parts

llguidance = pytest.importorskip("llguidance")

HOSTILE = {"type": "integer", "multipleOf": 7919 * 7907}  # minutes and gigabytes, if nobody stops it


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    made = AsyncEngine.from_parts(fake_parts(), kv_blocks=400)
    yield made
    made.close()


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """A guard of the test's own, with time without end: only the test ends a compilation."""
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 3600.0)
    made = Guard(grammar.LIMITS, memory=4 << 30)
    monkeypatch.setattr(grammar, "_guard", made)
    yield made
    made.close()


async def written(engine: AsyncEngine, seed: int) -> tuple[int, ...]:
    stream = await engine.submit("Once upon a time", SamplingParams(max_tokens=300, seed=seed, ignore_eos=True))
    return (await stream.result()).token_ids


async def test_other_streams_finish_while_a_hostile_schema_compiles(
    engine: AsyncEngine, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four streams of 300 tokens, begun after the compilation, end before it, each as if it were alone. Then the child is killed, and the
    request that waited is refused by name."""
    alone = [await written(engine, seed) for seed in range(4)]
    children: list[Any] = []
    asked = threading.Event()
    honest = guard._ask

    def watched(child: Any, field: str, *rest: Any) -> Any:
        if field == "json_schema":
            children.append(child)
            asked.set()
        return honest(child, field, *rest)

    monkeypatch.setattr(guard, "_ask", watched)
    hostile = asyncio.create_task(engine.submit("x", SamplingParams(json_schema=HOSTILE, max_tokens=4)))
    assert await asyncio.to_thread(asked.wait, 60.0)
    assert await asyncio.gather(*(written(engine, seed) for seed in range(4))) == alone
    assert not hostile.done()
    assert children[0].poll() is None  # still at it
    children[0].kill()
    with pytest.raises(UnsupportedError) as caught:
        await hostile
    assert caught.value.param == "json_schema"
    assert (await written(engine, 0)) == alone[0]


async def test_the_engine_takes_steps_while_a_schema_is_compiled_in_its_own_process(
    engine: AsyncEngine, guard: Guard, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What passed the child is compiled again beside the engine, by code that does not hold Python's lock: hundreds of steps go on meanwhile. With the
    lock held there could be only those of the moment in which it changes hands, made short here."""
    monkeypatch.setattr(guard_module, "BRISK", 3600.0)  # the child must come to its end beside busy streams
    taken: list[int] = []
    enough = asyncio.Event()

    async def busy() -> None:
        while not enough.is_set():
            await written(engine, 1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = engine.stats()["steps_total"]
        matcher = llguidance.LLMatcher(*args, **kwargs)
        taken.append(engine.stats()["steps_total"] - before)
        return matcher

    names = {name: getattr(llguidance, name) for name in ("LLTokenizer", "LLParserLimits")}
    monkeypatch.setattr(grammar, "_llguidance", lambda field: SimpleNamespace(**names, LLMatcher=counted))
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    sys.setswitchinterval(1e-4)
    others = [asyncio.create_task(busy()) for _ in range(3)]
    slow = {"type": "integer", "multipleOf": 40_009}  # some 160 ms
    stream = await engine.submit("x", SamplingParams(json_schema=slow, max_tokens=1))
    enough.set()
    await stream.result()
    await asyncio.gather(*others)
    assert taken[0] > 10


async def test_the_models_vocabulary_is_made_ready_before_any_request(engine: AsyncEngine) -> None:
    """Over a large vocabulary that takes tenths of a second with Python's lock held; not in the middle of other people's answers."""
    await asyncio.wrap_future(engine._compilers.submit(lambda: None))
    for _ in range(1000):
        if engine.tokenizer in grammar._BUILT:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the tokenizer was never built")
