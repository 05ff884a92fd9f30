"""OLMoE: llama with mixtures in every layer; queries and keys are normed whole."""

from __future__ import annotations

from verbatim.model.families.common import gguf_rows, header, parts, rows
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import Table, alias, followed, must_equal
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    base = parts.whole_heads(c, parts.rotary(c))
    return parts.with_experts(c, base, inner="intermediate_size", qk_norm="width")


_KEYS: Table = {
    "intermediate_size": followed("inner width of an expert"),
    "head_dim": rows.FIXED_HEAD_DIM,
    "num_experts": rows.EXPERTS,
    "num_local_experts": alias("num_experts"),
    "num_experts_per_tok": rows.EXPERTS_USED,
    "norm_topk_prob": rows.RENORMALISED,
    "clip_qkv": must_equal(note="queries, keys and values are not clamped"),
}
FAMILY = Family(
    model_type="olmoe",
    models="OLMoE",
    keys=rows.rotary_keys(rows.ROUTER, rows.FULL, rows.ATTENTION_BIASES, _KEYS),
    spec=_spec,
    gguf=Gguf(
        "olmoe",
        keys=gguf_rows.rotary(
            gguf_rows.gguf_experts("num_experts"),
            {"expert_weights_norm": gguf_rows.NOT_RENORMALISED},
        ),
        implied=lambda h: {"intermediate_size": header.expert_width(h), "norm_topk_prob": False},
    ),
    tiny={"olmoe": tiny(num_experts=4, num_experts_per_tok=2)},
)
