"""Adapters against PEFT: the logits of the reference backend equal those of transformers with the
adapter that PEFT itself created, saved and applies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from verbatim.backend.reference import ReferenceBackend
from verbatim.base.errors import ModelError
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, StepPlan
from verbatim.convert.merge_adapter import merge_directory, merged_model
from verbatim.lora.adapter_load import load_adapter, with_adapters
from verbatim.model.loading.load import Model, load_model
from verbatim.testing.tiny_models import TINY_CONFIGS

TOKENS = tuple(range(3, 40, 2))
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "llama": LLAMA,
    "cohere": LLAMA,  # interleaved rotary rows
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],  # fused
    "gpt2": ["c_attn", "c_proj", "c_fc"],  # Conv1D
    "qwen35": LLAMA,  # q_proj has a gate of the attention's output
    "qwen3next": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],  # fused by head
}


def save(
    folder: Path,
    family: str,
    targets: list[str] | None = None,
    saving: dict[str, Any] | None = None,
    **lora: Any,
) -> np.ndarray:
    """A tiny checkpoint and a trained-looking PEFT adapter of it. Returns PEFT's log-probabilities.
    The libraries are imported here: pytest imports this file in each of its processes."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    kind = TINY_CONFIGS[family]["model_type"]
    values = {k: v for k, v in TINY_CONFIGS[family].items() if k != "model_type"}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **(special | values))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder / "model")
    adapted = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets or TARGETS[family], **lora)
    ).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.2)
        adapted.save_pretrained(folder / "adapter", **(saving or {}))
        logits = adapted(torch.tensor([TOKENS])).logits[0]
    return np.asarray(torch.log_softmax(logits.double(), -1))


def logits_of(folder: Path, adapter: bool, model_folder: str = "model") -> np.ndarray:
    model = with_adapters(load_model(folder / model_folder), [f"x={folder / 'adapter'}"])
    return logprobs(model, 0 if adapter else -1)


def logprobs(model: Model, adapter: int = -1) -> np.ndarray:
    """Log-probabilities of each next token by the reference backend."""
    backend = ReferenceBackend(model)
    backend.allocate(tuple(4 for _ in model.spec.groups))
    draw = DrawSpec(SamplingParams(logprobs=model.spec.vocab, temperature=0), 0, 1)
    blocks = tuple((0, 1, 2) for _ in model.spec.groups)
    step = SeqStep(0, TOKENS, 0, blocks, len(TOKENS), draw, adapter=adapter)
    rows = backend.execute(StepPlan(0, (step,))).sequences[0].drawn
    out = np.zeros((len(TOKENS), model.spec.vocab))
    for row, drawn in zip(out, rows, strict=True):
        for token, logprob in drawn.top:
            row[token] = logprob
    return out


@pytest.mark.parametrize("family", TARGETS)
def test_logits_equal_those_of_peft(family: str, tmp_path: Path) -> None:
    lora: dict[str, Any] = {"r": 4, "lora_alpha": 6, "fan_in_fan_out": family == "gpt2"}
    if family == "llama":
        lora |= {
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
            "alpha_pattern": {"v_proj": 3},
        }
    peft = save(tmp_path, family, **lora)
    ours = logits_of(tmp_path, adapter=True)
    assert np.abs(ours - peft).max() < 1e-4
    assert np.abs(logits_of(tmp_path, adapter=False) - peft).max() > 0.05, "the adapter matters"
    merge_directory(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    merged = logits_of(tmp_path, adapter=False, model_folder="merged")
    assert np.abs(merged - peft).max() < 1e-4


@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["embed_tokens"]])
def test_an_adapter_of_head_or_embedding_is_merged_as_peft_saves_it(
    targets: list[str], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """PEFT saves the weight below such an adapter, too, and warns of it."""
    peft = save(tmp_path, "llama", targets, r=4, lora_alpha=6)
    model, adapter = load_model(tmp_path / "model"), tmp_path / "adapter"
    stored = load_file(adapter / "adapter_model.safetensors")
    (copy,) = [name for name in stored if name.endswith(f"{targets[0]}.base_layer.weight")]
    with pytest.raises(ModelError, match=f"{targets[0]} is the .*per request; `verbatim merge`"):
        with_adapters(model, [f"x={adapter}"])
    found = load_adapter("a", str(adapter), model.spec, model.weights, to_merge=True)
    merge_directory(tmp_path / "model", adapter, tmp_path / "merged")
    whole = load_model(tmp_path / "merged")
    assert np.abs(logprobs(whole) - peft).max() < 1e-4
    assert np.abs(logprobs(model) - peft).max() > 0.05
    for name, tensor in merged_model(model, found).weights.tensors.items():
        assert tensor.data.tobytes() == whole.weights[name].data.tobytes()
    stored[copy][3, 5] += 0.5
    save_file(stored, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=f"{copy} differs .*save_embedding_layers=False"):
        load_adapter("a", str(adapter), model.spec, model.weights, to_merge=True)


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # with a head of its own, and without
def test_saved_copies_of_embedding_and_head_are_compared_and_not_used(
    family: str, tmp_path: Path
) -> None:
    peft = save(tmp_path, family, ["q_proj"], {"save_embedding_layers": True}, r=4)
    names = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"} < {
        *names
    }
    assert np.abs(logits_of(tmp_path, adapter=True) - peft).max() < 1e-4


def test_every_key_of_peft_is_known() -> None:
    """A key that PEFT adds must be looked at before its version is raised."""
    import dataclasses

    from peft import LoraConfig

    from verbatim.lora import adapter_file

    known = adapter_file._FOLLOWED | adapter_file._NO_EFFECT | set(adapter_file._REFUSED)
    names = {field.name for field in dataclasses.fields(LoraConfig)}
    # off by default, and refused like an unknown key if they are not
    assert names - known == {"velora_config", "monteclora_config", "arrow_config", "kasa_config"}
