"""StableLM: layer norms, heads rotated in part; some models have parallel blocks with one norm."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, parts, rows
from verbatim.model.families.common.family import Config, Family, Gguf, RopeRules, tiny
from verbatim.model.keys import Table, followed, no_effect
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    parallel = c.boolean("use_parallel_residual", False)
    return replace(
        parts.whole_heads(c, parts.layer_norm(c)),
        qkv_bias=c.fact("qkv_bias", c.boolean("use_qkv_bias", False)),
        parallel=parallel,
        shared_norm=parallel,
    )


_KEYS: Table = {
    "head_dim": rows.FIXED_HEAD_DIM,
    "use_qkv_bias": followed("biases of q, k and v"),
    "use_parallel_residual": followed(f"{rows.PARALLEL}, through one norm"),
    "rope_pct": no_effect("`partial_rotary_factor` decides"),
}
FAMILY = Family(
    model_type="stablelm",
    models="StableLM",
    keys=rows.rotary_keys(rows.FULL, rows.NO_BIASES, rows.PARTIAL, _KEYS, eps="layer_norm_eps"),
    spec=_spec,
    rope=RopeRules(partial=True),
    gguf=Gguf(
        "stablelm",
        keys={
            **gguf_rows.gguf_layer_norm("layer_norm_eps"),
            "use_parallel_residual": no_effect("the norms in the file decide"),
        },
        implied=lambda h: {"use_parallel_residual": "blk.0.ffn_norm.weight" not in h.tensors},
    ),
    tiny={"stablelm": tiny(rms_norm_eps=None, use_qkv_bias=True, partial_rotary_factor=0.5)},
)
