"""GGUF metadata -> ModelSpec, one function per architecture.

In: the metadata of a GGUF file and its tensors, which alone tell the vocabulary size, whether the
head is tied, and the frequency divisors of llama3 and longrope. Out: the architecture as data, the
pooling of embeddings, and warnings to show at load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verbatim.base.errors import ModelError
from verbatim.model.config_fields import Fields
from verbatim.model.families import MAX_LAYERS, check_spec, pick_context
from verbatim.model.gguf_keys import GENERAL_KEYS, GGUF_KEYS, POOLING, is_metadata
from verbatim.model.keys import check_keys, printable
from verbatim.model.layout import GGUF_KEY_NAMES
from verbatim.model.rope import length_warning, make_rope
from verbatim.model.spec import LayerSpec, ModelSpec, RopeSpec
from verbatim.weights.tensor import Tensor

# Gemma's 27B models scale queries by hidden / heads instead of by head_dim. No key in the file says
# so, so the model is recognised by its number of layers.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Header:
    """The model that a GGUF header describes."""

    spec: ModelSpec
    warnings: tuple[str, ...] = ()  # shown to the user at load
    pooling: str = "mean"  # how `embed` pools a sequence into one vector


def spec_from_gguf(
    metadata: Mapping[str, Any], tensors: Tensors, *, context: int | None = None, file: str
) -> ModelSpec:
    return read_header(metadata, tensors, context=context, file=file).spec


def read_header(
    metadata: Mapping[str, Any], tensors: Tensors, *, context: int | None = None, file: str
) -> Header:
    """Check every metadata key and build the Header."""
    architecture = Fields(metadata, file).string("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture!r} is unknown; known: {', '.join(sorted(_ARCHITECTURES))}",
            file=file,
        )
    prefix = f"{architecture}."
    warnings: list[str] = []
    others = {name: value for name, value in metadata.items() if not name.startswith(prefix)}
    general = {name: value for name, value in others.items() if name in GENERAL_KEYS}
    check_keys(general, GENERAL_KEYS, what="GGUF files", file=file)
    warnings += [
        f"{printable(name)} is not known and is not a key of {architecture}; ignored"
        for name in others
        if name not in GENERAL_KEYS and not is_metadata(name)
    ]
    checked = check_keys(
        metadata, GGUF_KEYS[architecture], what=architecture, file=file, prefix=prefix
    )
    warnings += checked.warnings
    fields = Fields(checked.values, file, prefix, warnings)
    spec = check_spec(_ARCHITECTURES[architecture](fields, tensors, context), file, GGUF_KEY_NAMES)
    kind = fields.integer("pooling_type", 1, low=0, high=max(POOLING))
    return Header(spec, tuple(warnings), POOLING[kind])


def _llama(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    """The spec that all rotary architectures start from."""
    hidden, heads = f.integer("embedding_length"), f.integer("attention.head_count")
    head_dim = f.integer("attention.key_length", max(1, hidden // heads))
    if f.integer("attention.value_length", head_dim) != head_dim:
        raise f.fail("attention.value_length", f"values must be as long as keys ({head_dim})")
    context = pick_context(requested, f.integer("context_length"), f.integer("context_length"))
    rope = _rope(f, tensors, f.integer("rope.dimension_count", head_dim), context)
    window = (
        f.integer("attention.sliding_window", low=0) if f.has("attention.sliding_window") else 0
    )
    experts = f.integer("expert_count", 0, low=0, high=4096)
    layer = LayerSpec(window=window or None, rope=rope, experts=experts)
    mlp = f.integer("feed_forward_length", 0 if experts else 1, low=0)
    return ModelSpec(
        family="mixtral" if experts else "llama",
        vocab=_vocab(f, tensors),
        hidden=hidden,
        heads=heads,
        kv_heads=f.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp=0 if experts else mlp,
        context=context,
        layers=(layer,) * f.integer("block_count", high=MAX_LAYERS),
        norm_eps=f.number("attention.layer_norm_rms_epsilon"),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        tied="output.weight" not in tensors,
        experts_used=f.integer("expert_used_count") if experts else 0,
        expert_mlp=f.integer("expert_feed_forward_length", mlp) if experts else 0,
    )


def _vocab(f: Fields, tensors: Tensors) -> int:
    embed = tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise ModelError("tensor token_embd.weight is missing or not a matrix", file=f.file)
    return embed.shape[0]


def _rope(f: Fields, tensors: Tensors, dim: int, context: int) -> RopeSpec:
    """Rope scaling in GGUF's own keys. llama3 and longrope store one divisor per frequency, as
    tensors."""
    trained = f.integer("context_length")
    factor = f.raw("rope.scaling.factor", f.raw("rope.scale_linear", None))
    scaled = factor not in (None, 0, 1)
    kind = f.string("rope.scaling.type", "linear" if scaled else "none")
    record: dict[str, Any] = {"rope_type": kind if kind != "linear" or scaled else "none"}
    if factor:
        record["factor"] = factor
    if f.has("rope.scaling.original_context_length"):
        record["original_max_position_embeddings"] = f.integer(
            "rope.scaling.original_context_length"
        )
    if f.has("rope.scaling.attn_factor"):
        record["attention_factor"] = _attention_factor(f, kind, record)
    record["beta_fast"] = f.number("rope.scaling.yarn_beta_fast")
    record["beta_slow"] = f.number("rope.scaling.yarn_beta_slow")
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
    base = f.number("rope.freq_base")
    rope = make_rope(record, theta=base, dim=dim, context=context, trained=trained, file=f.file)
    if warning := length_warning(record, context=context, trained=trained):
        f.warn(warning)
    return rope


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


def _qwen2(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(_llama(f, tensors, requested), family="qwen2", qkv_bias=True)


def _qwen3(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(_llama(f, tensors, requested), family="qwen3", qk_norm=True)


def _qwen3moe(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    f.integer("expert_count")
    return replace(_llama(f, tensors, requested), family="qwen3moe", qk_norm=True)


def _gemma(f: Fields, tensors: Tensors, requested: int | None, family: str) -> ModelSpec:
    base = _llama(f, tensors, requested)
    wide = len(base.layers) == _GEMMA_27B_LAYERS[family]
    return replace(
        base,
        family=family,
        activation="gelu_tanh",
        post_norms=True,
        embed_scale=math.sqrt(base.hidden),
        attention_scale=1.0 / math.sqrt(base.hidden // base.heads if wide else base.head_dim),
        attention_softcap=_cap(f, "attn_logit_softcapping"),
        logit_softcap=_cap(f, "final_logit_softcapping"),
    )


def _cap(f: Fields, key: str) -> float:
    """A softcap; in GGUF 0 means none."""
    return 0.0 if f.raw(key, 0) == 0 else f.cap(key)


def _gemma2(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = _gemma(f, tensors, requested, "gemma2")
    window = f.integer("attention.sliding_window")
    layers = tuple(
        replace(a, window=window if i % 2 == 0 else None) for i, a in enumerate(base.layers)
    )
    return replace(base, layers=layers)


def _gemma3(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = _gemma(f, tensors, requested, "gemma3")
    window, pattern = (
        f.integer("attention.sliding_window"),
        f.raw("attention.sliding_window_pattern"),
    )
    count = len(base.layers)
    if isinstance(pattern, int) and pattern > 0:
        sliding = [(i + 1) % pattern != 0 for i in range(count)]
    else:
        sliding = [bool(s) for s in f.items("attention.sliding_window_pattern")]
        if len(sliding) != count:
            raise f.fail("attention.sliding_window_pattern", f"{count} entries are needed")
    dim = f.integer("rope.dimension_count", base.head_dim)
    theta = f.number("rope.freq_base_swa")
    local = make_rope(
        {}, theta=theta, dim=dim, context=base.context, trained=base.context, file=f.file
    )
    whole = _rope(f, tensors, dim, base.context)
    layers = tuple(
        LayerSpec(window=window if s else None, rope=local if s else whole) for s in sliding
    )
    return replace(base, qk_norm=True, layers=layers)


def _phi3(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(_llama(f, tensors, requested), family="phi3")


def _gpt2(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    hidden, heads, positions = (
        f.integer("embedding_length"),
        f.integer("attention.head_count"),
        f.integer("context_length"),
    )
    if hidden % heads:
        raise f.fail("embedding_length", f"a multiple of the {heads} heads is needed")
    if f.integer("attention.head_count_kv", heads) != heads:
        raise f.fail(
            "attention.head_count_kv", f"gpt2 has as many key heads as query heads ({heads})"
        )
    return ModelSpec(
        family="gpt2",
        vocab=_vocab(f, tensors),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp=f.integer("feed_forward_length"),
        context=pick_context(requested, positions, positions),
        layers=(LayerSpec(),) * f.integer("block_count", high=MAX_LAYERS),
        norm="layer",
        norm_eps=f.number("attention.layer_norm_epsilon"),
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        learned_positions=True,
        tied="output.weight" not in tensors,
        trained_positions=positions,
    )


_ARCHITECTURES: dict[str, Callable[[Fields, Tensors, int | None], ModelSpec]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
