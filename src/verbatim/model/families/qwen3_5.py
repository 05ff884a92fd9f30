"""Qwen3.5 (dense): gated delta nets with gated attention in some layers; the text part of
qwen3_5."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, mixers, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, RopeRules, Wrapper, tiny
from verbatim.model.families.common.gguf_fields import GgufFields, Values, facts
from verbatim.model.keys import Table, followed, must_equal, no_effect, renamed
from verbatim.model.spec import DeltaSpec, ModelSpec

_SECTIONS = [11, 11, 10, 0]  # rotary pairs of time, height, width; text has one position for all
ONE_POSITION = no_effect("text has one position per token in every section")


def delta_net(c: Config) -> ModelSpec:
    base = parts.rotary(c, uniform=False)
    if base.activation != "silu":  # the convolution of a delta net uses the same activation
        raise c.fail("hidden_act", "silu is needed: delta nets are implemented with silu only")
    interval = c.integer("full_attention_interval", 4)
    return replace(
        mixers.with_mixers(c, base, "delta", lambda i: (i + 1) % interval == 0),
        norm_offset=1.0,
        qk_norm="head",
        attention_gate=True,
        conv_kernel=c.integer("linear_conv_kernel_dim", high=mixers.MAX_TAPS),
        delta=_delta(c),
    )


def _delta(c: Config) -> DeltaSpec:
    heads, keys = c.integer("linear_num_value_heads"), c.integer("linear_num_key_heads")
    if heads % keys:
        raise c.fail("linear_num_value_heads", f"a multiple of the {keys} key heads is needed")
    dims = c.integer("linear_key_head_dim"), c.integer("linear_value_head_dim")
    return DeltaSpec(keys, heads, *dims, tiled=c.fact("tiled", False) and heads != keys)


def implied(h: GgufFields) -> Values:
    heads, width = h.integer("ssm.time_step_rank"), h.integer("ssm.inner_size")
    if width % heads:
        raise h.fail("ssm.inner_size", f"a multiple of the {heads} value heads is needed")
    bias = f"blk.{h.integer('full_attention_interval') - 1}.attn_"  # the first layer of attention
    return {
        "linear_value_head_dim": width // heads,
        **facts(qkv_bias=f"{bias}q.bias" in h.tensors, out_bias=f"{bias}output.bias" in h.tensors),
    }


def tiled(h: GgufFields) -> Values:
    """llama.cpp's converter reorders the value heads of qwen35 and qwen35moe, but not of
    qwen3next."""
    return {**implied(h), **facts(tiled=True)}


def exported(spec: ModelSpec) -> Values:
    delta = spec.delta
    assert delta is not None, "the family has delta nets"
    attention = [layer.mixer == "attention" for layer in spec.layers]
    keys: Values = {
        "ssm.conv_kernel": spec.conv_kernel,
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.key_heads,
        "ssm.time_step_rank": delta.value_heads,
        "ssm.inner_size": delta.values,
        "full_attention_interval": attention.index(True) + 1,
    }
    if spec.shared_mlp:
        keys["expert_shared_feed_forward_length"] = spec.shared_mlp
    return keys


def exported_sections(spec: ModelSpec) -> Values:
    return {**exported(spec), "rope.dimension_sections": _SECTIONS}


DELTA: Table = {
    "head_dim": rows.HEAD_DIM,
    "linear_conv_kernel_dim": followed("taps of the convolutions"),
    "linear_key_head_dim": followed("size of a key head of a delta net"),
    "linear_value_head_dim": followed("size of a value head of a delta net"),
    "linear_num_key_heads": followed("key heads of a delta net"),
    "linear_num_value_heads": followed("value heads of a delta net"),
    "full_attention_interval": followed(
        "layer period: every N-th layer is attention, where layer_types is absent; absent: 4"
    ),
    "layer_types": followed("full_attention or linear_attention, layer by layer"),
    "sliding_window": rows.NO_WINDOW,
    "attention_bias": followed("biases of q, k, v and o of attention"),
    "mlp_bias": rows.NO_BIAS,
}
_MTP = no_effect("the file's tensors tell whether it has a draft layer")
KEYS: Table = {
    **rows.rotary_keys(rows.PARTIAL, DELTA),
    "attn_output_gate": must_equal(True, note="attention has an output gate"),
    "output_gate_type": must_equal(
        "swish", "silu", note="the gate of a delta net is SiLU, as in transformers"
    ),
    "mlp_only_layers": must_equal([], note="all layers have one kind of MLP"),
    "mamba_ssm_dtype": no_effect("states are float32"),
    "mtp_num_hidden_layers": _MTP,
    "mtp_use_dedicated_embeddings": _MTP,
}
RULES = RopeRules(
    partial=True, keys={"mrope_section": ONE_POSITION, "mrope_interleaved": ONE_POSITION}
)
LAYER = {
    "attn.gate": "self_attn.q_proj",
    **tensors.each("delta.*", "linear_attn.in_proj_*", "qkv z b a"),
    "delta.kernel": "linear_attn.conv1d",
    "delta.decay": "linear_attn.A_log",
    "delta.dt": "linear_attn.dt_bias",
    "delta.norm": "linear_attn.norm",
    "delta.out": "linear_attn.out_proj",
    **tensors.SHARED_EXPERT,
}
GGUF_LAYER = {**tensors.GGUF_MLP_NORM, "attn.gate": "attn_q"}
GGUF_DELTA: Table = {
    **gguf_rows.GGUF_ROTARY,
    "ssm.conv_kernel": renamed("linear_conv_kernel_dim"),
    "ssm.state_size": renamed("linear_key_head_dim"),
    "ssm.group_count": renamed("linear_num_key_heads"),
    "ssm.time_step_rank": renamed("linear_num_value_heads"),
    "ssm.inner_size": followed("width of all value heads of a delta net"),
    "full_attention_interval": renamed("full_attention_interval", default=4),
    "nextn_predict_layers": gguf_rows.DRAFTS,
    "rope.dimension_sections": ONE_POSITION,
}
TINY: Values = tiny(
    num_hidden_layers=4,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)


def qwen_wrapper(model_type: str, text: str) -> Wrapper:
    """A language model with an image encoder."""
    keys = rows.wrapper_keys(
        text,
        *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        more={"language_model_only": no_effect("only the language model is used")},
    )
    return Wrapper(model_type, keys, (text,))


FAMILY = Family(
    model_type="qwen3_5_text",
    name="qwen35",
    models="Qwen3.5 (dense; the text part of `qwen3_5`)",
    keys=KEYS,
    spec=delta_net,
    rope=RULES,
    names=tensors.hf_names(LAYER),
    gguf=Gguf("qwen35", keys=GGUF_DELTA, names=tensors.gguf_names(GGUF_LAYER), implied=tiled),
    exported=exported_sections,
    drafts=tensors.QWEN_MTP,
    tiny={"qwen35": TINY},
)
WRAPPER = qwen_wrapper("qwen3_5", "qwen3_5_text")
