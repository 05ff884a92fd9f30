"""A server whose engine runs on two ranks: a killed rank ends its requests, and the engine comes
back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import Live
from test_server_robust import kill_engine

from cli_fixtures import tiny
from eventually import eventually

pytestmark = pytest.mark.server
__all__ = ["tiny"]


@pytest.fixture
def live(tiny: Path) -> Iterator[Live]:
    flags = ("--tensor-parallel", "2", "--threads", "1", "--speculate", "off", "--backend", "cpu")
    back_off = ("--backoff-seconds", "0.01", "--backoff-limit", "0.2")
    server = Live(str(tiny), *flags, *back_off, engine=None)
    yield server.wait_ready()
    if server.process.poll() is None:
        server.stop(signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Processes that a thread of the process has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def rank_of(engine: int) -> int:
    """The process of rank 1."""
    found = [p for p in children(engine) if b"parallel.rank_process" in cmdline(p)]
    assert len(found) == 1
    return found[0]


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def restarted(live: Live, before: int) -> bool:
    ready = live.client.get("/health").status_code == 200
    return ready and before not in children(live.process.pid)


def test_a_killed_rank_ends_its_requests_and_the_engine_comes_back(live: Live) -> None:
    expected = live.complete()["choices"][0]["text"]
    engine = live.engine_pid()
    body = {"model": "m", "stream": True, "prompt": "x", "max_tokens": 6000, "ignore_eos": True}
    with live.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(rank_of(engine), signal.SIGKILL)
        assert "engine_died" in "".join(lines)
    eventually(lambda: restarted(live, engine), live.log_text)
    assert "rank 1 of 2 has ended (killed by signal 9)" in live.log_text()
    assert live.complete()["choices"][0]["text"] == expected

    engine = live.engine_pid()  # and once more, while no step runs
    os.kill(rank_of(engine), signal.SIGKILL)
    eventually(lambda: restarted(live, engine), live.log_text)
    assert live.complete()["choices"][0]["text"] == expected


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_rank_killed_200_times_under_traffic(live: Live) -> None:
    """Every request ends in exactly one state."""
    kill_engine(live, int(os.environ.get("KILLS", "200")), lambda one: rank_of(one.engine_pid()))
