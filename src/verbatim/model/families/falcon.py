"""Falcon 7B, 40B and 180B: layer norms, attention and MLP in parallel, with a norm each or one."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, GgufFields, Values, tiny
from verbatim.model.families.gpt_neox import LAYER
from verbatim.model.keys import Table, followed, must_equal, renamed
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    new, parallel = c.boolean("new_decoder_architecture", False), c.boolean("parallel_attn", False)
    if new and not parallel:
        raise c.fail("parallel_attn", "new_decoder_architecture needs true")
    norms = c.integer("num_ln_in_parallel_attn", 2 if new else 1, low=1, high=2)
    if norms == 2 and not new:
        raise c.fail("num_ln_in_parallel_attn", "2 needs new_decoder_architecture")
    parts.activation(c, "activation")  # an error names this key, not hidden_act
    bias = c.boolean("bias", False)
    sizes = c.with_values(
        num_key_value_heads=_kv_heads(c, new),
        intermediate_size=c.integer("ffn_hidden_size", 4 * c.integer("hidden_size")),
        hidden_act=c.string("activation"),
        attention_bias=bias,
        mlp_bias=bias,
    )
    return replace(
        parts.whole_heads(c, parts.layer_norm(sizes, "layer_norm_epsilon")),
        gated=False,
        parallel=parallel,
        shared_norm=parallel and norms == 1,
    )


def _kv_heads(c: Config, new: bool) -> int:
    heads = c.integer("num_attention_heads")
    own = new or not c.boolean("multi_query", False)
    kv_heads = c.integer("num_kv_heads", heads) if own else 1
    if not new and kv_heads not in (1, heads):
        raise c.fail("num_kv_heads", f"{heads} is needed without new_decoder_architecture")
    return kv_heads


def _implied(h: GgufFields) -> Values:
    norms = 2 if "blk.0.attn_norm_2.weight" in h.tensors else 1
    new = dict.fromkeys(("new_decoder_architecture", "parallel_attn"), True)
    return {**new, "num_ln_in_parallel_attn": norms}


_ABSENT = ("intermediate_size", "num_key_value_heads")
_NOT_TINY = dict.fromkeys(("rms_norm_eps", *_ABSENT))
_KEYS: Table = {
    **rows.COMMON_KEYS,
    **rows.ROPE,
    **rows.FULL,
    **{name: key for name, key in rows.SIZES.items() if name not in _ABSENT},
    "num_kv_heads": followed(f"unless multi_query: {rows.KV_HEADS.note}"),
    "ffn_hidden_size": followed("inner width of the MLP; null: 4 hidden_size"),
    "activation": followed("activation of the MLP"),
    "layer_norm_epsilon": followed("epsilon of the norms"),
    "bias": followed("biases of all matrices"),
    "alibi": must_equal(False, note="positions are rotary"),
    "new_decoder_architecture": followed(f"num_kv_heads decides, and {rows.PARALLEL}"),
    "multi_query": followed("one key and value head, unless new_decoder_architecture"),
    "parallel_attn": followed(rows.PARALLEL),
    "num_ln_in_parallel_attn": followed(
        "2: attention and MLP have a norm each; absent: 2 with new_decoder_architecture"
    ),
    "head_dim": rows.FIXED_HEAD_DIM,
    "n_embed": must_equal(note="older name of hidden_size; rename it"),
    "tie_word_embeddings": rows.TIED,
    "apply_residual_connection_post_layernorm": must_equal(
        False, note="the residual is added before the norm"
    ),
}
FAMILY = Family(
    model_type="falcon",
    models="Falcon",
    keys=_KEYS,
    spec=_spec,
    names=tensors.Names(
        {
            **LAYER,
            **tensors.fused_qkv("self_attention.query_key_value"),
            "attn.o": "self_attention.dense",
        },
        top={"embed": "word_embeddings", "final_norm": "ln_f", "stack": "h"},
        two_norms={"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"},
        grouped=True,
    ),
    gguf=Gguf(
        "falcon",
        keys={
            **gguf_rows.gguf_layer_norm("layer_norm_epsilon"),
            "attention.head_count_kv": renamed("num_kv_heads"),
            "feed_forward_length": renamed("ffn_hidden_size"),
        },
        names=tensors.gguf_names(
            tensors.GGUF_FUSED_QKV, two_norms={"attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
        ),
        implied=_implied,
    ),
    tiny={"falcon": tiny(**_NOT_TINY, num_kv_heads=2, new_decoder_architecture=True)},
)
