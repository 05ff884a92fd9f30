"""Seed-OSS: llama with biases on q, k and v, and perhaps on o."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import parts, rows, tensors
from verbatim.model.families.common.family import Family, Gguf, tiny
from verbatim.model.keys import Table, followed

_KEYS: Table = {
    "head_dim": rows.HEAD_DIM_OR_NULL,
    "attention_bias": followed("biases of q, k and v"),
    "attention_out_bias": followed("bias of o"),
    "mlp_bias": followed("biases of the MLP"),
    "residual_dropout": rows.TRAINING,
}
FAMILY = Family(
    model_type="seed_oss",
    models="Seed-OSS",
    keys=rows.rotary_keys(rows.FULL, _KEYS),
    spec=lambda c: replace(
        parts.rotary(c), out_bias=c.fact("out_bias", c.boolean("attention_out_bias", False))
    ),
    gguf=Gguf("seed_oss", names=tensors.gguf_names(tensors.GGUF_MLP_NORM)),
    tiny={"seed_oss": tiny(head_dim=16)},
)
