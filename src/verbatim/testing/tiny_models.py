"""Tiny random models for tests: every family, made in milliseconds, without PyTorch and without
files.

    model = tiny_model("gemma3")                       # in memory
    model = tiny_model("llama", type="q8_0", hidden_size=64)
    backend = ReferenceBackend(model)

The weights give attention far from uniform and logits that spread over several units, so a wrong
mask, rotation or block changes the tokens.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.files.safetensors import SafetensorsDir
from verbatim.formats.conversion import quantise
from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor, Weights
from verbatim.model.adapter import Adapter, LowRank, is_adapted
from verbatim.model.architecture import spec_from_config
from verbatim.model.families import FAMILIES as FAMILY_FILES
from verbatim.model.layout import is_quantisable, layout
from verbatim.model.loading.load import Model
from verbatim.model.spec import ModelSpec

# Every family's tiny models, from its file in model/families.
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    name: {"model_type": model_type, **config}
    for model_type, family in FAMILY_FILES.items()
    for name, config in family.tiny.items()
}
# Families that decode from left to right, and diffusion models, which transformers lacks.
FAMILIES = tuple(name for name, c in TINY_CONFIGS.items() if not FAMILY_FILES[c["model_type"]].body)
DIFFUSION_FAMILIES = tuple(name for name in TINY_CONFIGS if name not in FAMILIES)


def tiny_model(
    family: str = "llama",
    *,
    seed: int = 0,
    type: str = "f32",
    context: int | None = None,
    **changes: Any,
) -> Model:
    """A small random model of one of FAMILIES. `type`: storage type of the matrices whose rows
    divide into its blocks. `changes`: Hugging Face config keys that replace the tiny defaults."""
    config = TINY_CONFIGS[family] | changes
    spec = spec_from_config(config, context=context, file=f"tiny {family}")
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in layout(spec).items():
        stored = type if is_quantisable(name) and shape[-1] % BLOCKS[type][0] == 0 else "f32"
        values = _values(random, name, shape, spec.norm_offset, spec.tied)
        tensors[name] = Tensor(name, stored, shape, quantise(stored, values))
    digest = hashlib.sha256(
        repr((sorted(config.items(), key=repr), seed, type)).encode()
    ).hexdigest()
    source = SafetensorsDir(Path(f"tiny-{family}"), config, {}, {}, digest)
    return Model(spec, Weights(tensors, f"tiny-{family}", digest), source, (1,), {})


def tiny_adapter(
    spec: ModelSpec, name: str = "adapter", *, seed: int = 0, rank: int = 4
) -> Adapter:
    """A random LoRA adapter of every weight that an adapter can change."""
    random = np.random.default_rng(seed)
    parts: dict[str, LowRank] = {}
    for weight, shape in layout(spec).items():
        if is_adapted(weight):
            a = random.standard_normal((rank, shape[1]), np.float32) / np.float32(shape[1] ** 0.5)
            b = random.standard_normal((shape[0], rank), np.float32) * np.float32(0.3)
            low, high = (
                Tensor(weight, "f32", x.shape, x.reshape(-1).view(np.uint8)) for x in (a, b)
            )
            parts[weight] = LowRank(low, high, 0.5 + seed)
    return Adapter(name, f"tiny adapter {seed} of rank {rank}", parts)


def _values(
    random: np.random.Generator, name: str, shape: tuple[int, ...], offset: float, tied: bool
) -> np.ndarray:
    values = random.standard_normal(shape, dtype=np.float32)
    if name.endswith((".bias", ".choice_bias")):
        return values * np.float32(0.1)
    if name.endswith(".sinks"):
        return values
    if name.endswith("delta.decay"):
        return -np.exp(values)
    if name.endswith(".kernel"):
        return values * np.float32(0.7)
    if name.endswith("delta.norm"):
        return np.float32(1.0) + values * np.float32(0.1)
    if name.endswith("moe.scales") or shape == (1,):  # factors of experts and of layers
        return np.float32(1.0) + values * np.float32(0.1)
    if "norm" in name:
        return np.float32(1.0 - offset) + values * np.float32(0.1)
    if name in ("embed", "positions", "layer_inputs.embed"):
        # A tied head with large embeddings would only repeat its input.
        return values * np.float32(0.25 if tied else 0.7)
    # Attention and routing far from uniform.
    sharp = 2.0 if name.endswith((".q", ".k", "router")) else 1.0
    return values * np.float32(sharp / math.sqrt(shape[-1]))
