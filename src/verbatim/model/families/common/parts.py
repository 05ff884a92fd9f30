"""Parts that the family functions share: activations, windows, the rotary base, checks of sizes.

In: a config with its defaults filled in. Out: fields of a ModelSpec. Every error names its key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from verbatim.base.errors import ModelError, ParameterError
from verbatim.base.json_io import JsonMapping
from verbatim.model.config_fields import Fields, short
from verbatim.model.families.common.family import Config
from verbatim.model.families.common.gguf_fields import MAX_LAYERS, Record
from verbatim.model.families.common.rope_record import family_record, rope_of
from verbatim.model.keys import printable
from verbatim.model.layout import HF_KEY_NAMES
from verbatim.model.spec import LayerSpec, ModelSpec, RopeSpec

MAX_VOCAB = 1 << 20  # the sampler's integer sums hold no more (docs/numerics.md)
_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh", "gelu_pytorch_tanh")
_ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(_GELU_TANH, "gelu_tanh"),
    "relu2": "relu2",
}
# model_types that tell of an encoder; `clip` is GGUF's name of such a file
_MULTIMODAL = re.compile(r"^clip$|(^|_)(omni|vl|audio)(_|$)")


def unknown_family(
    what: str, kind: str, known: Iterable[str], keys: JsonMapping, file: str, more: str = ""
) -> ModelError:
    """The error for an architecture that is not implemented. `what`: the key that names it.
    `known`: those that are. `keys`: the file's, which tell what kind of model it is."""
    thinker = keys.get("thinker_config")  # the part of an Omni model that generates text
    parts = thinker if isinstance(thinker, Mapping) else keys
    known, inner, hint = sorted(known), parts.get("text_config"), ""
    multimodal = {"vision_config", "audio_config", "text_config"} & set(parts)
    if keys.get("is_encoder_decoder") is True or f"{kind}.decoder_block_count" in keys:
        hint = ": an encoder-decoder model"
    elif multimodal or _MULTIMODAL.search(kind):
        text = inner.get("model_type") if isinstance(inner, Mapping) else None
        of = f" ({printable(text)})" if isinstance(text, str) else ""
        hint = f": a language model{of} with an encoder of images or sound"
    elif re.search(r"mamba(?!_ssm)|\bssm|state_size|rwkv", " ".join((kind, *keys))):
        hint = ": it has state-space (Mamba) layers"
    elif near := get_close_matches(kind.lower(), known, 1, 0.8):
        hint = f": the nearest name is {near[0]}"
    return ModelError(
        f"{what} {short(kind)} is unknown{hint}; known: {', '.join(known)}{more}; "
        "see docs/models.md",
        file=file,
    )


