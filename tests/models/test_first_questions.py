"""What people ask first, answered by the default model at temperature 0: the cpu backend's answers
against the reference backend's float32.

first_questions.json was written before anything was measured. first_answers.json holds the
reference's answers, and the questions that cpu answers otherwise with each type of activations; its
bits are the same on every machine, so the lists are. To record the file again (minutes):
    python tests/models/test_first_questions.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verbatim import LLM, SamplingParams
from verbatim.hub.catalog import DEFAULT, resolve

HERE = Path(__file__).parent
FILE = HERE / "first_answers.json"
QUESTIONS: list[str] = json.loads((HERE / "first_questions.json").read_text("utf-8"))
TOKENS = 48
pytestmark = [pytest.mark.native, pytest.mark.model]


def answers(path: Path, questions: list[str] = QUESTIONS, **settings: Any) -> dict[str, str]:
    """Question -> answer."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    with LLM(path, context=512, speculate="off", **settings) as llm:
        done = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=TOKENS))
    return {q: c.text for q, c in zip(questions, done, strict=True)}


def different(
    path: Path, activations: str, expected: dict[str, str], questions: list[str] = QUESTIONS
) -> list[str]:
    """The questions whose answers on cpu differ from the reference's."""
    found = answers(path, questions, backend="cpu", activations=activations)
    return [q for q in questions if found[q] != expected[q]]


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("activations", "every"),
    [("int12", 3), pytest.param("int12", 1, marks=SOAK), pytest.param("int8", 1, marks=SOAK)],
)
def test_the_answers_that_differ_from_float32_are_the_recorded_ones(
    activations: str, every: int, default_model: Path
) -> None:
    """`make test` asks every third question, and those whose answers differ."""
    recorded = json.loads(FILE.read_text("utf-8"))
    wrong = recorded["different"][activations]
    asked = [q for number, q in enumerate(QUESTIONS) if number % every == 0 or q in wrong]
    assert different(default_model, activations, recorded["reference"], asked) == wrong


def test_the_capital_of_france_is_paris() -> None:
    recorded = json.loads(FILE.read_text("utf-8"))
    question = "What is the capital of France?"
    assert recorded["reference"][question] == "The capital of France is Paris."
    assert question not in recorded["different"]["int12"]


if __name__ == "__main__":
    model = resolve(DEFAULT)
    reference = answers(model, backend="reference")
    by_type = {name: different(model, name, reference) for name in ("int8", "int12")}
    record = {"reference": reference, "different": by_type}
    FILE.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
