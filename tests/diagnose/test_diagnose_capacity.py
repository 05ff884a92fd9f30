"""`verbatim plan`: memory, roofline bounds and cost from a config alone, against numbers worked out
by hand and against the limits that `verbatim bench` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_result import Call
from verbatim.base.errors import ParameterError
from verbatim.diagnose.capacity import Plan, make_plan
from verbatim.diagnose.devices import DEVICES, device_of, parse_device
from verbatim.diagnose.footprint import Footprint, footprint_of_config, read_footprint
from verbatim.observe.roofline import MachineLimits, cost_card, load_limits, save_limits
from verbatim.testing.tiny_models import TINY_CONFIGS

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


def published(name: str, **changes: Any) -> Footprint:
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    return footprint_of_config(config, f"{name}.json")


def counted(name: str) -> Footprint:
    return read_footprint(name, quant=None, kv_type="f16", resolve=Path)


def plan(footprint: Footprint, device: str = "a100", **traffic: Any) -> Plan:
    return make_plan(footprint, parse_device(device), **traffic)


def test_the_kv_cache_of_70b_is_1_34_gb() -> None:
    found = plan(published("llama-3-70b"), "h100", tp=8, context=4096)
    assert found.kv_sequence == 2 * 80 * 8 * 128 * 4096 * 2 == 1_342_177_280
    assert plan(published("llama-3-70b"), "h100", tp=16).kv_sequence == 2 * 1_342_177_280


def test_the_states_of_recurrent_layers_count_with_the_kv_cache() -> None:
    """In three delta nets: two blocks of 4 heads of 8 x 8, of 16 updates of 56 values, and of 16
    inputs of 64 channels."""
    found = plan(footprint_of_config(TINY_CONFIGS["qwen35"], "tiny"), context=32, output=8)
    states = 2 * 3 * 4 * (4 * 8 * 8 + 16 * 56 + 16 * 64)
    assert found.footprint.state_bytes == states == 52_224
    assert found.kv_sequence == 2 * 2 * 16 * 2 * 32 + states
    assert found.room_sequences is not None
    memory = found.footprint.weight_bytes + found.room_sequences * found.kv_sequence
    assert found.device.memory
    assert 0.8 < memory / found.device.memory < 1


def test_a_denoising_step_computes_a_block_or_the_whole_canvas() -> None:
    for family, rows, drawn in (("llada", 64, 16), ("sdar", 4, 4)):
        found = plan(footprint_of_config(TINY_CONFIGS[family], "tiny"), context=64, output=16)
        body, seen = found.footprint.prompt_ops_token, found.footprint.attention_ops(64)
        head = found.footprint.ops_token - body
        assert found.denoising is not None
        assert found.denoising.ops == rows * (body + seen) + drawn * head
    plain = plan(footprint_of_config(TINY_CONFIGS["qwen3"], "tiny"), context=64, output=16)
    assert plain.denoising is None


@pytest.mark.parametrize(
    ("count", "device", "milliseconds"),
    [("7B", "2039,312", 6.9), ("7B", "600,125", 23.3), ("70B", "3350,989", 41.8)],
)
def test_a_parameter_count_gives_the_time_to_read_it(
    count: str, device: str, milliseconds: float
) -> None:
    found = plan(counted(count), device)
    assert found.decode.seconds * 1e3 == pytest.approx(milliseconds, abs=0.05)
    assert found.decode.limit == "memory"
    assert found.footprint.weight_bytes == (14e9 if count == "7B" else 140e9)


@pytest.mark.parametrize(
    ("name", "device", "least"),
    [("mistral-7b", "a100", 6.9), ("mistral-7b", "a10", 23.0), ("llama-3-70b", "h100", 41.0)],
)
def test_published_configs_stay_above_the_same_bounds(name: str, device: str, least: float) -> None:
    found = plan(published(name), device)
    assert least <= found.decode_empty.seconds * 1e3 <= least * 1.04


def test_parameters_of_published_models() -> None:
    sizes = {name: published(name).params / 1e9 for name in ("llama-2-7b", "mistral-7b")}
    assert sizes == {
        "llama-2-7b": pytest.approx(6.738, abs=1e-3),
        "mistral-7b": pytest.approx(7.242, abs=1e-3),
    }
    assert published("llama-3-70b").params / 1e9 == pytest.approx(70.554, abs=1e-3)
    assert published("mixtral-8x7b").params / 1e9 == pytest.approx(46.703, abs=1e-3)


def test_mha_gqa_and_mqa_cost_as_many_bytes_as_their_key_heads() -> None:
    sizes = {
        heads: plan(published("llama-2-7b", num_key_value_heads=heads), context=4096).kv_sequence
        for heads in (32, 8, 1)
    }
    assert sizes[32] == 2 * 32 * 32 * 128 * 4096 * 2 == 2**31
    assert sizes[8] * 4 == sizes[1] * 32 == sizes[32]
    shapes = [published("llama-2-7b", num_key_value_heads=heads).shape for heads in (32, 8, 1)]
    assert [s.rpartition("(")[2] for s in shapes] == ["MHA)", "GQA)", "MQA)"]


def test_a_window_bounds_the_kv_cache() -> None:
    mistral = published("mistral-7b")
    assert mistral.kv_bytes(32768) == mistral.kv_bytes(4096) == 4096 * mistral.kv_bytes(1)
    # A prompt of 3 windows: the first window is a triangle, the rest a band.
    assert mistral.prompt_attention_ops(12288) == pytest.approx(
        32 * mistral.attention[0].ops_position * (4096**2 / 2 + 2 * 4096**2)
    )


def test_layers_with_other_heads_and_layers_that_share_keys_are_counted_one_by_one() -> None:
    """Gemma 4: four layers, of which the last two read the keys and values of the first two. The
    sliding one has two key heads of 8, the full one two of 16."""
    found = footprint_of_config(TINY_CONFIGS["gemma4"], "config.json", quant="f16")
    sliding, full = 2 * 2 * 8 * 2, 2 * 2 * 16 * 2
    assert found.kv_bytes(1) == sliding + full
    assert found.kv_bytes(100) == 12 * sliding + 100 * full
    assert found.attention_ops(100) == 2 * 4 * 4 * (8 * 12 + 16 * 100)
    assert "over 2 key heads of 8 or 2 key heads of 16 (GQA)" in found.shape


def test_quantised_weights_and_caches() -> None:
    config = json.loads((CONFIGS / "llama-2-7b.json").read_text())
    half, four = (
        footprint_of_config(config, "x.json", quant=quant).weight_bytes for quant in (None, "q4_0")
    )
    assert four / half == pytest.approx(18 / 32 / 2, rel=1e-3)  # 4.5 bits against 16
    eight = footprint_of_config(config, "x.json", kv_type="q8")
    assert eight.kv_bytes(1) == 32 * 2 * 32 * (128 + 4)
    assert footprint_of_config(config, "x.json", kv_type="fp8").kv_bytes(1) == 32 * 2 * 32 * 128


def test_a_gpu_reads_the_weights_that_the_cuda_backend_keeps() -> None:
    """Blocks, and where they fit also float16 copies, which decoding does not read; float16 of
    types without kernels."""
    config = json.loads((CONFIGS / "mistral-7b.json").read_text())
    half = footprint_of_config(config, "x.json").on_gpu(80e9)
    assert (half.kept, half.step_bytes) == (
        "",
        pytest.approx(2 * (half.params - 32000 * 4096), 1e-3),
    )
    eight = footprint_of_config(config, "x.json", quant="q8_0")
    large, small = eight.on_gpu(80e9), eight.on_gpu(24e9)
    assert large.kept == "in blocks and in float16"
    assert large.step_bytes == small.step_bytes
    assert (small.kept, small.step_bytes) == ("in blocks", pytest.approx(eight.step_bytes, 0.01))
    buffer = 2 * 2 * 14336 * 4096  # for gate and up
    assert small.weight_bytes == pytest.approx(eight.weight_bytes + buffer, 0.01)
    four = footprint_of_config(config, "x.json", quant="q4_0")
    both = four.on_gpu(80e9)
    assert both.kept == "in blocks and in float16"
    assert both.weight_bytes == pytest.approx(four.weight_bytes + half.weight_bytes, 0.01)
    assert both.step_bytes == pytest.approx(four.step_bytes, 0.01)
    three = footprint_of_config(config, "x.json", quant="q3_k").on_gpu(80e9)
    assert (three.kept, three.step_bytes) == ("unpacked to float16", half.step_bytes)
    single = footprint_of_config(config, "x.json", quant="f32").on_gpu(80e9)
    assert (single.kept, single.step_bytes) == ("in float16", half.step_bytes)


def test_decode_turns_compute_bound_where_reading_and_computing_take_equally_long() -> None:
    """7B, no KV cache: 14 GB / 2,039 GB/s = 6.87 ms; 14 GFLOP / 312 TFLOPS = 44.9 µs: batch 153."""
    found = plan(counted("7B"))
    assert found.compute_bound == 154 > 312e12 / 2039e9 > 153
    assert plan(counted("7B"), batch=153).decode.limit == "memory"
    assert plan(counted("7B"), batch=154).decode.limit == "compute"
    # Multi-head attention at 4,096: a sequence's cache takes 23 times longer to read than its work.
    assert plan(published("llama-2-7b"), context=4096).compute_bound is None


def test_more_sequences_touch_more_experts() -> None:
    mixtral = published("mixtral-8x7b")
    shares = [(mixtral.read_bytes(b) - mixtral.step_bytes) / mixtral.expert_bytes for b in (1, 2)]
    assert shares == [pytest.approx(2 / 8), pytest.approx(1 - (6 / 8) ** 2)]


def test_price_and_share_of_decode() -> None:
    found = plan(counted("7B"), context=2000, output=1000, batch=10, price=3.6)
    # 14 GFLOP per prompt token at 312 TFLOPS; 6.87 ms per step of ten tokens.
    assert found.input_price == pytest.approx(0.001 * 14e9 / 312e12 * 1e6, rel=1e-3)
    assert found.output_price == pytest.approx(0.001 * 14e9 / 2039e9 / 10 * 1e6)
    prefill, decode = 10 * 1000 * 14e9 / 312e12, 1000 * 14e9 / 2039e9
    assert found.decode_share == pytest.approx(decode / (prefill + decode), rel=1e-3)
    assert plan(counted("7B")).input_price is None


def test_what_fits() -> None:
    one = plan(published("llama-3-70b"), "h100", context=4096)
    assert one.fits is False
    assert one.room_sequences == 0
    four = plan(published("llama-3-70b"), "h100", tp=4, context=4096)
    assert four.fits is True
    left = 0.9 * 320e9 - four.footprint.weight_bytes
    assert four.room_sequences == int(left // 1_342_177_280) == 109
    assert plan(published("llama-3-70b"), "3350,989").fits is None


@pytest.mark.parametrize("family", sorted(TINY_CONFIGS))
def test_every_family_can_be_planned(family: str) -> None:
    found = footprint_of_config(TINY_CONFIGS[family], "config.json", quant="f32")
    from verbatim.testing.tiny_models import tiny_model

    tensors = tiny_model(family).weights
    assert found.weight_bytes == sum(tensor.data.nbytes for tensor in tensors.values())
    spec = tiny_model(family).spec
    assert found.kv_bytes(1) == 2 * spec.kv_token_values  # two bytes per value


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"context": 100_000}, "context"),
        ({"output": 4096, "context": 4096}, "output"),
        ({"batch": 0}, "batch"),
        ({"tp": 0}, "tp"),
    ],
)
def test_impossible_traffic_is_refused(changes: dict[str, int], param: str) -> None:
    with pytest.raises(ParameterError) as raised:
        plan(published("llama-2-7b"), **changes)
    assert raised.value.param == param


@pytest.mark.parametrize("text", ["h1000", "1,2,3,4", "0,1", "nan,1", "inf,1", ""])
def test_an_unknown_device_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="h200"):
        parse_device(text)


# ------------------------------------------------------------------------------ the command line


def test_the_command_prints_and_exits_by_what_fits(verbatim: Call) -> None:
    config = str(CONFIGS / "llama-3-70b.json")
    result = verbatim("plan", config, "--device", "h100", "--price", "2")
    assert result.code == 1
    assert "DOES NOT FIT" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    result = verbatim("plan", config, "--device", "h100", "--tp", "8", "--json")
    assert result.code == 0
    assert result.json["kv_sequence"] == 1_342_177_280
    assert result.json["decode"]["limit"] == "memory"
    assert verbatim("plan", "no/such-model", "--device", "h100").code == 3
    assert verbatim("plan", config, "--device", "h100", "--quant", "q9").code == 2
    none = verbatim("plan", "0B", "--device", "h100")
    assert none.code == 2
    assert "0B has no parameters" in none.err
    shown = verbatim("plan", config, "--device", "h100", "--tp", "8", "--quant", "q8_0").out
    assert "in blocks and in float16 on the GPU" in " ".join(shown.split())


@pytest.mark.model
def test_this_device_agrees_with_the_limits_that_bench_prints(
    verbatim: Call, default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bench` builds its limits from the opened engine, `plan` from the file's header. They differ
    by the norms, which the engine does not count: far below the stated margin of 1 %."""
    from verbatim.diagnose import this_device
    from verbatim.engine.calls.llm import LLM

    monkeypatch.setattr(this_device.gpu, "present", lambda: False)
    limits = MachineLimits(37.9e9, threads=2, method="native", int8_ops=638e9, when=1.0)
    save_limits(tmp_path / "cache", limits)
    with LLM(default_model) as llm:
        card = cost_card(llm.loaded.backend.spec, llm.loaded.backend.info)
    for context, batch in ((32, 1), (512, 1), (2000, 1), (32, 16)):
        found = verbatim(
            "plan", str(default_model), "--context", str(context), "--batch", str(batch), "--json"
        ).json
        ceiling = card.decode_ceiling(limits, context, batch)
        assert found["output_tokens_per_second"] == pytest.approx(ceiling, rel=0.01)
        prompt = found["prompt"]
        rate = prompt / found["prefill"]["seconds"]
        ceiling = card.prefill_ceiling(limits, prompt)
        if prompt > 100:  # a short prompt pays for its LM head, which bench leaves out
            assert rate == pytest.approx(ceiling, rel=0.01)


