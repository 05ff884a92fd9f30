"""Command R7B and Command A: cohere with three sliding layers with rotary positions, then a full
layer without."""

from __future__ import annotations

from verbatim.model.families.cohere import FAMILY as COHERE
from verbatim.model.families.cohere import GGUF_KEYS, KEYS, NAMES, parallel
from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import Table, followed, must_equal, no_effect
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    base = parts.layer_norm(c, uniform=False)
    windows = parts.period_windows(c, base, c.integer("sliding_window_pattern"))
    return parallel(c, parts.rotary_only_in_windows(base, windows))


_OWN_KEYS: Table = {
    "sliding_window": followed(f"{rows.SLIDING.note}; the others have no rotary positions"),
    "layer_types": rows.LAYER_WINDOWS,
    "sliding_window_pattern": followed(rows.PERIOD, 4),
    "layer_switch": no_effect("`sliding_window_pattern` decides"),
    "order_of_interleaved_layers": must_equal(
        "local_attn_first", note="the last layer of a period is full_attention"
    ),
}
_OWN_GGUF_KEYS: Table = {
    **GGUF_KEYS,
    **gguf_rows.pattern(4, "; full layers have no rotary positions", zero=False),
}
FAMILY = Family(
    model_type="cohere2",
    models="Command R7B, Command A",
    keys=rows.rotary_keys(KEYS, _OWN_KEYS, eps="layer_norm_eps"),
    spec=_spec,
    names=NAMES,
    gguf=Gguf("cohere2", keys=_OWN_GGUF_KEYS, names=tensors.GGUF_PAIRS),
    exported=COHERE.exported,
    tiny={
        "cohere2": tiny(rms_norm_eps=None, num_hidden_layers=5, sliding_window=12, logit_scale=1.5)
    },
)
