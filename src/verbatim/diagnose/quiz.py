"""A quiz: questions with known answers, judged by rule. Greedy, sampling, best-of-n and majority
vote on the same questions.

In: a file (JSON Lines or CSV with the fields question, answer and, optionally, choices) and an LLM.
Out: a QuizResult with 95 % intervals. The samples of a question are one request with n choices and
logprobs, so that sampled, best-of-n and vote judge the same texts. Equal seeds give equal results.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from verbatim.base.defaults import NO_DEFAULTS, resolve
from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonObject
from verbatim.base.params import SamplingParams
from verbatim.base.records import Choice
from verbatim.diagnose.statistics import wilson
from verbatim.engine.step.failed_step import raise_error

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM

MAX_QUESTIONS = 10_000
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str
    choices: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """The question as it is asked. Choices are named, and one word is asked for."""
        if len(self.choices) < 2:
            return self.text
        listed = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        return f"{self.text} Answer with one of these: {listed}."

    def extract(self, text: str) -> str | None:
        """The answer in a text: the first of the choices that occurs; else the last number, if the
        answer is one; else the first line."""
        if self.choices:
            low = f" {_words(text)} "
            found = [(low.find(f" {_words(c)} "), c) for c in self.choices]
            at = [(place, c) for place, c in found if place >= 0]
            return min(at)[1] if at else None
        if _NUMBER.fullmatch(self.answer):
            numbers = _NUMBER.findall(text)
            return numbers[-1].replace(",", "") if numbers else None
        lines = text.strip().splitlines()
        return _words(lines[0]) if lines else None

    def is_right(self, text: str) -> bool:
        found = self.extract(text)
        if found is None:
            return False
        if self.choices or _NUMBER.fullmatch(self.answer):
            return found == self.answer.replace(",", "")
        return f" {_words(self.answer)} " in f" {found} "


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


# Questions that a small instruction model can answer, for `verbatim doctor`. The place of the right
# choice varies, so that naming the first one gains nothing.
BUILT_IN = tuple(
    Question(text, answer, tuple(choices.split()))
    for text, answer, choices in (
        ("What is the capital of France?", "Paris", "London Rome Paris Berlin Madrid"),
        ("What colour is the sky on a clear day?", "blue", "green red yellow blue black"),
        ("Which animal barks?", "dog", "cat cow bird fish dog"),
        ("On which planet do we live?", "Earth", "Mars Earth Venus Jupiter Saturn"),
        ("What do bees make?", "honey", "honey milk wool silk bread"),
        ("Is ice hot or cold?", "cold", "hot cold"),
        ("What is frozen water called?", "ice", "steam rain ice sand smoke"),
        ("Which language is spoken in Spain?", "Spanish", "French German Spanish Italian"),
        ("Is an elephant larger or smaller than a mouse?", "larger", "smaller larger"),
        ("Which season comes after winter?", "spring", "summer autumn spring"),
    )
)


def read_quiz(path: str) -> tuple[Question, ...]:
    """Questions from a JSON Lines file, or from a CSV file with a header."""
    try:
        text = Path(path).read_text("utf-8-sig")  # spreadsheets write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ParameterError("quiz", f"cannot read {path!r}: {why}") from None
    if path.endswith(".csv"):
        try:
            rows: list[object] = list(csv.DictReader(StringIO(text)))
        except csv.Error as error:
            raise ParameterError("quiz", f"{path!r} is not CSV: {error}") from None
    else:  # not splitlines(): a JSON string may contain U+2028
        rows = [
            _parsed(line, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()
        ]
    if not 0 < len(rows) <= MAX_QUESTIONS:
        raise ParameterError(
            "quiz", f"{path!r} has {len(rows)} questions; 1 to {MAX_QUESTIONS} are needed"
        )
    return tuple(_question(row, number) for number, row in enumerate(rows, 1))


def _parsed(line: str, number: int) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        wanted = 'a line is {"question": "2 + 2?", "answer": "4"}'
        raise ParameterError("quiz", f"line {number} is not JSON: {error}; {wanted}") from None


def _question(row: object, number: int) -> Question:
    if not isinstance(row, dict) or not row.get("question") or row.get("answer") in (None, ""):
        raise ParameterError("quiz", f"question {number} needs the fields question and answer")
    if unknown := set(row) - {"question", "answer", "choices"}:
        raise ParameterError(
            "quiz", f"question {number} has the field {min(map(str, unknown))!r:.40}; known are"
            " question, answer, choices"
        )  # fmt: skip
    choices = row.get("choices") or ()
    if isinstance(choices, str):  # a column of a CSV file
        choices = tuple(part.strip() for part in choices.split("|"))
    answer = str(row["answer"])
    if choices and answer not in choices:
        raise ParameterError(
            "quiz", f"question {number}: the answer {answer!r:.40} is not one of its choices"
        )
    return Question(str(row["question"]), answer, tuple(map(str, choices)))


# --------------------------------------------------------------------------------------- running


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Right answers of one method. The interval counts questions, not samples: the samples of one
    question are not independent."""

    method: str
    right: float
    questions: int

    @property
    def share(self) -> float:
        return self.right / self.questions

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.right, self.questions)


