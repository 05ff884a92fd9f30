"""`verbatim doctor MODEL` finds each of 14 planted faults in copies of a tiny model and of the
default model, and calls the sound ones sound."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_models import FAULTS, LIVE, copy_of, default_directory, tiny_directory

from cli_result import Call
from verbatim.base.defaults import catalog_defaults, resolve
from verbatim.base.errors import BackendError
from verbatim.base.params import SamplingParams
from verbatim.base.records import TokenLogprob
from verbatim.diagnose.doctor import live_checks
from verbatim.diagnose.doctor.file_checks import check_files
from verbatim.diagnose.doctor.findings import Finding, is_sound
from verbatim.diagnose.doctor.kv_cost import KvCost, TextScores, cost_findings, divergence, kv_cost
from verbatim.diagnose.doctor.live_checks import OPEN, check_loops, check_turns
from verbatim.diagnose.doctor.model_files import read_files
from verbatim.diagnose.doctor.weight_checks import check_weights, not_finite
from verbatim.diagnose.quiz import BUILT_IN
from verbatim.engine.calls.llm import LLM
from verbatim.files.gguf import read_gguf
from verbatim.files.gguf_write import write_gguf
from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor
from verbatim.testing.fakes import fake_parts


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("sound") / "tiny")


@pytest.fixture(scope="session")
def sound_default(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return default_directory(default_model, tmp_path_factory.mktemp("sound") / "default")


def complaints(findings: list[Finding]) -> dict[str, Finding]:
    return {f.check: f for f in findings if f.state != "good"}


def check_all(path: Path) -> list[Finding]:
    files = read_files(path)
    return [*check_files(files), *check_weights(files)]


# ------------------------------------------------------------------------------------------ tiny


def test_the_sound_tiny_model_is_called_sound(verbatim: Call, sound: Path) -> None:
    result = verbatim("doctor", str(sound), "--json")
    assert result.code == 0
    assert (result.json["faults"], result.json["live"]) == (0, True)
    assert [f for f in result.json["findings"] if f["state"] != "good"] == []
    checks = {f["check"] for f in result.json["findings"]}
    assert {check for check, _ in FAULTS.values()} <= checks
    assert verbatim("doctor", str(sound), "--json").out == result.out  # the same in every run
    text = verbatim("doctor", str(sound)).out
    assert "no fault found by 18 checks, 0 notes" in text
    kv = [f for f in result.json["findings"] if f["check"] == "kv cache"]
    assert [f["text"].split(":")[0] for f in kv] == ["kv_type q8", "kv_type fp8"]
    assert all("% saved" in f["evidence"] and "(0% saved" not in f["evidence"] for f in kv)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_the_tiny_model_is_found(
    verbatim: Call, sound: Path, tmp_path: Path, fault: str
) -> None:
    check, plant = FAULTS[fault]
    broken = copy_of(sound, tmp_path / "broken")
    plant(broken)
    result = verbatim("doctor", str(broken), "--json")
    found = {f["check"]: f for f in result.json["findings"] if f["state"] != "good"}
    assert check in found, found
    assert found[check]["evidence"]
    assert found[check]["remedy"]
    notes = fault in ("pad equal to eos", "template missing", "generation config against defaults")
    assert found[check]["state"] == ("note" if notes else "bad")
    assert result.code == (0 if notes else 1)
    assert (result.json["faults"] == 0) is notes


def test_there_are_fourteen_faults() -> None:
    assert len(FAULTS) == 14


def test_a_model_that_cannot_be_loaded_is_reported_and_not_run(
    verbatim: Call, sound: Path, tmp_path: Path
) -> None:
    broken = copy_of(sound, tmp_path / "broken")
    (broken / "rest.safetensors").unlink()
    result = verbatim("doctor", str(broken))
    assert result.code == 1
    assert "weights cannot be read" in " ".join(result.out.split())
    assert verbatim("doctor", str(tmp_path / "nothing.gguf")).code == 3


def test_no_live_checks_only_the_files(verbatim: Call, sound: Path) -> None:
    checks = [
        f["check"] for f in verbatim("doctor", str(sound), "--no-live", "--json").json["findings"]
    ]
    assert "weights" in checks
    assert "loops" not in checks
    assert "kv cache" not in checks


# ---------------------------------------------------------------------------------------- default

WEIGHTS = ("tied head", "weights")  # what check_weights() reports; the rest is check_files()


@pytest.mark.model
def test_the_default_model_is_called_sound(default_model: Path, sound_default: Path) -> None:
    assert complaints(check_all(sound_default)) == {}
    # The published file declares its end of turn as padding, too: a note, not a fault.
    published = check_all(default_model)
    assert is_sound(published)
    assert set(complaints(published)) == {"pad"}


# One fault of each file; the tiny model has all of them in `make test`.
BY_FILE = (
    "eos is not the end of turn",
    "template differs",
    "special token outside the vocabulary",
    "tied with its own head",
    "nan weights",
)


@pytest.mark.model
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=[] if name in BY_FILE else [pytest.mark.soak])
        for name in FAULTS
        if name not in LIVE
    ],
)
def test_each_fault_of_the_default_model_is_found(
    sound_default: Path, tmp_path: Path, fault: str
) -> None:
    check, plant = FAULTS[fault]
    broken = copy_of(sound_default, tmp_path / "broken")
    plant(broken)
    files = read_files(broken)
    assert check in complaints(check_weights(files) if check in WEIGHTS else check_files(files))


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_ends_its_turns_and_does_not_loop(default_model: Path) -> None:
    with LLM(default_model, context=512) as llm:
        assert complaints([*check_turns(llm), *check_loops(llm, prompts=OPEN[:2])]) == {}


def changed(gguf: Path, target: Path, change: dict[str, np.ndarray]) -> Path:
    """A copy of a GGUF file with other bytes in some tensors."""
    source = read_gguf(gguf)
    tensors = [
        Tensor(t.name, t.type, t.shape, change.get(name, t.data))
        for name, t in source.tensors.items()
    ]
    write_gguf(target, source.metadata, tensors, types=source.types)
    return target


@pytest.mark.model
@pytest.mark.slow
def test_a_default_model_whose_end_was_never_trained(
    default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_checks, "TURN_TOKENS", 24)  # none ends, so fewer show the same
    embed = read_gguf(default_model).tensors["token_embd.weight"]
    rows = embed.row_view().copy()
    rows[2] = 0
    path = changed(default_model, tmp_path / "x.gguf", {"token_embd.weight": rows.reshape(-1)})
    with LLM(path, context=512) as llm:
        assert [f.state for f in check_turns(llm)] == ["bad"]


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.slow
def test_a_default_model_without_attention_loops(
    default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_checks, "LOOP_TOKENS", 80)  # it repeats from the start
    norms = {
        name: np.zeros_like(tensor.data)
        for name, tensor in read_gguf(default_model).tensors.items()
        if name.endswith("attn_norm.weight")
    }
    with LLM(changed(default_model, tmp_path / "x.gguf", norms), context=512) as llm:
        assert [f.state for f in check_loops(llm, prompts=OPEN[:1])] == ["bad"]


def test_live_checks_judge_the_model_without_its_recommended_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stated = catalog_defaults({"top_p": 0.05, "repetition_penalty": 1.8})
    asked: list[SamplingParams] = []
    with LLM.from_loaded(replace(fake_parts(), defaults=stated), kv_blocks=400) as llm:
        generate = llm.generate

        def spy(prompts: Any, params: list[SamplingParams]) -> Any:
            asked.extend(params)
            return generate(prompts, params)

        monkeypatch.setattr(llm, "generate", spy)
        found = {f.check for f in live_checks.check_live(llm)}
    assert {"loops", "quiz"} <= found
    assert len(asked) == 2 * (len(OPEN) + len(BUILT_IN)) + (8 if "turn ends" in found else 0)
    assert [p for p in asked if resolve(p, stated) != p] == []


def test_live_checks_fail_on_a_model_that_computes_nan() -> None:
    """An answer that ended with an error is neither a wrong answer nor one without a loop."""
    with LLM.from_loaded(fake_parts(broken=ord("e")), kv_blocks=400) as llm:
        for check in (live_checks.check_loops, live_checks.check_quiz):
            with pytest.raises(BackendError, match="not finite"):
                check(llm)


# --------------------------------------------------------------------------------- GGUF, details


def test_added_tokens_outside_the_vocabulary_are_found(sound: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / name
        shutil.copytree(sound, path)
        data = json.loads((path / name).read_text())
        if name == "tokenizer.json":
            data["added_tokens"].append({**data["added_tokens"][0], "id": 99999, "content": "<x>"})
        else:
            data["added_tokens_decoder"] = {"99999": {"content": "<x>"}}
        (path / name).write_text(json.dumps(data))
        finding = complaints(check_all(path))["special tokens"]
        assert f"'<x>' of {name} is 99999" in finding.text


def test_faults_of_a_gguf_header(tiny: Path, tmp_path: Path) -> None:
    source = read_gguf(tiny)

    def complaints_with(**changes: object) -> dict[str, Finding]:
        meta = dict(source.metadata)
        for name, value in changes.items():
            key = name.replace("__", ".")
            meta[key] = value
            if value is None:
                del meta[key]
        write_gguf(tmp_path / "x.gguf", meta, source.tensors.values())
        return complaints(check_all(tmp_path / "x.gguf"))

    assert complaints_with() == {}
    assert "eos" in complaints_with(tokenizer__ggml__eos_token_id=None)
    assert "eos" in complaints_with(tokenizer__ggml__eos_token_id=100)
    assert "special tokens" in complaints_with(tokenizer__ggml__bos_token_id=9999)
    assert "template" in complaints_with(tokenizer__chat_template=None)
    assert "template" in complaints_with(tokenizer__chat_template__default="{{ messages }}")
    assert "generation" in complaints_with(general__sampling__temp=-0.25)
    assert "pad" in complaints_with(tokenizer__ggml__padding_token_id=0)
    scaled = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 2.0,
        "llama__rope__scaling__original_context_length": 512,
    }
    assert "context" in complaints_with(**scaled)
    both = {"llama__rope__scale_linear": 2.0, "llama__rope__scaling__factor": 4.0}
    assert "rope keys" in complaints_with(**both)


@pytest.mark.parametrize("kind", sorted(BLOCKS))
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_one_bad_value_or_scale_is_found_in_every_type(kind: str, value: float) -> None:
    values, size = BLOCKS[kind]
    data = np.zeros(4 * size, np.uint8)
    tensor = Tensor("x", kind, (4, values), data)
    assert not_finite(tensor) == 0
    if kind == "bf16":
        raw = np.array([value], np.float32).view(np.uint8)[2:]
    else:
        raw = np.array([value], np.float32 if kind in ("f32", "q8_k") else np.float16).view(
            np.uint8
        )
    scale = {"q2_k": 80, "q3_k": 108, "q6_k": 208, "tq1_0": 52, "tq2_0": 64}.get(kind, 0)
    if kind == "iq1_m":  # the nibbles of the scale are spread over four words
        bits = int(raw.view(np.uint16)[0])
        raw, scale = np.array([bits << 12, bits << 8, bits << 4, bits], np.uint64), 48
        raw = (raw & np.uint64(0xF000)).astype(np.uint16).view(np.uint8)
    if kind == "mxfp4":  # a power of two has no NaN; the largest one overflows
        raw = np.array([255, 0xFF], np.uint8)
    data[size + scale : size + scale + raw.size] = raw
    assert not_finite(tensor) == 1
    assert not np.isfinite(tensor.to_f32()).all()


# --------------------------------------------------------------------------------------- KV cache


def test_the_divergence_of_two_lists_of_log_probabilities() -> None:
    """Equal to the KL divergence where the lists hold every token; below it where they are cut."""
    r = np.random.default_rng(3)
    for spread in (0.01, 0.3, 2.0):
        p = r.normal(size=50) * 3
        q = p + r.normal(size=50) * spread
        p, q = (x - np.log(np.exp(x).sum()) for x in (p, q))
        exact = float((np.exp(p) * (p - q)).sum())
        lists = [sorted(enumerate(x.tolist()), key=lambda pair: -pair[1]) for x in (p, q)]
        assert divergence(*lists) == pytest.approx(exact, rel=1e-6)
        assert 0 < divergence(lists[0][:20], lists[1][:20]) <= exact + 1e-9
    assert divergence(lists[0], lists[0]) == 0


def scores(kv_type: str, size: int, rows: list[list[float]]) -> TextScores:
    found = [tuple(sorted(enumerate(np.log(row).tolist()), key=lambda x: -x[1])) for row in rows]
    return TextScores(kv_type, size, tuple(TokenLogprob(0, 0.0, row) for row in found))


def test_a_costly_kv_type_gets_a_note() -> None:
    f16 = scores("f16", 200, [[0.6, 0.4], [0.5, 0.5], [0.9, 0.1], [0.7, 0.3]])
    near = kv_cost(f16, scores("q8", 106, [[0.61, 0.39], [0.5, 0.5], [0.9, 0.1], [0.7, 0.3]]))
    far = kv_cost(f16, scores("fp8", 100, [[0.1, 0.9], [0.5, 0.5], [0.9, 0.1], [0.7, 0.3]]))
    assert (near.agreement, far.agreement) == (1.0, 0.75)
    assert far.kl == pytest.approx(far.worst / 4)
    good, costly = cost_findings([near, far])
    assert (good.state, costly.state) == ("good", "note")
    assert "100 bytes per token instead of 200 (50% saved)" in costly.evidence
    assert costly.remedy == "--kv-type q8 costs less"
    assert cost_findings([far])[0].remedy == "keep f16"


def cost(kv_type: str, kl: float, worst: float, size: int) -> KvCost:
    return KvCost(kv_type, 383, kl, worst, 0.95, size, 200)


def test_a_kv_type_is_judged_by_its_worst_position_and_by_the_other_types() -> None:
    # Qwen2.5-Coder-0.5B, whose keys have outliers: q8 costs more than fp8, in more bytes
    q8, fp8 = cost_findings([cost("q8", 0.0174, 1.19, 106), cost("fp8", 0.0130, 0.09, 100)])
    assert (q8.state, fp8.state) == ("note", "good")
    assert q8.remedy == "--kv-type fp8 costs less"
    # the same without a bad position: more bytes have to buy something
    q8, fp8 = cost_findings([cost("q8", 0.0174, 0.19, 106), cost("fp8", 0.0130, 0.09, 100)])
    assert (q8.state, q8.remedy, fp8.state) == ("note", "--kv-type fp8 costs less", "good")
    # the default model: q8 costs less than fp8 and takes more
    found = cost_findings([cost("q8", 0.0038, 0.03, 106), cost("fp8", 0.0096, 0.07, 100)])
    assert [f.state for f in found] == ["good", "good"]
    # neither is better: one has the smaller mean, the other the smaller maximum
    found = cost_findings([cost("q8", 0.03, 0.1, 106), cost("fp8", 0.01, 0.9, 100)])
    assert [f.remedy for f in found] == ["keep f16", "keep f16"]


def test_findings_survive_a_file_that_breaks_a_check(sound: Path, tmp_path: Path) -> None:
    broken = copy_of(sound, tmp_path / "broken")
    words = json.loads((broken / "tokenizer_config.json").read_text())
    (broken / "tokenizer_config.json").unlink()
    words["chat_template"] = "{{ raise_exception('never') }}"
    (broken / "tokenizer_config.json").write_text(json.dumps(words))
    found = complaints(check_all(broken))
    assert found["end of turn"].state == "bad"
    assert "never" in found["end of turn"].evidence
