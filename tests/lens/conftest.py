"""Fixtures of the Lens tests: one server on the fake model, one browser."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))

from live_server import Live

from chromium import launched
from step_gate import StepGate


@pytest.fixture(scope="session")
def gate(tmp_path_factory: pytest.TempPathFactory) -> StepGate:
    return StepGate(tmp_path_factory.mktemp("lens") / "gate")


@pytest.fixture(scope="session")
def live(gate: StepGate) -> Iterator[Live]:
    # 64: the explanations of /v1 hold every candidate that the bars of a stage may show
    server = Live("--max-logprobs", "64", engine=f"pipeline,gate={gate.path}").wait_ready()
    yield server
    gate.open()
    assert server.stop() == 0, server.log_text()


@pytest.fixture(scope="module")  # Playwright runs an event loop, in which asyncio.run() fails
def browser() -> Iterator[Any]:
    with launched() as running:
        yield running
