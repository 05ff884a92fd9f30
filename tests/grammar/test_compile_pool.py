"""Compile pool: limits hold, a crash costs one request, streams continue, no worker outlives its
parent. Fake workers and fake clocks; real processes only where the operating system is tested.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eventually import HANG_SECONDS, eventually
from verbatim import SamplingParams
from verbatim.base.errors import OverloadedError, UnsupportedError
from verbatim.engine.calls import async_engine
from verbatim.engine.calls.async_engine import AsyncEngine
from verbatim.engine.calls.fair_pool import FairThreadPool
from verbatim.grammar import compile_pool, compile_worker, compiler, grammar_cache, matcher
from verbatim.grammar.compile_pool import (
    CompilePool,
    CompileWorker,
    PoolBusy,
    TooExpensive,
    WorkerDied,
    worker_command,
)
from verbatim.grammar.grammar_cache import GrammarCache
from verbatim.grammar.llguidance_tokenizer import _TOKENIZERS, llguidance_tokenizer
from verbatim.testing.fakes import fake_parts

llguidance = pytest.importorskip("llguidance")

HOSTILE = {"type": "integer", "multipleOf": 7919 * 7907}  # minutes and gigabytes without limits
ADR = Path(__file__).parents[2] / "docs" / "adr" / "0012-grammar-compile-pool.md"
DEFAULT_ARRIVAL_TIMEOUT = compiler.ARRIVAL_TIMEOUT  # a fixture raises it during the tests


class FakeWorker:
    """A worker whose calls follow a script."""

    def __init__(
        self, *script: Callable[[], Any], start: Callable[[], None] = lambda: None
    ) -> None:
        self.script = iter(script)
        self.start = start
        self.alive = True
        self.killed = False
        self.deadlines: list[float] = []

    def wait_ready(self, deadline: float) -> None:
        self.deadlines.append(deadline)
        self.start()

    def call(self, message: Any, deadline: float) -> dict[str, Any]:
        self.deadlines.append(deadline)
        step = next(self.script, None)
        return step() if step else {"grammar": f"grammar of {message[1]}"}

    def kill(self) -> None:
        self.killed, self.alive = True, False


def dies(code: int) -> Callable[[], Any]:
    def step() -> Any:
        raise WorkerDied(code)

    return step


def times_out() -> Any:
    raise TimeoutError


@pytest.fixture
def make_pool() -> Iterator[Callable[..., CompilePool]]:
    """A pool of these workers, in this order; its clock stays at 0."""
    made: list[CompilePool] = []

    def make(*workers: Any, **options: Any) -> CompilePool:
        supply = iter(workers)

        def spawn() -> Any:
            return next(supply, None) or FakeWorker()

        made.append(
            CompilePool(matcher.LIMITS, **{"spawn": spawn, "clock": lambda: 0.0, **options})
        )
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture
def processes() -> Iterator[Callable[..., CompilePool]]:
    """A pool of real workers; only the limit under test can be reached."""
    made: list[CompilePool] = []

    def make(**options: Any) -> CompilePool:
        limits = {"memory": 4 << 30, "cpu_seconds": 3600.0, "timeout": 3600.0, **options}
        made.append(CompilePool(matcher.LIMITS, **limits))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def translate(pool: CompilePool, field: str = "regex", value: Any = "a") -> str:
    return pool.translate(field, value, pool._clock() + 3600.0).grammar


# --- slots


def test_a_third_compile_waits_for_one_of_two_slots(make_pool: Callable[..., CompilePool]) -> None:
    pool = make_pool(size=2)
    with pool.slot(0.0), pool.slot(0.0), pytest.raises(PoolBusy), pool.slot(0.0):
        pytest.fail("a third slot")
    with pool.slot(0.0), pool.slot(0.0):
        pass


def test_a_waiting_compile_starts_when_a_slot_becomes_free(
    make_pool: Callable[..., CompilePool],
) -> None:
    waiting, started = threading.Event(), threading.Event()

    def clock() -> float:  # read by a caller that found no free slot
        waiting.set()
        return 0.0

    def wait() -> None:
        with pool.slot(3600.0):
            started.set()

    pool = make_pool(size=1, clock=clock)
    thread = threading.Thread(target=wait)
    with pool.slot(0.0):
        thread.start()
        assert waiting.wait(HANG_SECONDS)
        assert not started.is_set()
    thread.join(HANG_SECONDS)
    assert started.is_set()


def test_a_failed_compile_returns_its_slot(make_pool: Callable[..., CompilePool]) -> None:
    pool = make_pool(FakeWorker(dies(-signal.SIGABRT)))
    with pytest.raises(TooExpensive), pool.slot(0.0):
        translate(pool)
    with pool.slot(0.0):
        assert translate(pool) == "grammar of a"


# --- what a worker may do


def test_a_worker_is_reused(make_pool: Callable[..., CompilePool]) -> None:
    first = FakeWorker()
    pool = make_pool(first)
    assert [translate(pool, value=value) for value in "abc"] == [f"grammar of {v}" for v in "abc"]
    assert pool._idle == [first]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGPROF, r"more than 0\.75 seconds of CPU time"),
        (-signal.SIGXCPU, r"more than 0\.75 seconds of CPU time"),
        (-signal.SIGABRT, "too much memory"),
        (-signal.SIGSEGV, "crash"),
        (1, "crash"),
    ],
)
def test_a_worker_crash_fails_only_its_request(
    make_pool: Callable[..., CompilePool], code: int, words: str
) -> None:
    first, second = FakeWorker(dies(code)), FakeWorker()
    pool = make_pool(first, second)
    with pytest.raises(TooExpensive, match=words):
        translate(pool)
    assert first.killed
    assert pool._idle == [second]  # started at once, before the next request needs it
    assert translate(pool) == "grammar of a"


def test_a_worker_killed_from_outside_is_retried_once(
    make_pool: Callable[..., CompilePool],
) -> None:
    killed = dies(-signal.SIGKILL)
    assert translate(make_pool(FakeWorker(killed))) == "grammar of a"
    with pytest.raises(TooExpensive, match="memory"):  # the system's out-of-memory killer
        translate(make_pool(FakeWorker(killed), FakeWorker(killed)))


def test_a_compile_over_the_timeout_is_killed_and_may_be_retried(
    make_pool: Callable[..., CompilePool],
) -> None:
    first = FakeWorker(times_out)
    pool = make_pool(first, timeout=5.0)
    with pytest.raises(PoolBusy):
        translate(pool)
    assert first.killed
    assert first.deadlines == [3600.0, 5.0]
    assert translate(pool) == "grammar of a"
    (worker,) = pool._idle
    pool.translate("regex", "b", 1.5)  # the deadline comes before the timeout
    assert worker.deadlines[-2:] == [1.5, 1.5]


def test_a_worker_that_died_while_idle_is_replaced(make_pool: Callable[..., CompilePool]) -> None:
    first = FakeWorker()
    pool = make_pool(first)
    translate(pool)
    first.alive = False
    assert translate(pool) == "grammar of a"
    assert first.killed  # reaped


def test_a_worker_that_does_not_start_is_a_retryable_error(
    make_pool: Callable[..., CompilePool],
) -> None:
    pool = make_pool(FakeWorker(start=times_out))
    with pytest.raises(PoolBusy):
        translate(pool)
    assert translate(pool) == "grammar of a"


def test_close_kills_idle_and_active_workers(make_pool: Callable[..., CompilePool]) -> None:
    entered, leave = threading.Event(), threading.Event()

    def compiles() -> Any:
        entered.set()
        assert leave.wait(HANG_SECONDS)
        return {"grammar": "late"}

    active, idle = FakeWorker(compiles), FakeWorker()
    pool, found = make_pool(active, idle), []
    thread = threading.Thread(target=lambda: found.append(translate(pool)))
    thread.start()
    assert entered.wait(HANG_SECONDS)
    translate(pool)
    pool.close()
    assert idle.killed
    leave.set()
    thread.join(HANG_SECONDS)
    assert found == ["late"]
    assert active.killed
    with pytest.raises(PoolBusy):
        translate(pool)


# --- real workers


def test_a_compile_over_the_cpu_limit_is_killed(processes: Callable[..., CompilePool]) -> None:
    """The worker that replaces the killed one has a limit that no machine reaches."""
    limits = iter((0.2, 3600.0))

    def spawn() -> CompileWorker:
        return CompileWorker(worker_command(matcher.LIMITS, 4 << 30, next(limits)))

    pool = processes(cpu_seconds=0.2, spawn=spawn)
    with pytest.raises(TooExpensive, match=r"more than 0\.2 seconds of CPU time"):
        translate(pool, "json_schema", json.dumps(HOSTILE))
    assert translate(pool)


def test_the_cpu_limit_is_per_compile(processes: Callable[..., CompilePool]) -> None:
    """Many cheap compiles in one worker take more CPU time together than the limit of one compile,
    which is forty times what one of them takes on this machine."""
    numbers = itertools.count(2001, 2)

    def compile_one(pool: CompilePool) -> float:
        """CPU seconds of the worker; outside Linux, which has its clock, those of a usual one."""
        (worker,) = pool._idle
        clock = (~worker.process.pid << 3) | 2 if sys.platform == "linux" else None
        before = 0.0 if clock is None else time.clock_gettime(clock)
        schema = {"type": "integer", "multipleOf": next(numbers)}
        translate(pool, "json_schema", json.dumps(schema))
        return 0.01 if clock is None else time.clock_gettime(clock) - before

    usual = processes()
    translate(usual)
    limit = 40 * compile_one(usual)
    pool, spent = processes(cpu_seconds=limit), 0.0
    translate(pool)
    (first,) = pool._idle
    while spent < 1.5 * limit:
        spent += compile_one(pool)
    assert pool._idle == [first]


def test_a_compile_over_the_memory_limit_is_rejected(processes: Callable[..., CompilePool]) -> None:
    pool = processes(memory=200 << 20)
    schema = {"allOf": [{"type": "string", "pattern": f"a{{{i}}}.*b"} for i in range(200)]}
    with pytest.raises(TooExpensive, match="too much memory"):
        translate(pool, "json_schema", json.dumps(schema))
    assert translate(pool)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_STACK bounds a running stack on Linux")
def test_a_worker_has_less_stack_than_a_thread_of_the_server(
    processes: Callable[..., CompilePool],
) -> None:
    """A chain of 1500 rules takes 6 MiB of stack: what fits into 8 MiB is refused at 4 MiB, so no
    chain that the worker accepts can end the server, which compiles it again."""
    import resource

    chain = "".join(f"r{i} ::= r{i + 1}\n" for i in range(1500))
    grammar = f'root ::= r0\n{chain}r1500 ::= "a"'
    before = resource.getrlimit(resource.RLIMIT_STACK)
    unlimited = before[1] == resource.RLIM_INFINITY
    for stack in (8 << 20, resource.RLIM_INFINITY) if unlimited else (min(8 << 20, before[1]),):
        resource.setrlimit(resource.RLIMIT_STACK, (stack, before[1]))
        try:
            pool = processes()
            assert translate(pool)
            with pytest.raises(TooExpensive, match="crash"):
                translate(pool, "grammar", grammar)
        finally:
            resource.setrlimit(resource.RLIMIT_STACK, before)


def test_a_compile_over_the_wall_clock_timeout_is_killed(
    processes: Callable[..., CompilePool],
) -> None:
    pool = processes(timeout=0.05)
    worker = pool._checkout()
    pool._checkin(worker)
    with pytest.raises(PoolBusy):
        translate(pool, "json_schema", json.dumps(HOSTILE))
    assert worker.process.returncode == -signal.SIGKILL


def test_a_worker_outlives_the_thread_that_caused_its_start(
    processes: Callable[..., CompilePool],
) -> None:
    """The kernel's parent-death signal comes when the thread that forked ends."""
    pool = processes()
    caller = threading.Thread(target=translate, args=(pool,))
    caller.start()
    caller.join()
    (worker,) = pool._idle
    assert translate(pool)
    assert pool._idle == [worker]


