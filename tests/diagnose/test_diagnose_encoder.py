"""`verbatim doctor MODEL` checks an encoder as one: no end of sequence, no chat template, but
pooling, text length and embeddings. `bench` and `verify` refuse it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cli_result import Call
from tiny_encoders import POSITIONS, write_encoder

CHECKS = ["special tokens", "text length", "pooling", "loader", "weights"]


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "nomic_bert"])
def test_a_sound_encoder_is_called_sound(verbatim: Call, tmp_path: Path, kind: str) -> None:
    result = verbatim("doctor", str(write_encoder(tmp_path / "m", kind)), "--json")
    assert result.code == 0
    assert [f for f in result.json["findings"] if f["state"] != "good"] == []
    assert [f["check"] for f in result.json["findings"]] == [*CHECKS, "embeddings"]


def test_a_sound_cross_encoder_is_called_sound(verbatim: Call, tmp_path: Path) -> None:
    model = str(write_encoder(tmp_path / "m", scores=True))
    result = verbatim("doctor", model, "--json")
    assert [f["check"] for f in result.json["findings"]] == [*CHECKS, "scores"]
    assert result.json["faults"] == 0
    assert "safetensors, encoder" in " ".join(verbatim("doctor", model, "--no-live").out.split())


def test_an_encoder_without_stated_pooling_is_sound_with_a_note(
    verbatim: Call, tmp_path: Path
) -> None:
    model = write_encoder(tmp_path / "m")
    (model / "modules.json").unlink()
    result = verbatim("doctor", str(model), "--json")
    assert result.code == 0
    notes = {f["check"]: f for f in result.json["findings"] if f["state"] == "note"}
    assert list(notes) == ["pooling"]
    assert "--pooling" in notes["pooling"]["remedy"]


def damaged(tmp_path: Path, change: str) -> Path:
    model = write_encoder(tmp_path / "m")
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("attention.self.query.weight"))
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, file)
    return model


@pytest.mark.parametrize(
    ("change", "text"), [("missing", "cannot be read"), ("nan", "NaN or infinite")]
)
def test_a_broken_encoder_is_found(verbatim: Call, tmp_path: Path, change: str, text: str) -> None:
    result = verbatim("doctor", str(damaged(tmp_path, change)), "--json")
    assert result.code == 1
    bad = [f for f in result.json["findings"] if f["state"] == "bad"]
    assert bad
    assert text in bad[0]["text"]
    assert {f["check"] for f in bad} <= {"files", "weights", "embeddings", "live"}


def test_a_tokenizer_that_promises_more_positions_is_a_note(verbatim: Call, tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "m")
    file = model / "tokenizer_config.json"
    before = file.read_text("utf-8") if file.is_file() else "{}"
    assert before.startswith("{")
    more = f'"model_max_length": {POSITIONS + 1}'
    file.write_text(f"{{{more}}}" if before.strip() == "{}" else f"{{{more}, {before[1:]}")
    result = verbatim("doctor", str(model), "--no-live", "--json")
    notes = [f["check"] for f in result.json["findings"] if f["state"] != "good"]
    assert (result.code, notes) == (0, ["text length"])


def test_a_flag_without_effect_on_an_encoder_is_refused(verbatim: Call, tmp_path: Path) -> None:
    result = verbatim("doctor", str(write_encoder(tmp_path / "m")), "--kv-type", "q8")
    assert result.code == 2
    assert result.err.startswith("verbatim: --kv-type: has no effect on an encoder")


@pytest.mark.parametrize(
    "args", [("verify",), ("bench", "--quick", "-m"), ("bench", "--speculate", "ngram", "-m")]
)
def test_bench_and_verify_refuse_an_encoder_and_name_no_other_flag(
    verbatim: Call, tmp_path: Path, args: tuple[str, ...]
) -> None:
    result = verbatim(*args, str(write_encoder(tmp_path / "m")))
    assert (result.code, result.out) == (2, "")
    assert "is an encoder and generates no text; `verbatim embed`" in result.err
    assert "leave it out" not in result.err
