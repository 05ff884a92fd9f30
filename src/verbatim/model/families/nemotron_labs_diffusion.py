"""Nemotron-Labs-Diffusion: ministral3's layers, which decode from left to right, or fill a block of
masks behind a causal context."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families import mistral3
from verbatim.model.families.common import parts, rows, tensors
from verbatim.model.families.common.family import Config, Family
from verbatim.model.keys import Table, followed, must_equal, no_effect
from verbatim.model.spec import DiffusionSpec, ModelSpec


def _spec(c: Config) -> ModelSpec:
    block = c.integer("block_size", high=4096)
    diffusion = DiffusionSpec(parts.mask_token(c), block, causal=True, confidence=0.9)
    return replace(mistral3.FAMILY.spec(c), diffusion=diffusion)


_TRAINING = (
    *("dlm_loss_weight", "ar_loss_weight", "dp_varying_mask_ratio", "random_length_prob"),
    *("tok_mask_half_life_ratio", "ada_perm_ratio_per_block", "ada_dlm_loss_ratio"),
    *("global_loss_avg", "use_sbd_objective", "self_spec_inference_mode"),
)
_KEYS: Table = {
    **dict.fromkeys(_TRAINING, no_effect("training only", private=True)),
    "sliding_window": must_equal(note="every token sees all before it"),
    "dlm_paradigm": no_effect("the request decides how tokens are drawn", private=True),
    "dlm_type": must_equal("llada", note="a mask draws its own position", private=True),
    "block_size": followed("positions of a block", 32, private=True),
    "mask_token_id": rows.mask_token(100),
}
FAMILY = Family(
    model_type="nemotron_labs_diffusion",
    body="ministral3",
    models="Nemotron-Labs-Diffusion",
    keys={**mistral3.FAMILY.keys, **_KEYS},
    spec=_spec,
    rope=mistral3.FAMILY.rope,
    names=tensors.hf_names(
        {},
        top={
            "embed": "encoder.embed_tokens",
            "final_norm": "encoder.norm",
            "head": "diffusion_head",
            "stack": "encoder.layers",
        },
    ),
    tiny={
        "nemotron_labs_diffusion": {
            "mask_token_id": 259,
            "block_size": 8,
            **mistral3.FAMILY.tiny["ministral3"],
        }
    },
)
