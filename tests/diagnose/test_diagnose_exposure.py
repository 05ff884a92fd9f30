"""`verbatim drift`: the numbers are the model's own, the loop mark is the detector's."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faulty_models import tiny_directory

from cli_result import Call
from verbatim.base.defaults import catalog_defaults
from verbatim.cli.commands.drift import spark
from verbatim.diagnose.exposure import find_loop, measure_drift, smooth
from verbatim.engine.calls.llm import LLM
from verbatim.testing.fakes import fake_parts


def test_series_are_those_of_the_model() -> None:
    """The fake backend's logits are a function of the tokens so far: recompute everything."""
    loaded = fake_parts()
    llm = LLM.from_loaded(loaded, kv_blocks=400)
    given = list(b"a text that was written by a person")
    start = list(b"start")
    forced, greedy, sampled = measure_drift(llm, start, given, tokens=16, seed=3, context=8)
    assert forced.token_ids == tuple(given[8:24])
    assert len(greedy.token_ids) == len(sampled.token_ids) == 16
    for series, before in ((forced, given[:8]), (greedy, b"start"), (sampled, b"start")):
        known = list(before)
        for token, logprob, entropy in zip(
            series.token_ids, series.logprobs, series.entropies, strict=True
        ):
            row = logits(loaded.backend, known)
            probs = np.exp(row - row.max())
            probs /= probs.sum()
            assert logprob == pytest.approx(math.log(probs[token]), abs=1e-4)
            assert entropy == pytest.approx(float(-(probs * np.log(probs)).sum()), abs=1e-3)
            known.append(token)
    again = measure_drift(llm, start, given, tokens=16, seed=3, context=8)
    assert again == [forced, greedy, sampled]
    assert measure_drift(llm, start, given, tokens=16, seed=4)[2] != sampled


def test_the_models_recommended_filters_do_not_apply() -> None:
    plain = fake_parts()
    stated = catalog_defaults({"top_p": 0.05, "repetition_penalty": 1.8})
    series = [
        measure_drift(
            LLM.from_loaded(parts, kv_blocks=400), list(b"start"), list(b"a text"), tokens=16
        )
        for parts in (plain, replace(plain, defaults=stated))
    ]
    assert series[0] == series[1]


def logits(backend: object, tokens: list[int]) -> np.ndarray:
    from verbatim.testing.fakes import FakeBackend, mix

    assert isinstance(backend, FakeBackend)
    number = 1
    for token in tokens:
        number = mix(number, token)
    return backend.logits(number).astype(np.float64)


def test_the_loop_mark() -> None:
    assert find_loop(range(300)) == (None, 0)
    # The detector needs 64 tokens of the loop, the first 30 do not belong to it.
    assert find_loop([*range(1000, 1030), *[1, 2, 3] * 40]) == (94, 3)
    assert find_loop([5] * 70) == (64, 1)


def test_a_model_that_loops_is_marked(
    verbatim: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny chain of 320 tokens: greedy text never repeats within 200 tokens; a chain of two
    does."""
    from faulty_models import FAULTS, copy_of

    sound = tiny_directory(tmp_path / "tiny")
    broken = copy_of(sound, tmp_path / "broken")
    FAULTS["loops"][1](broken)
    words = ("drift", "cat", "--tokens", "150", "--json")
    found = verbatim(*words, "-m", str(sound)).json["series"]
    assert [s["loop_at"] for s in found] == [None, None, None]
    found = verbatim(*words, "-m", str(broken), "--plot", str(tmp_path / "x.svg")).json["series"]
    assert (found[1]["loop"], found[2]["loop"]) == (2, 2)
    assert found[1]["loop_at"] is not None
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")


def test_the_report_and_the_file(verbatim: Call, tmp_path: Path) -> None:
    text = tmp_path / "given.txt"
    text.write_text("the cat sat on the mat, and the dog didn't mind at all " * 3)
    result = verbatim("drift", "--file", str(text), "--prefix", "8", "--tokens", "24")
    assert result.code == 0
    assert "teacher-forced" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    found = verbatim(
        "drift", "the dog", "--file", str(text), "--prefix", "8", "--max-tokens", "24", "--json"
    ).json
    assert [len(s["tokens"]) for s in found["series"]] == [24, 24, 24]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("x", "--temperature", "0"), "temperature"),
        (("x", "--file", "no-such-file"), "cannot read"),
        (("x", "--plot", "x.pdf"), "plot"),
        (("x", "--max-tokens", "100000"), "--max-tokens: "),
    ],
)
def test_wrong_flags_are_refused(verbatim: Call, words: tuple[str, ...], hint: str) -> None:
    result = verbatim("drift", *words)
    assert result.code == 2
    assert hint in result.err


def test_smoothing_and_sparks() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0], 2) == (1.0, 2.0, 4.0, 6.0)
    assert spark((0.0, 1.0), 2, 0.0, 1.0) == "▁█"
    assert len(spark(tuple(range(100)), 20, 0, 99)) == 20
