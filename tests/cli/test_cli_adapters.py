"""`--adapter` of the commands, and `verbatim merge`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_result import Call
from verbatim.files.gguf_write import write_gguf
from verbatim.formats.tensor import Tensor
from verbatim.model.adapter import LowRank
from verbatim.testing.tiny_models import tiny_adapter

ASK = ("--max-tokens", "6", "--temperature", "0", "--json", "-q", "Hello")


@pytest.fixture(scope="session")
def adapter(tiny: Path) -> Path:
    """A GGUF adapter of the attention outputs of tiny.gguf."""
    from verbatim.model.loading.load import load_model

    made = tiny_adapter(load_model(tiny).spec, seed=3)
    loaded = {name: part for name, part in made.parts.items() if name.endswith("attn.o")}

    def tensors(name: str, part: LowRank) -> list[Tensor]:
        stem = f"blk.{name.split('.')[1]}.attn_output.weight"
        return [
            Tensor(f"{stem}.lora_{side}", "f32", t.shape, t.data)
            for side, t in (("a", part.a), ("b", part.b))
        ]

    file = tiny.parent / "adapter.gguf"
    metadata = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 16.0,
    }
    write_gguf(file, metadata, [t for name, part in loaded.items() for t in tensors(name, part)])
    return file


def test_run_replay_score_and_merge_use_the_adapter(
    verbatim: Call, adapter: Path, tiny: Path, tmp_path: Path
) -> None:
    base = json.loads(verbatim("run", *ASK).out)
    receipt = tmp_path / "receipt.json"
    load = ("--adapter", f"x={adapter}")
    named = json.loads(verbatim("run", *load, "--save-receipt", str(receipt), *ASK).out)
    assert named["fingerprint"] != base["fingerprint"]
    assert named["tokens"] != base["tokens"]

    assert verbatim("replay", *load, str(receipt)).out == "identical\n"
    missing = verbatim("replay", str(receipt))
    assert missing.code == 2
    assert "'x' is not a loaded adapter" in missing.err

    scores = {verbatim("score", *words, "some text").out for words in ((), load)}
    assert len(scores) == 2

    merged = tmp_path / "merged.gguf"
    assert verbatim("merge", str(tiny), str(adapter), "-o", str(merged)).code == 0
    again = json.loads(verbatim("run", "-m", str(merged), *ASK).out)
    assert again["tokens"] == named["tokens"]


def test_a_wrong_adapter_is_an_error_that_names_it(verbatim: Call, adapter: Path) -> None:
    gone = verbatim("run", "--adapter", "x=no/such", "hi")
    assert gone.code == 3
    assert "no such adapter" in gone.err
    several = verbatim("run", "--adapter", f"x={adapter}", "--lora", f"y={adapter}", "hi")
    assert several.code == 2
    assert "--use-adapter" in several.err
    answered = verbatim("run", "--enable-lora", "hi")
    assert "--adapter NAME=PATH" in answered.err
