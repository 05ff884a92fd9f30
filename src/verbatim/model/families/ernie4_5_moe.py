"""ERNIE 4.5 (mixtures): a biased choice of experts, a shared MLP, and dense first layers."""

from __future__ import annotations

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, GgufFields, Values, tiny
from verbatim.model.families.ernie4_5 import with_bias
from verbatim.model.keys import Table, alias, followed, must_equal, no_effect, renamed
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    base, shared = parts.rotary(with_bias(c)), c.integer("moe_num_shared_experts", 0, low=0)
    return parts.with_experts(
        c,
        base,
        "moe_num_experts",
        _sparse(c, len(base.layers)),
        used="moe_k",
        choice_bias=True,
        shared_mlp=shared * c.integer("moe_intermediate_size"),
    )


def _sparse(c: Config, layers: int) -> list[bool]:
    first, step = c.integer("moe_layer_start_index", low=0), c.integer("moe_layer_interval", 1)
    last = c.integer("moe_layer_end_index", -1, low=-1)
    last = layers - 1 if last == -1 else last
    return [first <= i <= last and (i + 1) % step == 0 for i in range(layers)]


def _implied(h: GgufFields) -> Values:
    """The width of the shared MLP is that of its tensor."""
    width, first = h.integer("expert_feed_forward_length"), h.integer("leading_dense_block_count")
    shared = h.tensors.get(f"blk.{first}.ffn_up_shexp.weight")
    return {"moe_num_shared_experts": shared.shape[0] // width if shared else 0}


def _exported(spec: ModelSpec) -> Values:
    return {
        "expert_shared_count": spec.shared_mlp // spec.expert_mlp,
        "leading_dense_block_count": sum(not layer.experts for layer in spec.layers),
    }


_KEYS: Table = {
    "use_bias": must_equal(False, note="the matrices have no biases"),
    "moe_intermediate_size": rows.EXPERT_MLP,
    "moe_k": rows.EXPERTS_USED,
    "moe_num_experts": rows.EXPERTS,
    "num_experts": alias("moe_num_experts"),
    "num_experts_per_tok": alias("moe_k"),
    "moe_num_shared_experts": followed("inner width of the shared MLP, in experts"),
    "moe_layer_start_index": followed("first layer that may be a mixture"),
    "moe_layer_end_index": followed("last layer that may be a mixture; -1: the last"),
    "moe_layer_interval": followed("layer period: every N-th layer is a mixture of experts"),
    "moe_norm_min": no_effect("the sum of softmax weights is larger"),
}
_BY_TENSORS = no_effect("the tensors of the shared MLP decide")
_GGUF_KEYS: Table = {
    **gguf_rows.GGUF_ROTARY,
    **gguf_rows.gguf_experts("moe_num_experts"),
    "expert_used_count": renamed("moe_k"),
    "expert_shared_count": _BY_TENSORS,
    "expert_shared_feed_forward_length": _BY_TENSORS,
    "leading_dense_block_count": renamed("moe_layer_start_index"),
    "interleave_moe_layer_step": renamed("moe_layer_interval", zero=True),
}
FAMILY = Family(
    model_type="ernie4_5_moe",
    name="ernie4_5-moe",
    models="ERNIE 4.5 (mixtures)",
    keys=rows.rotary_keys(rows.ROUTER, rows.FULL, rows.NO_BIASES, _KEYS),
    spec=_spec,
    names=tensors.hf_names(
        {**tensors.SHARED, "moe.choice_bias": "mlp.moe_statics.e_score_correction_bias"},
        interleaved=True,
    ),
    gguf=Gguf("ernie4_5-moe", keys=_GGUF_KEYS, names=tensors.GGUF_PAIRS, implied=_implied),
    exported=_exported,
    tiny={"ernie4_5_moe": tiny(moe_num_experts=4, moe_k=2, moe_intermediate_size=32)},
)
