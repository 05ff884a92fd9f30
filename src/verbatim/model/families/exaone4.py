"""EXAONE 4: the norms of olmo2, each head normed; with windows, full layers have no rotary
positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from verbatim.model.families.common import gguf_rows, header, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import Table, followed
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    base, window = parts.rotary(c, uniform=False), parts.window_of(c)
    windows = parts.layer_windows(c, len(base.layers), _pattern(c), window)
    spec = base if window is None else parts.rotary_only_in_windows(base, windows)
    return replace(spec, pre_norms=False, post_norms=True, qk_norm="head")


def _pattern(c: Config) -> Callable[[int], bool]:
    """Whether layer i is sliding: a period, or a string such as LLLG (local, global)."""
    letters = c.raw("sliding_window_pattern", None)
    if isinstance(letters, str) and letters and set(letters) <= set("LG"):
        return lambda i: letters[i % len(letters)] == "L"
    period = 1 if c.has("layer_types") else c.integer("sliding_window_pattern")
    return lambda i: (i + 1) % period != 0


_KEYS: Table = {
    "sliding_window": followed(f"{rows.SLIDING.note}, if any; others have no rotations"),
    "sliding_window_pattern": followed(
        "where layer_types is absent: every N-th layer is full_attention; or a string of L "
        "(sliding) and G (full), repeated"
    ),
    "layer_types": rows.LAYER_WINDOWS,
}
FAMILY = Family(
    model_type="exaone4",
    models="EXAONE 4",
    keys=rows.rotary_keys(rows.NO_BIASES, _KEYS),
    spec=_spec,
    names=tensors.hf_names(tensors.POST_NORMS),
    gguf=Gguf(
        "exaone4",
        keys=gguf_rows.rotary(gguf_rows.pattern(4, "; others then have no rotary positions")),
    ),
    exported=header.pattern_flags,
    tiny={"exaone4": tiny(head_dim=16, num_hidden_layers=5, sliding_window=12)},
)
