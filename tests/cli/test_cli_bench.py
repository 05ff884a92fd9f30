"""`verbatim bench`: the arithmetic of the limits, the alternating rounds, the plot, and the final
JSON line."""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_result import Call

from verbatim import LLM
from verbatim.backend import open_backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError
from verbatim.bench import measure
from verbatim.bench.crowd import Crowd, make_crowd, run_crowd
from verbatim.bench.rivals import client
from verbatim.cli import bench_report
from verbatim.diagnose.footprint import footprint_of_config
from verbatim.observe.plot import Chart, Line, draw, figure
from verbatim.observe.roofline import (
    CostCard,
    MachineLimits,
    cost_card,
    load_limits,
    measure_limits,
    native_probes,
    save_limits,
)
from verbatim.testing_models import TINY_CONFIGS, tiny_model

# Figures of a real machine and the default model: 37.9 GB/s, 638 GOP/s, 98 MB per token.
LIMITS = MachineLimits(37.9e9, threads=2, method="native", int8_ops=638e9)
CARD = CostCard(
    weight_bytes=98_000_000,
    kv_token_bytes=23_040,
    ops_token=270_000_000,
    ops_position=69_120,
    prompt_ops_token=212_000_000,
)


def test_ceilings_match_values_computed_by_hand() -> None:
    assert CARD.decode_ceiling(LIMITS, 0) == pytest.approx(
        37.9e9 / 98e6
    )  # 387 tokens/s: memory is the limit
    assert CARD.decode_ceiling(LIMITS, 2000) == pytest.approx(37.9e9 / (98e6 + 2000 * 23_040))
    # 64 sequences: 64 * 0.27 GOP take 27 ms, reading takes 2.6 ms: the integer units are the limit
    assert CARD.decode_ceiling(LIMITS, 0, 64) == pytest.approx(638e9 / 270e6)
    assert CARD.prefill_ceiling(LIMITS, 512) == pytest.approx(638e9 / (212e6 + 256 * 69_120))
    unknown = MachineLimits(37.9e9, threads=2, method="numpy")
    assert CARD.prefill_ceiling(unknown, 512) is None
    assert CARD.decode_ceiling(unknown, 0, 64) == pytest.approx(64 * 37.9e9 / 98e6)


def test_the_cost_card_counts_every_matrix() -> None:
    from verbatim.model.layout import is_quantisable, layout

    for family in ("llama", "gpt2", "qwen2", "lfm2", "gemma4"):
        spec = tiny_model(family).spec
        card = cost_card(spec, SimpleNamespace(weight_bytes=1, kv_token_bytes=2, expert_bytes=0))
        sizes = {
            name: shape[0] * shape[1]
            for name, shape in layout(spec).items()
            if is_quantisable(name)
        }
        head = spec.vocab * spec.hidden
        rows = ("embed", "head", "layer_inputs.embed")  # read row by row, or counted as `head`
        body = sum(size for name, size in sizes.items() if name not in rows)
        assert card.ops_token == 2 * (body + head), family
        assert card.prompt_ops_token == 2 * body
        dims = [spec.kv_shape(i)[1] for i, a in enumerate(spec.layers) if a.mixer == "attention"]
        assert card.ops_position == 4 * spec.heads * sum(dims)


def test_a_mixture_of_experts_costs_only_its_active_experts() -> None:

    info = SimpleNamespace(weight_bytes=1, kv_token_bytes=2, expert_bytes=0)
    two = cost_card(tiny_model("mixtral", num_experts_per_tok=2).spec, info)
    three = cost_card(tiny_model("mixtral", num_experts_per_tok=3).spec, info)
    spec = tiny_model("mixtral").spec
    assert (
        three.ops_token - two.ops_token == 2 * len(spec.layers) * 3 * spec.hidden * spec.expert_mlp
    )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3moe", "llama"])
