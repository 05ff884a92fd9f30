"""LFM2: short convolutions, with attention in some layers."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.config_fields import MAX_COUNT
from verbatim.model.families.common import gguf_rows, mixers, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, GgufFields, Values, tiny
from verbatim.model.keys import Table, alias, followed, must_equal, no_effect, renamed
from verbatim.model.spec import ModelSpec

_KV = "attention.head_count_kv"
_UNUSED = (
    *("block_dim", "conv_dim", "conv_dim_out", "num_heads", "block_norm_eps"),
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
    "conv_use_xavier_init",
)
KEYS: Table = {
    **rows.COMMON_KEYS,
    **rows.SIZES,
    **rows.ROPE,
    **rows.NO_BIASES,
    "head_dim": rows.ROTARY_HEAD_DIM,
    "norm_eps": followed("epsilon of the norms"),
    "tie_word_embeddings": rows.TIED,
    "tie_embedding": alias("tie_word_embeddings"),
    "conv_L_cache": followed("taps of the convolutions"),
    "conv_bias": followed("biases of the convolution layers"),
    "layer_types": followed("full_attention or conv, layer by layer"),
    "sliding_window": rows.NO_WINDOW,
    "use_pos_enc": must_equal(True, note="positions are rotary"),
    "block_use_swiglu": must_equal(True, note="the MLP is a SwiGLU"),
    **dict.fromkeys(_UNUSED, no_effect("not used by transformers")),
}
NAMES = tensors.Names(
    {
        "attn_norm": "operator_norm",
        **tensors.each("attn.*", "self_attn.*_proj", "q k v"),
        "attn.o": "self_attn.out_proj",
        **tensors.each("attn.*_norm", "self_attn.*_layernorm", "q k"),
        "conv.in": "conv.in_proj",
        "conv.kernel": "conv.conv",
        "conv.out": "conv.out_proj",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "feed_forward.w1",
        "mlp.up": "feed_forward.w3",
        "mlp.down": "feed_forward.w2",
        "moe.router": "feed_forward.gate",
        "moe.choice_bias": "feed_forward.expert_bias",
        "moe.gate": "feed_forward.experts.{e}.w1",
        "moe.up": "feed_forward.experts.{e}.w3",
        "moe.down": "feed_forward.experts.{e}.w2",
    },
    top={"final_norm": "embedding_norm"},
)
# llama.cpp's name of the norm before the head
GGUF_NAMES = tensors.gguf_names({}, top={"final_norm": "token_embd_norm"})
GGUF_KEYS: Table = {
    **gguf_rows.GGUF_ROTARY,
    "attention.head_count_kv": followed(
        "key and value heads, layer by layer; 0: the layer is a convolution"
    ),
    "attention.layer_norm_rms_epsilon": renamed("norm_eps"),
    "shortconv.l_cache": renamed("conv_L_cache"),
}
TINY: Values = tiny(
    rms_norm_eps=None, num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"]
)


def lfm2(c: Config) -> ModelSpec:
    base = parts.rotary(c.with_values(rms_norm_eps=c.number("norm_eps")), uniform=False)
    everywhere = not c.has("full_attn_idxs")
    indices = c.layer_numbers("full_attn_idxs", len(base.layers))
    return replace(
        mixers.with_mixers(c, base, "conv", lambda i: everywhere or i in indices),
        qk_norm="head",
        conv_kernel=c.integer("conv_L_cache", high=mixers.MAX_TAPS),
        conv_bias=c.boolean("conv_bias", False),
    )


def _spec(c: Config) -> ModelSpec:
    return lfm2(c.with_values(intermediate_size=_mlp(c)))


def _mlp(c: Config) -> int:
    """The inner width of the MLP: two thirds of the config's number, rounded up."""
    inner = c.integer("intermediate_size")
    if not c.boolean("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    step = c.integer("block_multiple_of")
    inner = step * -(-int(c.number("block_ffn_dim_multiplier") * inner) // step)
    if not 0 < inner <= MAX_COUNT:
        raise c.fail("block_ffn_dim_multiplier", f"the inner width of the MLP would be {inner}")
    return inner


def implied(h: GgufFields) -> Values:
    """head_count_kv has one entry per layer, 0 for a convolution."""
    layers, raw = h.layers, h.raw(_KV)
    counts = [raw] if isinstance(raw, int) else h.items(_KV)
    heads = {n for n in counts if isinstance(n, int) and n}
    known = len(heads) == 1 and min(heads) > 0 and all(n in (0, *heads) for n in counts)
    if not known or len(counts) not in (1, layers):
        raise h.fail(_KV, f"{layers} entries are needed: 0, or one number of key heads")
    attention = [bool(n) for n in counts] if len(counts) == layers else [True] * layers
    first = attention.index(False) if False in attention else 0
    return {
        "num_key_value_heads": heads.pop(),
        "layer_types": ["full_attention" if a else "conv" for a in attention],
        "conv_bias": f"blk.{first}.shortconv.in_proj.bias" in h.tensors,
        "block_auto_adjust_ff_dim": False,
    }


def exported(spec: ModelSpec) -> Values:
    counts = [spec.kv_heads if a.mixer == "attention" else 0 for a in spec.layers]
    return {"attention.head_count_kv": counts, "shortconv.l_cache": spec.conv_kernel}


FAMILY = Family(
    model_type="lfm2",
    models="LFM2",
    keys={
        **KEYS,
        "intermediate_size": followed("inner width of the MLP, before block_auto_adjust_ff_dim"),
        "block_ff_dim": alias("intermediate_size"),
        "block_auto_adjust_ff_dim": followed(
            "the inner width is two thirds of intermediate_size times block_ffn_dim_multiplier, "
            "rounded up to a multiple of block_multiple_of"
        ),
        "block_multiple_of": followed("see block_auto_adjust_ff_dim"),
        "block_ffn_dim_multiplier": followed("see block_auto_adjust_ff_dim"),
        "full_attn_idxs": followed("attention layers, where layer_types is absent; absent: all"),
    },
    spec=_spec,
    names=NAMES,
    gguf=Gguf("lfm2", keys=GGUF_KEYS, names=GGUF_NAMES, implied=implied),
    exported=exported,
    tiny={"lfm2": {**TINY, "block_multiple_of": 16}},
)