def test_a_failed_fork_is_a_retryable_error() -> None:
    pool = CompilePool(matcher.LIMITS, spawn=lambda: CompileWorker(["/nonexistent/python"]))
    with pytest.raises(PoolBusy):
        translate(pool)
    pool.close()


def test_a_worker_killed_before_it_has_started_ends() -> None:
    worker = CompileWorker(worker_command(matcher.LIMITS, 4 << 30, 3600.0))
    worker.kill()
    worker._thread.join(HANG_SECONDS)
    assert not worker.alive


def test_workers_that_die_are_replaced(processes: Callable[..., CompilePool]) -> None:
    pool = processes()
    translate(pool)
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
        (worker,) = pool._idle
        worker.process.send_signal(number)
        worker._thread.join(HANG_SECONDS)
        assert translate(pool)


def test_a_large_structure_passes_through_the_socket(processes: Callable[..., CompilePool]) -> None:
    choices = [f"{number:07d}" for number in range(30_000)]
    assert choices[-1] in translate(processes(), "choice", choices)


def test_workers_run_at_a_low_priority(processes: Callable[..., CompilePool]) -> None:
    pool = processes()
    translate(pool)
    (worker,) = pool._idle
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, worker.process.pid) == min(19, own + compile_worker.NICE)


# --- a worker ends with its parent


