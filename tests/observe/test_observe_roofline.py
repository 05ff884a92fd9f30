"""Roofline: limits of the machine, cost of a token, and the ceilings that follow from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from machine_limits import CARD, LIMITS
from verbatim.backend import open_backend
from verbatim.base.config import EngineConfig
from verbatim.diagnose.footprint import footprint_of_config
from verbatim.observe.roofline import (
    MachineLimits,
    cost_card,
    load_limits,
    measure_limits,
    native_probes,
    save_limits,
)
from verbatim.testing.tiny_models import TINY_CONFIGS, tiny_model


def test_ceilings_match_values_computed_by_hand() -> None:
    # 387 tokens/s: memory is the limit
    assert CARD.decode_ceiling(LIMITS, 0) == pytest.approx(37.9e9 / 98e6)
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
