"""`verbatim bench`: refused flags, the limit before the result, the plot, and the final JSON
line."""

from __future__ import annotations

import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_result import Call
from machine_limits import CARD, LIMITS
from verbatim.base.errors import VerbatimError
from verbatim.bench import crowd, measure
from verbatim.cli.lib import bench_report
from verbatim.engine.calls.llm import LLM
from verbatim.observe.roofline import load_limits
from verbatim.testing.fakes import fake_parts
from verbatim.testing.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("rate", "gain", "result"), [(380.0, 1.0, False), (390.0, 1.0, True), (390.0, 3.0, False)]
)
def test_a_share_above_the_limit_is_measured_again_and_explained(
    rate: float,
    gain: float,
    result: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The limit of the first row is 387 tokens/s; the second row stays below its limit. `gain`: of
    the second measurement."""
    from verbatim.cli.commands import bench

    rows = [
        measure.Job("decode", 1, 10, lambda _: 10 / rate),
        measure.Job("decode", 2000, 10, lambda _: 1.0),
    ]
    monkeypatch.setattr(bench, "print_limits", lambda llm, quick: (LIMITS, CARD))
    again = replace(LIMITS, read_bytes=LIMITS.read_bytes * gain)
    monkeypatch.setattr(bench_report, "refresh_limits", lambda *_: again)
    monkeypatch.setattr(measure, "Ours", lambda llm: SimpleNamespace(name="verbatim"))
    monkeypatch.setattr(measure, "jobs", lambda **_: rows)
    info = SimpleNamespace(name="cpu")
    loaded = SimpleNamespace(backend=SimpleNamespace(info=info))
    llm: Any = SimpleNamespace(config=SimpleNamespace(step_tokens=1), context=4096, loaded=loaded)
    bench._measure(llm, None, {}, 1, True)
    shown = capsys.readouterr()
    last = shown.out.splitlines()[-1]
    assert ("measured again" in shown.err) == (rate > 387)
    assert (
        last.startswith("share above 100 % (decode at 1): the machine was slower while its limits")
        == result
    )


def test_the_estimate_is_corrected_by_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    todo = [
        measure.Job("prefill", 512, 512, lambda _: 0.0),
        measure.Job("batch", 4, 64, lambda _: 0.0),
    ]
    prefill, batch = (bench_report.least_seconds(job, CARD, LIMITS) for job in todo)
    assert prefill == pytest.approx(512 / CARD.prefill_ceiling(LIMITS, 512))  # type: ignore[operator]
    assert batch > 16 * CARD.step_seconds(LIMITS, 32, 4), "16 steps, and the prompts' prefill"
    clock = iter([100.0, 100.0 + 2 * 1000 * prefill / bench_report.USUAL_SHARE])
    monkeypatch.setattr(bench_report.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr("verbatim.cli.lib.terminal.use_colour", lambda stream: True)
    progress = bench_report.BenchProgress(todo, CARD, LIMITS, 1000)
    for job in todo:
        progress.start(job)
        progress.clear()
    shown = capsys.readouterr().err
    slower = 2 * 1000 * batch / bench_report.USUAL_SHARE / 60  # twice the estimate, in minutes
    assert "1 of 2: prefill 512, estimated: " in shown
    assert f"2 of 2: sequences 4, estimated: {slower:.0f} min left" in shown


def test_a_plot_without_matplotlib_fails_before_any_measurement(
    verbatim: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = verbatim("bench", "--plot", str(tmp_path / "p.svg"), "--model", "no/such/model")
    assert result.code == 2
    assert result.err.startswith("verbatim: --plot: ")
    assert "pip install '.[bench]'" in result.err


def test_rival_flags_without_against_are_rejected(verbatim: Call) -> None:
    for flag in ("--rival-python", "--rival-model"):
        result = verbatim("bench", flag, "x")
        assert result.code == 2
        assert flag[2:].replace("-", "_") in result.err.replace("-", "_")
        assert "--against" in result.err


def test_a_rival_is_refused_where_it_does_not_run(verbatim: Call) -> None:
    result = verbatim("bench", "--backend", "cuda", "--against", "llama.cpp")
    assert result.code == 2
    assert result.err.startswith("verbatim: --against: llama.cpp runs on the CPU here")
    result = verbatim("bench", "--against", "vllm")
    assert result.code == 2
    assert result.err.startswith("verbatim: --against: vllm needs --backend cuda")


def test_the_crowd_of_a_gpu_stands_beside_that_of_a_rival(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from verbatim.cli.commands import bench

    asked = []

    class FakeRival:
        def crowd(self, prompts: list[int], lengths: list[int]) -> float:
            asked.append((prompts, lengths))
            return 2.0

    llm: Any = LLM.from_loaded(fake_parts(), kv_blocks=64)
    theirs = bench._rival_crowd(llm, FakeRival(), quick=True)  # type: ignore[arg-type]
    requests = crowd.make_crowd(llm, 32)
    assert asked[1] == ([len(p) for p in requests.prompts], requests.lengths)
    assert asked[0][1] == requests.lengths
    assert asked[0][0] != asked[1][0]
    monkeypatch.setattr(crowd, "run_crowd", lambda *_: 1.0)
    monkeypatch.setattr(crowd.Crowd, "least_seconds", lambda *_: 0.5)
    out = bench._crowd(llm, None, None, True, theirs)  # type: ignore[arg-type]
    assert out["rival_rate"] == requests.tokens / 2
    assert capsys.readouterr().out.rstrip().endswith("2.00x")


def test_a_second_process_that_fails_has_no_cold_start(tmp_path: Path) -> None:
    with pytest.raises(VerbatimError, match=r"no answer .*3\); verbatim run Hi .*none\.gguf"):
        measure.cold_start(str(tmp_path / "none.gguf"), (), 1)


def test_the_limits_of_a_gpu_are_those_of_the_cuda_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = SimpleNamespace(name="H200", read_bytes=4.3e12, ops=790e12, memory=141e9)
    module = SimpleNamespace(measure_gpu=lambda: card)
    monkeypatch.setattr(bench_report, "import_module", lambda name: module)
    spec = tiny_model("llama").spec
    info = SimpleNamespace(
        name="cuda", detail="d", threads=1, weight_bytes=10**9, kv_token_bytes=10**5, expert_bytes=0
    )
    loaded = SimpleNamespace(backend=SimpleNamespace(info=info, spec=spec), name="m")
    limits, cost = bench_report.print_limits(SimpleNamespace(loaded=loaded), quick=True)  # type: ignore[arg-type]
    assert cost.decode_ceiling(limits, 0) == pytest.approx(4300)
    shown = capsys.readouterr().out
    assert shown.startswith("machine   H200: reads 4300 GB/s; 790 bfloat16 TFLOP/s; 141 GB")
    assert "ceiling   4300 tokens per second" in shown


def test_the_whole_bench_on_a_tiny_model(verbatim: Call, tmp_path: Path, tiny: Path) -> None:
    plot = tmp_path / "p.svg"
    sizes = ["--prefills", "8,16", "--contexts", "8", "--batches", "1,2", "--repeats", "1"]
    result = verbatim("bench", "--quick", *sizes, "--plot", str(plot))
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith("machine"), "the limit comes before the result"
    assert re.search(r"^5 measurements, estimated: \d+ (s|min)$", result.err, re.M)
    assert any(line.startswith("ceiling") for line in lines[:4])
    data: dict[str, Any] = json.loads(lines[-1])
    assert [(row["kind"], row["size"]) for row in data["rows"]] == [
        ("prefill", 8),
        ("prefill", 16),
        ("decode", 8),
        ("batch", 1),
        ("batch", 2),
    ]
    assert all(row["rate"] > 0 for row in data["rows"])
    assert data["cold_start_s"] > 0
    assert data["first_token_s"] > 0
    assert data["limits"]["read_bytes"] > 0
    ElementTree.fromstring(plot.read_text())
    assert load_limits(Path(os.environ["VERBATIM_CACHE"])) is not None, (
        "run prints the limit from now on"
    )