def start_worker(**options: Any) -> CompileWorker:
    command = worker_command(matcher.LIMITS, 4 << 30, 3600.0)
    command[-1] = json.dumps(json.loads(command[-1]) | options)
    return CompileWorker(command)


@pytest.mark.parametrize(
    "job", [None, ["json_schema", json.dumps(HOSTILE)]], ids=["idle", "compiling"]
)
def test_a_worker_ends_at_end_of_input(job: Any) -> None:
    """Without any signal, as on a system without a parent-death signal."""
    worker = start_worker()
    worker.wait_ready(time.monotonic() + HANG_SECONDS)
    worker._socket.sendall(json.dumps(job).encode() + b"\n" if job else b"")
    worker._socket.close()
    worker._thread.join(HANG_SECONDS)
    assert worker.process is not None
    assert worker.process.returncode == 0


def test_a_worker_whose_parent_is_gone_ends() -> None:
    """The parent died before the worker could request the parent-death signal."""
    worker = start_worker(parent=os.getppid())
    worker._thread.join(HANG_SECONDS)
    assert worker.process is not None
    assert worker.process.returncode == 0
    worker.kill()


VICTIM = """
import contextlib, json, os, sys, threading
from verbatim.grammar import matcher
from verbatim.grammar.compile_pool import CompilePool

timeout, fork = float(sys.argv[1]), sys.argv[2] == "fork"
pool = CompilePool(matcher.LIMITS, cpu_seconds=3600.0, timeout=timeout)

def compile_forever(field, value):
    while True:
        with contextlib.suppress(Exception), pool.slot(1e9):
            pool.translate(field, value, 1e9)

if fork:  # it holds the workers' sockets until the test closes standard input
    pool.translate("regex", "a", 1e9)
    if not os.fork():
        print("started", flush=True)
        sys.stdin.read()
        os._exit(0)
hostile = json.dumps({"type": "integer", "multipleOf": 7919 * 7907})
for job in (("json_schema", hostile), ("regex", "[a-z]{5}")):
    threading.Thread(target=compile_forever, args=job, daemon=True).start()
if not fork:
    print("started", flush=True)
threading.Event().wait()
"""
MARK = "VERBATIM_TEST_MARK"
_marks = itertools.count()


