"""Fixtures and settings of the whole suite."""

from __future__ import annotations

import gc
import itertools
import os
import resource
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import not_run
from chromium import launched
from shell_variables import remove_user_settings
from step_gate import StepGate

if TYPE_CHECKING:
    from live_server import Live

try:
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers
except ModuleNotFoundError:  # `make test-gpu` runs without it
    pass
else:
    # The same examples in every run; no deadline, since tests must not depend on the load.
    settings.register_profile(
        "ci",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
    # Hypothesis also tries the constants of the modules that are loaded, and which these are
    # depends on the files that a worker process ran before. No setting turns it off.
    if hasattr(providers, "_get_local_constants"):
        NO_CONSTANTS = providers.Constants()
        providers._get_local_constants = lambda: NO_CONSTANTS

# The suite tests the CPU backends; without this, backend=auto would use a GPU if there is one.
# `make test-gpu` sets VERBATIM_TEST_GPU and runs the GPU tests.
ON_GPU = os.environ.get("VERBATIM_TEST_GPU") == "1"
if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(trylast=True)  # after pytest has chosen the colours of its own output
def pytest_configure(config: pytest.Config) -> None:
    remove_user_settings(os.environ)
    # Tests open some hundreds of connections; macOS allows a process 256 files by default.
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < 1024 and (most >= 1024 or most == resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
    not_run.pytest_configure(config)  # the table of tests that did not run


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live as long as the process, so the garbage collector need not visit them;
    its visits are a quarter of the collection's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        # Few objects are left to the collector's counts, which would start a full collection every
        # few thousand objects: 24.1 s of CPU time became 22.3 s, with the same peak memory.
        gc.set_threshold(100_000, 20, 20)


@pytest.fixture(autouse=True)
def _same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a seed gets the same one in every run of a test. The seeds differ, and an
    answer that happens to be short is short in every run."""
    from verbatim.engine import request  # not by its path, which pytest would resolve per test

    monkeypatch.setattr(request, "new_seed", itertools.count(1).__next__)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file; the catalog downloads it into the cache once."""
    from verbatim.hub import catalog
    from verbatim.hub.model_list import list_models

    if ON_GPU and not list_models()[0].ready:  # machines with a GPU may have no network
        pytest.skip(
            "the default model is not in the cache; VERBATIM_CACHE names a directory that holds it"
        )
    return catalog.resolve(catalog.DEFAULT)


# ---- tests in a browser: one server on the fake model for the pages of the chat and of the Lens


@pytest.fixture(scope="session")
def gate(tmp_path_factory: pytest.TempPathFactory) -> StepGate:
    return StepGate(tmp_path_factory.mktemp("pages") / "gate")


@pytest.fixture(scope="session")
def live(gate: StepGate) -> Iterator[Live]:
    from live_server import Live

    # 64: the explanations of /v1 hold every candidate that the bars of a stage may show
    server = Live("--max-logprobs", "64", engine=f"pipeline,gate={gate.path}").wait_ready()
    yield server
    gate.open()
    assert server.stop() == 0, server.log_text()


@pytest.fixture(scope="module")  # Playwright runs an event loop, in which asyncio.run() fails
def browser() -> Iterator[Any]:
    with launched() as running:
        yield running