def test_this_device_names_the_day_of_its_limits(
    verbatim: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verbatim.diagnose import this_device

    monkeypatch.setattr(this_device.gpu, "present", lambda: False)
    limits = MachineLimits(37.9e9, threads=2, method="native", when=1794870455.25)
    save_limits(tmp_path / "cache", limits)
    text = verbatim("plan", "1B", "--device", "this").out
    assert "this machine, 2 threads (measured 2026-11-16, native)" in text
    assert "estimated" in text
    assert "at least" not in text
    assert "at most" not in text, "a busy machine measures less than it can do"
    assert device_of(MachineLimits(1.0, 1, "numpy"), None).kind == "measured, numpy"


def test_this_device_measures_when_bench_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verbatim.diagnose import this_device
    from verbatim.observe import roofline

    monkeypatch.setattr(this_device.gpu, "present", lambda: False)
    monkeypatch.setattr(roofline, "native_probes", lambda: (lambda t, n: 5e9, lambda t: 7e9))
    found = this_device.this_device(tmp_path)
    assert (found.read_bytes, found.ops, found.unit) == (5e9, 7e9, "int8 OPS")
    monkeypatch.setattr(roofline, "native_probes", lambda: (lambda t, n: 4e9, lambda t: 9e9))
    assert this_device.this_device(tmp_path) == found  # saved, as bench does
    roofline.mark_beaten(tmp_path)  # by a run: measured again, and the best of both is kept
    again = this_device.this_device(tmp_path)
    assert (again.read_bytes, again.ops) == (5e9, 9e9)
    assert not load_limits(tmp_path).beaten  # type: ignore[union-attr]
    assert device_of(MachineLimits(1.0, 1, "numpy"), None).ridge is None
    assert DEVICES["h100"].ridge == pytest.approx(295.2, abs=0.1)


def test_a_rank_has_its_rows_and_gathers_what_the_others_computed() -> None:
    """Two layers of the llama shape, counted by hand: hidden 32, 4 query and 2 key heads of 8,
    MLP 64, vocabulary 256, tied; a norm has 32 values."""
    config = TINY_CONFIGS["llama"] | {"vocab_size": 256, "tie_word_embeddings": True}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"intermediate_size": 64, "num_hidden_layers": 2}
    found = plan(
        footprint_of_config(config | sizes, "tiny", quant="f32"), tp=2, context=64, output=8
    )
    assert found.ranks is not None
    matrices = 2 * 32 * (32 + 16 + 16 + 32 + 3 * 64) + 256 * 32
    assert found.ranks.weight_bytes == 4 * (matrices / 2 + 5 * 32)
    assert found.ranks.heads == (2, 2)
    row = 32 + 2 * (32 + 32 + 64 + 32) + 256  # embedding, then four gathers per layer, logits
    assert found.ranks.gathered_bytes == 4 * row // 2
    whole = plan(published("llama-3-70b"), tp=3, context=64, output=8)  # 64 query, 8 key heads
    assert whole.ranks is not None
    assert whole.ranks.heads == (16, 24, 24)
