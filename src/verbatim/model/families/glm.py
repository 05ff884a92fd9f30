"""GLM-4-9B-Chat: norms before attention and MLP, heads rotated in part, by interleaved pairs."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, RopeRules, tiny
from verbatim.model.keys import followed
from verbatim.model.spec import ModelSpec


def glm_spec(c: Config) -> ModelSpec:
    return replace(parts.rotary(c), out_bias=c.fact("out_bias", False))


KEYS = rows.rotary_keys(
    rows.FULL,
    rows.PARTIAL,
    {
        "head_dim": rows.HEAD_DIM_OR_NULL,
        "attention_bias": followed("biases of q, k and v"),
        "mlp_bias": rows.NO_BIAS,
    },
)
FAMILY = Family(
    model_type="glm",
    models="GLM-4-9B-Chat",
    keys=KEYS,
    spec=glm_spec,
    rope=RopeRules(partial=True),
    names=tensors.hf_names(tensors.FUSED_MLP, interleaved=True),
    gguf=Gguf("chatglm", names=tensors.gguf_names({"mlp.gate": "ffn_up"}, interleaved=True)),
    tiny={"glm": tiny(head_dim=16)},
)
