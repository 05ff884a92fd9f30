"""SDAR: a qwen3 that fills blocks of masked tokens, with attention to earlier blocks and inside the
own one."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families import qwen3
from verbatim.model.families.common import parts, rows
from verbatim.model.families.common.family import Config, Family, tiny
from verbatim.model.keys import followed, must_equal
from verbatim.model.spec import DiffusionSpec, ModelSpec


def _spec(c: Config) -> ModelSpec:
    block = c.integer("block_size", high=4096)
    return replace(qwen3.FAMILY.spec(c), diffusion=DiffusionSpec(parts.mask_token(c), block))


FAMILY = Family(
    model_type="sdar",
    body="qwen3",
    models="SDAR",
    keys={
        **qwen3.FAMILY.keys,
        "use_sliding_window": must_equal(False, note="blocks attend to all earlier ones"),
        "block_size": followed("positions of a block", 4, private=True),
        "mask_token_id": rows.mask_token(151669),
    },
    spec=_spec,
    tiny={"sdar": tiny(head_dim=16, block_size=4, mask_token_id=259)},
)
