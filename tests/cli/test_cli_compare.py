"""`verbatim compare`: settings side by side, marked differences, the quiz and its four methods."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.cells import cell_len

from cli_result import Call
from verbatim.cli.commands import compare
from verbatim.cli.commands.compare import read_settings

QUIZ = Path(__file__).parents[2] / "examples" / "quiz.jsonl"


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
        (("x", "--vary", "-s", "seed=1"), "--vary: has its own columns"),
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


def test_vary_repeats_the_circumstances_of_verify(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("compare", "the cat", "the dog", "--raw", "--vary", "--max-tokens", "12", "--seed=4")
    result = verbatim(*words, "--temperature=1", "--json")
    assert result.code == 0
    settings = result.json["settings"]
    names = {setting["name"].partition("=")[0] for setting in settings}
    varied = {"max_running", "step_tokens", "prefix_cache", "threads", "speculate"}
    assert names == varied | {"tensor_parallel"}
    assert {setting["same"] for setting in settings} == {2}
    monkeypatch.setattr(compare, "_varied", lambda *_: ("seed=1", "threads=1,seed=1", "seed=2"))
    result = verbatim(*words[:-1], "--temperature=1")
    assert result.code == 1
    texts, _, summary = result.out.partition("Summary")
    assert "threads=1" not in texts, "the texts that are the same are not repeated"
    assert "seed=2" in texts
    assert "threads=1" in summary


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
