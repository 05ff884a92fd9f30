"""SDAR: a qwen3 that fills blocks of masked tokens, with attention to earlier blocks and inside the
own one."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families import qwen3
from verbatim.model.families.common.family import Config, Family, tiny
from verbatim.model.keys import followed, must_equal
from verbatim.model.spec import DiffusionSpec, ModelSpec


def _spec(c: Config) -> ModelSpec:
    spec = qwen3.FAMILY.spec(c)
    block, mask = c.integer("block_size", 4, high=4096), c.integer("mask_token_id", low=0)
    if mask >= spec.vocab:
        raise c.fail("mask_token_id", f"{mask} is beyond the vocabulary of {spec.vocab}")
    return replace(spec, diffusion=DiffusionSpec(mask, block))


FAMILY = Family(
    model_type="sdar",
    body="qwen3",
    models="SDAR",
    keys={
        **qwen3.FAMILY.keys,
        "use_sliding_window": must_equal(False, note="blocks attend to all earlier ones"),
        "block_size": followed("positions of a diffusion block", 4, private=True),
        "mask_token_id": followed("token of an undecided position", 151669, private=True),
    },
    spec=_spec,
    tiny={"sdar": tiny(head_dim=16, block_size=4, mask_token_id=259)},
)
