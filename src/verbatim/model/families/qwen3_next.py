"""Qwen3-Next: the layers of qwen3_5, and mixtures with a gated shared MLP."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, RopeRules, Values
from verbatim.model.families.qwen3_5 import (
    DELTA,
    GGUF_DELTA,
    GGUF_LAYER,
    LAYER,
    TINY,
    delta_net,
    exported,
    implied,
)
from verbatim.model.keys import Table, followed
from verbatim.model.spec import ModelSpec

MOE_KEYS: Table = {
    **rows.ROUTER,
    "num_experts_per_tok": rows.EXPERTS_USED,
    "moe_intermediate_size": rows.EXPERT_MLP,
    "shared_expert_intermediate_size": followed("inner width of the shared MLP"),
}
GGUF_DELTA_MOE: Table = {
    **GGUF_DELTA,
    **gguf_rows.gguf_experts("num_experts", "experts of a layer"),
    "expert_shared_feed_forward_length": gguf_rows.SHARED_WIDTH,
}
TINY_MOE: Values = {
    **TINY,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def shared_mixture(c: Config, base: ModelSpec, sparse: Sequence[bool] | None = None) -> ModelSpec:
    """Mixtures with a gated shared MLP in the `sparse` layers; None: in all."""
    width = c.integer("shared_expert_intermediate_size")
    return parts.with_experts(c, base, sparse=sparse, shared_mlp=width, shared_gate=True)


def _spec(c: Config) -> ModelSpec:
    base, experts = delta_net(c), c.integer("num_experts", low=0, high=4096)
    sparse = parts.sparse_layers(c, len(base.layers))
    return shared_mixture(c, base, sparse) if experts and any(sparse) else base


_KEYS: Table = {
    "num_experts": followed("experts of a layer; 0: dense"),
    "norm_topk_prob": rows.RENORMALISED,
    "decoder_sparse_step": rows.SPARSE_STEP,
    "mlp_only_layers": rows.DENSE_LAYERS,
}
FAMILY = Family(
    model_type="qwen3_next",
    name="qwen3next",
    models="Qwen3-Next",
    keys=rows.rotary_keys(rows.PARTIAL, DELTA, MOE_KEYS, _KEYS),
    spec=_spec,
    rope=RopeRules(partial=True),
    names=tensors.hf_names(
        {
            **LAYER,
            **tensors.each("delta.*", "linear_attn.in_proj_qkvz", "qkv z"),
            **tensors.each("delta.*", "linear_attn.in_proj_ba", "b a"),
        }
    ),
    gguf=Gguf(
        "qwen3next",
        keys=GGUF_DELTA_MOE,
        names=tensors.gguf_names({**GGUF_LAYER, "delta.b": "ssm_ba", "delta.a": "ssm_ba"}),
        implied=implied,
    ),
    exported=exported,
    drafts=tensors.QWEN_MTP,
    tiny={"qwen3next": TINY_MOE},
)
