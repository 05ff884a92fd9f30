"""A quantised checkpoint end to end: the logits of transformers with the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import CASES, VOCAB, build
from drive import Driver

from verbatim.model.loading.load import load_model

pytestmark = pytest.mark.torch


def test_an_fp8_llama_has_the_logits_of_transformers(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    case = next(case for case in CASES if case.name.startswith("llama"))
    model = build(case, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, packed = load_file(file), {}
    for name, weight in tensors.items():
        if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
            scale = weight.abs().amax(dim=1, keepdim=True) / 448
            small = (weight / scale).to(torch.float8_e4m3fn)
            packed |= {name: small, f"{name}_scale": scale}
            tensors[name] = small.float() * scale
        else:
            packed[name] = weight
    save_file(packed, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model.load_state_dict(tensors, strict=False)
    tokens = np.random.default_rng(0).integers(3, VOCAB, 12).tolist()
    with torch.no_grad():
        want = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    got = Driver(load_model(tmp_path, context=case.context)).feed(tokens)
    assert np.abs(got - want).max() < 1e-4
