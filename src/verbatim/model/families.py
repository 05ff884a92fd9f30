"""config.json -> ModelSpec. Each family is one function; gguf_families.py does the same for GGUF.

In: the parsed config of a safetensors directory. Out: the architecture as data, and warnings to
show at load. Every key is first checked against the family's table (config_keys.py), which also
holds the defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from verbatim.base.errors import ModelError, ParameterError
from verbatim.model.config_fields import Fields
from verbatim.model.config_keys import CONFIG_KEYS
from verbatim.model.keys import check_keys
from verbatim.model.layout import HF_KEY_NAMES
from verbatim.model.rope_record import Record, flat_record, gemma3_record, rope_of
from verbatim.model.spec import LayerSpec, ModelSpec

MAX_LAYERS = 4096  # far above any real model; bounds the work on a hostile config
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def spec_from_config(
    config: Mapping[str, Any], *, context: int | None = None, file: str = "config.json"
) -> ModelSpec:
    """The architecture of a Hugging Face config, for an engine with `context` positions.

    None: the model's own context."""
    return read_config(config, context=context, file=file)[0]


def read_config(
    config: Mapping[str, Any], *, context: int | None = None, file: str = "config.json"
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The architecture, and warnings to show at load."""
    warnings: list[str] = []
    fields = Fields(config, file)
    kind = fields.string("model_type")
    if kind == "gemma3":  # the multi-modal wrapper; only its language model is used
        outer = _checked(fields, kind, warnings)
        text = outer.mapping("text_config")
        if text.get("model_type", "gemma3_text") != "gemma3_text":
            raise ModelError(
                f"text_config.model_type is {text['model_type']!r}: gemma3_text is needed",
                file=file,
            )
        kind = "gemma3_text"
        fields = Fields(
            {**text, "tie_word_embeddings": outer.boolean("tie_word_embeddings", True)}, file
        )
    if kind not in _FAMILIES:
        raise ModelError(
            f"model_type {kind!r} is unknown; known: {', '.join(sorted(_FAMILIES))}", file=file
        )
    if kind == "gemma3_text":
        _check_pattern(fields)
    spec = _FAMILIES[kind](_checked(fields, kind, warnings), context)
    return check_spec(spec, file), tuple(warnings)


def _checked(fields: Fields, kind: str, warnings: list[str]) -> Fields:
    checked = check_keys(fields.values, CONFIG_KEYS[kind], what=kind, file=fields.file)
    warnings += checked.warnings
    return Fields(checked.values, fields.file, warnings=warnings)


def rope_records(config: Mapping[str, Any], file: str) -> tuple[Record, Record]:
    """The rope records of full and of sliding layers that the ModelSpec uses. Not for gpt2."""
    fields = Fields(config, file)
    kind = fields.string("model_type")
    if kind == "gemma3":
        kind, fields = "gemma3_text", Fields(fields.mapping("text_config"), file)
    f = _checked(fields, kind, [])
    if kind == "gemma3_text":
        return gemma3_record(f, "full_attention"), gemma3_record(f, "sliding_attention")
    record = flat_record(f, phi3=kind == "phi3")
    return record, record


def check_spec(
    spec: ModelSpec, file: str, key_names: Mapping[str, str] = HF_KEY_NAMES
) -> ModelSpec:
    """Check the sizes of a model against each other. `key_names`: the file's names of the keys."""
    if spec.heads % spec.kv_heads:
        raise ModelError(
            f"{spec.heads} query heads cannot share {spec.kv_heads} key heads "
            f"({key_names['heads']}, {key_names['kv_heads']})",
            file=file,
        )
    for layer in spec.layers:
        if layer.rope is not None and layer.rope.dim > spec.head_dim:
            raise ModelError(
                f"rotary dimension {layer.rope.dim} is larger than a head ({spec.head_dim}); "
                f"see {key_names['rotary']}",
                file=file,
            )
        if layer.experts and not 0 < spec.experts_used <= layer.experts:
            raise ModelError(
                f"{spec.experts_used} of {layer.experts} experts cannot be used "
                f"({key_names['experts_used']}, {key_names['experts']})",
                file=file,
            )
    # A window as wide as the context masks nothing, so those layers join the KV cache group of
    # full attention.
    layers = tuple(
        replace(a, window=None) if a.window is not None and a.window >= spec.context else a
        for a in spec.layers
    )
    return replace(spec, layers=layers)


def pick_context(requested: int | None, default: int, limit: int) -> int:
    """The engine's context: the requested one, else the model's; at most the model's positions."""
    if requested is not None and requested > limit:
        raise ParameterError(
            "context",
            f"{requested} is more than this model's {limit} positions; ask for at most that",
        )
    return requested or default


# --------------------------------------------------------------------------------- shared parts


def _context(f: Fields, requested: int | None, record: Record) -> int:
    trained = f.integer("max_position_embeddings")
    factor = record.get("factor", 1)
    # Dynamic scaling extends the trained length by its factor. For the other rope types
    # max_position_embeddings is the extended length already.
    dynamic = (
        record["rope_type"] == "dynamic" and isinstance(factor, (int, float)) and 1 < factor < 1e6
    )
    return pick_context(requested, trained, int(trained * factor) if dynamic else trained)


def _activation(f: Fields, key: str = "hidden_act") -> Any:
    name = f.string(key)
    if name not in _ACTIVATIONS:
        raise f.fail(key, f"known activations: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _layer_types(f: Fields, layers: int) -> list[bool] | None:
    """Which layers are sliding, where the config has `layer_types`."""
    types = ["full_attention" if t == "attention" else t for t in f.items("layer_types")]
    if not types:
        return None
    if len(types) != layers or any(t not in ("sliding_attention", "full_attention") for t in types):
        raise f.fail(
            "layer_types", f"{layers} entries are needed, each full_attention or sliding_attention"
        )
    return [t == "sliding_attention" for t in types]


def _windows(
    f: Fields, layers: int, default: Callable[[int], bool], window: int | None
) -> list[int | None]:
    """Window of each layer: from `layer_types` if present, else by the family's `default`."""
    sliding = _layer_types(f, layers) or [default(i) for i in range(layers)]
    if any(sliding) and window is None:
        raise f.fail(
            "layer_types" if f.has("layer_types") else "sliding_window",
            "sliding layers need sliding_window",
        )
    return [window if s else None for s in sliding]


def _check_one_window(f: Fields, layers: int, window: int | None) -> None:
    """In a family whose layers are all of one type, `layer_types` must list that type."""
    types = _layer_types(f, layers)
    if types is not None and any(sliding != (window is not None) for sliding in types):
        needed = "full_attention" if window is None else "sliding_attention"
        raise f.fail(
            "layer_types",
            f"all layers of this family have one type, which by sliding_window is {needed}",
        )


def _check_pattern(f: Fields) -> None:
    """Reject a `_sliding_window_pattern` that transformers writes but does not read back."""
    alone = not f.has("layer_types") and not f.has("sliding_window_pattern")
    if alone and f.raw("_sliding_window_pattern", 6) != 6:
        raise f.fail(
            "_sliding_window_pattern", "it is not read; give layer_types or sliding_window_pattern"
        )


def _window(f: Fields) -> int | None:
    return f.integer("sliding_window") if f.has("sliding_window") else None


# ------------------------------------------------------------------------------------- families


def _llama(f: Fields, requested: int | None) -> ModelSpec:
    """Llama 2, 3, 3.x and SmolLM2."""
    return _rotary(f, requested, flat_record(f))


def _rotary(
    f: Fields,
    requested: int | None,
    record: Record,
    window: int | None = None,
    *,
    uniform: bool = True,
) -> ModelSpec:
    """The spec that all rotary families start from. `uniform`: all layers have one type."""
    hidden, heads, layers = (
        f.integer("hidden_size"),
        f.integer("num_attention_heads"),
        f.integer("num_hidden_layers"),
    )
    if layers > MAX_LAYERS:
        raise f.fail("num_hidden_layers", f"at most {MAX_LAYERS}")
    if uniform:
        _check_one_window(f, layers, window)
    head_dim = f.integer("head_dim", max(1, hidden // heads))
    context = _context(f, requested, record)
    bias = f.boolean("attention_bias", False)
    return ModelSpec(
        family="llama",
        vocab=f.integer("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=f.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp=f.integer("intermediate_size"),
        context=context,
        layers=(LayerSpec(window=window, rope=rope_of(f, record, head_dim, context)),) * layers,
        norm_eps=f.number("rms_norm_eps"),
        activation=_activation(f, "hidden_act") if f.has("hidden_act") else "silu",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=f.boolean("mlp_bias", False),
        tied=f.boolean("tie_word_embeddings", False),
    )


def _mistral(f: Fields, requested: int | None) -> ModelSpec:
    return _rotary(f, requested, flat_record(f), _window(f))


def _qwen2(f: Fields, requested: int | None) -> ModelSpec:
    """Always biases on q, k and v, never on o. Windows from layer max_window_layers on."""
    base = _rotary(f, requested, flat_record(f), uniform=False)
    return replace(_windowed_qwen(f, base), family="qwen2", qkv_bias=True, out_bias=False)


def _qwen3(f: Fields, requested: int | None) -> ModelSpec:
    base = _rotary(f, requested, flat_record(f), uniform=False)
    return replace(_windowed_qwen(f, base), family="qwen3", qk_norm=True)


def _windowed_qwen(f: Fields, spec: ModelSpec) -> ModelSpec:
    start = f.integer("max_window_layers", low=0)
    window = _window(f) if f.boolean("use_sliding_window", False) else None
    windows = _windows(f, len(spec.layers), lambda i: window is not None and i >= start, window)
    return replace(
        spec, layers=tuple(replace(a, window=w) for a, w in zip(spec.layers, windows, strict=True))
    )


def _mixtral(f: Fields, requested: int | None) -> ModelSpec:
    base = _rotary(f, requested, flat_record(f), _window(f))
    experts = f.integer("num_local_experts", high=4096)
    return replace(
        base,
        family="mixtral",
        mlp=0,
        layers=tuple(replace(layer, experts=experts) for layer in base.layers),
        experts_used=f.integer("num_experts_per_tok"),
        expert_mlp=base.mlp,
    )


def _qwen3_moe(f: Fields, requested: int | None) -> ModelSpec:
    window = _window(f) if f.boolean("use_sliding_window", False) else None
    if window is not None and f.integer("max_window_layers", 0, low=0):
        raise f.fail(
            "max_window_layers",
            "only 0 is supported with use_sliding_window: every layer has the window",
        )
    base = replace(_rotary(f, requested, flat_record(f), window), family="qwen3moe", qk_norm=True)
    experts = f.integer("num_experts", high=4096)
    step, dense = f.integer("decoder_sparse_step"), f.items("mlp_only_layers")
    if any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise f.fail("mlp_only_layers", "a list of layer numbers is needed")
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(len(base.layers))]
    return replace(
        base,
        mlp=0 if all(sparse) else base.mlp,
        layers=tuple(
            replace(a, experts=experts if s else 0)
            for a, s in zip(base.layers, sparse, strict=True)
        ),
        experts_used=f.integer("num_experts_per_tok"),
        expert_mlp=f.integer("moe_intermediate_size"),
        experts_renormalised=f.boolean("norm_topk_prob", False),
    )


def _gemma2(f: Fields, requested: int | None) -> ModelSpec:
    base = _gemma(f, requested, flat_record(f))
    windows = _windows(f, len(base.layers), lambda i: i % 2 == 0, _window(f))
    return replace(
        base,
        family="gemma2",
        layers=tuple(replace(a, window=w) for a, w in zip(base.layers, windows, strict=True)),
        attention_softcap=f.cap("attn_logit_softcapping"),
        logit_softcap=f.cap("final_logit_softcapping"),
    )


def _gemma3(f: Fields, requested: int | None) -> ModelSpec:
    """Five sliding layers per full layer. Sliding layers have a separate rope record."""
    full, sliding = gemma3_record(f, "full_attention"), gemma3_record(f, "sliding_attention")
    base = _gemma(f, requested, full)
    local = rope_of(f, sliding, base.head_dim, base.context)
    pattern = f.integer("sliding_window_pattern")
    windows = _windows(f, len(base.layers), lambda i: (i + 1) % pattern != 0, _window(f))
    return replace(
        base,
        family="gemma3",
        qk_norm=True,
        layers=tuple(
            LayerSpec(window=w, rope=a.rope if w is None else local)
            for a, w in zip(base.layers, windows, strict=True)
        ),
        logit_softcap=f.cap("final_logit_softcapping"),
    )


def _gemma(f: Fields, requested: int | None, record: Record) -> ModelSpec:
    base = _rotary(f.with_values(hidden_act=None), requested, record, uniform=False)
    return replace(
        base,
        activation=_activation(f, "hidden_activation"),
        norm_offset=1.0,
        post_norms=True,
        embed_scale=math.sqrt(base.hidden),
        attention_scale=1.0 / math.sqrt(f.number("query_pre_attn_scalar")),
    )


def _phi3(f: Fields, requested: int | None) -> ModelSpec:
    return replace(_rotary(f, requested, flat_record(f, phi3=True), _window(f)), family="phi3")


def _gpt2(f: Fields, requested: int | None) -> ModelSpec:
    hidden, heads = f.integer("n_embd"), f.integer("n_head")
    positions, layers = f.integer("n_positions"), f.integer("n_layer", high=MAX_LAYERS)
    if hidden % heads:
        raise f.fail("n_embd", f"a multiple of n_head ({heads}) is needed")
    _check_one_window(f, layers, None)
    return ModelSpec(
        family="gpt2",
        vocab=f.integer("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp=f.integer("n_inner", 4 * hidden),
        context=pick_context(requested, positions, positions),
        layers=(LayerSpec(),) * layers,
        norm="layer",
        norm_eps=f.number("layer_norm_epsilon"),
        activation=_activation(f, "activation_function"),
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
