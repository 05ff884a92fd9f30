"""GGUF metadata -> ModelSpec: architectures with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from verbatim.model.config_fields import Fields
from verbatim.model.families.families_recurrent import MAX_TAPS, with_mixers
from verbatim.model.families.gguf_parts import Tensors, cap, rotary
from verbatim.model.spec import DeltaSpec, ModelSpec

_KV = "attention.head_count_kv"


def _lfm2(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    """head_count_kv has one entry per layer, 0 for a convolution."""
    layers, raw = f.integer("block_count"), f.raw(_KV)
    counts = [raw] if isinstance(raw, int) else f.items(_KV)
    heads = {n for n in counts if isinstance(n, int) and n}
    known = len(heads) == 1 and all(n in (0, *heads) for n in counts)
    if not known or len(counts) not in (1, layers):
        raise f.fail(_KV, f"{layers} entries are needed: 0, or one number of key heads")
    base = rotary(f.with_values(**{f"{f.prefix}{_KV}": heads.pop()}), tensors, requested)
    attention = [bool(n) for n in counts] if len(counts) == layers else [True] * layers
    first = attention.index(False) if False in attention else 0
    base = replace(
        base,
        family="lfm2",
        qk_norm="head",
        conv_kernel=f.integer("shortconv.l_cache", high=MAX_TAPS),
        conv_bias=f"blk.{first}.shortconv.in_proj.bias" in tensors,
    )
    return with_mixers(base, attention, "conv")


def _lfm2moe(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    """lfm2 with a sigmoid router, and dense first layers."""
    base = _lfm2(f, tensors, requested)
    experts = f.integer("expert_count", high=4096)
    dense = f.integer("leading_dense_block_count", low=0)
    return replace(
        base,
        family="lfm2moe",
        mlp=f.integer("feed_forward_length") if dense else 0,
        layers=tuple(
            replace(a, experts=experts if i >= dense else 0) for i, a in enumerate(base.layers)
        ),
        experts_renormalised=f.boolean("expert_weights_norm", True),
        experts_scale=cap(f, "expert_weights_scale") or 1.0,
        router="sigmoid",
        choice_bias=f"blk.{dense}.exp_probs_b.bias" in tensors,
    )


def _qwen35(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = rotary(f, tensors, requested)
    drafts = f.integer("nextn_predict_layers", low=0, high=len(base.layers) - 1)
    layers = base.layers[: len(base.layers) - drafts]
    interval = f.integer("full_attention_interval")
    attention = [(i + 1) % interval == 0 for i in range(len(layers))]
    if not any(attention):
        raise f.fail("full_attention_interval", "at least one layer of attention is needed")
    bias = f"blk.{attention.index(True)}.attn_"
    base = replace(
        base,
        family="qwen35",
        layers=layers,
        qk_norm="head",
        qkv_bias=f"{bias}q.bias" in tensors,
        out_bias=f"{bias}output.bias" in tensors,
        attention_gate=True,
        conv_kernel=f.integer("ssm.conv_kernel", high=MAX_TAPS),
        delta=_delta(f),
    )
    return with_mixers(base, attention, "delta")


def _delta(f: Fields) -> DeltaSpec:
    keys, heads = f.integer("ssm.group_count"), f.integer("ssm.time_step_rank")
    if heads % keys:
        raise f.fail("ssm.time_step_rank", f"a multiple of the {keys} key heads is needed")
    width = f.integer("ssm.inner_size")
    if width % heads:
        raise f.fail("ssm.inner_size", f"a multiple of the {heads} value heads is needed")
    # llama.cpp's converter reorders the value heads of qwen35 and qwen35moe, but not of qwen3next
    tiled = f.prefix in ("qwen35.", "qwen35moe.") and heads != keys
    return DeltaSpec(keys, heads, f.integer("ssm.state_size"), width // heads, tiled)


def _qwen3next(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(
        _qwen35(f, tensors, requested),
        family="qwen3next",
        shared_mlp=f.integer("expert_shared_feed_forward_length"),
        shared_gate=True,
    )


def _qwen35moe(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    f.integer("expert_count")
    return replace(_qwen3next(f, tensors, requested), family="qwen35moe")


RECURRENT_ARCHITECTURES: dict[str, Callable[[Fields, Tensors, int | None], ModelSpec]] = {
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "qwen3next": _qwen3next,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
}
