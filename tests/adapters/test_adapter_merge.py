"""`verbatim merge`: the merged model computes what the adapter computes, up to rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from adapter_files import adapted, write_peft
from click.testing import CliRunner

from verbatim.backend.reference import ReferenceBackend
from verbatim.base.errors import ParameterError
from verbatim.base.records import SeqStep, StepPlan
from verbatim.cli.merge import command
from verbatim.convert.export_model import model_metadata, model_tensors
from verbatim.model.load import Model, load_model
from verbatim.testing_models import tiny_model
from verbatim.weights.gguf_write import write_gguf

TOKENS = tuple(range(3, 40, 2))


def states(model: Model, adapter: int = -1) -> np.ndarray:
    """Final hidden states of TOKENS."""
    backend = ReferenceBackend(model)
    backend.allocate(tuple(4 for _ in model.spec.groups))
    blocks = tuple((0, 1, 2) for _ in model.spec.groups)
    step = SeqStep(0, TOKENS, 0, blocks, hidden=True, adapter=adapter)
    found = backend.execute(StepPlan(0, (step,))).sequences[0].hidden
    assert found is not None
    return found


def merge(*words: str | Path) -> None:
    CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)


def write_model(model: Model, file: Path) -> Path:
    metadata, extra = model_metadata(model, "tiny")
    write_gguf(file, metadata, [*extra, *model_tensors(model)])
    return file


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_merged_gguf_file_computes_what_the_adapter_does(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    file = write_model(model, tmp_path / "model.gguf")
    targets = ["qkv_proj", "o_proj", "gate_up_proj"] if family == "phi3" else None
    adapter = write_peft(tmp_path / "adapter", model.spec, targets=targets)
    with_adapter = states(adapted(load_model(file), {"a": adapter}), 0)
    merge(file, adapter, "-o", tmp_path / "merged.gguf")
    merged = load_model(tmp_path / "merged.gguf")
    assert np.abs(states(merged) - with_adapter).max() < 1e-3
    assert np.abs(states(load_model(file)) - with_adapter).max() > 0.1
    assert merged.source.metadata == load_model(file).source.metadata  # type: ignore[union-attr]


def test_quantised_weights_and_existing_files_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", type="q8_0")
    file = write_model(model, tmp_path / "model.gguf")
    adapter = write_peft(tmp_path / "adapter", model.spec)
    out = tmp_path / "merged.gguf"
    with pytest.raises(ParameterError, match=r"quantised \(q8_0\).*--requantise"):
        merge(file, adapter, "-o", out)
    assert not out.exists()
    merge(file, adapter, "-o", out, "--requantise")
    close = states(adapted(load_model(file), {"a": adapter}), 0)
    assert np.abs(states(load_model(out)) - close).mean() < 0.1
    with pytest.raises(ParameterError, match="--force"):
        merge(file, adapter, "-o", out, "--requantise")
    with pytest.raises(ParameterError, match=r"does not end in \.gguf"):
        merge(file, adapter, "-o", tmp_path / "folder")
