"""The floors of `verbatim doctor`: what a trained model passes and a scrambled one does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from faulty_models import tiny_directory

from cli_result import Call
from verbatim.base.config import EngineConfig
from verbatim.diagnose.doctor.findings import Finding
from verbatim.diagnose.doctor.text_checks import (
    THETAS,
    Reading,
    check_copy,
    check_language,
    check_theta,
    read_texts,
    with_theta,
)
from verbatim.engine.calls.llm import LLM
from verbatim.engine.loading.load_engine import load_for_engine
from verbatim.files.gguf import read_gguf
from verbatim.files.gguf_write import write_gguf
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.load import load_model
from verbatim.model.spec import LayerSpec

Read = Callable[..., Reading]


def read(model: Path, theta: float = 1.0, context: int = 2048) -> Reading:
    config = EngineConfig(context=context)
    loaded = load_for_engine(model, config, change=partial(with_theta, factor=theta))
    with LLM.from_loaded(loaded, context=context) as llm:
        reading = read_texts(llm)
    assert reading is not None
    return reading


@pytest.fixture(scope="session")
def at_theta(default_model: Path) -> Callable[[float], Reading]:
    """The default model's reading with a multiple of its rope_theta."""
    return cache(lambda theta: read(default_model, theta))


# ---------------------------------------------------------------------------------------- default


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_passes_every_floor(at_theta: Callable[[float], Reading]) -> None:
    found = at_theta(1.0)
    assert check_language(found).state == "good"
    # with a margin: 3 nats per token in its best language, and a tenth of the cost the second time
    assert min(nats - floor for nats, floor in found.languages.values()) < -3
    assert found.second < 0.1 * found.first
    assert found.distance > 900
    assert [f.state for f in check_copy(found, [LayerSpec()] * 2)] == ["good"]
    others = {factor: at_theta(factor) for factor in THETAS}
    assert check_theta(found, others).state == "good"
    assert min(other.nats.mean() for other in others.values()) > found.nats.mean() + 0.1


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("factor", THETAS)
def test_a_default_model_with_another_rope_theta_is_found(
    at_theta: Callable[[float], Reading], factor: float
) -> None:
    """Text and copies hardly suffer: only the comparison with the right theta shows it."""
    wrong = at_theta(factor)
    assert check_language(wrong).state == "good"
    found = check_theta(wrong, {1 / factor: at_theta(1.0)})
    assert found.state == "bad"
    assert f"{1 / factor:g} times the rope_theta" in found.text


def reversed_vocabulary(source: Path, target: Path) -> None:
    file = read_gguf(source)
    tokens = list(file.metadata["tokenizer.ggml.tokens"])
    tokens[1000:60_000] = tokens[1000:60_000][::-1]
    meta = {**file.metadata, "tokenizer.ggml.tokens": tokens}
    write_gguf(target, meta, file.tensors.values(), types=file.types)


def permuted_head(source: Path, target: Path) -> None:
    file = read_gguf(source)
    embed = file.tensors["token_embd.weight"]
    rows = np.random.default_rng(0).permutation(embed.row_view()).reshape(-1)
    head = Tensor("output.weight", embed.type, embed.shape, rows)
    write_gguf(target, file.metadata, [*file.tensors.values(), head], types=file.types)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("damage", [reversed_vocabulary, permuted_head])
def test_a_default_model_with_scrambled_tokens_is_found(
    default_model: Path, tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    damage(default_model, tmp_path / "x.gguf")
    found = read(tmp_path / "x.gguf", context=512)
    assert check_language(found).state == "bad"
    # by a margin: one nat per token in the language that suffers least
    assert min(nats - floor for nats, floor in found.languages.values()) > 1


# ------------------------------------------------------------------------------------------ small


def test_random_weights_are_no_language_model(verbatim: Call, tiny: Path) -> None:
    result = verbatim("doctor", str(tiny), "--json")
    found = {f["check"]: f for f in result.json["findings"]}
    assert (result.code, found["language"]["state"]) == (1, "bad")
    assert "random weights" in found["language"]["remedy"]
    assert "rope" not in found  # not judged by a model that predicts nothing


def test_the_verdict_says_what_was_tested(verbatim: Call, tmp_path: Path) -> None:
    sound = tiny_directory(tmp_path / "tiny")
    last = verbatim("doctor", str(sound), "--no-live").out.splitlines()[-1]
    assert last == "no fault found by 11 checks, 0 notes; the model was not run (--no-live)"
    (sound / "config.json").write_text((sound / "config.json").read_text().replace(
        '"eos_token_id": 0', '"eos_token_id": 100'
    ))  # fmt: skip
    last = verbatim("doctor", str(sound), "--no-live").out.splitlines()[-1]
    assert last.startswith("1 fault found by 11 checks")


def test_another_theta_is_what_a_file_with_that_theta_gives(tiny: Path, tmp_path: Path) -> None:
    file = read_gguf(tiny)
    key = "llama.rope.freq_base"
    stated = float(file.metadata.get(key, 10_000.0))
    write_gguf(tmp_path / "x.gguf", {**file.metadata, key: stated * 10}, file.tensors.values())
    expected = load_model(tmp_path / "x.gguf").spec.layers
    found = with_theta(load_model(tiny), 10.0).spec.layers
    for a, b in zip(expected, found, strict=True):
        assert a.rope is not None
        assert b.rope is not None
        assert b.rope.inv_freq == pytest.approx(a.rope.inv_freq)


def reading(languages: dict[str, tuple[float, float]], second: float = 0.1) -> Reading:
    return Reading(np.ones(400), languages, dict.fromkeys(languages, 4.0), 3.0, second, 1000)


def test_one_language_suffices() -> None:
    def state(**nats: float) -> Finding:
        return check_language(reading({name: (value, 7.0) for name, value in nats.items()}))

    assert state(english=3.5, chinese=11.0).state == "good"
    assert state(english=5.0, chinese=11.0).state == "note"
    assert state(english=9.0, chinese=11.0).state == "bad"
    assert state(english=float("nan"), chinese=float("nan")).state == "bad"


def test_a_copy_is_expected_of_two_layers_that_see_it() -> None:
    full, near, state = LayerSpec(), LayerSpec(window=512), LayerSpec(mixer="delta")
    bad = reading({}, second=2.0)
    assert [f.state for f in check_copy(bad, [full, full, near])] == ["bad"]
    assert [f.state for f in check_copy(reading({}), [full, full, near])] == ["good"]
    assert check_copy(bad, [full, near, near, state]) == []


def test_another_theta_must_be_better_by_more_than_chance() -> None:
    r = np.random.default_rng(0)
    stated = reading({})

    def state(gain: float, spread: float) -> str:
        other = replace(stated, nats=stated.nats - gain - spread * r.normal(size=400))
        return check_theta(stated, {0.1: other, 10.0: stated}).state

    assert state(0.2, 0.3) == "bad"
    assert state(0.2, 5.0) == "good"  # chance
    assert state(0.02, 0.01) == "good"  # sure, and too little


def test_a_short_context_holds_no_texts(tiny: Path) -> None:
    with LLM(tiny, context=128) as llm:
        assert read_texts(llm) is None
