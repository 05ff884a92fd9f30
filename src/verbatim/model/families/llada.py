"""LLaDA: llama's layers under OLMo's names, with full attention over prompt and canvas."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import Key, Table, alias, followed, must_equal, no_effect
from verbatim.model.spec import DiffusionSpec, ModelSpec


def _spec(c: Config) -> ModelSpec:
    mask, remasking = parts.mask_token(c), "low_confidence_static"
    return replace(
        parts.rotary(c), diffusion=DiffusionSpec(mask, block=32, full=True, remasking=remasking)
    )


_OFF = "not part of published models"
_ALIASES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "embedding_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "activation_type": "hidden_act",
    "weight_tying": "tie_word_embeddings",
}
_FIXED: dict[str, Key] = {
    **{
        name: must_equal(False, note=_OFF, private=True)
        for name in (
            *("alibi", "attention_layer_norm", "bias_for_layer_norm", "include_bias"),
            *("include_qkv_bias", "input_emb_norm", "multi_query_attention", "scale_logits"),
        )
    },
    "clip_qkv": must_equal(note=_OFF, private=True),
    "block_type": must_equal("llama", note="the layers are llama's", private=True),
    "layer_norm_type": must_equal("rms", note="the norms are RMS norms", private=True),
    "layer_norm_with_affine": must_equal(True, note="norms have weights", private=True),
    "rope": must_equal(True, note="rotary positions", private=True),
}
_UNUSED = (
    *("alibi_bias_max", "attention_layer_norm_with_affine", "block_group_size", "mlp_ratio"),
    *("embedding_dropout", "residual_dropout", "flash_attention", "rope_full_precision"),
    *("init_cutoff_factor", "init_device", "init_fn", "init_std", "precision"),
)
_KEYS: Table = {
    **{name: alias(of, private=True) for name, of in _ALIASES.items()},
    **_FIXED,
    **dict.fromkeys(_UNUSED, no_effect("training, or the choice of a kernel", private=True)),
    "rms_norm_eps": followed("epsilon of the norms", 1e-5),
    "mask_token_id": rows.mask_token(126336),
}
FAMILY = Family(
    model_type="llada",
    body="llama",
    models="LLaDA",
    keys=rows.rotary_keys(rows.NO_BIASES, rows.FULL, _KEYS),
    spec=_spec,
    names=tensors.hf_names(
        {
            "attn_norm": "attn_norm",
            **{f"attn.{part}": f"{part}_proj" for part in "qkv"},
            "attn.o": "attn_out",
            "mlp_norm": "ff_norm",
            "mlp.gate": "ff_proj",
            "mlp.up": "up_proj",
            "mlp.down": "ff_out",
        },
        top={
            "embed": "transformer.wte",
            "final_norm": "transformer.ln_f",
            "head": "model.transformer.ff_out",
            "stack": "transformer.blocks",
        },
    ),
    gguf=Gguf(
        "llada",
        keys=gguf_rows.GGUF_FULL,
        other=gguf_rows.gguf_masks(shift=False),
        names=tensors.GGUF_PAIRS,
    ),
    exported=parts.masks,
    tiny={"llada": tiny(num_key_value_heads=4, mask_token_id=259)},
)
