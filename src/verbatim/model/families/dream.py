"""Dream: a qwen2 with full attention over prompt and canvas, whose rows draw the next position."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families import qwen2
from verbatim.model.families.common import gguf_rows, header, parts, rows
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import must_equal
from verbatim.model.spec import DiffusionSpec, ModelSpec


def _spec(c: Config) -> ModelSpec:
    mask, remasking = parts.mask_token(c), "low_confidence_static"
    diffusion = DiffusionSpec(mask, block=0, full=True, shift=True, remasking=remasking)
    return replace(qwen2.FAMILY.spec(c), diffusion=diffusion)


FAMILY = Family(
    model_type="Dream",
    name="dream",
    body="qwen2",
    models="Dream",
    keys={
        **qwen2.FAMILY.keys,
        "use_sliding_window": must_equal(False, note="every position sees all others"),
        "mask_token_id": rows.mask_token(151666),
    },
    spec=_spec,
    gguf=Gguf(
        "dream",
        keys=gguf_rows.GGUF_FULL,
        other=gguf_rows.gguf_masks(shift=True),
        implied=header.every_layer_window,
    ),
    exported=parts.masks,
    tiny={"dream": tiny(mask_token_id=259)},
)
