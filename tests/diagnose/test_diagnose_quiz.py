"""Quiz and comparison: marked differences, the four methods, the files, the intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verbatim.base.errors import ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Choice, Finish, TokenLogprob
from verbatim.diagnose.comparison import differences
from verbatim.diagnose.quiz import Question, _judge, read_quiz, run_quiz
from verbatim.diagnose.statistics import distinct, repetition, wilson
from verbatim.engine.calls.llm import LLM

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


def test_the_example_quiz_is_valid() -> None:
    questions = read_quiz(str(QUIZ))
    assert len({q.text for q in questions}) == len(questions) >= 20
    assert all(q.choices and q.is_right(q.answer) for q in questions)
    assert json.loads(QUIZ.read_text().splitlines()[0])["question"] == questions[0].text


@pytest.mark.model
@pytest.mark.native
def test_the_table_in_the_docs_is_reproduced(default_model: Path) -> None:
    """The first three rows of docs/tools/compare.md: seeds make them the same on every machine."""
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


def test_answers_are_found_in_texts() -> None:
    choice = Question("Where?", "Rome", ("Paris", "Rome", "New York"))
    assert choice.prompt == "Where? Answer with one of these: Paris, Rome or New York."
    assert choice.is_right("It is Rome, not Paris.")
    assert not choice.is_right("Paris, and then Rome.")
    assert choice.extract("NEW  YORK!") == "New York"
    assert choice.extract("Romeo") is None
    number = Question("?", "1,200")
    assert number.is_right("first 3, then 1200.")
    assert not number.is_right("1200 or 7")
    assert not number.is_right("none")
    free = Question("?", "blue whale")
    assert free.is_right("The Blue Whale.\nMore text")
    assert not free.is_right("A whale that is blue")


def test_quiz_files(tmp_path: Path) -> None:
    lines = tmp_path / "q.jsonl"
    lines.write_text('{"question": "a?", "answer": 4}\n\n{"question": "b?", "answer": "x"}\n')
    table = tmp_path / "q.csv"
    table.write_text("question,answer,choices\na?,4,\nb?,x,x|y\n")
    assert read_quiz(str(lines)) == (Question("a?", "4"), Question("b?", "x"))
    assert read_quiz(str(table))[1].choices == ("x", "y")
    lines.write_text("What is 2 + 2?\n")
    with pytest.raises(ParameterError, match=r'line 1 is not JSON.*a line is \{"question"'):
        read_quiz(str(lines))


def test_statistics() -> None:
    assert wilson(0, 4) == (0.0, pytest.approx(0.4899, abs=1e-4))
    assert wilson(4, 4) == (pytest.approx(0.5101, abs=1e-4), pytest.approx(1.0))
    assert wilson(8, 10) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert repetition([1, 2, 3]) == 0.0
    assert repetition([7] * 10) == pytest.approx(6 / 7)
    assert distinct([[1, 2, 3], [1, 2, 4]]) == 3 / 4


def test_a_quiz_of_a_spreadsheet_keeps_its_line_breaks(tmp_path: Path) -> None:
    """A byte order mark, CRLF, and a quoted field of two lines, as spreadsheets write them."""
    file = tmp_path / "quiz.csv"
    file.write_bytes('\ufeffquestion,answer\r\n"one\ntwo\u2028three?",4\r\n'.encode())
    assert read_quiz(str(file)) == (Question("one\ntwo\u2028three?", "4"),)
    file = tmp_path / "quiz.jsonl"
    row = {"question": "one\u2028two?", "answer": "4"}
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n", "utf-8-sig")
    assert read_quiz(str(file)) == (Question("one\u2028two?", "4"),)


@pytest.mark.parametrize(
    ("name", "text"), [("q.csv", "question,answer\n" + "x" * 200_000), ("q.jsonl", "[" * 100_000)]
)
def test_a_quiz_that_its_parser_refuses_is_an_error_of_the_file(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ParameterError, match="is not"):
        read_quiz(str(tmp_path / name))