def test_bench_and_plan_count_the_same_experts(backend: str, family: str) -> None:
    """The card of an opened backend and the footprint of the same shapes: one share of the experts
    at every batch. The backends count norms and small vectors differently: 3 % here."""
    model = tiny_model(family)
    card = cost_card(model.spec, open_backend(model, EngineConfig(backend=backend)).info)
    plan = footprint_of_config(TINY_CONFIGS[family], "config.json", quant="f32")
    assert bool(card.expert_bytes) == (family != "llama")
    assert card.expert_bytes == plan.expert_bytes
    for batch in (1, 3, 16, 1000):
        assert card.read_bytes(batch) == pytest.approx(plan.read_bytes(batch), rel=0.03)
        seconds = card.step_seconds(MachineLimits(1e9, 1, "native"), 0, batch)
        assert seconds == card.read_bytes(batch) / 1e9
    used = card.experts_used / card.experts if card.experts else 1.0
    assert card.read_bytes() == card.weight_bytes - (1 - used) * card.expert_bytes
    assert card.read_bytes(1000) == card.weight_bytes


def test_limits_are_measured_saved_and_loaded(tmp_path: Path) -> None:
    limits = measure_limits(2, megabytes=4, repeats=1)
    assert limits.read_bytes > 1e8  # 0.1 GB/s: no machine is slower
    assert limits.method == "numpy"
    assert limits.int8_ops is None
    assert load_limits(tmp_path) is None
    save_limits(tmp_path / "new", limits)
    assert load_limits(tmp_path / "new") == limits
    slower = replace(limits, read_bytes=limits.read_bytes / 2)
    save_limits(tmp_path / "new", slower)
    assert load_limits(tmp_path / "new") == limits, (
        "a busy minute does not lower the machine's limit"
    )
    for junk in ("", "[1]", '{"read_bytes": 1}', '{"other": 2}'):
        (tmp_path / "limits.json").write_text(junk)
        assert load_limits(tmp_path) is None


def test_the_best_of_several_passes_is_the_limit() -> None:
    speeds = iter([1e9, 5e9, 2e9, 1e9, 1e9, 1e9])
    ops = iter([7.0, 9.0, 8.0])
    limits = measure_limits(
        2,
        native_read=lambda threads, size: next(speeds),
        native_ops=lambda threads: next(ops),
        repeats=3,
    )
    assert limits.read_bytes == 5e9
    assert limits.int8_ops == 9.0
    assert limits.method == "native"


@pytest.mark.native
def test_the_native_probes_return_positive_rates() -> None:
    read, ops = native_probes()
    if read is None or ops is None:
        pytest.skip("the probe was not built")
    assert read(2, 64 << 20) > 1e8
    assert read(1, 1) == 0.0  # less than a page per thread: nothing to measure
    assert ops(1) == 0.0 or ops(1) > 1e8


class FakeRunner:
    """A runner that records its rounds."""

    def __init__(self, name: str, log: list[str], seconds: float = 1.0) -> None:
        self.name, self.log, self.seconds = name, log, seconds

    def prefill(self, tokens: int) -> float:
        self.log.append(self.name)
        return self.seconds

    def decode(self, context: int, steps: int) -> float:
        return self.prefill(context)

    def batch(self, sequences: int, context: int, steps: int) -> float:
        return self.prefill(context)


def test_rounds_alternate_and_the_first_is_a_warm_up() -> None:
    log: list[str] = []
    [job] = measure.jobs([100], [], [], 8, 512, 4096)
    row = measure.measure(job, [FakeRunner("verbatim", log, 0.5), FakeRunner("rival", log, 2.0)], 3)
    assert log == ["verbatim", "rival"] * 4
    assert row.rate("verbatim") == 200
    assert row.rate("rival") == 50


def test_a_gpu_has_two_rounds_to_warm_up() -> None:
    """The first compiles kernels, and the second captures the graph of the prompt's shape."""
    times = iter([0.8, 0.3, 0.002, 0.002])
    job = measure.Job("prefill", 100, 100, lambda _: next(times))
    row = measure.measure(job, [FakeRunner("verbatim", [])], 2, measure.GPU_WARM_UPS)
    assert row.seconds["verbatim"] == [0.002, 0.002]


def test_a_slow_measurement_is_not_repeated() -> None:
    log: list[str] = []
    [job] = measure.jobs([100], [], [], 8, 512, 4096)
    row = measure.measure(
        job, [FakeRunner("verbatim", log, 0.5), FakeRunner("rival", log, 60.0)], 3
    )
    assert log.count("rival") == 1
    assert row.seconds["rival"] == [60.0]
    assert len(row.seconds["verbatim"]) == 3


