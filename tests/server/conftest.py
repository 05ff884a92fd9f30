"""Fixtures of the server tests: live servers, and the environments of third-party clients."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import client_setup
import pytest
from live_server import ON_RAY, Live, check_ledger, usage_balances

from eventually import eventually


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with the real scheduler and sampler over hashed logits. At the end its ledger must
    balance over all tests that used it."""
    state = tmp_path_factory.mktemp("kept") / "state"
    live = Live("--max-output-tokens", "512", "--state-dir", str(state), fresh=True).wait_ready()
    yield live
    numbers = live.wait_at_rest()
    if ON_RAY:  # the replicas' reports arrive one after the other
        eventually(lambda: usage_balances(live.metrics()), lambda: str(live.metrics()))
        numbers = live.metrics()
        assert numbers["verbatim_router_requests_total"] > 0
    check_ledger(numbers)
    assert live.stop() == 0, live.log_text()


@pytest.fixture(scope="session")
def real(default_model: Path) -> Iterator[Live]:
    """The default model, which states no pooling of embeddings. With one thread: two would wait for
    each other at every barrier while the other worker of the suite uses a core."""
    flags = ("--model", str(default_model), "--pooling", "mean", "--threads", "1")
    live = Live(*flags, engine=None, fresh=True).wait_ready()
    yield live
    numbers = live.wait_at_rest()
    check_ledger(numbers)
    assert live.stop() == 0, live.log_text()


# ----------------------------------------------------------------------------- third-party clients

_setup: subprocess.Popen[bytes] | None = None


def pytest_collection_finish(session: pytest.Session) -> None:
    global _setup
    if (
        _setup is None
        and any("client_python" in getattr(i, "fixturenames", ()) for i in session.items)
        and not session.config.option.collectonly
    ):
        _setup = client_setup.start()


def _wait_for_setup() -> None:
    if _setup is None:
        return
    try:
        _setup.wait(1000)  # only a hang takes as long
    except subprocess.TimeoutExpired:
        os.killpg(_setup.pid, signal.SIGKILL)
        raise


@pytest.fixture(scope="session")
def client_python() -> Path:
    """The Python of the environment with the client packages."""
    _wait_for_setup()
    home = client_setup.python_home()
    if not (home / "done").exists():
        pytest.skip(
            "the client packages could not be installed: "
            + (client_setup.cache_dir() / "setup.log").read_text()[-300:]
        )
    return home / "bin" / "python"


@pytest.fixture(scope="session")
def client_node() -> Path:
    """The folder with node_modules."""
    _wait_for_setup()
    home = client_setup.node_home()
    if not (home / "done").exists():
        pytest.skip("node or the npm packages are not there")
    return home
