"""config.json -> ModelSpec. Each family is one function that says how it differs; GGUF metadata is read in gguf_families.py.

In: the parsed config of a safetensors directory. Out: the architecture as data. Anything unknown is a ModelError with its key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from verbatim.base.errors import ModelError, ParameterError
from verbatim.model.fields import Fields
from verbatim.model.rope import make_rope
from verbatim.model.spec import LayerSpec, ModelSpec, RopeSpec

MAX_LAYERS = 4096
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def spec_from_config(config: Mapping[str, Any], *, context: int | None = None, file: str = "config.json") -> ModelSpec:
    """The architecture that a Hugging Face config describes, for an engine with this context (None: the model's own)."""
    fields = Fields(config, file)
    kind = fields.string("model_type")
    if kind == "gemma3":  # the multi-modal wrapper: we run its text part
        fields = Fields(fields.mapping("text_config"), file, "")
        kind = "gemma3_text"
    if kind not in _FAMILIES:
        raise ModelError(f"model_type {kind!r} is unknown; known: {', '.join(sorted(_FAMILIES))}", file=file)
    Fields(config, file).refuse("quantization_config")
    spec = _FAMILIES[kind](fields, context)
    return check_spec(spec, file)


def check_spec(spec: ModelSpec, file: str) -> ModelSpec:
    """What must hold between the numbers of any model."""
    if spec.heads % spec.kv_heads:
        raise ModelError(f"{spec.heads} query heads cannot share {spec.kv_heads} key heads", file=file)
    for layer in spec.layers:
        if layer.rope is not None and layer.rope.dim > spec.head_dim:
            raise ModelError(f"rotary dimension {layer.rope.dim} is larger than a head ({spec.head_dim})", file=file)
        if layer.experts and not 0 < spec.experts_used <= layer.experts:
            raise ModelError(f"{spec.experts_used} of {layer.experts} experts cannot be used", file=file)
    # a window as wide as the context hides nothing: those layers share the cache group of the full ones
    layers = tuple(replace(a, window=None) if a.window is not None and a.window >= spec.context else a for a in spec.layers)
    return replace(spec, layers=layers)


def pick_context(asked: int | None, own: int, limit: int) -> int:
    """The engine's context: what was asked, else the model's own; never beyond what the positions can express."""
    if asked is not None and asked > limit:
        raise ParameterError("context", f"{asked} is more than this model's {limit} positions; ask for at most that")
    return asked or own


# ----------------------------------------------------------------------------------------------------------------- parts


def _rope_record(f: Fields, kind: str | None = None) -> dict[str, Any]:
    """The scaling record with its theta, from the newer `rope_parameters` or the older `rope_scaling` and `rope_theta`."""
    record = f.mapping("rope_parameters")
    if kind is not None and isinstance(record.get(kind), Mapping):
        record = dict(record[kind])
    if not record:
        record = f.mapping("rope_scaling")
    return record


def _rope(f: Fields, head_dim: int, context: int, *, theta: float = 10000.0, record: dict[str, Any] | None = None) -> RopeSpec:
    record = _rope_record(f) if record is None else record
    trained = f.integer("max_position_embeddings", 2048)
    base = Fields(record, f.file, "").number("rope_theta", f.number("rope_theta", theta))
    part = Fields(record, f.file, "").number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    if f.has("original_max_position_embeddings"):  # phi3 keeps it beside the record
        record.setdefault("original_max_position_embeddings", f.integer("original_max_position_embeddings"))
    return make_rope(record, theta=base, dim=int(head_dim * part), context=context, trained=trained, file=f.file)


def _context(f: Fields, asked: int | None) -> int:
    own = f.integer("max_position_embeddings", 2048)
    record = _rope_record(f)
    kind = record.get("rope_type", record.get("type"))
    factor = record.get("factor", 1)
    # dynamic scaling is made to go beyond the trained length, by its factor; the others say their whole length already
    stretch = factor if kind == "dynamic" and isinstance(factor, (int, float)) and 1 < factor < 1e6 else 1
    return pick_context(asked, own, int(own * stretch))


def _activation(f: Fields, key: str = "hidden_act", default: str = "silu") -> Any:
    name = f.string(key, default)
    if name not in _ACTIVATIONS:
        raise f.fail(key, f"known activations: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _windows(f: Fields, layers: int, default: Callable[[int], bool], window: int | None) -> list[int | None]:
    """Each layer's window: from `layer_types` where the config has it, else by the family's own rule."""
    types = f.items("layer_types")
    if types and (len(types) != layers or any(t not in ("sliding_attention", "full_attention") for t in types)):
        raise f.fail("layer_types", f"{layers} entries are needed, each full_attention or sliding_attention")
    sliding = [t == "sliding_attention" for t in types] if types else [default(i) for i in range(layers)]
    if any(sliding) and window is None:
        raise f.fail("layer_types", "sliding layers need sliding_window")
    return [window if s else None for s in sliding]


def _defaulted(f: Fields, defaults: Mapping[str, Any]) -> Fields:
    """The family's own defaults, for keys that the config leaves out or sets to null."""
    return Fields({**f.values, **{k: v for k, v in defaults.items() if f.values.get(k) is None}}, f.file)


def _window(f: Fields, default: int | None = None) -> int | None:
    return f.integer("sliding_window") if f.has("sliding_window") else default


# -------------------------------------------------------------------------------------------------------------- families


def _llama(f: Fields, asked: int | None, *, window: bool = False, vocab: int = 32000, eps: float = 1e-6) -> ModelSpec:
    """Llama 2, 3, 3.x, SmolLM2; the others start from here. The defaults are those of the Hugging Face config classes."""
    hidden, heads, layers = (
        f.integer("hidden_size", 4096),
        f.integer("num_attention_heads", 32),
        f.integer("num_hidden_layers", 32),
    )
    if layers > MAX_LAYERS:
        raise f.fail("num_hidden_layers", f"at most {MAX_LAYERS}")
    head_dim = f.integer("head_dim", max(1, hidden // heads))
    context = _context(f, asked)
    bias = f.boolean("attention_bias", False)
    seen = _window(f) if window else None
    return ModelSpec(
        family="llama",
        vocab=f.integer("vocab_size", vocab),
        hidden=hidden,
        heads=heads,
        kv_heads=f.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp=f.integer("intermediate_size", 11008),
        context=context,
        layers=(LayerSpec(window=seen, rope=_rope(f, head_dim, context)),) * layers,
        norm_eps=f.number("rms_norm_eps", eps),
        activation=_activation(f),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=f.boolean("mlp_bias", False),
        tied=f.boolean("tie_word_embeddings", False),
    )


def _mistral(f: Fields, asked: int | None) -> ModelSpec:
    return _llama(f, asked, window=True)


def _qwen2(f: Fields, asked: int | None) -> ModelSpec:
    """Biases on q, k, v always, on o never. Windows only where use_sliding_window, from layer max_window_layers on."""
    return replace(_windowed_qwen(f, _llama(f, asked, vocab=151936)), family="qwen2", qkv_bias=True, out_bias=False)


def _qwen3(f: Fields, asked: int | None) -> ModelSpec:
    f = _defaulted(f, {"head_dim": 128})
    return replace(_windowed_qwen(f, _llama(f, asked, vocab=151936)), family="qwen3", qk_norm=True)


def _windowed_qwen(f: Fields, spec: ModelSpec, first: int | None = None) -> ModelSpec:
    if not f.boolean("use_sliding_window", False):
        return spec
    start = f.integer("max_window_layers", 28, low=0) if first is None else first
    windows = _windows(f, len(spec.layers), lambda i: i >= start, _window(f, 4096))
    return replace(spec, layers=tuple(replace(a, window=w) for a, w in zip(spec.layers, windows, strict=True)))


def _mixtral(f: Fields, asked: int | None) -> ModelSpec:
    f = _defaulted(f, {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6})
    base = _llama(f, asked, window=True)
    experts = f.integer("num_local_experts", 8, high=4096)
    return replace(
        base,
        family="mixtral",
        mlp=0,
        layers=tuple(replace(layer, experts=experts) for layer in base.layers),
        experts_used=f.integer("num_experts_per_tok", 2),
        expert_mlp=base.mlp,
    )


def _qwen3_moe(f: Fields, asked: int | None) -> ModelSpec:
    base = replace(_windowed_qwen(f, _llama(f, asked, vocab=151936), first=0), family="qwen3moe", qk_norm=True)
    experts = f.integer("num_local_experts", f.raw("num_experts", 128), high=4096)
    step, dense = f.integer("decoder_sparse_step", 1), f.items("mlp_only_layers")
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(len(base.layers))]
    return replace(
        base,
        mlp=0 if all(sparse) else base.mlp,
        layers=tuple(replace(a, experts=experts if s else 0) for a, s in zip(base.layers, sparse, strict=True)),
        experts_used=f.integer("num_experts_per_tok", 8),
        expert_mlp=f.integer("moe_intermediate_size", 768),
        experts_renormalised=f.boolean("norm_topk_prob", False),
    )


def _gemma2(f: Fields, asked: int | None) -> ModelSpec:
    defaults = {"vocab_size": 256000, "head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    f = _defaulted(f, {**defaults, "tie_word_embeddings": True})
    f.refuse("use_bidirectional_attention", False)
    base = _gemma(f, asked)
    windows = _windows(f, len(base.layers), lambda i: i % 2 == 0, _window(f, 4096))
    return replace(
        base,
        family="gemma2",
        layers=tuple(replace(a, window=w) for a, w in zip(base.layers, windows, strict=True)),
        attention_softcap=f.cap("attn_logit_softcapping", None if "attn_logit_softcapping" in f.values else 50.0),
        logit_softcap=f.cap("final_logit_softcapping", None if "final_logit_softcapping" in f.values else 30.0),
    )


def _gemma3(f: Fields, asked: int | None) -> ModelSpec:
    """Five windowed layers to one full one. Windowed layers have a rope of their own, never scaled."""
    defaults = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }
    f = _defaulted(f, defaults)
    f.refuse("use_bidirectional_attention", False)
    base = _gemma(f, asked)
    local = _rope(f, base.head_dim, base.context, record=_local_rope(f))
    whole = _rope(f, base.head_dim, base.context, theta=1e6, record=_rope_record(f, "full_attention"))
    pattern = f.integer("sliding_window_pattern", f.raw("_sliding_window_pattern", 6))
    windows = _windows(f, len(base.layers), lambda i: (i + 1) % pattern != 0, _window(f, 4096))
    return replace(
        base,
        family="gemma3",
        qk_norm=True,
        layers=tuple(LayerSpec(window=w, rope=whole if w is None else local) for w in windows),
        attention_softcap=f.cap("attn_logit_softcapping"),
        logit_softcap=f.cap("final_logit_softcapping"),
    )


def _local_rope(f: Fields) -> dict[str, Any]:
    record = f.mapping("rope_parameters").get("sliding_attention")
    theta = f.number("rope_local_base_freq", 10000.0)
    return {"rope_theta": theta, **record} if isinstance(record, Mapping) else {"rope_theta": theta}


def _gemma(f: Fields, asked: int | None) -> ModelSpec:
    base = _llama(f, asked)
    default = f.string("hidden_act", "gelu_pytorch_tanh")
    return replace(
        base,
        activation=_activation(f, "hidden_activation", default if default != "gelu" else "gelu_pytorch_tanh"),
        norm_offset=1.0,
        post_norms=True,
        embed_scale=math.sqrt(base.hidden),
        attention_scale=1.0 / math.sqrt(f.number("query_pre_attn_scalar", 256)),
    )


def _phi3(f: Fields, asked: int | None) -> ModelSpec:
    record = _rope_record(f)
    if record.get("rope_type", record.get("type")) == "yarn":
        record = {**record, "rope_type": "longrope"}  # early phi3 configs say yarn and mean longrope
        f = Fields({**f.values, "rope_parameters": record}, f.file)
    defaults = {"vocab_size": 32064, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    return replace(_llama(_defaulted(f, defaults), asked, window=True), family="phi3")


def _gpt2(f: Fields, asked: int | None) -> ModelSpec:
    f.refuse("scale_attn_by_inverse_layer_idx", False)
    f.refuse("add_cross_attention", False)
    hidden, heads = f.integer("n_embd", 768), f.integer("n_head", 12)
    positions = f.integer("n_positions", 1024)
    if hidden % heads:
        raise f.fail("n_embd", f"a multiple of n_head ({heads}) is needed")
    return ModelSpec(
        family="gpt2",
        vocab=f.integer("vocab_size", 50257),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp=f.integer("n_inner", 4 * hidden),
        context=pick_context(asked, positions, positions),
        layers=(LayerSpec(),) * f.integer("n_layer", 12, high=MAX_LAYERS),
        norm="layer",
        norm_eps=f.number("layer_norm_epsilon", 1e-5),
        activation=_activation(f, "activation_function", "gelu_new"),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        learned_positions=True,
        tied=f.boolean("tie_word_embeddings", True),
        attention_scale=0.0 if f.boolean("scale_attn_weights", True) else 1.0,
        trained_positions=positions,
    )


_FAMILIES: dict[str, Callable[[Fields, int | None], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
