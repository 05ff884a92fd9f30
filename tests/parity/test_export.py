"""A GGUF file that `convert` writes gives the logits of its source: families whose layout in GGUF
differs most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drive import Driver, exported

from verbatim.base.errors import ModelError
from verbatim.convert.export_families import unscaled
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.load import load_model
from verbatim.testing.tiny_models import tiny_model

TOKENS = np.random.default_rng(3).integers(0, 260, 40).tolist()
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4", {}),
    "gemma4 without layer inputs": ("gemma4", {"hidden_size_per_layer_input": 0}),
    "gemma4 scaled": (
        "gemma4",
        {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e5,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            }
        },
    ),
    "gemma4moe": ("gemma4moe", {}),
    "gemma4moe, width no square": ("gemma4moe", {"hidden_size": 96}),
    "qwen3next": ("qwen3next", {}),
    "qwen35": ("qwen35", {}),
    "qwen35, one value head per key head": ("qwen35", {"linear_num_value_heads": 2}),
    "qwen35moe": ("qwen35moe", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_written_file_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    model = tiny_model(family, **changes)
    again = load_model(exported(model, tmp_path / "x.gguf"))
    ours, theirs = (Driver(m).feed(TOKENS) for m in (model, again))
    # Bits differ where a norm gets its offset, a router norm its factor, and where value heads are
    # in another order. GGUF's epsilon of the norms is a float32.
    np.testing.assert_allclose(theirs, ours, atol=1e-4)


@pytest.mark.parametrize("width", [64, 96, 2816])
def test_a_router_norm_keeps_its_bits(width: int) -> None:
    values = np.random.default_rng(width).standard_normal(5000).astype(np.float32)
    factor = np.float32(width**-0.5)
    loaded = values * factor
    tensor = Tensor("x", "f32", loaded.shape, loaded.view(np.uint8))
    np.testing.assert_array_equal(unscaled(tensor, width).to_f32() * factor, loaded)


def test_layers_that_one_period_does_not_describe_are_refused(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    model = tiny_model("qwen35", num_hidden_layers=4, layer_types=kinds)
    with pytest.raises(ModelError, match="layer 2: GGUF has no key"):
        exported(model, tmp_path / "x.gguf")
