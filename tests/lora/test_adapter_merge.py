"""`verbatim merge`: the merged model computes what the adapter computes, up to rounding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from adapter_files import CONFIG, adapted, write_peft
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from tiny_tokenizer import train_tokenizer
from verbatim.backend.reference import ReferenceBackend
from verbatim.base.errors import ModelError, ParameterError
from verbatim.base.records import SeqStep, StepPlan
from verbatim.cli.commands.merge import command
from verbatim.convert.export_model import model_metadata, model_tensors
from verbatim.files.gguf import read_gguf
from verbatim.files.gguf_write import write_gguf
from verbatim.lora.adapter_load import load_adapter
from verbatim.model.loading.load import Model, load_model
from verbatim.model.loading.names import hf_source
from verbatim.testing.tiny_models import tiny_model

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


def write_head_adapter(folder: Path, model: Model) -> Path:
    """A PEFT directory with an adapter of the output head alone."""
    folder.mkdir()
    config = {**CONFIG, "target_modules": ["lm_head"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(2)
    vocab, hidden = model.spec.vocab, model.spec.hidden
    shapes = {"A": (config["r"], hidden), "B": (vocab, config["r"])}
    tensors = {
        f"base_model.model.lm_head.lora_{side}.weight": random.standard_normal(shape, np.float32)
        for side, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_of_the_head_is_merged_and_refused_per_request(tmp_path: Path) -> None:
    model = tiny_model("llama")
    file = write_model(model, tmp_path / "model.gguf")
    adapter = write_head_adapter(tmp_path / "adapter", model)
    with pytest.raises(ModelError, match=r"lm_head is the output head.*verbatim merge"):
        load_adapter("a", str(adapter), model.spec)
    merge(file, adapter, "-o", tmp_path / "merged.gguf")
    merged = load_model(tmp_path / "merged.gguf").weights["head"].to_f32()
    pair = load_file(adapter / "adapter_model.safetensors")
    a, b = (pair[f"base_model.model.lm_head.lora_{side}.weight"] for side in "AB")
    want = model.weights["head"].to_f32() + CONFIG["lora_alpha"] / CONFIG["r"] * (b @ a)
    np.testing.assert_allclose(merged, want, atol=1e-4)
    tied = tiny_model("qwen2")
    with pytest.raises(ModelError, match="heads that are the embedding"):
        load_adapter("a", str(adapter), tied.spec, to_merge=True)


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


def save_bf16(model: Model, folder: Path) -> None:
    """A llama directory in bfloat16, and a second copy of its weights, as Mistral ships one."""
    import torch
    from safetensors.torch import save_file as save_torch

    folder.mkdir()
    tensors = {
        hf_source("llama", "model.", name, 0).names[0]: torch.tensor(t.to_f32()).bfloat16()
        for name, t in model.weights.items()
    }
    save_torch(tensors, folder / "model.safetensors")
    save_torch({f"x.{n}": t for n, t in tensors.items()}, folder / "consolidated.safetensors")
    (folder / "config.json").write_text(json.dumps(getattr(model.source, "config", {})))


def test_a_merged_directory_holds_no_copy_without_the_adapter(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_bf16(model, tmp_path / "model")
    adapter = write_peft(tmp_path / "adapter", model.spec)
    merge(tmp_path / "model", adapter, "-o", tmp_path / "merged")
    names = {file.name for file in (tmp_path / "merged").iterdir()}
    assert names == {"config.json", "model.safetensors"}


def test_vectors_of_a_merged_gguf_file_are_float32(tmp_path: Path) -> None:
    """llama.cpp computes with float32 norms and biases only, and its converter writes them so."""
    model = tiny_model("llama", vocab_size=288)
    save_bf16(model, tmp_path / "model")
    train_tokenizer(tmp_path / "model", 280)
    adapter = write_peft(tmp_path / "adapter", model.spec)
    merge(tmp_path / "model", adapter, "-o", tmp_path / "merged.gguf")
    tensors = read_gguf(tmp_path / "merged.gguf").tensors
    assert tensors["blk.0.attn_norm.weight"].type == "f32"
    assert {t.type for t in tensors.values() if len(t.shape) > 1} == {"bf16"}


def test_settings_in_subfolders_are_merged_with_the_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_bf16(model, tmp_path / "model")
    names = ["1_Pooling/config.json", "additional_chat_templates/tool_use.jinja"]
    for name in (*names, "onnx/model.onnx_data"):
        (tmp_path / "model" / name).parent.mkdir()
        (tmp_path / "model" / name).write_text('{"pooling_mode_mean_tokens": true}')
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "model" / "modules.json").write_text(json.dumps(modules))
    merge(
        tmp_path / "model",
        write_peft(tmp_path / "adapter", model.spec),
        *("-o", tmp_path / "merged"),
    )
    assert all((tmp_path / "merged" / name).is_file() for name in names)
    assert not (tmp_path / "merged" / "onnx").exists()
    assert load_model(tmp_path / "merged").embedding.pooling == "mean"