def start_victim(timeout: float, *, fork: bool = False) -> tuple[subprocess.Popen[str], str]:
    """A process with a pool under load. Its descendants inherit the mark in their environment."""
    mark = f"{os.getpid()}-{next(_marks)}"
    command = [sys.executable, "-c", VICTIM, str(timeout), "fork" if fork else "plain"]
    pipe = subprocess.PIPE
    environment = {**os.environ, MARK: mark}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment), mark


def marked(mark: str) -> list[int]:
    """The processes, except zombies, whose environment has the mark."""
    wanted = f"{MARK}={mark}"
    if sys.platform != "linux":
        listing = subprocess.run(
            ["ps", "-axEww", "-o", "pid=,command="], capture_output=True, check=True
        )
        lines = listing.stdout.decode(errors="replace").splitlines()
        return [int(line.split()[0]) for line in lines if wanted in line.split()]
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            if entry.name.isdigit() and wanted.encode() in (entry / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(entry.name))
    return found


def survivors(mark: str) -> list[int]:
    """Poll until all processes with the mark have ended; returns those left after a hang."""
    with suppress(AssertionError):
        eventually(lambda: not marked(mark))
    return marked(mark)


def kill_at_random_moments(rng: random.Random, kills: int) -> int:
    """Kill `kills` parents and return how many of their processes survive. Some parents die
    before they are ready, the others up to half a second later; half of them kill and restart
    workers constantly."""
    left = 0
    for _ in range(kills):
        victim, mark = start_victim(rng.choice([0.02, 3600.0]))
        with victim:
            assert victim.stdout is not None
            if rng.random() < 0.9:
                assert victim.stdout.readline() == "started\n"
            with suppress(subprocess.TimeoutExpired):
                victim.wait(rng.random() * 0.5)
            assert victim.poll() is None  # the test kills it, nothing else
            victim.kill()
        left += len(survivors(mark))
    return left


