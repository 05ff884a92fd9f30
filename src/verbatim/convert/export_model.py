"""Export a model as GGUF: its ModelSpec as metadata keys, its weights in GGUF's names and
layout.

In: a Model loaded from a safetensors directory. Out: metadata and tensors for write_gguf.
Invariant: the ModelSpec read back from the result equals the original. A model that GGUF's keys
cannot express is rejected, with the field named.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.convert.export_families import TILED, fused, tiled, unscaled
from verbatim.formats.tensor import Tensor
from verbatim.model.architecture import rope_records, spec_from_gguf
from verbatim.model.embedding import POOLINGS
from verbatim.model.families import ARCHITECTURES, gguf_architecture, named
from verbatim.model.families.common.gguf_rows import POOLING
from verbatim.model.layout import layout
from verbatim.model.loading.load import Model
from verbatim.model.loading.names import Source, gguf_source
from verbatim.model.rope import STOPPED, plain_frequencies
from verbatim.model.spec import DeltaSpec, ModelSpec, RopeSpec

# Fields that GGUF stores in another form, such as the norm offset, which is added to the weights.
NOT_COMPARED = {"family", "norm_offset", "layers", "delta"}
# What a ModelSpec or a layer of it holds -> the keys of config.json that may set it.
CONFIG_KEYS = {
    "activation": ("hidden_act", "hidden_activation", "activation_function", "activation"),
    "attention_scale": ("query_pre_attn_scalar", "attention_multiplier"),
    "experts_renormalised": ("norm_topk_prob",),
    "mlp": ("intermediate_size", "mlp_only_layers"),
    "parallel": ("parallel_attn", "use_parallel_residual"),
    "window": ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    "mixer": ("layer_types", "full_attention_interval", "full_attn_idxs"),
    "experts": ("mlp_only_layers", "decoder_sparse_step", "num_experts", "num_local_experts"),
    "KV heads and head size": ("num_key_value_heads", "head_dim", "layer_types"),
    "MLP width": ("intermediate_size", "use_double_wide_mlp"),
    "shared KV layer": ("num_kv_shared_layers", "layer_types"),
    "keys as values": ("attention_k_eq_v",),
    "rope": ("rope_parameters", "rope_scaling", "position_embedding_type", "no_rope_layers"),
}


def model_metadata(model: Model, name: str) -> tuple[dict[str, object], list[Tensor]]:
    """The metadata keys, and the small tensors that some rope scalings need."""
    spec, config = model.spec, getattr(model.source, "config", {})
    arch = gguf_architecture(spec.family)
    if not arch:
        raise ModelError(f"GGUF has no architecture of the family {spec.family}")
    meta: dict[str, object] = {"general.architecture": arch, "general.name": name}
    norm = "layer_norm" if spec.norm == "layer" else "layer_norm_rms"
    keys: dict[str, object] = {
        "context_length": spec.trained_positions or spec.context,
        "embedding_length": spec.hidden,
        "block_count": len(spec.layers),
        "feed_forward_length": spec.mlp or spec.expert_mlp,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        f"attention.{norm}_epsilon": float(spec.norm_eps),
        "vocab_size": spec.vocab,
    }
    if not spec.learned_positions:
        keys |= {"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim}
    keys |= _experts(spec) | _windows(spec)
    if family := named(spec.family):
        keys |= family.exported(spec)
    if model.embedding.pooling in POOLINGS:
        numbers = {name: number for number, name in POOLING.items()}
        keys["pooling_type"] = numbers[model.embedding.pooling]
    extra: list[Tensor] = []
    ropes = [layer.rope for layer in spec.layers if layer.rope is not None]
    if ropes:
        more, extra = _rope(spec, config, str(model.path))
        keys |= more
    other = ARCHITECTURES[arch][0].other
    return meta | {k if k in other else f"{arch}.{k}": value for k, value in keys.items()}, extra


def _experts(spec: ModelSpec) -> dict[str, object]:
    count = max(layer.experts for layer in spec.layers)
    if not count:
        return {}
    keys: dict[str, object] = {
        "expert_count": count,
        "expert_used_count": spec.experts_used,
        "expert_feed_forward_length": spec.expert_mlp,
    }
    if spec.router == "sigmoid":
        keys |= {
            "expert_gating_func": 2,
            "expert_weights_norm": spec.experts_renormalised,
            "expert_weights_scale": float(spec.experts_scale),
            "expert_shared_count": spec.shared_mlp // spec.expert_mlp,
            "leading_dense_block_count": sum(not layer.experts for layer in spec.layers),
        }
    return keys


def _windows(spec: ModelSpec) -> dict[str, object]:
    windows = [layer.window for layer in spec.layers if layer.window is not None]
    return {"attention.sliding_window": max(windows)} if windows else {}


def _rope(
    spec: ModelSpec, config: Mapping[str, object], file: str
) -> tuple[dict[str, object], list[Tensor]]:
    whole, local = rope_records(config, file)
    rope = next(
        layer.rope
        for layer in reversed(spec.layers)
        if layer.rope and (layer.window is None or local is whole)
    )
    theta = float(whole["rope_theta"])
    keys: dict[str, object] = {"rope.dimension_count": rope.dim, "rope.freq_base": theta}
    if local is not whole:
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
    kind = whole["rope_type"]
    extra: list[Tensor] = []
    match kind:
        case "default":
            pass
        case "linear":
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(whole["factor"])}
        case "llama3" | "proportional":
            extra.append(_vector("rope_freqs.weight", _divisors(rope, theta)))
        case "yarn":
            factor = float(whole["factor"])
            keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": factor} | _original(whole)
            names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
            keys |= {f"rope.scaling.{key}": float(whole[ours]) for ours, key in names.items()}
            if spec.family == "mistral3" and whole.get("mscale") == 1:
                magnitude = float(whole.get("mscale_all_dim") or 0)
                keys["rope.scaling.yarn_log_multiplier"] = magnitude
            else:  # attn_factor multiplies the magnitude that yarn computes
                keys["rope.scaling.attn_factor"] = rope.attention_factor / (
                    1 + 0.1 * math.log(max(factor, 1.0))
                )
        case "ntk_alpha":
            growth = float(whole["alpha"]) ** (rope.dim / max(rope.dim - 2, 1))
            keys["rope.freq_base"] = theta * growth
        case "longrope":
            keys |= _original(whole)
            keys["rope.scaling.attn_factor"] = rope.attention_factor
            extra += [
                _vector(f"rope_factors_{n}.weight", np.array(whole[f"{n}_factor"]))
                for n in ("long", "short")
            ]
        case _:
            raise ModelError(
                f"rope_type {kind!r} has no GGUF keys, so this model cannot be written as GGUF",
                file=file,
            )
    return keys, extra


def _original(record: Mapping[str, Any]) -> dict[str, object]:
    value = record.get("original_max_position_embeddings")
    return {"rope.scaling.original_context_length": int(value)} if value else {}


def _divisors(rope: RopeSpec, theta: float) -> np.ndarray:
    plain = plain_frequencies(theta, rope.dim)
    pairs = zip(plain, rope.inv_freq, strict=True)
    return np.array([float(p) / f if f else STOPPED for p, f in pairs])


def _vector(name: str, values: np.ndarray) -> Tensor:
    data = np.ascontiguousarray(values, np.float32)
    return Tensor(name, "f32", data.shape, data.view(np.uint8).reshape(-1))


# --- weights


def model_tensors(model: Model, only: Collection[str] | None = None) -> Iterator[Tensor]:
    """Every weight under its GGUF name, one at a time: fused where GGUF fuses, the rotated rows
    of llama interleaved, the norm offset added to the norms. `only`: the tensors that hold one of
    these weights."""
    spec = model.spec
    arch = gguf_architecture(spec.family)
    two_norms = spec.parallel and not spec.shared_norm
    parts: dict[str, list[Tensor]] = {}
    sources = {
        name: gguf_source(arch, name, two_norms=two_norms, fused_experts=spec.experts_beside)
        for name in layout(spec)
    }
    counts = Counter(source.names[0] for source in sources.values())
    rotated = next((layer.rope.dim for layer in spec.layers if layer.rope), 0)
    wanted = {sources[name].names[0] for name in (sources if only is None else only)}
    for name, source in sources.items():
        key = source.names[0]
        if key not in wanted:
            continue
        tensor = model.weights[name]
        if name.endswith("norm") and spec.norm_offset and not name.endswith("delta.norm"):
            tensor = _vector(key, tensor.to_f32() + np.float32(spec.norm_offset))
        if source.by_width:
            tensor = unscaled(tensor, spec.hidden)
        if ".delta." in name and spec.delta is not None and _reordered(arch, spec.delta):
            tensor = tiled(name.rpartition(".")[2], tensor, spec.delta, str(model.path))
        if source.permuted:
            tensor = _interleaved(tensor, spec.head_dim, rotated)
        parts.setdefault(key, []).append(tensor)
        if len(parts[key]) == counts[key]:
            yield _joined(key, parts.pop(key), source, spec)


def _reordered(arch: str, delta: DeltaSpec) -> bool:
    """Whether GGUF orders the value heads otherwise than the model."""
    return arch in TILED and delta.value_heads != delta.key_heads and not delta.tiled


def _interleaved(tensor: Tensor, head: int, rotated: int) -> Tensor:
    """Interleave rows j and j + d/2 of the rotated part of each head, the inverse of what the
    GGUF loader does for such architectures."""
    if not rotated:  # no layer has rotary positions
        return tensor
    heads = tensor.data.reshape(tensor.shape[0] // head, head, -1)
    pairs = heads[:, :rotated].reshape(len(heads), 2, rotated // 2, -1).swapaxes(1, 2)
    data = np.concatenate([pairs.reshape(len(heads), rotated, -1), heads[:, rotated:]], axis=1)
    return Tensor(tensor.name, tensor.type, tensor.shape, data.reshape(-1))


def _joined(name: str, parts: list[Tensor], source: Source, spec: ModelSpec) -> Tensor:
    if len(parts) == 1:
        return Tensor(name, parts[0].type, parts[0].shape, parts[0].data)
    assert len({part.type for part in parts}) == 1, f"parts of {name} differ in type"
    axis = 1 if source.halves else 0
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return Tensor(name, parts[0].type, tuple(shape), fused(parts, source, spec))


# --- round trip


def check_round_trip(
    model: Model, metadata: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> None:
    """Raise ModelError unless the ModelSpec read from the new file equals the model's."""
    file = str(model.path)
    seen = spec_from_gguf(metadata, tensors, file=file)
    ours = model.spec
    for field in fields(ModelSpec):
        if field.name in NOT_COMPARED:
            continue
        a, b = getattr(ours, field.name), getattr(seen, field.name)
        same = abs(a - b) <= 1e-6 * max(abs(a), abs(b)) if isinstance(a, float) else a == b
        if field.name == "attention_scale":
            same = abs(ours.scale - seen.scale) <= 1e-6 * ours.scale
        if not same:
            raise ModelError(
                f"GGUF has no key for {field.name} = {a!r} of this {ours.family} model "
                f"(it would become {b!r}){_set_by(model, field.name)}",
                file=file,
            )
    if _untiled(ours) != _untiled(seen):
        raise ModelError(f"GGUF has no keys for {ours.delta} of this model", file=file)
    for i in range(len(ours.layers)):
        found = _layer(seen, i)
        for name, value in _layer(ours, i).items():
            if value != found[name]:
                raise ModelError(
                    f"layer {i}: GGUF has no key for {name} = {value!r} of this {ours.family} "
                    f"model (it would become {found[name]!r}){_set_by(model, name)}",
                    file=file,
                )
        if not _same_rope(ours.layers[i].rope, seen.layers[i].rope):
            raise ModelError(
                f"layer {i}: GGUF has no key for rope settings of this {ours.family} model"
                f"{_set_by(model, 'rope')}",
                file=file,
            )


