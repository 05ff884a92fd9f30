"""OLMo 3: olmo2 with windows in three of four layers, whose rope is not scaled."""

from __future__ import annotations

from verbatim.model.families.common import header, parts, rope_record, rows
from verbatim.model.families.common.family import Config, Family, Record, tiny
from verbatim.model.families.olmo2 import NAMES, olmo
from verbatim.model.keys import Table, followed
from verbatim.model.spec import ModelSpec

_THETA = 500000.0


def _spec(c: Config) -> ModelSpec:
    full, sliding = _records(c)
    base = parts.rotary(c, full, uniform=False)
    windows = parts.period_windows(c, base, 4)
    return olmo(parts.with_local_rope(c, base, sliding, windows))


def _records(c: Config) -> tuple[Record, Record]:
    """transformers gives the config's rope_theta to full_attention only."""
    theta = c.number("rope_theta", _THETA)
    local = c.mapping("rope_parameters").get("sliding_attention") or {}
    own = isinstance(local, dict) and local.get("rope_theta")
    if theta != _THETA and not own:
        own = "unless rope_parameters.sliding_attention has its own rope_theta"
        raise c.fail("rope_theta", f"only {_THETA} is supported, {own}")
    return (
        rope_record.layer_type_record(c, "full_attention", "rope_theta"),
        rope_record.layer_type_record(c, "sliding_attention", _THETA),
    )


_KEYS: Table = {
    "rope_theta": rows.theta_key(
        "theta of full_attention",
        more="; checked: 500000 or null where the record of sliding_attention has none",
    ),
    "sliding_window": rows.SLIDING,
    "layer_types": followed(
        "window or none, layer by layer; absent: every 4th layer is full_attention"
    ),
}
FAMILY = Family(
    model_type="olmo3",
    name="olmo2",
    models="OLMo 3",
    keys=rows.rotary_keys(rows.NESTED_ROPE, rows.ATTENTION_BIASES, _KEYS),
    spec=_spec,
    records=_records,
    names=NAMES,
    architecture="olmo2",
    exported=header.pattern_flags,
    tiny={"olmo3": tiny(num_hidden_layers=5, sliding_window=12, rope_theta=_THETA)},
)
