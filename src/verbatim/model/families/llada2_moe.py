"""LLaDA2: glm4_moe's layers with groups of experts, which fill blocks as SDAR does."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families import glm4_moe
from verbatim.model.families.common import parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, RopeRules
from verbatim.model.keys import Table, alias, followed, must_equal, no_effect
from verbatim.model.spec import DiffusionSpec, ModelSpec


def _spec(c: Config) -> ModelSpec:
    groups, used = c.integer("n_group"), c.integer("topk_group")
    size, rest = divmod(c.integer("n_routed_experts"), groups)
    if rest or (groups > 1 and size < 2):
        raise c.fail("n_group", "groups of two or more experts, all of one size, are needed")
    if used > groups or used * size < c.integer("num_experts_per_tok"):
        raise c.fail("topk_group", f"too many, or too few: there are {groups} groups of {size}")
    return replace(
        glm4_moe.FAMILY.spec(c),
        out_bias=c.boolean("use_bias", False),
        expert_groups=groups,
        expert_groups_used=used,
        diffusion=DiffusionSpec(parts.mask_token(c), block=32, confidence=0.95),
    )


_KEYS: Table = {
    "use_sliding_window": must_equal(False, note="blocks attend to all earlier ones"),
    "sliding_window": no_effect("`use_sliding_window` decides"),
    "max_window_layers": no_effect("`use_sliding_window` decides"),
    "use_qkv_bias": alias("attention_bias", private=True),
    "use_bias": followed("bias of the attention's output", False, private=True),
    "use_qk_norm": followed("RMS norm of each query and key head", True),
    "norm_head": must_equal(False, note="the head is not normalised", private=True),
    "num_experts": alias("n_routed_experts", private=True),
    "num_shared_experts": alias("n_shared_experts", private=True),
    "n_group": followed("groups of adjacent experts"),
    "topk_group": followed("groups in which a token's experts are chosen"),
    "score_function": must_equal("sigmoid", note="sigmoids of the router", private=True),
    "router_dtype": no_effect("the router is computed in float32", private=True),
    "rotary_dim": no_effect("`partial_rotary_factor` decides", private=True),
    "moe_router_enable_expert_bias": must_equal(True, note="is part of the file", private=True),
    **dict.fromkeys(("embedding_dropout", "output_dropout"), rows.TRAINING),
    "mask_token_id": rows.mask_token(156895),
}
FAMILY = Family(
    model_type="llada2_moe",
    body="glm4_moe",
    models="LLaDA2",
    keys={**glm4_moe.FAMILY.keys, **_KEYS},
    spec=_spec,
    rope=RopeRules(partial=True),
    names=tensors.hf_names(
        {
            **tensors.SHARED,
            **tensors.fused_qkv("attention.query_key_value"),
            "attn.o": "attention.dense",
            "attn.q_norm": "attention.query_layernorm",
            "attn.k_norm": "attention.key_layernorm",
            "moe.choice_bias": "mlp.gate.expert_bias",
        },
        top={"embed": "word_embeddings"},
    ),
    tiny={
        "llada2_moe": {
            **glm4_moe.FAMILY.tiny["glm4_moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
            "mask_token_id": 259,
        }
    },
)
