"""Gemma 4, and the text part of the multi-modal gemma4.

Full and sliding layers differ in head size, key heads and rope. The last layers read the keys and
values of an earlier layer, and every layer may have an input of its own per token.
"""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.config_fields import MAX_COUNT, short
from verbatim.model.families.common import gguf_rows, header, parts, rope_record, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, Wrapper, tiny
from verbatim.model.families.common.gguf_fields import GgufFields, Record, Values, facts
from verbatim.model.families.gemma2 import ACTIVATION, LOGIT_CAP, NAMES, gemma
from verbatim.model.keys import Table, followed, must_equal, no_effect, renamed
from verbatim.model.spec import LayerSpec, ModelSpec

_PERIOD = 6  # every sixth layer is full attention, where layer_types is absent
_THETA = 10000.0  # theta of a rope record that states none
_HEADS = ("head_dim", "num_key_value_heads")  # what per_layer_config may change
_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
_ROPE = {
    "full_attention": _FULL_ROPE,
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _records(c: Config) -> tuple[Record, Record]:
    """The rope records of full and of sliding layers."""
    if not c.has("rope_parameters"):
        c = c.with_values(rope_parameters=_ROPE)
    full = rope_record.layer_type_record(c, "full_attention", _THETA)
    return full, rope_record.layer_type_record(c, "sliding_attention", _THETA)


def _spec(c: Config) -> ModelSpec:
    full, sliding = _records(c)
    plain: Record = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    base = gemma(c, plain)
    slides = _sliding(c, len(base.layers))
    spec = replace(
        base,
        layers=_layers(c, slides, full, sliding, base),
        qk_norm="head",
        value_norm=True,
        post_norms=True,
        attention_scale=1.0,
        logit_softcap=c.cap("final_logit_softcapping"),
        layer_scale=c.fact("layer_scale", True),
    )
    spec = replace(spec, layer_input=_layer_input(c, spec))
    return _with_experts(c, spec) if c.boolean("enable_moe_block", False) else spec


def _layers(
    c: Config, slides: list[bool], full: Record, sliding: Record, base: ModelSpec
) -> tuple[LayerSpec, ...]:
    count = len(slides)
    heads = c.fact("heads") or _layer_heads(c, slides)
    own = count - c.integer("num_kv_shared_layers", 0, low=0, high=count - 1)
    ropes = {
        s: rope_record.rope_of(c, sliding if s else full, heads[slides.index(s)][0], base.context)
        for s in set(slides)
    }
    window, same = c.integer("sliding_window"), c.boolean("attention_k_eq_v", False)
    wide = own < count and c.boolean("use_double_wide_mlp", False)
    mlps = c.fact("mlps") or [2 * base.mlp if wide and i >= own else 0 for i in range(count)]
    return tuple(
        LayerSpec(
            window=window if s else None,
            rope=ropes[s],
            head_dim=heads[i][0],
            kv_heads=heads[i][1],
            kv_layer=_kv_layer(c, slides, i, own),
            value_is_key=not s and i < own and (same or i in c.fact("without_values", ())),
            mlp=mlps[i],
        )
        for i, s in enumerate(slides)
    )


def _with_experts(c: Config, spec: ModelSpec) -> ModelSpec:
    """Experts beside the MLP of every layer."""
    experts = parts.with_experts(c, spec, used="top_k_experts", experts_beside=True)
    return replace(experts, mlp=spec.mlp)


def _sliding(c: Config, count: int) -> list[bool]:
    """Which layers are sliding. The last layer is full attention, as in transformers."""
    sliding = parts.layer_types(c, count) or [(i + 1) % _PERIOD != 0 for i in range(count)]
    if c.fact("heads"):
        return sliding
    if sliding[-1] and c.has("layer_types"):
        c.warn("layer_types: the last layer is computed as full_attention, as in transformers")
    return [*sliding[:-1], False]


def _layer_heads(c: Config, slides: list[bool]) -> list[tuple[int, int]]:
    """Head size and key heads of each layer. They are equal in all layers of one type."""
    plain = (
        c.integer("head_dim"),
        c.integer("num_key_value_heads", c.integer("num_attention_heads")),
    )
    if c.values.get("per_layer_config", plain) is None:
        raise c.fail("per_layer_config", "remove the key for the heads of the layer types")
    if c.has("per_layer_config"):
        entries = c.by_layer("per_layer_config", len(slides))
        found = [_own_heads(c, i, entries.get(i, {}), plain) for i in range(len(slides))]
        for kind in (True, False):
            if len({h for h, s in zip(found, slides, strict=True) if s is kind}) > 1:
                raise c.fail("per_layer_config", "layers of one type need equal heads")
    else:
        kv = plain[1]
        if c.boolean("attention_k_eq_v", False) and c.has("num_global_key_value_heads"):
            kv = c.integer("num_global_key_value_heads")
        found = [plain if s else (c.integer("global_head_dim"), kv) for s in slides]
    queries = c.integer("num_attention_heads")
    if any(queries % kv for _, kv in found):
        raise c.fail("num_attention_heads", "a multiple of every layer's key heads is needed")
    return found


def _own_heads(c: Config, layer: int, entry: object, plain: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(entry, dict) or any(key not in _HEADS for key in entry):
        raise c.fail("per_layer_config", f"only {' and '.join(_HEADS)} of a layer may differ")
    values = [entry.get(key, default) for key, default in zip(_HEADS, plain, strict=True)]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_COUNT:
            raise c.fail("per_layer_config", f"layer {layer}: {short(value)} is not a count")
    return values[0], values[1]


def _kv_layer(c: Config, slides: list[bool], layer: int, own: int) -> int | None:
    """The layer whose keys and values this layer reads: the last of its type among the first `own`;
    None: its own."""
    if layer < own:
        return None
    sources = [i for i in range(own) if slides[i] is slides[layer]]
    if not sources:
        raise c.fail("num_kv_shared_layers", f"layer {layer} has no earlier layer of its type")
    return sources[-1]


def _layer_input(c: Config, spec: ModelSpec) -> int:
    width = c.integer("hidden_size_per_layer_input", 0, low=0)
    if width and c.integer("vocab_size_per_layer_input") != spec.vocab:
        raise c.fail("vocab_size_per_layer_input", f"it must be vocab_size ({spec.vocab})")
    return width


# ---------------------------------------------------------------------------------------- GGUF


def _implied(h: GgufFields) -> Values:
    """Keys that end in _swa are those of the sliding layers. Values are keys where a full layer has
    no tensor for values."""
    slides = [kind == "sliding_attention" for kind in header.sliding_types(h)]
    kv, mlp = (_per_layer(h, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    full, swa = h.integer("attention.key_length"), h.integer("attention.key_length_swa")
    if h.integer("attention.value_length_swa", swa) != swa:
        raise h.fail("attention.value_length_swa", f"values must be as long as keys ({swa})")
    local = {
        "rope_type": "default",
        "rope_theta": h.number("rope.freq_base_swa"),
        "dim": h.integer("rope.dimension_count_swa", swa),
    }
    return {
        "head_dim": swa,
        "num_key_value_heads": kv[slides.index(True) if True in slides else 0],
        "intermediate_size": mlp[0],
        "moe_intermediate_size": h.raw("expert_feed_forward_length", mlp[0]),
        "vocab_size_per_layer_input": h.vocab,
        "enable_moe_block": bool(h.raw("expert_count", 0)),
        **facts(
            heads=[(swa if s else full, n) for s, n in zip(slides, kv, strict=True)],
            mlps=[n if n != mlp[0] else 0 for n in mlp],
            without_values=_without_values(h),
            layer_scale="blk.0.layer_output_scale.weight" in h.tensors,
            local_rope=local,
        ),
    }


def _without_values(h: GgufFields) -> set[int]:
    return {i for i in range(h.layers) if f"blk.{i}.attn_v.weight" not in h.tensors}


def _per_layer(h: GgufFields, key: str) -> list[int]:
    """One number for all layers, or one per layer."""
    raw, count = h.raw(key), h.layers
    numbers = [raw] * count if isinstance(raw, int) else h.items(key)
    valid = all(
        isinstance(n, int) and not isinstance(n, bool) and 0 < n <= MAX_COUNT for n in numbers
    )
    if len(numbers) != count or not valid:
        raise h.fail(key, f"a positive number, or {count} of them, is needed")
    return [int(n) for n in numbers]


def _exported(spec: ModelSpec) -> Values:
    """The last layer is a full one."""
    shapes = [spec.kv_shape(i) for i in range(len(spec.layers))]
    sliding = [i for i, layer in enumerate(spec.layers) if layer.window is not None]
    swa = shapes[sliding[0]][1] if sliding else spec.head_dim
    cap = {"final_logit_softcapping": float(spec.logit_softcap)} if spec.logit_softcap else {}
    return {
        **header.pattern_flags(spec),
        **cap,
        "attention.head_count_kv": [kv for kv, _ in shapes],
        "feed_forward_length": [spec.mlp_width(i) for i in range(len(spec.layers))],
        "attention.key_length": shapes[-1][1],
        "attention.value_length": shapes[-1][1],
        "attention.key_length_swa": swa,
        "attention.value_length_swa": swa,
        "attention.shared_kv_layers": sum(a.kv_layer is not None for a in spec.layers),
        "embedding_length_per_layer_input": spec.layer_input,
        "rope.dimension_count_swa": swa,
    }


_GGUF_KEYS: Table = {
    **gguf_rows.GGUF_ROTARY,
    **gguf_rows.gguf_experts("num_experts", "experts beside the MLP of a layer; 0: none"),
    "expert_used_count": renamed("top_k_experts"),
    "attention.head_count_kv": followed("key and value heads, of all layers or layer by layer"),
    "feed_forward_length": followed("inner width of the MLP, of all layers or layer by layer"),
    "attention.key_length": followed("size of a head of full layers"),
    "attention.key_length_swa": followed("size of a head of sliding layers"),
    "attention.value_length_swa": followed("checked: equal to attention.key_length_swa"),
    "attention.shared_kv_layers": renamed("num_kv_shared_layers"),
    "attention.sliding_window": renamed("sliding_window"),
    "attention.sliding_window_pattern": renamed("layer_types", gguf_rows.LAYER_PERIOD, 6),
    "rope.dimension_count": followed("rotated part of a head of full layers"),
    "rope.dimension_count_swa": followed("rotated part of a head of sliding layers"),
    "rope.freq_base": followed("base of the frequencies of full layers", 1e6),
    "rope.freq_base_swa": followed("base of the frequencies of sliding layers", 10000.0),
    "embedding_length_per_layer_input": renamed("hidden_size_per_layer_input"),
    "final_logit_softcapping": gguf_rows.LOGIT_CAP,
}
_KEYS: Table = {
    **rows.COMMON_KEYS,
    **rows.SIZES,
    **rows.ATTENTION_BIASES,
    "num_key_value_heads": followed("key and value heads of the sliding layers"),
    "head_dim": followed("size of a head of the sliding layers"),
    "global_head_dim": followed(
        "size of a head of the full layers, where per_layer_config is absent", 512
    ),
    "num_global_key_value_heads": followed(
        "key heads of the full layers with attention_k_eq_v, where per_layer_config is absent"
    ),
    "per_layer_config": followed('head_dim and num_key_value_heads by layer number ("5" or "05")'),
    "attention_k_eq_v": followed("the values of full layers are their keys before norm"),
    "num_kv_shared_layers": followed(
        "last layers, which read the keys and values of the last earlier layer of their type"
    ),
    "use_double_wide_mlp": followed("the MLP of those layers is twice as wide"),
    "hidden_size_per_layer_input": followed("width of each layer's own input; 0: none"),
    "vocab_size_per_layer_input": followed("checked: equal to vocab_size"),
    "hidden_activation": ACTIVATION,
    "hidden_act": no_effect("`hidden_activation` decides, as in transformers"),
    "rms_norm_eps": followed("epsilon of the norms"),
    "tie_word_embeddings": rows.TIED,
    **dict.fromkeys(rows.ROPE, must_equal(note="belongs in the rope record of a layer type")),
    "rope_parameters": rows.ROPES,
    "sliding_window": followed("window of the sliding layers"),
    "layer_types": followed("window or none, layer by layer; absent: every sixth is full"),
    "final_logit_softcapping": LOGIT_CAP,
    "use_bidirectional_attention": must_equal("vision", note="text attends to what is before it"),
    "enable_moe_block": followed("every layer has experts beside its MLP"),
    "num_experts": followed("experts of a layer, with enable_moe_block"),
    "top_k_experts": followed("experts used per token, with enable_moe_block"),
    "moe_intermediate_size": followed("inner width of an expert, with enable_moe_block"),
}
_NAMES = tensors.Names(
    {
        **NAMES.layer,
        "mlp_own_norm": "post_feedforward_layernorm_1",
        "moe_norm": "pre_feedforward_layernorm_2",
        "moe_post_norm": "post_feedforward_layernorm_2",
        "router_norm": "router.scale",
        "moe.router": "router.proj",
        "moe.scales": "router.per_expert_scale",
        **tensors.each("moe.*", "experts.{e}.*_proj", "gate up down"),
        "input.gate": "per_layer_input_gate",
        "input.project": "per_layer_projection",
        "input_norm": "post_per_layer_input_norm",
        "scale": "layer_scalar",
    },
    top={
        "layer_inputs.embed": "embed_tokens_per_layer",
        "layer_inputs.project": "per_layer_model_projection",
        "layer_inputs.norm": "per_layer_projection_norm",
    },
)
_TINY: Values = tiny(
    rope_theta=None,
    head_dim=8,
    global_head_dim=16,
    sliding_window=12,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_hidden_layers=4,
    hidden_size_per_layer_input=0,
)
FAMILY = Family(
    model_type="gemma4_text",
    name="gemma4",
    models="Gemma 4 (the text part of `gemma4`)",
    keys=_KEYS,
    spec=_spec,
    records=_records,
    names=_NAMES,
    gguf=Gguf("gemma4", keys=_GGUF_KEYS, implied=_implied),
    exported=_exported,
    tiny={
        "gemma4": {
            **_TINY,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 260,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
        "gemma4moe": {
            **_TINY,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    },
)
_AUDIO = ("audio_config", "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id")
WRAPPER = Wrapper(
    model_type="gemma4",
    text=("gemma4_text",),
    keys=rows.wrapper_keys(
        "gemma4_text",
        *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id"),
        "vision_soft_tokens_per_image",
        more=dict.fromkeys(_AUDIO, no_effect("audio is not read")),
    ),
)
