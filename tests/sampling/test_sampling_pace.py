"""A structure that takes long to compile costs its own request, and no other stream a step. Events are counted, no clock decides."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verbatim import SamplingParams
from verbatim.base.errors import OverloadedError, UnsupportedError
from verbatim.engine import aio, core
from verbatim.engine.aio import AsyncEngine
from verbatim.engine.workers import Workers
from verbatim.sampling import grammar, kept, turns
from verbatim.sampling.guard import Busy, Child, Guard, TooMuch
from verbatim.sampling.kept import Kept
from verbatim.sampling.turns import Turn, Turns
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
    monkeypatch.setattr(grammar, "PATIENCE", 3600.0)
    monkeypatch.setattr(aio, "PATIENCE", 3600.0)
    made = Guard(grammar.LIMITS, memory=4 << 30)
    monkeypatch.setattr(grammar, "_guard", made)
    yield made
    made.close()


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has no processor to spare, whatever machine this is."""
    monkeypatch.setattr(core, "_processors", lambda: 0)


@pytest.fixture
def computing(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step gives Python's lock away for a moment, as real ones do while they compute. A fake one that only lends it for microseconds, again and again, may keep the
    event loop waiting to the end of the answer."""
    real = engine.core.backend.execute

    def execute(*args: Any) -> Any:
        time.sleep(0.0005)
        return real(*args)

    monkeypatch.setattr(engine.core.backend, "execute", execute)


async def written(engine: AsyncEngine, seed: int) -> tuple[int, ...]:
    stream = await engine.submit("Once upon a time", SamplingParams(max_tokens=300, seed=seed, ignore_eos=True))
    return (await stream.result()).token_ids


async def test_other_streams_finish_while_a_hostile_schema_compiles(
    engine: AsyncEngine, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four streams of 300 tokens, begun after the compilation, end before it, each as if it were alone. Then the child is killed, and the
    request that waited is refused by name."""
    alone = [await written(engine, seed) for seed in range(4)]
    children: list[Child] = []
    asked = threading.Event()
    honest = Child.ask

    def watched(child: Child, field: str, *rest: Any) -> None:
        honest(child, field, *rest)
        children.append(child)
        asked.set()

    monkeypatch.setattr(Child, "ask", watched)
    hostile = asyncio.create_task(engine.submit("x", SamplingParams(json_schema=HOSTILE, max_tokens=4)))
    assert await asyncio.to_thread(asked.wait, 60.0)
    assert await asyncio.gather(*(written(engine, seed) for seed in range(4))) == alone
    assert not hostile.done()
    assert children[0].process.poll() is None  # still at it
    os.kill(children[0].worker, signal.SIGABRT)  # as where memory is out
    with pytest.raises(UnsupportedError) as caught:
        await hostile
    assert caught.value.param == "json_schema"
    assert (await written(engine, 0)) == alone[0]


async def test_the_engine_takes_steps_while_a_schema_is_compiled_in_its_own_process(
    engine: AsyncEngine, guard: Guard, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What passed the child is compiled again beside the engine, by code that does not hold Python's lock: hundreds of steps go on meanwhile. With the
    lock held there could be only those of the moment in which it changes hands, made short here."""
    monkeypatch.setattr(core, "SHARE", 1.0)  # the child must come to its end beside busy streams
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
    await asyncio.wrap_future(engine._compilers.submit("", lambda: None))
    for _ in range(1000):
        if engine.tokenizer in grammar._BUILT:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the tokenizer was never built")


# ------------------------------------------------------------------------------------------------- turns beside answers


def soon(what: Callable[[], bool], why: str) -> None:
    for _ in range(3000):
        if what():
            return
        time.sleep(0.01)
    pytest.fail(why)


def test_the_average_holds_whatever_a_turn_costs() -> None:
    """Ten minutes on a clock of the test's own, with turns of three sizes: what they had together is the burst, the share and one turn at most."""
    for cost in (0.0003, 0.02, 0.9):
        now = 0.0
        account = Turns(lambda: now)  # noqa: B023
        had = 0.0
        while now < 600:
            with account.turn(0.0, now, lambda: turns.SHARE) as turn:
                if turn is None:
                    now += 0.01
                else:
                    turn.used = cost
                    had += cost
            assert had <= turns.BURST + turns.SHARE * now + cost + 1e-6
        assert had >= turns.SHARE * 600 - cost - 1e-6


def test_with_nothing_beside_it_a_turn_costs_nothing() -> None:
    account = Turns(lambda: 0.0)
    for _ in range(100):
        with account.turn(0.0, 0.0, turns.alone) as turn:
            assert turn is not None
            turn.used = 5.0
    with account.turn(0.0, 0.0, lambda: turns.SHARE) as turn:
        assert turn is not None  # the account is as full as it was


def test_what_had_least_is_next_and_one_is_at_a_time() -> None:
    account = Turns()
    order: list[float] = []

    def wait(had: float) -> None:
        with account.turn(had, time.monotonic() + 60, lambda: 1000.0) as turn:
            assert turn is not None
            assert account._taken
            order.append(had)

    with account.turn(0.0, time.monotonic() + 60, lambda: 1000.0):
        waiting = []
        for had in (0.3, 0.1, 0.2):
            waiting.append(threading.Thread(target=wait, args=(had,)))
            waiting[-1].start()
        soon(lambda: len(account._waiting) == 3, "three wait")
        assert order == []
    for thread in waiting:
        thread.join()
    assert order == [0.1, 0.2, 0.3]


class Counted(Turns):
    """Every metered turn costs the same, and time is what the engine has done: `began` counts them by that clock."""

    def __init__(self, clock: Callable[[], float], cost: float) -> None:
        super().__init__(clock)
        self.cost, self.began, self.free = cost, 0, 0

    @contextmanager
    def turn(self, *args: Any) -> Iterator[Turn | None]:
        with super().turn(*args) as turn:
            if turn is not None:
                self.began += turn.metered
                self.free += not turn.metered
            yield turn
            if turn is not None:
                turn.used = self.cost


@pytest.mark.usefixtures("crowded", "computing")
@pytest.mark.parametrize("kind", ["regex", "choice", "json_schema"])
async def test_new_structures_one_after_another_take_no_more_than_their_share_of_a_running_stream(
    engine: AsyncEngine, guard: Guard, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the engine is a hundredth of a second here, and a turn takes as long. So beside 1,000 steps there are at most as many turns as the share of ten seconds and
    the burst allow, and no structure is compiled outside of one."""
    step = 0.01
    guard.turns = counted = Counted(lambda: engine.stats()["steps_total"] * step, step)
    made: list[int] = []

    def matcher(*args: Any, **kwargs: Any) -> Any:
        made.append(counted.began + counted.free)
        return llguidance.LLMatcher(*args, **kwargs)

    names = {name: getattr(llguidance, name) for name in ("LLTokenizer", "LLParserLimits")}
    monkeypatch.setattr(grammar, "_llguidance", lambda field: SimpleNamespace(**names, LLMatcher=matcher))
    ended = asyncio.Event()

    async def client() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            asked = {"regex": f"a{number}", "choice": [f"{number}", "no"], "json_schema": {"const": number}}[kind]
            await engine.submit("x", SamplingParams(**{kind: asked}, max_tokens=1))

    monkeypatch.setattr(core, "CALM", 3600.0)  # an engine with a stream is never idle
    running = await engine.submit("Once upon a time", SamplingParams(max_tokens=1000, seed=1, ignore_eos=True))
    async for _ in running:
        break
    free, before, began = counted.free, counted.began, engine.stats()["steps_total"]
    other = asyncio.create_task(client())
    await running.result()
    seconds = (engine.stats()["steps_total"] - began) * step
    taken, alone = counted.began - before, counted.free - free
    ended.set()
    await other
    assert alone <= 4  # none was free of charge, but those that the end of the stream let go
    assert 0 < taken <= (turns.BURST + turns.SHARE * seconds) / step + 3
    assert made[-1] <= counted.began + counted.free
    assert len(set(made)) == len(made)  # each in a turn of its own


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_stands_still_where_it_has_no_turn(guard: Guard) -> None:
    """Beside answers that leave nothing: a few slices out of the burst, then it is stopped, and in the end refused as busy, not as too costly. The next request
    has a new worker."""
    refused: list[BaseException] = []
    over = threading.Event()
    until = time.monotonic() + 3600.0

    def clock() -> float:
        return until + 1 if over.is_set() else time.monotonic()

    guard.turns = Turns(clock)

    def ask() -> None:
        try:
            guard.translate("json_schema", json.dumps(HOSTILE), 3600.0, until, lambda: 0.0)
        except Busy as error:
            refused.append(error)

    guard.translate("regex", "a", 60.0)
    (child,) = guard._idle
    worker = child.worker
    thread = threading.Thread(target=ask)
    thread.start()

    def state() -> str:
        return Path(f"/proc/{worker}/stat").read_text().rsplit(") ", 1)[1][0]

    soon(lambda: state() == "T" and guard.turns._account <= 0, "the child was never stopped")
    spent = child.spent()
    time.sleep(0.2)
    assert (state(), child.spent()) == ("T", spent)
    assert os.sched_getscheduler(worker) == os.SCHED_IDLE
    assert spent < 10 * turns.BURST
    over.set()
    thread.join(60)
    assert len(refused) == 1
    assert isinstance(refused[0], Busy)
    assert (
        refused[0].had >= turns.BURST
    )  # it is told that it needs more than there is beside answers, not to come again at once
    guard.turns = Turns()
    assert guard.translate("regex", "b", 60.0, share=lambda: 1.0)
    assert child.worker not in (0, worker)
    assert os.sched_getscheduler(child.worker) == os.SCHED_OTHER
    child.stand_back()
    low = child.worker
    assert guard.translate("regex", "c", 60.0)  # one that stood back serves nobody else
    assert child.worker not in (0, low)


def test_a_large_structure_now_and_then_is_not_refused(guard: Guard) -> None:
    """Some 80 ms of a processor, a hundred times an ordinary schema: out of what is granted at once, with no share at all. Not so the fourth one in a row."""
    until = time.monotonic() + 3600.0
    guard.turns = account = Turns(lambda: 0.0)
    account._clock = lambda: until + 1 if account._account <= 0 else 0.0  # nobody waits for what will not come
    had: list[float] = []

    def translate(number: int) -> None:
        schema = json.dumps({"type": "integer", "multipleOf": number})
        had.append(guard.translate("json_schema", schema, 60.0, until, lambda: 0.0)[1])
        assert len(had) > 1 or not guard._idle[0].low  # at the lowest priority it would be there too late

    with pytest.raises(Busy):
        list(map(translate, range(20_011, 20_200, 2)))
    assert had
    assert 0.02 < had[0] < turns.BURST
    assert sum(had) < turns.BURST + 0.1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_child_does_not_outlive_the_engine() -> None:
    program = """
import json, sys, threading, time
from verbatim.sampling import grammar
from verbatim.sampling.guard import Guard
guard = Guard(grammar.LIMITS)
guard.translate("regex", "a", 60.0)
child = guard._idle[0]
hostile = json.dumps({"type": "integer", "multipleOf": 7919 * 7907})
threading.Thread(target=guard.translate, args=("json_schema", hostile, 3600.0, time.monotonic() + 3600, lambda: 0.0), daemon=True).start()
while guard.turns._account > 0 or guard.turns._taken:
    time.sleep(0.01)
print(child.process.pid, child.worker, flush=True)
time.sleep(3600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    soon(lambda: not any(alive(pid) for pid in pids), f"{pids} are still there")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("crowded", "computing")
async def test_an_idle_engine_gives_compiling_all_it_has(engine: AsyncEngine) -> None:
    assert engine.core.compile_share() is None
    stream = await engine.submit("x", SamplingParams(max_tokens=2000, ignore_eos=True))
    async for _ in stream:
        break
    assert engine.core.compile_share() == turns.SHARE
    await stream.aclose()
    await asyncio.to_thread(engine._idle.wait, 60)
    assert engine.core.compile_share() is None


@pytest.mark.usefixtures("computing")
async def test_a_spare_processor_is_for_compiling(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_processors", lambda: 1000)
    async with await engine.submit("x", SamplingParams(max_tokens=2000, ignore_eos=True)) as stream:
        async for _ in stream:
            break
        assert engine.core.compile_share() == 1.0


# ------------------------------------------------------------------------------------------- who waits, and how long


async def test_waiting_for_a_worker_counts(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers are at something that does not end: the next request is refused in time, as busy, with its field named."""
    monkeypatch.setattr(aio, "PATIENCE", 0.05)
    free = threading.Event()
    for caller in "abcd":
        engine._compilers.submit(caller, free.wait)
    with pytest.raises(OverloadedError, match="try again") as caught:
        await engine.submit("x", SamplingParams(regex="a"))
    assert (caught.value.param, caught.value.status) == ("regex", 429)
    free.set()
    assert engine.stats()["requests_total"] == 0


def test_one_that_had_all_there_is_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two refusals that a client can act on: others were before it, or it is too large for an engine with answers in progress."""
    for had, words, wait in (
        (0.1, "beside what else runs here; try again, or", 2.0),
        (0.25, "more than 0.2 seconds .* when fewer", 10.0),
    ):

        def translate(*_: Any, had: float = had) -> Any:
            raise Busy(had)

        monkeypatch.setattr(Guard, "translate", translate)
        with pytest.raises(OverloadedError, match=words) as caught:
            grammar.compile_structure(SamplingParams(regex=f"a{had}"), fake_parts().tokenizer)
        assert (caught.value.param, caught.value.status, caught.value.retry_after) == ("regex", 429, wait)


def test_a_caller_with_many_delays_himself() -> None:
    workers = Workers(3, "test")
    free, begun = threading.Event(), []
    mine = [workers.submit("many", lambda i=i: (begun.append(i), free.wait())) for i in range(6)]
    try:
        assert workers.submit("one", lambda: "at once").result(60) == "at once"
        assert len(begun) <= 2
        free.set()
        for future in mine:
            future.result(60)
        assert sorted(begun) == list(range(6))
    finally:
        free.set()
        workers.close()
    assert workers.submit("late", lambda: 1).cancelled()


def thing(size: int) -> Any:
    return SimpleNamespace(size=size, spent=False)


def test_structures_are_kept_by_bytes() -> None:
    cache = Kept(limit=100)
    made: list[bytes] = []

    def get(name: bytes, size: int) -> None:
        cache.get(name, 0.0, lambda: made.append(name) or thing(size))

    for name in (b"a", b"b", b"a", b"c", b"a"):  # a, b and c are 40 each: b goes, it was asked for longest ago
        get(name, 40)
    assert made == [b"a", b"b", b"c"]
    get(b"b", 40)
    assert made[3:] == [b"b"]
    get(b"huge", 101)
    get(b"huge", 101)
    assert made[4:] == [b"huge", b"huge"]  # what is larger than all may be is not kept, and costs nobody his place
    assert cache.bytes == 80
    get(b"a", 40)
    assert made[6:] == []
    cache._done[b"a"].spent = True  # nothing new is begun with it
    get(b"a", 50)
    get(b"a", 50)
    assert made[6:] == [b"a"]
    assert cache.bytes == 90


def test_what_many_ask_for_at_once_is_compiled_once() -> None:
    cache, free, made = Kept(), threading.Event(), []

    def slow() -> Any:
        made.append(1)
        free.wait()
        return thing(1)

    found: list[Any] = []
    waiting = [threading.Thread(target=lambda: found.append(cache.get(b"x", time.monotonic() + 60, slow))) for _ in range(8)]
    for thread in waiting:
        thread.start()
    soon(lambda: bool(made), "nobody began")
    with pytest.raises(Busy):
        cache.get(b"x", 0.0, slow)  # whoever has no time does not wait
    free.set()
    for thread in waiting:
        thread.join()
    assert len(made) == 1
    assert len({id(one) for one in found}) == 1


def test_what_was_too_much_is_remembered_for_a_while_and_busy_is_not() -> None:
    now = 0.0
    cache, made = Kept(clock=lambda: now), []

    def refuse(error: type[Exception]) -> None:
        made.append(error)
        raise error("too costly")

    for _ in range(2):
        with pytest.raises(Busy):
            cache.get(b"x", 0.0, lambda: refuse(Busy))
    for _ in range(3):
        with pytest.raises(TooMuch, match="too costly"):
            cache.get(b"x", 0.0, lambda: refuse(TooMuch))
    assert made == [Busy, Busy, TooMuch]
    now = kept.MEMORY_OF_REFUSALS + 1
    with pytest.raises(TooMuch):
        cache.get(b"x", 0.0, lambda: refuse(TooMuch))
    assert len(made) == 4


async def test_the_same_structure_again_is_not_compiled_again(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await (await engine.submit("x", SamplingParams(regex="again[0-9]{3}", seed=1))).result()
    monkeypatch.setattr(grammar, "_compile", lambda *args: pytest.fail("compiled again"))
    again = await (await engine.submit("x", SamplingParams(regex="again[0-9]{3}", seed=1))).result()
    assert again.text == first.text
