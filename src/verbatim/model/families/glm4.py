"""GLM-4-0414 (dense): norms before and after attention and MLP, heads rotated in part, by
interleaved pairs."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import rows, tensors
from verbatim.model.families.common.family import Family, Gguf, RopeRules, tiny
from verbatim.model.families.glm import KEYS, glm_spec

_LAYER = {
    **tensors.FUSED_MLP,
    "attn_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
FAMILY = Family(
    model_type="glm4",
    models="GLM-4-0414",
    keys={**KEYS, "head_dim": rows.HEAD_DIM},
    spec=lambda c: replace(glm_spec(c), post_norms=True),
    rope=RopeRules(partial=True),
    names=tensors.hf_names(_LAYER, interleaved=True),
    gguf=Gguf("glm4", names=tensors.gguf_names({"mlp.gate": "ffn_up"}, interleaved=True)),
    tiny={"glm4": tiny(head_dim=16)},
)
