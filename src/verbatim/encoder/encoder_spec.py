"""EncoderSpec: a bidirectional transformer encoder (BERT and its kin) as data.

encoder/encoder.py reads nothing else. Weights have internal names, [out, in] for a linear layer:

    embed, types, positions, embed_norm[.bias]
    layers.{i}.{q,k,v,o}[.bias]    layers.{i}.attn_norm[.bias]
    layers.{i}.{gate,up,down}[.bias]    layers.{i}.mlp_norm[.bias]
    score.dense[.bias], score.out[.bias]    the head of a cross-encoder
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from verbatim.files.gguf import GGUFFile
from verbatim.files.safetensors import SafetensorsDir
from verbatim.model.embedding import EmbeddingSpec
from verbatim.model.spec import LayerSpec, ModelSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Sizes and options. Every layer is x = norm(x + attention(x)), x = norm(x + mlp(x))."""

    family: str  # bert, roberta, nomic-bert
    vocab: int
    hidden: int
    heads: int
    head_dim: int
    mlp: int
    layers: int
    context: int  # longest text in tokens
    types: int  # rows of the token type embedding; 0: the model has none
    positions: int = 0  # rows of the learned position embedding; 0: rotary positions
    first_position: int = 0  # position of the first token (roberta: padding id + 1)
    rope_theta: float = 0.0  # base of the rotary frequencies; 0: learned positions
    norm_eps: float = 1e-12
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = "gelu"
    gated: bool = False  # down(act(gate(x)) * up(x)); False: down(act(up(x)))
    bias: bool = True  # every linear layer has one
    scores: bool = False  # a cross-encoder: the first state becomes one relevance score
    score_activation: Literal["sigmoid", "identity"] = "sigmoid"

    def shapes(self) -> dict[str, Shape]:
        """The shape of every weight, by internal name."""
        h, inner, m = self.hidden, self.heads * self.head_dim, self.mlp
        found: dict[str, Shape] = {"embed": (self.vocab, h), "embed_norm": (h,)}
        found["embed_norm.bias"] = (h,)
        if self.types:
            found["types"] = (self.types, h)
        if self.positions:
            found["positions"] = (self.positions, h)
        for i in range(self.layers):
            layer = {f"layers.{i}.{name}": (inner, h) for name in "qkv"}
            layer[f"layers.{i}.o"] = (h, inner)
            for name in ("gate", "up") if self.gated else ("up",):
                layer[f"layers.{i}.{name}"] = (m, h)
            layer[f"layers.{i}.down"] = (h, m)
            found |= layer
            if self.bias:
                found |= {f"{name}.bias": shape[:1] for name, shape in layer.items()}
            for norm in ("attn_norm", "mlp_norm"):
                found[f"layers.{i}.{norm}"] = found[f"layers.{i}.{norm}.bias"] = (h,)
        if self.scores:
            found |= {"score.dense": (h, h), "score.dense.bias": (h,)}
            found |= {"score.out": (1, h), "score.out.bias": (1,)}
        return found

    def as_model_spec(self) -> ModelSpec:
        """Sizes for the engine, which plans and reports by ModelSpec. No decoder runs it."""
        return ModelSpec(
            family=self.family,
            vocab=self.vocab,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.head_dim,
            mlp=self.mlp,
            context=self.context,
            layers=(LayerSpec(),) * self.layers,
            norm="layer",
            norm_eps=self.norm_eps,
            gated=self.gated,
        )


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """A loaded encoder. The weights are float32, whatever the file holds."""

    spec: EncoderSpec
    weights: dict[str, np.ndarray] = field(repr=False)
    source: GGUFFile | SafetensorsDir = field(repr=False)
    digest: str  # hash of the file and the options; part of the fingerprint
    embedding: EmbeddingSpec
    types: dict[str, int] = field(default_factory=dict)  # parameters by type in the file
    warnings: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return Path(self.source.path)
