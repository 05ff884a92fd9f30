"""SmolLM3: llama whose every fourth layer has no rotary positions."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import header, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import followed, no_effect
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    base = parts.rotary(c, uniform=False)
    count, interval = len(base.layers), c.integer("no_rope_layer_interval")
    rotated = c.items("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    if len(rotated) < count or any(r not in (0, 1) for r in rotated):
        raise c.fail("no_rope_layers", f"{count} entries are needed, one per layer, each 0 or 1")
    sliding, window = c.boolean("use_sliding_window", False), parts.window_of(c)
    windows = parts.layer_windows(
        c, count, lambda i: sliding and window is not None and not rotated[i], window
    )
    if any(windows) and not sliding:
        raise c.fail("layer_types", "sliding_attention needs use_sliding_window")
    layers = tuple(
        replace(a, rope=a.rope if r else None)
        for a, r in zip(base.layers, rotated[:count], strict=True)
    )
    return parts.with_windows(replace(base, layers=layers), windows)


FAMILY = Family(
    model_type="smollm3",
    models="SmolLM3",
    keys=rows.rotary_keys(
        rows.BIASES,
        {
            "no_rope_layers": followed("0: the layer has no rotary positions; one entry per layer"),
            "no_rope_layer_interval": followed(
                "layer period: every N-th layer has no rotary positions, where no_rope_layers is "
                "absent"
            ),
            "use_sliding_window": followed(
                "the layers without rotary positions have a window, where layer_types is absent"
            ),
            "sliding_window": followed("window of the sliding_attention layers; null: none"),
            "layer_types": rows.LAYER_WINDOWS,
            "max_window_layers": no_effect("not used by this family"),
        },
    ),
    spec=_spec,
    # no key of a header says which layers are rotated: all but every fourth
    gguf=Gguf("smollm3", names=tensors.GGUF_PAIRS, implied=header.every_layer_window),
    tiny={"smollm3": tiny(num_hidden_layers=4)},
)