def _set_by(model: Model, name: str) -> str:
    """The end of an error: the keys of the model's config.json that set a property."""
    config = getattr(model.source, "config", {})
    config = config.get("text_config", config)
    keys = [key for key in CONFIG_KEYS.get(name, ()) if key in config]
    return f"; config.json sets it by {', '.join(keys)}" if keys else ""


def _untiled(spec: ModelSpec) -> DeltaSpec | None:
    """The sizes of delta nets, without the order of their value heads."""
    return None if spec.delta is None else replace(spec.delta, tiled=False)


def _layer(spec: ModelSpec, i: int) -> dict[str, object]:
    """What a file must say about one layer, rope settings apart."""
    a = spec.layers[i]
    return {
        "window": a.window,
        "experts": a.experts,
        "mixer": a.mixer,
        "KV heads and head size": spec.kv_shape(i),
        "MLP width": spec.mlp_width(i),
        "shared KV layer": a.kv_layer,
        "keys as values": a.value_is_key,
    }


def _same_rope(a: RopeSpec | None, b: RopeSpec | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dim != b.dim or len(a.inv_freq) != len(b.inv_freq):
        return False
    close = np.allclose(a.inv_freq, b.inv_freq, rtol=1e-6, atol=0)
    return close and abs(a.attention_factor - b.attention_factor) < 1e-6
