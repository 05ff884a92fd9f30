"""bench/random_model.py: its file loads, with the tokenizer of a whole GGUF file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from verbatim.base.errors import ModelError
from verbatim.base.params import SamplingParams
from verbatim.engine.calls.llm import LLM
from verbatim.files.gguf import read_gguf
from verbatim.files.gguf_write import write_gguf


@pytest.fixture
def random_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "random_model", Path(__file__).parents[2] / "bench" / "random_model.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(module.SHAPES, "135m", (2, 64, 128, 4, 2))
    return module


def test_words_are_taken_from_a_whole_file_which_may_have_no_tensors(
    random_model: ModuleType, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, words, out = read_gguf(tiny), tmp_path / "words.gguf", tmp_path / "out.gguf"
    write_gguf(words, source.metadata, [], types=source.types)
    monkeypatch.setattr(
        sys, "argv", ["x", str(out), "--words", str(words), "--type", "q8_0", "--shape", "135m"]
    )
    random_model.main()
    with LLM(out, context=64) as llm:
        assert llm.generate("a", SamplingParams(max_tokens=2)).token_ids
    cut = tiny.read_bytes()
    words.write_bytes(cut[: len(cut) - 1000])
    with pytest.raises(ModelError, match="cut short"):
        random_model.main()
    assert "whole GGUF file" in str(random_model.__doc__)
