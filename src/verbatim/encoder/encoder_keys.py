"""Key tables of encoders' config.json (see keys.py for the three treatments).

Defaults are those of transformers' config classes; tests/encoder/test_encoder_parity.py compares
them. nomic_bert has two sets of names: transformers' own, and those of the published checkpoints.
"""

from __future__ import annotations

from verbatim.model.families.common.rows import COMMON_KEYS, TRAINING
from verbatim.model.keys import Key, Table, alias, followed, must_equal, no_effect

_CLASSIFIER = {
    "id2label": followed("one label is a cross-encoder's relevance score"),
    "num_labels": followed("checked: 1 for a cross-encoder"),
    "label2id": no_effect("names of the labels"),
    "problem_type": no_effect("training only"),
    "classifier_dropout": TRAINING,
    "sentence_transformers": followed("activation_fn of a cross-encoder's score"),
    "sbert_ce_default_activation_function": followed("older name of that", private=True),
}
_COMMON: dict[str, Key] = {
    **COMMON_KEYS,
    **_CLASSIFIER,
    "architectures": followed("a name that ends in SequenceClassification is a cross-encoder"),
    "eos_token_id": no_effect("an encoder generates no token"),
    "sep_token_id": no_effect("the tokenizer's own setting decides"),
    "cls_token_id": no_effect("the tokenizer's own setting decides"),
    "mask_token_id": no_effect("the tokenizer's own setting decides"),
    "layer_norm_eps": followed("epsilon of the norms", 1e-12),
    "hidden_dropout_prob": TRAINING,
    "attention_probs_dropout_prob": TRAINING,
    "initializer_range": TRAINING,
    "gradient_checkpointing": TRAINING,
    "tie_word_embeddings": no_effect("the output head is not used"),
    "is_decoder": must_equal(False, note="encoders only"),
    "add_cross_attention": must_equal(False, note="encoders only"),
    "position_embedding_type": must_equal("absolute", note="learned positions"),
    "output_past": no_effect("metadata", private=True),
    "pruned_heads": must_equal({}, note="all heads are computed"),
    "adapters": must_equal({}, note="no adapters", private=True),
}


def _sizes(vocab: int, activation: str, positions: int) -> dict[str, Key]:
    return {
        "vocab_size": followed("rows of the embedding", vocab),
        "hidden_size": followed("width of the model", 768),
        "num_hidden_layers": followed("layers", 12),
        "num_attention_heads": followed("heads", 12),
        "intermediate_size": followed("inner width of the MLP", 3072),
        "hidden_act": followed("activation of the MLP", activation),
        "max_position_embeddings": followed("positions", positions),
        "type_vocab_size": followed("token types", 2),
    }


def _bert(vocab: int, padding: int, positions: int = 512) -> Table:
    return {
        **_COMMON,
        **_sizes(vocab, "gelu", positions),
        "pad_token_id": followed(
            "roberta's first position is this id + 1; sequences are not padded",
            padding,
            nullable=True,
        ),
    }


_NO_BIAS = must_equal(False, note="linear layers have no bias", private=True)
_UNUSED = no_effect("training or kernel choice", private=True)
ENCODER_KEYS: dict[str, Table] = {
    "bert": _bert(30522, 0),
    "roberta": _bert(50265, 1),
    "xlm-roberta": _bert(30522, 1),
    "nomic_bert": {
        **_COMMON,
        **_sizes(30528, "silu", 2048),
        "pad_token_id": no_effect("sequences are not padded"),
        "head_dim": followed("size of a head; null: hidden_size / num_attention_heads"),
        "rope_parameters": followed("rope_theta; only the type default"),
        "rope_theta": followed("base of the rotary frequencies", 1000.0),
        "default_theta": no_effect("default of rope_theta"),
        "n_embd": alias("hidden_size", private=True),
        "n_head": alias("num_attention_heads", private=True),
        "n_layer": alias("num_hidden_layers", private=True),
        "n_inner": alias("intermediate_size", private=True),
        "layer_norm_epsilon": alias("layer_norm_eps", private=True),
        "rotary_emb_base": alias("rope_theta", private=True),
        "n_positions": followed("positions; max_trained_positions is the limit", private=True),
        "max_trained_positions": followed("positions that the model was trained on", private=True),
        "activation_function": must_equal("swiglu", note="a gated silu MLP", private=True),
        "qkv_proj_bias": _NO_BIAS,
        "mlp_fc1_bias": _NO_BIAS,
        "mlp_fc2_bias": _NO_BIAS,
        "prenorm": must_equal(False, note="norms follow the addition", private=True),
        "parallel_block": must_equal(False, note="attention, then MLP", private=True),
        "parallel_block_tied_norm": _UNUSED,
        "causal": must_equal(False, note="encoders only", private=True),
        "use_rms_norm": must_equal(False, note="layer norms", private=True),
        "rotary_emb_fraction": must_equal(1.0, note="whole heads are rotated", private=True),
        "rotary_emb_interleaved": must_equal(False, note="pairs (j, j + d/2)", private=True),
        "rotary_emb_scale_base": must_equal(note="no xPos scaling", private=True),
        "rotary_scaling_factor": must_equal(note="no NTK scaling", private=True),
        "scale_attn_by_inverse_layer_idx": must_equal(False, note="not scaled", private=True),
        "scale_attn_weights": must_equal(True, note="divided by sqrt(head_dim)", private=True),
        "num_experts": must_equal(0, note="no mixture of experts", private=True),
        "moe_every_n_layers": must_equal(0, note="no mixture of experts", private=True),
        **dict.fromkeys(
            (
                *("attn_pdrop", "dense_seq_output", "embd_pdrop", "expert_choice_router"),
                *("ffn_div", "fused_bias_fc", "fused_dropout_add_ln", "last_layer_subset"),
                *("mlp_checkpoint_lvl", "pad_vocab_size_multiple", "reorder_and_upcast_attn"),
                *("resid_pdrop", "summary_activation", "summary_first_dropout"),
                *("summary_proj_to_labels", "summary_type", "summary_use_proj", "use_flash_attn"),
                "use_xentropy",
            ),
            _UNUSED,
        ),
    },
}
