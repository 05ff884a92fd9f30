"""ERNIE 4.5 (dense): llama, rotated by interleaved pairs, with biases everywhere or nowhere."""

from __future__ import annotations

from verbatim.model.families.common import parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import followed


def with_bias(c: Config) -> Config:
    bias = c.boolean("use_bias", False)
    return c.with_values(attention_bias=bias, mlp_bias=bias)


FAMILY = Family(
    model_type="ernie4_5",
    models="ERNIE 4.5 (dense)",
    keys=rows.rotary_keys(
        rows.FULL,
        rows.NO_BIASES,
        {"head_dim": rows.HEAD_DIM_OR_NULL, "use_bias": followed("biases of all matrices")},
    ),
    spec=lambda c: parts.rotary(with_bias(c)),
    names=tensors.hf_names({}, interleaved=True),
    gguf=Gguf("ernie4_5", names=tensors.GGUF_PAIRS),
    tiny={"ernie4_5": tiny(head_dim=16)},
)
