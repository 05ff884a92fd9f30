"""Third-party clients against a live server with the default model: chat, stream, error, cancel,
tools, JSON schema. See client_calls.py and .mjs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.server, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "DO_NOT_TRACK": "1",
}  # clients may contact loopback only
PYTHON = [
    "openai_sync",
    "openai_async",
    "anthropic",
    "ollama",
    "llm_command",
    "langchain",
    "instructor",
    "pydantic_ai",
    "litellm",
]


def run(*words: str, cwd: Path | None = None) -> None:
    env = {**os.environ, **QUIET}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip().endswith("ok")


@pytest.mark.parametrize("name", PYTHON)
def test_python_client(real: Any, client_python: Path, name: str) -> None:
    run(str(client_python), str(HERE / "client_calls.py"), name, real.url, "m")


@pytest.mark.parametrize("name", ["openai", "ai"])
def test_node_client(real: Any, client_node: Path, name: str) -> None:
    run("node", str(HERE / "client_calls.mjs"), name, real.url, "m", cwd=client_node)
