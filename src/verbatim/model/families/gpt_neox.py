"""Pythia, GPT-NeoX: layer norms, biases, attention and MLP in parallel, heads rotated in part."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, RopeRules, tiny
from verbatim.model.keys import Table, followed, must_equal, no_effect, renamed
from verbatim.model.spec import ModelSpec

LAYER = {
    "attn_norm": "input_layernorm",
    **tensors.fused_qkv("attention.query_key_value"),
    "attn.o": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def _spec(c: Config) -> ModelSpec:
    return replace(
        parts.whole_heads(c, parts.layer_norm(c)),
        gated=False,
        mlp_bias=c.fact("mlp_bias", True),
        parallel=c.boolean("use_parallel_residual", True),
    )


_KEYS: Table = {
    "head_dim": rows.FIXED_HEAD_DIM,
    "num_key_value_heads": must_equal(note="as many as query heads, as in transformers"),
    "rotary_emb_base": rows.theta_key("base of the frequencies", 1e4),
    "rotary_pct": followed("rotated fraction of a head, where the rope record has none", 0.25),
    "rope_theta": no_effect("`rotary_emb_base` decides, as in transformers"),
    "partial_rotary_factor": no_effect("`rotary_pct` decides, as in transformers"),
    "attention_bias": rows.ATTENTION_BIAS,
    "mlp_bias": no_effect("the MLP always has biases, as in transformers"),
    "use_parallel_residual": followed(rows.PARALLEL),
}
_GGUF_KEYS: Table = {
    **gguf_rows.gguf_layer_norm("layer_norm_eps"),
    "use_parallel_residual": renamed("use_parallel_residual"),
}
FAMILY = Family(
    model_type="gpt_neox",
    name="gptneox",
    models="Pythia, GPT-NeoX",
    keys=rows.rotary_keys(rows.FULL, _KEYS, eps="layer_norm_eps"),
    spec=_spec,
    rope=RopeRules(partial=True, theta="rotary_emb_base", fraction="rotary_pct"),
    names=tensors.Names(
        LAYER,
        top={"embed": "embed_in", "final_norm": "final_layer_norm", "head": "embed_out"},
        grouped=True,
    ),
    gguf=Gguf("gptneox", keys=_GGUF_KEYS, names=tensors.gguf_names(tensors.GGUF_FUSED_QKV)),
    exported=lambda spec: {"use_parallel_residual": spec.parallel},
    tiny={"gpt_neox": tiny(rms_norm_eps=None, num_key_value_heads=None, rotary_pct=0.5)},
)