def test_jobs_fit_the_context_and_batches_start_together() -> None:
    table = measure.jobs([32, 5000], [32, 4090], [1, 32, 1000], 16, 512, 4096)
    assert [(j.kind, j.size) for j in table] == [
        ("prefill", 32),
        ("decode", 32),
        ("batch", 1),
        ("batch", 32),
        ("batch", 1000),
    ]
    assert table[3].tokens == 32 * 16


@pytest.mark.parametrize(("rate", "result"), [(380.0, False), (390.0, True)])
def test_a_share_above_the_limit_is_explained(
    rate: float, result: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit of the first row is 387 tokens/s; the second row stays below its limit."""
    from verbatim.cli import bench

    rows = [
        measure.Job("decode", 1, 10, lambda _: 10 / rate),
        measure.Job("decode", 2000, 10, lambda _: 1.0),
    ]
    monkeypatch.setattr(bench, "print_limits", lambda llm, quick: (LIMITS, CARD))
    monkeypatch.setattr(measure, "Ours", lambda llm: SimpleNamespace(name="verbatim"))
    monkeypatch.setattr(measure, "jobs", lambda **_: rows)
    info = SimpleNamespace(name="cpu")
    parts = SimpleNamespace(backend=SimpleNamespace(info=info))
    llm: Any = SimpleNamespace(config=SimpleNamespace(step_tokens=1), context=4096, parts=parts)
    bench._measure(llm, None, {}, 1, True)
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last.startswith("share above 100 % (decode at 1): the machine was slower while its limits")
        == result
    )


CHARTS = [
    Chart(
        "t",
        "x",
        "y",
        (
            Line("a <b> & c", ((32, 100.0), (512, 90.0), (2000, 50.0))),
            Line("limit", ((32, 387.0), (2000, 263.0)), dashed=True),
        ),
        log_x=True,
    ),
    Chart("one point", "x", "y", (Line("z", ((4, 0.0),)),)),
]


def test_a_plot_shows_every_curve_from_zero() -> None:
    left, right = figure(CHARTS).axes
    curves = {line.get_label(): line for axis in (left, right) for line in axis.get_lines()}
    assert list(curves) == ["a <b> & c", "limit", "z"]
    assert curves["a <b> & c"].get_xydata().tolist() == [[32, 100], [512, 90], [2000, 50]]
    assert [c.get_linestyle() for c in curves.values()] == ["-", "--", "-"], "a limit is dashed"
    assert [axis.get_ylim()[0] for axis in (left, right)] == [0, 0]
    assert (left.get_xscale(), right.get_xscale()) == ("log", "linear")
    assert (left.get_title(), left.get_xlabel(), left.get_ylabel()) == ("t", "x", "y")


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_plot_is_a_file_of_the_named_kind(tmp_path: Path, ending: str, start: bytes) -> None:
    path = tmp_path / f"p.{ending}"
    draw(CHARTS, str(path))
    assert path.read_bytes().startswith(start)


def test_a_plot_without_matplotlib_fails_before_any_measurement(
    verbatim: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = verbatim("bench", "--plot", str(tmp_path / "p.svg"), "--model", "no/such/model")
    assert result.code == 2
    assert result.err.startswith("verbatim: plot: ")
    assert "pip install '.[bench]'" in result.err


# ------------------------------------------------------------------------------------------ rivals

WORKER = """
import json, os, sys
for line in sys.stdin:
    ask = json.loads(line)
    if ask["op"] == "open": print(json.dumps({"version": "9", "load": 0.1}), flush=True)
    elif ask["op"] == "decode": print(json.dumps({"error": "RuntimeError: no"}), flush=True)
    elif ask["op"] == "batch": os.kill(os.getpid(), 9)
    else: print(json.dumps({"seconds": ask["tokens"] / 100}), flush=True)
"""


def test_a_rival_process_answers_in_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setitem(client.WORKERS, "pretend", (str(tmp_path / "worker.py"), "json", "json"))
    rival = client.Rival("pretend", client.find_python("pretend", None))
    rival.open("x", 2, 64)
    assert (rival.version, rival.file) == ("9", "x")
    assert rival.prefill(50) == 0.5
    with pytest.raises(BackendError, match="RuntimeError: no"):
        rival.decode(1, 1)
    with pytest.raises(BackendError, match="SIGKILL"):
        rival.batch(1, 1, 1)
    rival.close()


def test_a_missing_rival_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        client.WORKERS, "pretend", ("worker.py", "no_such_module_x", "no-such-dist")
    )
    with pytest.raises(BackendError, match="--rival-python"):
        client.find_python("pretend", None)
    with pytest.raises(BackendError, match="cannot be run"):
        client.find_python("pretend", "/no/such/python")


def test_rival_flags_without_against_are_rejected(verbatim: Call) -> None:
    for flag in ("--rival-python", "--rival-model"):
        result = verbatim("bench", flag, "x")
        assert result.code == 2
        assert flag[2:].replace("-", "_") in result.err.replace("-", "_")
        assert "--against" in result.err


def test_bench_of_a_gpu_has_no_rival_and_needs_one(verbatim: Call, tiny: Path) -> None:
    result = verbatim("bench", "--backend", "cuda", "--against", "llama.cpp")
    assert result.code == 2
    assert result.err.startswith("verbatim: against: ")


def test_the_limits_of_a_gpu_are_those_of_the_cuda_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = SimpleNamespace(name="H200", read_bytes=4.3e12, ops=790e12, memory=141e9)
    module = SimpleNamespace(measure_gpu=lambda: card)
    monkeypatch.setattr(bench_report, "import_module", lambda name: module)
    spec = tiny_model("llama").spec
    info = SimpleNamespace(
        name="cuda",
        detail="d",
        threads=1,
        weight_bytes=10**9,
        kv_token_bytes=10**5,
        expert_bytes=0,
    )
    parts = SimpleNamespace(backend=SimpleNamespace(info=info, spec=spec), name="m")
    limits, cost = bench_report.print_limits(SimpleNamespace(parts=parts), quick=True)  # type: ignore[arg-type]
    assert cost.decode_ceiling(limits, 0) == pytest.approx(4300)
    shown = capsys.readouterr().out
    assert shown.startswith("machine   H200: reads 4300 GB/s; 790 bfloat16 TFLOP/s; 141 GB")
    assert "ceiling   4300 tokens per second" in shown


def test_the_least_time_of_a_crowd_matches_values_computed_by_hand() -> None:
    crowd = Crowd([[1] * 10, [1] * 20], [4, 2])
    assert crowd.tokens == 6
    # contexts 10 to 13 and 20 to 21: 87 positions; four steps
    read = 87 * CARD.kv_token_bytes + 4 * CARD.weight_bytes
    slow_memory = replace(LIMITS, read_bytes=1e9)
    assert crowd.least_seconds(slow_memory, CARD) == pytest.approx(read / 1e9)
    # 30 prompt tokens, which attend to 50 + 200 positions, and 6 drawn ones
    ops = 30 * CARD.prompt_ops_token + 6 * CARD.ops_token + (87 + 250) * CARD.ops_position
    slow_units = replace(LIMITS, int8_ops=1e9)
    assert crowd.least_seconds(slow_units, CARD) == pytest.approx(ops / 1e9)


def test_a_crowd_fits_the_context_and_draws_all_its_tokens(tiny: Path) -> None:
    with LLM(str(tiny), context=40, backend="reference") as llm:
        crowd = make_crowd(llm, 3)
        assert crowd.prompts != make_crowd(llm, 3, seed=1).prompts
        assert crowd.lengths == make_crowd(llm, 3, seed=1).lengths
        assert all(
            len(p) + n < llm.context for p, n in zip(crowd.prompts, crowd.lengths, strict=True)
        )
        before = llm.stats()["output_tokens_total"]
        assert run_crowd(llm, crowd) > 0
        assert llm.stats()["output_tokens_total"] - before == crowd.tokens


# ------------------------------------------------------------------------------------- the command


def test_the_whole_bench_on_a_tiny_model(verbatim: Call, tmp_path: Path, tiny: Path) -> None:
    plot = tmp_path / "p.svg"
    sizes = ["--prefills", "8,16", "--contexts", "8", "--batches", "1,2", "--repeats", "1"]
    result = verbatim("bench", "--quick", *sizes, "--plot", str(plot))
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith("machine"), "the limit comes before the result"
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


@pytest.mark.torch
@pytest.mark.soak
def test_transformers_as_a_rival(tmp_path: Path) -> None:
    """The real worker, on a tiny checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    rival = client.Rival("transformers", client.find_python("transformers", sys.executable))
    rival.open(str(tmp_path), 1, 64)
    assert rival.prefill(8) > 0
    assert rival.decode(8, 2) > 0
    assert rival.batch(2, 4, 2) > 0
    rival.close()
