"""The default model through the real command, as a new user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verbatim import LLM, SamplingParams

pytestmark = pytest.mark.model


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "verbatim", *words], capture_output=True, text=True
    )


def test_the_capital_of_france(default_model: Path) -> None:
    """The command of `make run`, with the prompt of the Makefile."""
    variables = dict(
        re.findall(
            r"^(\w+) \?= (.*)$", (Path(__file__).parents[2] / "Makefile").read_text(), re.MULTILINE
        )
    )
    done = run("run", variables["PROMPT"])
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    closing = done.stderr.strip().splitlines()[-1]
    assert "tokens per second" in closing


def test_json_has_the_documented_fields(default_model: Path) -> None:
    done = run("run", "--json", "--max-tokens", "5", "Hello")
    data = json.loads(done.stdout)
    assert set(data) >= {"text", "tokens", "finish_reason", "usage", "seed", "timings"}
    assert len(data["tokens"]) == data["usage"]["output_tokens"] == 5
    assert data["finish_reason"] == "length"


@pytest.mark.parametrize("raw", [[], pytest.param(["--raw"], marks=pytest.mark.soak)])
def test_a_character_without_a_token_causes_a_warning(default_model: Path, raw: list[str]) -> None:
    """The vocabulary of the default model has no token for U+0006."""
    done = run("run", *raw, "--max-tokens", "1", "a\x06b")
    assert "warning: prompt: the model's vocabulary cannot write U+0006" in done.stderr
    assert "cannot write" not in run("run", *raw, "--max-tokens", "1", "a b").stderr


def test_parse_special_reads_the_chat_format_of_the_model(default_model: Path) -> None:
    turn = "<|im_start|>user\nName the capital of France.<|im_end|>\n<|im_start|>assistant\n"
    asked = ["--raw", "--max-tokens", "12"]
    done = run("run", *asked, turn)
    assert "'<|im_start|>' was read as plain text; parse_special makes it the token" in done.stderr
    parsed = run("run", *asked, "--parse-special", turn)
    assert "Paris" in parsed.stdout
    assert "plain text" not in parsed.stderr
    assert "--parse-special: belongs to --raw" in run("run", "--parse-special", "hi").stderr
    with LLM("smollm2", context=64) as llm:
        ids = llm.encode(turn, parse_special=True)
        assert (ids[0], len(ids)) == (1, 15)
        assert llm.decode(ids) == "user\nName the capital of France.\nassistant\n"
        assert llm.generate(ids, SamplingParams(max_tokens=1)).warnings == ()
        assert (
            "parse_special"
            in llm.generate(llm.encode(turn), SamplingParams(max_tokens=1)).warnings[0]
        )


def test_models_lists_the_default_model_as_ready(default_model: Path) -> None:
    rows = json.loads(run("models", "--json").stdout)
    assert any(row["name"] == "smollm2" and row["ready"] for row in rows)
    assert run("pull", "-q").stdout.strip() == str(default_model)


def test_doctor_and_version() -> None:
    done = run("doctor", "--json")
    assert done.returncode == 0
    assert {row["what"] for row in json.loads(done.stdout)} >= {
        "python",
        "cpu kernels",
        "cache",
        "model",
    }
    version = run("version")
    assert version.stdout.startswith("verbatim ")
    assert "backend cpu:" in version.stdout