def check_spec(
    spec: ModelSpec, file: str, key_names: Mapping[str, str] = HF_KEY_NAMES
) -> ModelSpec:
    """Check the sizes of a model against each other. `key_names`: the file's names of the keys."""
    if spec.vocab > MAX_VOCAB:
        raise ModelError(
            f"{key_names['vocab']} has {spec.vocab} tokens: at most {MAX_VOCAB} are supported",
            file=file,
        )
    if any(spec.heads % spec.kv_shape(i)[0] for i in range(len(spec.layers))):
        raise ModelError(
            f"{spec.heads} query heads cannot share {spec.kv_heads} key heads "
            f"({key_names['heads']}, {key_names['kv_heads']})",
            file=file,
        )
    for i, layer in enumerate(spec.layers):
        head_dim = spec.kv_shape(i)[1]
        if layer.rope is not None and layer.rope.dim > head_dim:
            raise ModelError(
                f"rotary dimension {layer.rope.dim} is larger than a head ({head_dim}); "
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


def context_of(f: Config, record: Record) -> int:
    trained = f.integer("max_position_embeddings")
    factor = record.get("factor", 1)
    limit = trained
    if isinstance(factor, (int, float)) and 1 < factor < 1e6:
        # Dynamic scaling extends the trained length by its factor. For the other rope types
        # max_position_embeddings is the extended length already, except where YaRN was added to
        # the config of a published model and that length was left as it was.
        if record["rope_type"] == "dynamic":
            limit = int(trained * factor)
        elif record["rope_type"] == "yarn":
            original = record.get("original_max_position_embeddings")
            if type(original) is int and original < 1 << 32:
                limit = max(trained, int(original * factor))
    return pick_context(f.context, trained, limit)


def activation(f: Fields, key: str = "hidden_act") -> Any:
    name = f.string(key)
    if name not in _ACTIVATIONS:
        raise f.fail(key, f"known activations: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def layer_types(f: Fields, layers: int) -> list[bool] | None:
    """Which layers are sliding, where the config has `layer_types`."""
    types = ["full_attention" if t == "attention" else t for t in f.items("layer_types")]
    if not types:
        return None
    check_types(f, types, layers, "full_attention", "sliding_attention")
    return [t == "sliding_attention" for t in types]


def check_types(f: Fields, types: list[Any], layers: int, *known: str) -> None:
    if len(types) != layers:
        raise f.fail("layer_types", f"{len(types)} entries for {layers} layers")
    if wrong := [t for t in types if t not in known]:
        needed = " or ".join(known)
        raise f.fail("layer_types", f"{short(wrong[0])} is not supported; {needed} is needed")


def layer_windows(
    f: Fields, layers: int, default: Callable[[int], bool], window: int | None
) -> list[int | None]:
    """Window of each layer: from `layer_types` if present, else by the family's `default`."""
    sliding = layer_types(f, layers) or [default(i) for i in range(layers)]
    if any(sliding) and window is None:
        raise f.fail(
            "layer_types" if f.has("layer_types") else "sliding_window",
            "sliding layers need sliding_window",
        )
    return [window if s else None for s in sliding]


def period_windows(c: Config, spec: ModelSpec, period: int) -> list[int | None]:
    """As layer_windows; by default every `period`-th layer is full."""
    return layer_windows(c, len(spec.layers), lambda i: (i + 1) % period != 0, window_of(c))


def check_one_window(f: Fields, layers: int, window: int | None) -> None:
    """In a family whose layers are all of one type, `layer_types` must list that type."""
    types = layer_types(f, layers)
    if types is not None and any(sliding != (window is not None) for sliding in types):
        needed = "full_attention" if window is None else "sliding_attention"
        raise f.fail(
            "layer_types",
            f"all layers of this family have one type, which by sliding_window is {needed}",
        )


def window_of(f: Fields) -> int | None:
    return f.integer("sliding_window") if f.has("sliding_window") else None


def rotary(c: Config, record: Record | None = None, *, uniform: bool = True) -> ModelSpec:
    """The spec that all rotary families start from. `record`: the rope record, where it is not the
    family's only one. `uniform`: all layers have one type."""
    record = family_record(c) if record is None else record
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    layers, window = c.integer("num_hidden_layers"), window_of(c) if uniform else None
    if layers > MAX_LAYERS:
        raise c.fail("num_hidden_layers", f"at most {MAX_LAYERS}")
    if uniform:
        check_one_window(c, layers, window)
    head_dim = c.integer("head_dim", max(1, hidden // heads))
    context = context_of(c, record)
    bias = c.boolean("attention_bias", False)
    return ModelSpec(
        family=c.family.name,
        vocab=c.integer("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=c.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp=c.integer("intermediate_size"),
        context=context,
        layers=(LayerSpec(window=window, rope=rope_of(c, record, head_dim, context)),) * layers,
        norm_eps=c.number("rms_norm_eps"),
        activation=activation(c, "hidden_act") if c.has("hidden_act") else "silu",
        qkv_bias=c.fact("qkv_bias", bias),
        out_bias=c.fact("out_bias", bias),
        mlp_bias=c.fact("mlp_bias", c.boolean("mlp_bias", False)),
        tied=c.boolean("tie_word_embeddings", False),
    )


def layer_norm(c: Config, eps: str = "layer_norm_eps", *, uniform: bool = True) -> ModelSpec:
    """A rotary family with layer norms. `eps`: key of the norms' epsilon."""
    base = rotary(c.with_values(rms_norm_eps=c.number(eps)), uniform=uniform)
    return replace(base, norm="layer")


def whole_heads(c: Config, spec: ModelSpec) -> ModelSpec:
    if spec.hidden % spec.heads:
        raise c.fail("hidden_size", f"a multiple of num_attention_heads ({spec.heads}) is needed")
    return spec


def with_windows(
    spec: ModelSpec,
    windows: list[int | None],
    rope: Callable[[LayerSpec, int | None], RopeSpec | None] = lambda layer, window: layer.rope,
) -> ModelSpec:
    """Windows, and the rotary positions of a layer with such a window."""
    pairs = zip(spec.layers, windows, strict=True)
    return replace(spec, layers=tuple(replace(a, window=w, rope=rope(a, w)) for a, w in pairs))


def with_local_rope(
    c: Config, spec: ModelSpec, sliding: Record, windows: list[int | None]
) -> ModelSpec:
    """Windows, and in the layers that have one the rope record `sliding`."""
    local = rope_of(c, sliding, spec.head_dim, spec.context)
    return with_windows(spec, windows, lambda layer, window: local if window else layer.rope)


def rotary_only_in_windows(spec: ModelSpec, windows: list[int | None]) -> ModelSpec:
    """Windows, and no rotary positions in the layers without one."""
    return with_windows(spec, windows, lambda layer, window: layer.rope if window else None)


def with_experts(
    c: Config,
    spec: ModelSpec,
    key: str = "num_experts",
    sparse: Sequence[bool] | None = None,
    *,
    used: str = "num_experts_per_tok",
    inner: str = "moe_intermediate_size",
    **more: Any,
) -> ModelSpec:
    """Mixtures of experts in the layers that are `sparse`; None: in all. Without dense layers the
    spec has no width of a dense MLP. `key`, `used`, `inner`: the config's keys of the experts, of
    those that a token uses, and of their width. `more`: further fields of the spec."""
    sparse = [True] * len(spec.layers) if sparse is None else sparse
    experts = c.integer(key, high=4096)
    pairs = zip(spec.layers, sparse, strict=True)
    return replace(
        spec,
        mlp=0 if all(sparse) else spec.mlp,
        layers=tuple(replace(a, experts=experts if s else 0) for a, s in pairs),
        experts_used=c.integer(used),
        expert_mlp=c.integer(inner),
        experts_renormalised=c.boolean("norm_topk_prob", True),
        experts_scale=c.number("routed_scaling_factor", 1.0),
        **more,
    )


def sparse_layers(c: Config, layers: int) -> list[bool]:
    """Which layers are mixtures, by decoder_sparse_step and mlp_only_layers."""
    step, dense = c.integer("decoder_sparse_step"), c.layer_numbers("mlp_only_layers", layers)
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]


def mask_token(c: Config) -> int:
    """The token of an undecided position of a diffusion model."""
    mask, vocab = c.integer("mask_token_id", low=0), c.integer("vocab_size")
    if mask >= vocab:
        raise c.fail("mask_token_id", f"the vocabulary has {vocab} tokens")
    return mask


def masks(spec: ModelSpec) -> Record:
    """The GGUF keys of a diffusion model with full attention."""
    assert spec.diffusion is not None
    return {
        "attention.causal": False,
        "tokenizer.ggml.mask_token_id": spec.diffusion.mask,
        "diffusion.shift_logits": spec.diffusion.shift,
    }
