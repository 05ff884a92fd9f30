"""GLM-4.5 and 4.6: a sigmoid router, a shared MLP beside the experts, and dense first layers."""

from __future__ import annotations

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, RopeRules, tiny
from verbatim.model.families.common.gguf_fields import GgufFields, Values
from verbatim.model.keys import Table, alias, followed, must_equal, no_effect, renamed
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    base, dense = parts.rotary(c), c.integer("first_k_dense_replace", low=0)
    shared = c.integer("n_shared_experts", 0, low=0)
    return parts.with_experts(
        c,
        base,
        "n_routed_experts",
        [i >= dense for i in range(len(base.layers))],
        out_bias=c.fact("out_bias", False),
        qk_norm="head" if c.boolean("use_qk_norm", False) else "",
        router="sigmoid",
        choice_bias=True,
        shared_mlp=shared * c.integer("moe_intermediate_size"),
    )


def _implied(h: GgufFields) -> Values:
    if h.raw("leading_dense_block_count", 0):
        h.integer("feed_forward_length")
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in h.tensors}


_NO_GROUPS = must_equal(1, note="no groups of experts")
_DRAFTS = no_effect("the file's tensors tell whether it has a draft layer")
_KEYS: Table = {
    "attention_bias": followed("biases of q, k and v"),
    "mlp_bias": rows.NO_BIAS,
    "use_qk_norm": followed("RMS norm of each query and key head"),
    "n_routed_experts": rows.EXPERTS,
    "num_local_experts": alias("n_routed_experts"),
    "num_experts_per_tok": rows.EXPERTS_USED,
    "moe_intermediate_size": rows.EXPERT_MLP,
    "n_shared_experts": followed("inner width of the shared MLP, in experts"),
    "first_k_dense_replace": followed("first layers with a dense MLP"),
    "norm_topk_prob": rows.RENORMALISED,
    "routed_scaling_factor": rows.EXPERTS_SCALE,
    "n_group": _NO_GROUPS,
    "topk_group": _NO_GROUPS,
    "num_mtp_layers": _DRAFTS,
    "num_nextn_predict_layers": _DRAFTS,
}
_GGUF_KEYS: Table = {
    **gguf_rows.GGUF_ROTARY,
    **gguf_rows.sigmoid_experts(
        "n_routed_experts", "first_k_dense_replace", norm=False, note="experts of a layer; 0: dense"
    ),
    "expert_shared_count": renamed("n_shared_experts"),
    "nextn_predict_layers": gguf_rows.DRAFTS,
}
_GGUF = Gguf(
    "glm4moe", keys=_GGUF_KEYS, names=tensors.gguf_names(tensors.GGUF_MLP_NORM), implied=_implied
)
_NAMES = tensors.hf_names({**tensors.SHARED, "moe.choice_bias": "mlp.gate.e_score_correction_bias"})
_TINY = tiny(
    num_experts_per_tok=2,
    head_dim=16,
    n_routed_experts=4,
    moe_intermediate_size=32,
    use_qk_norm=True,
    routed_scaling_factor=1.5,
)
FAMILY = Family(
    model_type="glm4_moe",
    name="glm4moe",
    models="GLM-4.5, 4.6",
    keys=rows.rotary_keys(rows.ROUTER, rows.FULL, rows.PARTIAL, _KEYS),
    spec=_spec,
    rope=RopeRules(partial=True),
    names=_NAMES,
    gguf=_GGUF,
    drafts=tensors.NEXTN,
    tiny={"glm4_moe": _TINY},
)