@dataclass(frozen=True, slots=True)
class QuizResult:
    methods: tuple[Accuracy, ...]  # greedy, sampled, best of n, majority of n
    samples: int
    rows: tuple[JsonObject, ...]  # per question: greedy text, samples, what each method chose


def run_quiz(
    llm: LLM,
    questions: Sequence[Question],
    *,
    samples: int,
    params: SamplingParams,
    seed: int = 0,
    plain: bool = False,
) -> QuizResult:
    """Ask every question once greedily and `samples` times with `params`; all in one batch.
    `plain`: without the filters and penalties that the model recommends."""
    greedy = SamplingParams(temperature=0, max_tokens=params.max_tokens)
    settings = [greedy] * len(questions)
    settings += [params.with_(n=samples, logprobs=0, seed=seed + i) for i in range(len(questions))]
    if plain:
        settings = [resolve(p, NO_DEFAULTS) for p in settings]
    done = llm.generate([prompt_ids(llm, q.prompt) for q in questions] * 2, settings)
    raise_error(done)
    first, sampled = done[: len(questions)], done[len(questions) :]
    rows = [
        _judge(question, one.text, many.choices)
        for question, one, many in zip(questions, first, sampled, strict=True)
    ]
    names = ("greedy", "sampled", f"best of {samples}", f"majority of {samples}")
    keys = ("greedy_right", "sampled_right", "best_right", "vote_right")
    methods = tuple(
        Accuracy(name, sum(float(row[key]) for row in rows), len(rows))
        for name, key in zip(names, keys, strict=True)
    )
    return QuizResult(methods, samples, tuple(rows))


def prompt_ids(llm: LLM, text: str) -> list[int]:
    """The prompt of one question: a chat turn, or the plain text for a model without a template."""
    if llm.has_template:
        return list(llm.encode_chat([{"role": "user", "content": text}]))
    ids: list[int] = llm.tokenizer.encode_prompt(text)
    return ids


def mean_logprob(choice: Choice) -> float:
    values = [entry.logprob for entry in choice.logprobs]
    return sum(values) / len(values) if values else 0.0


def _judge(question: Question, greedy: str, samples: Sequence[Choice]) -> JsonObject:
    best = max(samples, key=mean_logprob)  # a tie goes to the first
    votes = Counter(a for s in samples if (a := question.extract(s.text)) is not None)
    winner = votes.most_common(1)[0][0] if votes else None  # a tie goes to the first
    voted = next((s.text for s in samples if question.extract(s.text) == winner), "")
    right = [question.is_right(s.text) for s in samples]
    return {
        "question": question.text,
        "answer": question.answer,
        "greedy": greedy,
        "samples": [s.text for s in samples],
        "best": best.text,
        "vote": winner,
        "votes": dict(votes),
        "greedy_right": question.is_right(greedy),
        "sampled_right": sum(right) / len(right),
        "best_right": question.is_right(best.text),
        "vote_right": winner is not None and question.is_right(voted),
    }