def test_no_worker_survives_a_killed_parent() -> None:
    assert kill_at_random_moments(random.Random(17), 8) == 0


def test_a_worker_ends_though_another_process_holds_its_socket() -> None:
    """A fork of the parent prevents end-of-input: the parent-death signal, or elsewhere the
    check of the parent's id, ends the worker."""
    victim, mark = start_victim(3600.0, fork=True)
    with victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "started\n"
        before = marked(mark)
        victim.kill()
        # the fork stays: it waits for its standard input
        eventually(lambda: len(marked(mark)) == 1)
    assert len(before) >= 3
    assert survivors(mark) == []


@pytest.mark.soak
def test_no_worker_survives_500_killed_parents() -> None:
    """Five at a time, so that the machine is under load."""
    left: list[int] = []
    threads = [
        threading.Thread(
            target=lambda s=seed: left.append(kill_at_random_moments(random.Random(s), 100))
        )
        for seed in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [0] * 5


# --- beside the engine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncEngine]:
    monkeypatch.setattr(async_engine, "ARRIVAL_TIMEOUT", 3600.0)
    made = AsyncEngine.from_loaded(fake_parts(), kv_blocks=400)
    yield made
    made.close()


async def written(engine: AsyncEngine, seed: int) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=300, seed=seed, ignore_eos=True)
    return (await (await engine.submit("Once upon a time", params)).result()).token_ids


