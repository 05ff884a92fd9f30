"""LFM2 MoE: lfm2 with a sigmoid router, and dense first layers."""

from __future__ import annotations

from verbatim.model.families.common import gguf_rows, parts, rows
from verbatim.model.families.common.family import Config, Family, Gguf, GgufFields, Values
from verbatim.model.families.lfm2 import (
    GGUF_KEYS,
    GGUF_NAMES,
    KEYS,
    NAMES,
    TINY,
    exported,
    implied,
    lfm2,
)
from verbatim.model.keys import Table, followed
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    if not c.has("layer_types"):
        raise c.fail("layer_types", "it is needed: full_attention or conv, layer by layer")
    base, dense = lfm2(c), c.integer("num_dense_layers", low=0)
    return parts.with_experts(
        c,
        base,
        sparse=[i >= dense for i in range(len(base.layers))],
        router="sigmoid",
        choice_bias=c.boolean("use_expert_bias", True),
    )


def _implied(h: GgufFields) -> Values:
    dense = h.integer("leading_dense_block_count", low=0)
    if dense:
        h.integer("feed_forward_length")
    return {**implied(h), "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in h.tensors}


_OWN_GGUF_KEYS: Table = {
    **GGUF_KEYS,
    **gguf_rows.sigmoid_experts(
        "num_experts", "num_dense_layers", norm=True, note="experts of a layer"
    ),
}
FAMILY = Family(
    model_type="lfm2_moe",
    name="lfm2moe",
    models="LFM2 MoE",
    keys={
        **KEYS,
        **rows.ROUTER,
        "num_dense_layers": followed("first layers with a dense MLP"),
        "num_experts": rows.EXPERTS,
        "num_experts_per_tok": rows.EXPERTS_USED,
        "moe_intermediate_size": rows.EXPERT_MLP,
        "norm_topk_prob": followed(
            "weights of the chosen experts sum to 1 (transformers adds 1e-6 to their sum)"
        ),
        "routed_scaling_factor": rows.EXPERTS_SCALE,
        "use_expert_bias": followed("the choice of experts has a bias"),
    },
    spec=_spec,
    names=NAMES,
    gguf=Gguf("lfm2moe", keys=_OWN_GGUF_KEYS, names=GGUF_NAMES, implied=_implied),
    exported=exported,
    tiny={
        "lfm2moe": {
            **TINY,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        }
    },
)
