"""Qwen 1.5 and 2 MoE: qwen2 with mixtures, beside each of which every token uses a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, header, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.families.qwen3_next import shared_mixture
from verbatim.model.keys import Table, followed, no_effect
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    base = parts.rotary(c, uniform=False)
    window = parts.window_of(c) if c.boolean("use_sliding_window", False) else None
    end = c.integer("max_window_layers", low=0) if window is not None else 0
    windows = parts.layer_windows(c, len(base.layers), lambda i: i % 2 == 0 and i < end, window)
    base = replace(
        parts.with_windows(base, windows),
        qkv_bias=c.fact("qkv_bias", c.boolean("qkv_bias", True)),
        out_bias=c.fact("out_bias", False),
    )
    return shared_mixture(c, base, parts.sparse_layers(c, len(base.layers)))


_KEYS: Table = {
    "max_window_layers": followed("of the layers before it, every other one has a window"),
    "attention_bias": no_effect("`qkv_bias` decides, as in transformers"),
    "qkv_bias": followed("biases of q, k and v"),
    "mlp_bias": rows.NO_BIAS,
    "num_experts": rows.EXPERTS,
    "num_experts_per_tok": rows.EXPERTS_USED,
    "moe_intermediate_size": rows.EXPERT_MLP,
    "shared_expert_intermediate_size": followed("inner width of the shared MLP"),
    "norm_topk_prob": rows.RENORMALISED,
    "decoder_sparse_step": rows.SPARSE_STEP,
    "mlp_only_layers": rows.DENSE_LAYERS,
}
_GGUF_KEYS: Table = {
    "expert_shared_feed_forward_length": gguf_rows.SHARED_WIDTH,
    "expert_weights_norm": gguf_rows.NOT_RENORMALISED,
}
_TINY = tiny(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
FAMILY = Family(
    model_type="qwen2_moe",
    name="qwen2moe",
    models="Qwen 1.5 MoE, Qwen 2 MoE",
    keys=rows.rotary_keys(rows.ROUTER, rows.QWEN_WINDOWS, _KEYS),
    spec=_spec,
    names=tensors.hf_names(tensors.SHARED_EXPERT),
    gguf=Gguf(
        "qwen2moe",
        keys=gguf_rows.rotary(gguf_rows.gguf_experts("num_experts"), _GGUF_KEYS),
        implied=lambda h: {**header.every_layer_window(h), "norm_topk_prob": False},
    ),
    exported=lambda spec: {"expert_shared_feed_forward_length": spec.shared_mlp},
    tiny={"qwen2moe": _TINY},
)
