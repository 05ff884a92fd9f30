"""A GGUF header under the names of a config.json, so that a family has one spec for both.

In: the checked ARCH.* keys of a header and the file's tensors, which alone tell the vocabulary, the
biases, whether the head is tied, and the frequency divisors of llama3 and longrope. Out: the values
and facts of a Config, and the header's name of each value, for error texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verbatim.base.errors import ModelError
from verbatim.formats.tensor import Tensor
from verbatim.model.families.common.family import Gguf
from verbatim.model.families.common.gguf_fields import GgufFields, Record, Values, facts
from verbatim.model.keys import Checked
from verbatim.model.spec import ModelSpec

_ROPE = "rope.freq_base"  # a table with this key is that of a family with rotary positions


def config_values(h: GgufFields, gguf: Gguf, defaults: Mapping[str, object]) -> Checked:
    """The header as a config. `defaults`: those of the family's config keys; they fill in what no
    key of the header states."""
    values: Values = {}
    written: dict[str, str] = {}
    for name, key in gguf.keys.items():
        if key.config:
            value = h.raw(name, None)
            absent = key.zero_is_absent and not isinstance(value, bool) and value == 0
            values[key.config] = None if absent else value
            written[key.config] = h.prefix + name
    for name, key in gguf.other.items():
        if key.config and h.raw(name, None) is not None:
            values[key.config], written[key.config] = h.raw(name), name
    values |= {"num_hidden_layers": h.layers, "vocab_size": h.vocab, **_tensor_values(h, gguf)}
    if "layer_types" in written:
        values["layer_types"] = _windows(h, gguf)
    if h.integer("expert_count", 0, low=0, high=4096) and "intermediate_size" in written:
        values |= _expert_widths(h)
    if _ROPE in gguf.keys:
        _check_value_length(h)
        values |= facts(rope=rope_record(h))
    return Checked({**defaults, **values, **gguf.implied(h)}, [], written)


def _windows(h: GgufFields, gguf: Gguf) -> list[str]:
    """layer_types; all layers are full where the header states no window."""
    key = "attention.sliding_window"
    if gguf.keys[key].zero_is_absent and not h.raw(key, 0):
        return ["full_attention"] * h.layers
    h.integer(key)
    return sliding_types(h)


def _tensor_values(h: GgufFields, gguf: Gguf) -> Values:
    return {
        "tie_word_embeddings": "output.weight" not in h.tensors,
        **facts(
            qkv_bias=f"blk.0.{gguf.names.layer['attn.q']}.bias" in h.tensors,
            out_bias="blk.0.attn_output.bias" in h.tensors,
            mlp_bias="blk.0.ffn_up.bias" in h.tensors,
        ),
    }


def _check_value_length(h: GgufFields) -> None:
    heads = h.integer("attention.head_count")
    head_dim = h.integer("attention.key_length", max(1, h.integer("embedding_length") // heads))
    if h.integer("attention.value_length", head_dim) != head_dim:
        raise h.fail("attention.value_length", f"values must be as long as keys ({head_dim})")


def sliding_types(h: GgufFields) -> list[str]:
    """layer_types by attention.sliding_window_pattern: a period, of which the last layer is full,
    or one flag per layer."""
    name, count = "attention.sliding_window_pattern", h.layers
    pattern = h.raw(name)
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        sliding = [(i + 1) % pattern != 0 for i in range(count)]
    else:
        sliding = [bool(s) for s in h.items(name)]
    if len(sliding) != count:
        raise h.fail(name, f"{count} entries are needed")
    return ["sliding_attention" if s else "full_attention" for s in sliding]


def pattern_flags(spec: ModelSpec) -> Values:
    """The other way round, for `verbatim convert`."""
    windows = [layer.window is not None for layer in spec.layers]
    return {"attention.sliding_window_pattern": windows} if any(windows) else {}


def every_layer_window(h: GgufFields) -> Values:
    """The config keys of qwen2 for a window of every layer."""
    window = h.raw("attention.sliding_window", 0) != 0
    kind = "sliding_attention" if window else "full_attention"
    return {"use_sliding_window": window, "max_window_layers": 0, "layer_types": [kind] * h.layers}


def expert_width(h: GgufFields) -> int:
    """The inner width of an expert."""
    return h.integer("expert_feed_forward_length", h.raw("feed_forward_length", 0))


def local_rope(h: GgufFields, theta: str = "rope.freq_base_swa") -> Values:
    """The unscaled rope record of sliding layers, as a fact."""
    record = {"rope_type": "default", "rope_theta": h.number(theta)}
    return facts(local_rope=record | _dimension(h, "rope.dimension_count"))


def _expert_widths(h: GgufFields) -> Values:
    """A mixture without dense layers may state either width."""
    inner = h.integer("feed_forward_length", 0, low=0)
    expert = h.integer("expert_feed_forward_length", inner)
    return {"intermediate_size": inner or expert, "moe_intermediate_size": expert}


# ---------------------------------------------------------------------------------------- rope


def rope_record(h: GgufFields, **more: Any) -> Record:
    """Rope scaling in GGUF's own keys. llama3 and longrope store one divisor per frequency, as
    tensors. `more`: further numbers of the scaling that the architecture implies."""
    record = _scaling(h) | more
    if "rope_factors_long.weight" in h.tensors and "rope_factors_short.weight" in h.tensors:
        record["rope_type"] = "longrope"
        record["long_factor"] = _numbers(h.tensors["rope_factors_long.weight"], h.file)
        record["short_factor"] = _numbers(h.tensors["rope_factors_short.weight"], h.file)
    elif "rope_freqs.weight" in h.tensors:
        if record["rope_type"] != "none":
            raise h.fail(
                "rope.scaling.type",
                "rope_freqs.weight is there too; only one of the two scalings is supported",
            )
        divisors = _numbers(h.tensors["rope_freqs.weight"], h.file)
        record = {"rope_type": "divided", "divisors": divisors}
    scales_angles = record["rope_type"] in ("yarn", "longrope")
    if not scales_angles and h.raw("rope.scaling.attn_factor", 1) != 1:
        raise h.fail("rope.scaling.attn_factor", "only 1 is supported without yarn and longrope")
    record["rope_theta"] = h.number("rope.freq_base")
    return record | _dimension(h, "rope.dimension_count")


def _scaling(h: GgufFields) -> Record:
    factor = h.raw("rope.scaling.factor", None)
    scaled = factor not in (None, 0, 1)
    kind = h.string("rope.scaling.type", "linear" if scaled else "none")
    record: Record = {"rope_type": kind if kind != "linear" or scaled else "none"}
    if factor or kind == "yarn":
        record["factor"] = factor or 1.0  # absent or 0: llama.cpp does not scale
    if h.has("rope.scaling.original_context_length"):
        original = h.integer("rope.scaling.original_context_length")
        record["original_max_position_embeddings"] = original
        if kind == "yarn" and h.has("rope.scaling.factor"):
            h.number("rope.scaling.factor")
    if h.has("rope.scaling.attn_factor"):
        record["attention_factor"] = _attention_factor(h, kind, record)
    record["beta_fast"] = h.number("rope.scaling.yarn_beta_fast")
    record["beta_slow"] = h.number("rope.scaling.yarn_beta_slow")
    return record


def _dimension(h: GgufFields, key: str) -> dict[str, int]:
    """The rotated part of a head, where the header states it; a head as a whole otherwise."""
    return {"dim": h.integer(key)} if h.has(key) else {}


def _attention_factor(h: GgufFields, kind: str, record: Mapping[str, Any]) -> float:
    """attn_factor times the default of the scaling: 1 + 0.1 ln(factor) for yarn, else 1."""
    factor = record.get("factor", 1)
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    grows = kind == "yarn" and number and 1 < factor < math.inf
    default = 1 + 0.1 * math.log(factor) if grows else 1.0
    return h.number("rope.scaling.attn_factor") * default


def _numbers(tensor: Tensor, file: str) -> list[float]:
    if len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise ModelError(
            f"tensor {tensor.name} has shape {tensor.shape}: a short vector is needed", file=file
        )
    return [float(v) for v in tensor.to_f32()]
