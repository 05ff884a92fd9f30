"""GLM-4-9B-Chat: glm4 with norms before attention and MLP only."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, RopeRules, tiny
from verbatim.model.families.glm4 import KEYS
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    return replace(parts.rotary(c), out_bias=c.fact("out_bias", False))


FAMILY = Family(
    model_type="glm",
    models="GLM-4-9B-Chat",
    keys={**KEYS, "head_dim": rows.HEAD_DIM_OR_NULL},
    spec=_spec,
    rope=RopeRules(partial=True),
    names=tensors.hf_names(tensors.FUSED_MLP, interleaved=True),
    gguf=Gguf("chatglm", names=tensors.gguf_names({"mlp.gate": "ffn_up"}, interleaved=True)),
    tiny={"glm": tiny(head_dim=16)},
)
