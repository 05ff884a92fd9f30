"""GPT-2: learned positions, layer norms, biases everywhere, keys and names of its own."""

from __future__ import annotations

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf
from verbatim.model.families.common.gguf_fields import MAX_LAYERS, GgufFields, Values
from verbatim.model.keys import Table, alias, followed, must_equal, no_effect, renamed
from verbatim.model.spec import LayerSpec, ModelSpec


def _spec(c: Config) -> ModelSpec:
    hidden, heads = c.integer("n_embd"), c.integer("n_head")
    positions, layers = c.integer("n_positions"), c.integer("n_layer", high=MAX_LAYERS)
    if hidden % heads:
        raise c.fail("n_embd", f"a multiple of n_head ({heads}) is needed")
    parts.check_one_window(c, layers, None)
    return ModelSpec(
        family="gpt2",
        vocab=c.integer("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp=c.integer("n_inner", 4 * hidden),
        context=parts.pick_context(c.context, positions, positions),
        layers=(LayerSpec(),) * layers,
        norm="layer",
        norm_eps=c.number("layer_norm_epsilon"),
        activation=parts.activation(c, "activation_function"),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        learned_positions=True,
        tied=c.boolean("tie_word_embeddings", True),
        attention_scale=0.0 if c.boolean("scale_attn_weights", True) else 1.0,
        trained_positions=positions,
    )


def _implied(h: GgufFields) -> Values:
    heads = h.integer("attention.head_count")
    if h.integer("attention.head_count_kv", heads) != heads:
        raise h.fail(
            "attention.head_count_kv", f"gpt2 has as many key heads as query heads ({heads})"
        )
    return {}


_SUMMARY = (
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    "summary_first_dropout",
)
_KEYS: Table = {
    **rows.COMMON_KEYS,
    **rows.FULL,
    "vocab_size": followed("rows of the embedding"),
    "n_positions": followed("context"),
    "n_embd": followed("width of the model"),
    "n_layer": followed("layers"),
    "n_head": followed("heads"),
    "n_inner": followed("inner width of the MLP; null: 4 n_embd"),
    "hidden_size": alias("n_embd"),
    "max_position_embeddings": alias("n_positions"),
    "num_attention_heads": alias("n_head"),
    "num_hidden_layers": alias("n_layer"),
    "activation_function": followed("activation of the MLP"),
    "layer_norm_epsilon": followed("epsilon of the norms"),
    "scale_attn_weights": followed("scores are divided by the root of a head's size"),
    "scale_attn_by_inverse_layer_idx": must_equal(False, note="all layers scale scores alike"),
    "reorder_and_upcast_attn": no_effect("order of a multiplication; attention is float32 here"),
    "tie_word_embeddings": rows.TIED,
    **dict.fromkeys(_SUMMARY, rows.LABELS),
    "n_ctx": no_effect("older name; `n_positions` decides"),
}
_GGUF_KEYS: Table = {
    **gguf_rows.GGUF_KEYS,
    "context_length": renamed("n_positions"),
    "embedding_length": renamed("n_embd"),
    "block_count": renamed("n_layer"),
    "feed_forward_length": renamed("n_inner"),
    "attention.head_count": renamed("n_head"),
    "attention.head_count_kv": followed("checked: equal to attention.head_count"),
    "attention.layer_norm_epsilon": renamed("layer_norm_epsilon"),
}
FAMILY = Family(
    model_type="gpt2",
    models="GPT-2",
    keys=_KEYS,
    spec=_spec,
    names=tensors.Names(
        {
            "attn_norm": "ln_1",
            **tensors.fused_qkv("attn.c_attn"),
            "attn.o": "attn.c_proj",
            "mlp_norm": "ln_2",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        top={"embed": "wte", "positions": "wpe", "final_norm": "ln_f", "stack": "h"},
        transposed=True,
    ),
    gguf=Gguf(
        "gpt2", keys=_GGUF_KEYS, names=tensors.gguf_names(tensors.GGUF_FUSED_QKV), implied=_implied
    ),
    key_names={
        "hidden": "n_embd",
        **dict.fromkeys(("heads", "kv_heads", "head_dim"), "n_head"),
        "mlp": "n_inner",
        "layers": "n_layer",
        "positions": "n_positions",
    },
    tiny={"gpt2": {"vocab_size": 260, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}},
)
