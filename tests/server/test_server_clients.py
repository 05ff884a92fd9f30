"""Third-party clients against a live server with the default model: chat, stream, error, cancel,
tools, JSON schema. See client_calls.py and .mjs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.server, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]
HERE = Path(__file__).parent
# clients may contact loopback only
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}
PYTHON = ("openai_sync", "openai_async", "anthropic", "ollama", "llm_command")
# they send their requests through the openai package, and take long to import
WRAPPERS = ("langchain", "instructor", "pydantic_ai", "litellm")


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **QUIET}
    return subprocess.run(words, capture_output=True, text=True, timeout=1700, cwd=cwd, env=env)


@pytest.fixture(scope="module")
def said(real: Any, client_python: Path) -> Callable[[tuple[str, ...]], dict[str, str]]:
    """What each of these Python clients printed: "ok", or its traceback. They run in one process,
    once."""

    @cache
    def outputs(names: tuple[str, ...]) -> dict[str, str]:
        done = run(str(client_python), str(HERE / "client_calls.py"), real.url, "m", *names)
        lines = [line.partition(": ") for line in done.stdout.splitlines()]
        return {"stderr": done.stderr[-4000:], **{name: text for name, _, text in lines}}

    return outputs


@pytest.mark.parametrize(
    "name", [*PYTHON, *[pytest.param(name, marks=pytest.mark.soak) for name in WRAPPERS]]
)
def test_python_client(said: Callable[[tuple[str, ...]], dict[str, str]], name: str) -> None:
    outputs = said(PYTHON if name in PYTHON else WRAPPERS)
    found = outputs.get(name, "the process ended before")
    assert found == "ok", found.replace("\\n", "\n") + outputs["stderr"]


@pytest.mark.parametrize("name", ["openai", "ai"])
def test_node_client(real: Any, client_node: Path, name: str) -> None:
    done = run("node", str(HERE / "client_calls.mjs"), name, real.url, "m", cwd=client_node)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip().endswith("ok")
