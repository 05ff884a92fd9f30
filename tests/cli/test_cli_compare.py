"""`verbatim compare`: settings side by side, marked differences, the quiz and its four methods."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from cli_result import Call
from rich.cells import cell_len

from verbatim.base.records import Choice, Finish, TokenLogprob
from verbatim.cli.compare import read_settings
from verbatim.diagnose.comparison import differences
from verbatim.diagnose.quiz import Question, _judge

QUIZ = Path(__file__).parents[2] / "examples" / "quiz.jsonl"


def test_differences_are_words_and_the_spaces_between_them() -> None:
    assert differences("same text", "same text") == [("same text", False)]
    assert differences("a red cat sat", "a blue dog sat") == [
        ("a ", False),
        ("blue dog", True),
        (" sat", False),
    ]
    assert differences("", "new") == [("new", True)]
    for other in ("", "x", " a  b\nc ", "one two three"):
        assert "".join(part for part, _ in differences("one\ntwo c", other)) == other


def test_settings_change_parameters_engines_and_models() -> None:
    found = read_settings(("top-p=0.5,seed=3", "kv_type=q8,threads=2", "model=x.gguf"), {})
    assert (found[0].params.top_p, found[0].params.seed) == (0.5, 3)
    assert found[1].engine == {"kv_type": "q8", "threads": 2}
    assert found[2].model == "x.gguf"
    assert found[0].params.on_loop == "stop"  # the command line's default
    assert "temperature" not in found[0].params.to_mapping()  # the model's own applies
    assert read_settings(("num_beams=2",), {})[0].params.temperature == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("-s", "warmth=1", "x"), "warmth"),
        (("-s", "temperature", "x"), "NAME=VALUE"),
        (("-s", "threads=two", "x"), "threads"),
        (("-s", "temperature=hot", "x"), "temperature"),
        (("--temperature", "0.3", "x"), "-s temperature=0.3"),
        (("--seed", "4", "x"), "the default columns"),
        ((), "prompt"),
        (("x", "--quiz", "q.jsonl"), "quiz"),
        (("--quiz", "no-such-file.jsonl"), "cannot read"),
        (("x", "--plot", "x.pdf"), "plot"),
    ],
)
def test_wrong_settings_are_refused_before_a_model_is_opened(
    verbatim: Call, words: tuple[str, ...], hint: str
) -> None:
    result = verbatim("compare", *words)
    assert result.code == 2
    assert hint in result.err


def test_compare_prints_texts_and_a_table(verbatim: Call, tmp_path: Path) -> None:
    words = ("compare", "the cat", "the dog", "--raw", "--max-tokens", "24", "--plot")
    settings = (
        "-s",
        "temperature=0",
        "-s",
        "temperature=0,speculate=off",
        "-s",
        "seed=1,temperature=1",
    )
    result = verbatim(*words, str(tmp_path / "x.svg"), *settings)
    assert result.code == 0
    assert "2/2" in result.out
    assert "0/2" in result.out
    assert "⟨" in result.out
    assert max(cell_len(line) for line in result.out.split("\n")) <= 80
    assert result.out.replace("\n", "").isprintable()  # the random model writes control characters
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")


def test_speculation_and_batching_change_nothing_and_a_seed_does(verbatim: Call) -> None:
    words = ("compare", "the cat", "the dog", "--raw", "--max-tokens", "24", "--json")
    settings = (
        "temperature=1,seed=4",
        "temperature=1,seed=4,speculate=off",
        "temperature=1,seed=5",
    )
    flags = [word for text in settings for word in ("-s", text)]
    first, again = (verbatim(*words, *flags).json["settings"] for _ in range(2))
    assert first[0]["texts"] == first[1]["texts"] != first[2]["texts"]
    assert [s["same"] for s in first] == [2, 2, 0]
    assert [s["logprob"] for s in first] == [s["logprob"] for s in again]
    assert first[0]["tokens"] == 48
    alone = verbatim("run", *words[1:2], *words[3:], "--temperature", "1", "--seed", "4").json
    assert alone["text"] == first[0]["texts"][0]


# ------------------------------------------------------------------------------------------- quiz


def sample(text: str, logprob: float) -> Choice:
    return Choice(0, text, (1,), Finish("stop"), logprobs=(TokenLogprob(1, logprob),))


def test_the_four_methods_judge_the_same_samples() -> None:
    question = Question("?", "red", ("red", "blue"))
    samples = [sample("red", -3.0), sample("blue", -1.0), sample("red!", -2.0), sample("?", -0.5)]
    found = _judge(question, "blue", samples)
    assert found["greedy_right"] is False
    assert found["sampled_right"] == 0.5
    assert found["best"] == "?"
    assert found["best_right"] is False
    assert found["votes"] == {"red": 2, "blue": 1}
    assert found["vote_right"] is True
    tie = _judge(question, "", [sample("blue", 0.0), sample("red", 0.0)])
    assert tie["vote"] == "blue"  # of equals, the first
    nothing = _judge(question, "", [sample("", 0.0)])
    assert nothing["vote"] is None
    assert nothing["vote_right"] is False


def test_the_quiz_is_reproducible_and_adds_up(verbatim: Call, tmp_path: Path) -> None:
    words = ("compare", "--quiz", str(QUIZ), "--samples", "3", "--max-tokens", "6", "--json")
    result = verbatim(*words, "--plot", str(tmp_path / "q.svg"))
    assert result.code == 0
    assert verbatim(*words).out == result.out
    assert verbatim(*words, "--seed", "1").out != result.out
    found = result.json
    assert [m["method"] for m in found["methods"]] == [
        "greedy",
        "sampled",
        "best of 3",
        "majority of 3",
    ]
    assert found["questions"] == len(found["rows"]) == len(QUIZ.read_text().splitlines())
    assert all(len(row["samples"]) == 3 for row in found["rows"])
    for method in found["methods"]:
        low, high = method["interval"]
        assert low <= method["share"] <= high
    assert (tmp_path / "q.svg").stat().st_size > 1000
    text = verbatim(*words[:-1]).out
    assert "95 % interval" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("not json\n", "line 1"),
        ('{"question": "a?"}\n', "question 1"),
        ('{"question": "a?", "answer": "b", "colour": 1}\n', "colour"),
        ('{"question": "a?", "answer": "b", "choices": ["c", "d"]}\n', "not one of its choices"),
        ("", "0 questions"),
    ],
)
def test_a_broken_quiz_is_refused(verbatim: Call, tmp_path: Path, text: str, hint: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    result = verbatim("compare", "--quiz", str(tmp_path / "q.jsonl"))
    assert result.code == 2
    assert hint in result.err


def test_the_example_quiz_is_valid() -> None:
    from verbatim.diagnose.quiz import read_quiz

    questions = read_quiz(str(QUIZ))
    assert len({q.text for q in questions}) == len(questions) >= 20
    assert all(q.choices and q.is_right(q.answer) for q in questions)
    assert json.loads(QUIZ.read_text().splitlines()[0])["question"] == questions[0].text


@pytest.mark.model
@pytest.mark.native
def test_the_table_in_the_docs_is_reproduced(default_model: Path) -> None:
    """The first three rows of docs/tools/compare.md: seeds make them the same on every machine."""
    from verbatim.base.params import SamplingParams
    from verbatim.diagnose.quiz import read_quiz, run_quiz
    from verbatim.engine.llm import LLM

    pytest.importorskip("verbatim.backend.cpu._native", reason="the native kernels are not built")
    params = SamplingParams(temperature=1.0, max_tokens=16)
    with LLM(default_model, backend="cpu", context=256) as llm:
        result = run_quiz(llm, read_quiz(str(QUIZ))[:3], samples=8, params=params)
    words = {True: "right", False: "wrong"}
    text = (QUIZ.parents[1] / "docs" / "tools" / "compare.md").read_text()
    for row in result.rows:
        [line] = [line for line in text.splitlines() if line.startswith(row["question"])]
        assert line.split()[-4:] == [
            words[row["greedy_right"]],
            f"{row['sampled_right']:.0%}",
            words[row["best_right"]],
            words[row["vote_right"]],
        ]
