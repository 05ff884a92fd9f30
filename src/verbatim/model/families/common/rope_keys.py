"""Key tables of the rope records of a config.json, by rope_type."""

from __future__ import annotations

from verbatim.model.keys import Key, Table, followed, must_equal, no_effect

_ORIGINAL = {"original_max_position_embeddings": followed("trained length")}
_FACTOR = {"factor": followed("scale")}
_RATIO = {
    "factor": followed("scale; null, as in longrope absent: ratio of the lengths", nullable=True)
}
_ATTENTION = {
    "attention_factor": followed("multiplies cosines and sines; null: as absent", nullable=True)
}
_ANY: dict[str, Key] = {
    "rope_type": followed("kind of scaling", "default"),
    "type": followed("older name of `rope_type`, which wins; null only beside it", nullable=True),
    "rope_theta": followed("base of the frequencies"),
    "partial_rotary_factor": followed(
        "rotated fraction of a head, in families that rotate heads in part; others need 1.0"
    ),
    "mrope_section": must_equal(note="positions are one number per token"),
    "finetuned": no_effect("metadata"),
}

_FRACTION: dict[str, Key] = {
    "partial_rotary_factor": followed(
        "fraction of a head's pairs that rotate; absent: the config's own, else 1"
    )
}
_LLAMA3 = {
    "low_freq_factor": followed("end of the blended band"),
    "high_freq_factor": followed("start of the blended band"),
}
_YARN = {
    "beta_fast": followed("start of the blended band; null: 32", 32.0, nullable=True),
    "beta_slow": followed("end of the blended band; null: 1", 1.0, nullable=True),
    "mscale": followed("numerator of the attention factor; null: as absent", nullable=True),
    "mscale_all_dim": followed("its denominator; null: as absent", nullable=True),
    "truncate": followed("round the band to whole pairs", True),
}
_LONGROPE = {
    "short_factor": followed("divisors where the engine's context is at most the trained length"),
    "long_factor": followed("divisors where the engine's context is longer"),
}
# Keys of a rope record by rope_type. A key of another rope_type has no effect; a warning names it.
ROPE_KEYS: dict[str, Table] = {
    "default": _ANY,
    "linear": _ANY | _FACTOR,
    "proportional": _ANY | _FACTOR | _FRACTION,
    "dynamic": _ANY | _FACTOR,
    "llama3": _ANY | _FACTOR | _ORIGINAL | _LLAMA3,
    "yarn": _ANY | _RATIO | _ORIGINAL | _ATTENTION | _YARN,
    "longrope": _ANY | _RATIO | _ORIGINAL | _ATTENTION | _LONGROPE,
}

# Keys of published checkpoints that no rope_type of transformers reads; a warning names them.
ROPE_UNREAD: Table = {"attn_factor": no_effect("`attention_factor` is the key")}


def all_rope_keys() -> dict[str, object]:
    keys = {name: key for table in ROPE_KEYS.values() for name, key in table.items()}
    return {**keys, **ROPE_UNREAD}
