"""Qwen 3 MoE: qwen3 whose layers are mixtures of experts, except those that are named."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, header, parts, rows
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import Table, alias, followed, must_equal
from verbatim.model.spec import ModelSpec

WINDOWS: Table = {
    "use_sliding_window": followed("turns the window on, in every layer"),
    "sliding_window": followed("window of every layer where use_sliding_window; null: none"),
    "max_window_layers": followed("checked: 0 where use_sliding_window; else without effect"),
    "layer_types": rows.WINDOW_TYPES,
}


def _one_window(c: Config) -> Config:
    """The config without the window that it does not use."""
    if not c.boolean("use_sliding_window", False) or not c.has("sliding_window"):
        return c.with_values(sliding_window=None)
    if c.integer("max_window_layers", 0, low=0):
        raise c.fail(
            "max_window_layers",
            "only 0 is supported with use_sliding_window: every layer has the window",
        )
    return c


def mixture(c: Config) -> ModelSpec:
    """llama with the mixtures and the window of qwen3_moe."""
    base = parts.rotary(_one_window(c))
    return parts.with_experts(c, base, sparse=parts.sparse_layers(c, len(base.layers)))


KEYS: Table = {
    **WINDOWS,
    "num_experts": rows.EXPERTS,
    "num_local_experts": alias("num_experts"),
    "num_experts_per_tok": rows.EXPERTS_USED,
    "moe_intermediate_size": rows.EXPERT_MLP,
    "norm_topk_prob": rows.RENORMALISED,
    "decoder_sparse_step": rows.SPARSE_STEP,
    "mlp_only_layers": rows.DENSE_LAYERS,
    "use_qk_norm": must_equal(True, note="heads are normed, as in transformers"),
    "qkv_bias": must_equal(False, note="`attention_bias` decides"),
    "shared_expert_intermediate_size": must_equal(0, note="no shared MLP"),
}
TINY = tiny(num_experts_per_tok=2, head_dim=16, num_experts=4, moe_intermediate_size=24)
FAMILY = Family(
    model_type="qwen3_moe",
    name="qwen3moe",
    models="Qwen 3 MoE",
    keys=rows.rotary_keys(rows.ROUTER, rows.ATTENTION_BIASES, KEYS),
    spec=lambda c: replace(mixture(c), qk_norm="head"),
    gguf=Gguf(
        "qwen3moe",
        keys=gguf_rows.rotary(gguf_rows.gguf_experts("num_experts")),
        implied=lambda h: {**header.every_layer_window(h), "norm_topk_prob": True},
    ),
    tiny={"qwen3moe": TINY},
)
