"""Parts that the architecture functions of GGUF share: the rotary base, rope scalings, windows.

In: the metadata of a GGUF file and its tensors. Out: fields of a ModelSpec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verbatim.base.errors import ModelError
from verbatim.formats.tensor import Tensor
from verbatim.model.config_fields import Fields
from verbatim.model.families.family_parts import MAX_LAYERS, pick_context
from verbatim.model.rope import length_warning, make_rope
from verbatim.model.spec import LayerSpec, ModelSpec, RopeSpec

Tensors = Mapping[str, Tensor]


def rotary(
    f: Fields, tensors: Tensors, requested: int | None, *, eps: str = "layer_norm_rms_epsilon"
) -> ModelSpec:
    """The spec that all rotary architectures start from."""
    hidden, heads = f.integer("embedding_length"), f.integer("attention.head_count")
    head_dim = f.integer("attention.key_length", max(1, hidden // heads))
    if f.integer("attention.value_length", head_dim) != head_dim:
        raise f.fail("attention.value_length", f"values must be as long as keys ({head_dim})")
    trained = f.integer("context_length")
    context = pick_context(requested, trained, max(trained, _yarn_length(f)))
    rope = rope_of(f, tensors, f.integer("rope.dimension_count", head_dim), context)
    window = (
        f.integer("attention.sliding_window", low=0) if f.has("attention.sliding_window") else 0
    )
    experts = f.integer("expert_count", 0, low=0, high=4096)
    layer = LayerSpec(window=window or None, rope=rope, experts=experts)
    mlp = f.integer("feed_forward_length", 0 if experts else 1, low=0)
    return ModelSpec(
        family="mixtral" if experts else "llama",
        vocab=vocab_of(f, tensors),
        hidden=hidden,
        heads=heads,
        kv_heads=f.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp=0 if experts else mlp,
        context=context,
        layers=(layer,) * f.integer("block_count", high=MAX_LAYERS),
        norm_eps=f.number(f"attention.{eps}"),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        tied="output.weight" not in tensors,
        experts_used=f.integer("expert_used_count") if experts else 0,
        expert_mlp=f.integer("expert_feed_forward_length", mlp) if experts else 0,
    )


def vocab_of(f: Fields, tensors: Tensors) -> int:
    embed = tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise ModelError("tensor token_embd.weight is missing or not a matrix", file=f.file)
    return embed.shape[0]


def rope_of(f: Fields, tensors: Tensors, dim: int, context: int, **more: Any) -> RopeSpec:
    """Rope scaling in GGUF's own keys. llama3 and longrope store one divisor per frequency, as
    tensors. `more`: further numbers of the scaling that the architecture implies."""
    trained = f.integer("context_length")
    factor = f.raw("rope.scaling.factor", None)
    scaled = factor not in (None, 0, 1)
    kind = f.string("rope.scaling.type", "linear" if scaled else "none")
    record: dict[str, Any] = {"rope_type": kind if kind != "linear" or scaled else "none"}
    if factor or kind == "yarn":
        record["factor"] = factor or 1.0  # absent or 0: llama.cpp does not scale
    if f.has("rope.scaling.original_context_length"):
        record["original_max_position_embeddings"] = f.integer(
            "rope.scaling.original_context_length"
        )
    if f.has("rope.scaling.attn_factor"):
        record["attention_factor"] = _attention_factor(f, kind, record)
    record["beta_fast"] = f.number("rope.scaling.yarn_beta_fast")
    record["beta_slow"] = f.number("rope.scaling.yarn_beta_slow")
    record |= more
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        record["rope_type"] = "longrope"
        record["long_factor"] = _numbers(tensors["rope_factors_long.weight"], f.file)
        record["short_factor"] = _numbers(tensors["rope_factors_short.weight"], f.file)
    elif "rope_freqs.weight" in tensors:
        if record["rope_type"] != "none":
            raise f.fail(
                "rope.scaling.type",
                "rope_freqs.weight is there too; only one of the two scalings is supported",
            )
        record = {
            "rope_type": "divided",
            "divisors": _numbers(tensors["rope_freqs.weight"], f.file),
        }
    scales_angles = record["rope_type"] in ("yarn", "longrope")
    if not scales_angles and f.raw("rope.scaling.attn_factor", 1) != 1:
        raise f.fail("rope.scaling.attn_factor", "only 1 is supported without yarn and longrope")
    base = f.number("rope.freq_base")
    rope = make_rope(record, theta=base, dim=dim, context=context, trained=trained, file=f.file)
    if warning := length_warning(record, context=context, trained=trained):
        f.warn(warning)
    return rope


def _yarn_length(f: Fields) -> int:
    """The length that YaRN extends to: a file may state it in its scaling only. 0 without YaRN."""
    factor, original = "rope.scaling.factor", "rope.scaling.original_context_length"
    if f.string("rope.scaling.type", "none") != "yarn" or not (f.has(factor) and f.has(original)):
        return 0
    times = f.number(factor)
    return int(f.integer(original) * times) if 1 < times < 1e6 else 0


def _attention_factor(f: Fields, kind: str, record: Mapping[str, Any]) -> float:
    """attn_factor times the default of the scaling: 1 + 0.1 ln(factor) for yarn, else 1."""
    factor = record.get("factor", 1)
    grows = (
        kind == "yarn"
        and isinstance(factor, (int, float))
        and not isinstance(factor, bool)
        and 1 < factor < math.inf
    )
    default = 1 + 0.1 * math.log(factor) if grows else 1.0
    return f.number("rope.scaling.attn_factor") * default


def _numbers(tensor: Tensor, file: str) -> list[float]:
    if len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise ModelError(
            f"tensor {tensor.name} has shape {tensor.shape}: a short vector is needed", file=file
        )
    return [float(v) for v in tensor.to_f32()]


def cap(f: Fields, key: str) -> float:
    """A softcap; in GGUF 0 means none."""
    return 0.0 if f.raw(key, 0) == 0 else f.cap(key)


def sliding_layers(f: Fields, count: int) -> list[bool]:
    """Which layers have the window: attention.sliding_window_pattern is a period, of which the last
    layer is full, or one flag per layer."""
    pattern = f.raw("attention.sliding_window_pattern")
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        return [(i + 1) % pattern != 0 for i in range(count)]
    sliding = [bool(s) for s in f.items("attention.sliding_window_pattern")]
    if len(sliding) != count:
        raise f.fail("attention.sliding_window_pattern", f"{count} entries are needed")
    return sliding