async def test_other_streams_finish_while_a_structure_compiles(
    engine: AsyncEngine, make_pool: Callable[..., CompilePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four streams, submitted after a compile has started, end before it, with the same tokens
    as alone. Then the worker dies, and the request that waited is rejected with its field named."""
    alone = [await written(engine, seed) for seed in range(4)]
    entered, leave = threading.Event(), threading.Event()

    def compiles() -> Any:
        entered.set()
        assert leave.wait(HANG_SECONDS)
        raise WorkerDied(-signal.SIGABRT)

    monkeypatch.setattr(compiler, "_pool", make_pool(FakeWorker(compiles)))
    task = asyncio.create_task(
        engine.submit("x", SamplingParams(json_schema=HOSTILE, max_tokens=4))
    )
    assert await asyncio.to_thread(entered.wait, HANG_SECONDS)
    assert await asyncio.gather(*(written(engine, seed) for seed in range(4))) == alone
    assert not task.done()
    leave.set()
    with pytest.raises(UnsupportedError, match="json_schema: takes too much memory") as caught:
        await task
    assert caught.value.status == 400
    assert (await written(engine, 0)) == alone[0]


async def test_an_expensive_grammar_does_not_block_the_compiles_of_another_tenant(
    engine: AsyncEngine, make_pool: Callable[..., CompilePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a running stream, tenant b's compile does not end. Twenty structures of tenant c
    compile meanwhile, and their requests complete."""
    entered, leave = threading.Event(), threading.Event()

    def endless() -> Any:
        entered.set()
        assert leave.wait(HANG_SECONDS)
        return {"grammar": llguidance.LLMatcher.grammar_from_regex("b")}

    def small() -> Any:
        return {"grammar": llguidance.LLMatcher.grammar_from_regex("c")}

    pool = make_pool(FakeWorker(endless), FakeWorker(*[small] * 20))
    monkeypatch.setattr(compiler, "_pool", pool)
    stream = await engine.submit("x", SamplingParams(max_tokens=3000, ignore_eos=True))
    expensive = asyncio.create_task(engine.submit("x", SamplingParams(regex="b"), tenant="b"))
    assert await asyncio.to_thread(entered.wait, HANG_SECONDS)
    done = []
    for number in range(20):
        params = SamplingParams(regex=f"c{{{number + 1}}}", max_tokens=1)
        done.append(await (await engine.submit("x", params, tenant="c")).result())
    assert len(done) == 20
    assert not expensive.done()
    leave.set()
    await (await expensive).aclose()
    await stream.aclose()


async def test_compiles_run_off_the_engine_thread_and_the_event_loop(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def make_matcher(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return llguidance.LLMatcher(*args, **kwargs)

    names = {name: getattr(llguidance, name) for name in ("LLTokenizer", "LLParserLimits")}
    library = SimpleNamespace(**names, LLMatcher=make_matcher)
    monkeypatch.setattr(compiler, "import_llguidance", lambda field: library)
    await (await engine.submit("x", SamplingParams(regex="off[0-9]", max_tokens=1))).result()
    assert threads[0].startswith("verbatim-compile")


def test_llguidance_releases_the_gil_while_it_compiles(request: pytest.FixtureRequest) -> None:
    """So the second compile, in the engine's process, delays no step. The switch interval is an
    hour: the other thread runs only if llguidance releases the GIL."""
    ticks, stop = 0, False

    def tick() -> None:
        nonlocal ticks
        while not stop:
            ticks += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    text = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps({"type": "integer", "multipleOf": 40_009})
    )
    vocabulary = llguidance_tokenizer(llguidance, fake_parts().tokenizer)
    other = threading.Thread(target=tick)
    other.start()
    sys.setswitchinterval(3600.0)
    before = ticks
    llguidance.LLMatcher(vocabulary, text, log_level=0)
    after = ticks
    stop = True
    sys.setswitchinterval(interval)
    other.join(HANG_SECONDS)
    assert after > before


async def test_the_tokenizer_trie_is_built_before_any_request(engine: AsyncEngine) -> None:
    """For a large vocabulary this takes tenths of a second with the GIL held."""
    await asyncio.wrap_future(engine._compilers.submit("", lambda: None))  # queued after prepare()
    assert engine.tokenizer in _TOKENIZERS


async def test_waiting_for_a_compile_thread_counts_towards_the_deadline(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All compile threads are busy: the request is rejected at its deadline, with its field
    named."""
    monkeypatch.setattr(async_engine, "ARRIVAL_TIMEOUT", 0.0)
    free = threading.Event()
    for caller in "ab":
        engine._compilers.submit(caller, lambda: free.wait(HANG_SECONDS))
    with pytest.raises(OverloadedError, match="try again") as caught:
        await engine.submit("x", SamplingParams(regex="a"))
    assert (caught.value.param, caught.value.status, caught.value.retry_after) == (
        "regex",
        429,
        2.0,
    )
    free.set()
    assert engine.stats()["requests_total"] == 0


def test_a_busy_pool_is_a_retryable_error(
    make_pool: Callable[..., CompilePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_pool", make_pool(FakeWorker(times_out)))
    with pytest.raises(OverloadedError, match=r"regex: could not be compiled.*try again") as caught:
        compiler.compile_structure(SamplingParams(regex="timeout"), fake_parts().tokenizer)
    assert (caught.value.param, caught.value.status, caught.value.retry_after) == (
        "regex",
        429,
        2.0,
    )


def test_the_pool_has_as_many_slots_as_there_are_compile_threads(engine: AsyncEngine) -> None:
    assert len(engine._compilers._threads) == compile_pool.SIZE


def test_the_limits_are_those_of_adr_12() -> None:
    """The CPU limit is the real bound; the wall-clock limits leave room for a busy machine."""
    table = ADR.read_text("utf-8")
    assert f"| {compile_pool.MEMORY >> 30} GiB |" in table
    assert f"| {compile_pool.CPU_SECONDS:g} s |" in table
    assert f"| {compile_pool.TIMEOUT:g} s | 429" in table
    assert f"| {DEFAULT_ARRIVAL_TIMEOUT:g} s | 429" in table
    assert compile_pool.TIMEOUT >= 20 * compile_pool.CPU_SECONDS


def test_a_tenant_with_many_structures_delays_only_itself() -> None:
    workers = FairThreadPool(3, "test")
    free, began = threading.Event(), []
    mine = [
        workers.submit("many", lambda i=i: (began.append(i), free.wait(HANG_SECONDS)))
        for i in range(6)
    ]
    try:
        assert workers.submit("one", lambda: "at once").result(HANG_SECONDS) == "at once"
        assert len(began) <= 2
        free.set()
        for future in mine:
            future.result(HANG_SECONDS)
        assert sorted(began) == list(range(6))
    finally:
        free.set()
        workers.close()
    assert workers.submit("late", lambda: 1).cancelled()


# --- the grammar cache


def compiled(size: int) -> Any:
    return SimpleNamespace(size=size, exhausted=False)


def test_the_cache_evicts_least_recently_used_structures_by_bytes() -> None:
    cache = GrammarCache(limit=100)
    made: list[bytes] = []

    def get(name: bytes, size: int) -> None:
        cache.get(name, 0.0, lambda: made.append(name) or compiled(size))

    for name in (b"a", b"b", b"a", b"c", b"a"):  # 40 each: b, the least recently used, is evicted
        get(name, 40)
    assert made == [b"a", b"b", b"c"]
    get(b"b", 40)
    assert made[3:] == [b"b"]
    get(b"huge", 101)
    get(b"huge", 101)
    assert made[4:] == [b"huge", b"huge"]  # larger than the cache: not cached, evicts nothing
    assert cache.bytes == 80
    get(b"a", 40)
    assert made[6:] == []
    cache._compiled[b"a"].exhausted = True  # its lexer is exhausted: compiled again
    get(b"a", 50)
    get(b"a", 50)
    assert made[6:] == [b"a"]
    assert cache.bytes == 90


def test_concurrent_callers_share_one_compile() -> None:
    cache, made = GrammarCache(clock=lambda: 0.0), []
    began, free = threading.Event(), threading.Event()

    def slow() -> Any:
        made.append(1)
        began.set()
        assert free.wait(HANG_SECONDS)
        return compiled(1)

    found: list[Any] = []
    waiting = [
        threading.Thread(target=lambda: found.append(cache.get(b"x", HANG_SECONDS, slow)))
        for _ in range(8)
    ]
    for thread in waiting:
        thread.start()
    assert began.wait(HANG_SECONDS)
    with pytest.raises(PoolBusy):
        cache.get(b"x", 0.0, slow)  # at its deadline it waits no longer
    free.set()
    for thread in waiting:
        thread.join()
    assert len(made) == 1
    assert len({id(one) for one in found}) == 1


def test_a_rejection_for_cost_is_cached_for_a_minute_and_a_timeout_is_not() -> None:
    now = 0.0
    cache, made = GrammarCache(clock=lambda: now), []

    def refuse(error: type[Exception]) -> None:
        made.append(error)
        raise error("too costly")

    for _ in range(2):
        with pytest.raises(PoolBusy):
            cache.get(b"x", 0.0, lambda: refuse(PoolBusy))
    for _ in range(3):
        with pytest.raises(TooExpensive, match="too costly"):
            cache.get(b"x", 0.0, lambda: refuse(TooExpensive))
    assert made == [PoolBusy, PoolBusy, TooExpensive]
    now = grammar_cache.REFUSAL_SECONDS + 1
    with pytest.raises(TooExpensive):
        cache.get(b"x", 0.0, lambda: refuse(TooExpensive))
    assert len(made) == 4


async def test_a_repeated_structure_is_a_cache_hit(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(regex="again[0-9]{3}", seed=1)
    first = await (await engine.submit("x", params)).result()
    monkeypatch.setattr(compiler, "_compile", lambda *args: pytest.fail("compiled again"))
    again = await (await engine.submit("x", params)).result()
    assert again.text == first.text
