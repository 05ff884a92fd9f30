"""Random LoRA adapters as files: PEFT directories and GGUF adapter files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from verbatim.backend import open_backend
from verbatim.base.config import EngineConfig
from verbatim.engine.calls.llm import LLM
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.loading.load_engine import adapter_infos
from verbatim.lora.adapter_load import load_adapter
from verbatim.model.adapter import is_adapted
from verbatim.model.layout import layout
from verbatim.model.loading.load import Model
from verbatim.model.loading.names import hf_source
from verbatim.model.spec import ModelSpec
from verbatim.testing.fakes import ByteTokenizer

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def modules(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Every module that an adapter of this model can change -> (out, in) of the file's matrix."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in layout(spec).items():
        if is_adapted(name):
            module = hf_source(spec.family, "model.", name, 0).names[0].removesuffix(".weight")
            out, _ = found.get(module, (0, 0))
            found[module] = (out + shape[0], shape[1])  # a fused matrix has the rows of its parts
    return found


def write_peft(
    folder: Path,
    spec: ModelSpec,
    *,
    seed: int = 1,
    ranks: dict[str, int] | None = None,
    targets: list[str] | None = None,
    **config: Any,
) -> Path:
    """A PEFT directory with random matrices. `ranks`: end of a module name -> its rank."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**CONFIG, **config}
    if targets is not None:
        values["target_modules"] = targets
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for module, (out, inputs) in modules(spec).items():
        last = module.rsplit(".", 1)[-1]
        if last not in values["target_modules"]:
            continue
        rank = (ranks or {}).get(last, values["r"])
        stem = f"base_model.model.{module}"
        a = random.standard_normal((rank, inputs)) / np.sqrt(inputs)
        b = random.standard_normal((out, rank)) * 0.3
        tensors[f"{stem}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"{stem}.lora_B.weight"] = b.astype(np.float32)
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def adapted(model: Model, paths: dict[str, Path]) -> Model:
    found = tuple(load_adapter(name, str(path), model.spec) for name, path in paths.items())
    return replace(model, adapters=found)


def open_llm(model: Model, backend: str = "reference", **options: Any) -> LLM:
    config = EngineConfig(backend=backend, threads=1)
    loaded = LoadedModel(
        backend=open_backend(model, config),
        tokenizer=ByteTokenizer(),
        eos_ids=(),
        digest=model.weights.digest,
        context=model.spec.context,
        adapters=adapter_infos(model),
    )
    return LLM.from_loaded(loaded, check=True, **options)
