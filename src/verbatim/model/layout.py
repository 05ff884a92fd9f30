"""Names and shapes of all weights of a ModelSpec.

In: a ModelSpec. Out: internal weight name -> shape. The loader validates every file against this
table, so backends can rely on it.
"""

from __future__ import annotations

from math import prod

from verbatim.model.spec import ModelSpec

Shape = tuple[int, ...]

# Keys that decide the shapes of weights, for error texts: ModelSpec field -> key in the file.
HF_KEY_NAMES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "layers": "num_hidden_layers",
    "experts": "num_local_experts or num_experts",
    "expert_mlp": "moe_intermediate_size or intermediate_size",
    "shared_mlp": "n_shared_experts",
    "mixtures": "decoder_sparse_step, mlp_only_layers, first_k_dense_replace, num_dense_layers or "
    "use_expert_bias",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "rotary": "partial_rotary_factor",
    "experts_used": "num_experts_per_tok",
    "conv_kernel": "conv_L_cache or linear_conv_kernel_dim",
    "delta": "linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, "
    "linear_value_head_dim",
    "mixers": "layer_types",
    "layer_input": "hidden_size_per_layer_input",
}
GGUF_KEY_NAMES = {
    "vocab": "token_embd.weight",
    "hidden": "embedding_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "mlp": "feed_forward_length",
    "layers": "block_count",
    "experts": "expert_count",
    "expert_mlp": "expert_feed_forward_length",
    "shared_mlp": "expert_shared_count",
    "mixtures": "expert_count",
    "attention_bias": "the biases of layer 0",
    "mlp_bias": "the biases of layer 0",
    "positions": "context_length",
    "tied": "output.weight",
    "rotary": "rope.dimension_count",
    "experts_used": "expert_used_count",
    "conv_kernel": "shortconv.l_cache or ssm.conv_kernel",
    "delta": "ssm.group_count, ssm.time_step_rank, ssm.state_size, ssm.inner_size",
    "mixers": "attention.head_count_kv or full_attention_interval",
    "layer_input": "embedding_length_per_layer_input",
}
_DECIDES = {
    "embed": ("vocab", "hidden"),
    "head": ("vocab", "hidden", "tied"),
    "positions": ("positions", "hidden"),
    "attn.q": ("hidden", "heads", "head_dim"),
    "attn.k": ("hidden", "kv_heads", "head_dim"),
    "attn.v": ("hidden", "kv_heads", "head_dim"),
    "attn.o": ("hidden", "heads", "head_dim"),
    "attn.q_norm": ("heads", "head_dim"),
    "attn.k_norm": ("kv_heads", "head_dim"),
    "attn.sinks": ("heads",),
    "mlp.gate": ("hidden", "mlp", "mixtures"),
    "mlp.up": ("hidden", "mlp", "mixtures"),
    "mlp.down": ("hidden", "mlp", "mixtures"),
    "moe.router": ("hidden", "experts", "mixtures"),
    "moe.gate": ("hidden", "experts", "expert_mlp", "mixtures"),
    "moe.up": ("hidden", "experts", "expert_mlp", "mixtures"),
    "moe.down": ("hidden", "experts", "expert_mlp", "mixtures"),
    "moe.choice_bias": ("experts", "mixtures"),
    "shared.gate": ("hidden", "shared_mlp", "mixtures"),
    "shared.up": ("hidden", "shared_mlp", "mixtures"),
    "shared.down": ("hidden", "shared_mlp", "mixtures"),
    "shared.scale": ("hidden", "mixtures"),
    "attn.gate": ("hidden", "heads", "head_dim"),
    "moe.scales": ("experts",),
    "layer_inputs.embed": ("vocab", "layers", "layer_input"),
    "layer_inputs.project": ("hidden", "layers", "layer_input"),
    "layer_inputs.norm": ("layer_input",),
    "input.gate": ("hidden", "layer_input"),
    "input.project": ("hidden", "layer_input"),
    "conv.in": ("hidden", "mixers"),
    "conv.out": ("hidden", "mixers"),
    "conv.kernel": ("hidden", "conv_kernel", "mixers"),
    "delta.kernel": ("conv_kernel", "delta", "mixers"),
    **{
        f"delta.{part}": ("hidden", "delta", "mixers")
        for part in ("qkv", "z", "b", "a", "out", "decay", "dt", "norm")
    },
}


def deciding_keys(name: str, key_names: dict[str, str]) -> str:
    """The file's keys that decide a weight's presence and shape: "vocab_size, hidden_size"."""
    stem = name.removesuffix(".bias")
    part = stem.split(".", 2)[2] if stem.startswith("layers.") else stem
    keys = _DECIDES.get(part, ("hidden",))
    if name.endswith(".bias") and "norm" not in part:
        keys = (*keys, "mlp_bias" if part.startswith("mlp.") else "attention_bias")
    if name.startswith("layers."):
        keys = (*keys, "layers")
    return ", ".join(dict.fromkeys(key_names[key] for key in keys))


# Matrices that --quant quantises. Norms, biases, routers and learned positions keep their type.
QUANTISED = (
    *("embed", "head", "attn.q", "attn.k", "attn.v", "attn.o", "attn.gate", "conv.in", "conv.out"),
    *("delta.qkv", "delta.z", "delta.out", "mtp.project", "eagle.fc", "dflash.fc"),
    "assistant.out",
    *("layer_inputs.embed", "layer_inputs.project", "input.gate", "input.project"),
)
_QUANTISED_PARTS = tuple(
    f"{block}.{part}" for block in ("mlp", "moe", "shared") for part in ("gate", "up", "down")
)


def is_quantisable(name: str) -> bool:
    """Whether --quant applies to the weight of this name."""
    part = name.split(".", 2)[2] if name.startswith("layers.") else name
    return part in QUANTISED or part in _QUANTISED_PARTS


def is_read_by_row(name: str, *, tied: bool) -> bool:
    """Whether a step reads only one row of the weight per token: such weights do not count in the
    bytes of a decode step. A tied embedding is also the LM head."""
    return name in ("positions", "layer_inputs.embed") or (name == "embed" and not tied)


def is_expert(name: str) -> bool:
    """Whether the weight belongs to experts: a step reads those that its rows choose."""
    return any(f".moe.{part}" in name for part in ("gate", "up", "down"))


def layout(spec: ModelSpec) -> dict[str, Shape]:
    """Every weight of the model: name -> shape. `head` is absent if it is tied to `embed`."""
    weights: dict[str, Shape] = {"embed": (spec.vocab, spec.hidden)}
    if assistant := spec.assistant:
        wide = assistant.target.hidden
        weights = {"embed": (spec.vocab, wide), "mtp.project": (spec.hidden, 2 * wide)}
        weights["assistant.out"] = (wide, spec.hidden)
        if assistant.centroids:
            weights["assistant.centroids"] = (assistant.centroids, spec.hidden)
            weights["assistant.ids"] = (spec.vocab,)
    if dflash := spec.dflash:
        weights |= {"dflash.fc": (spec.hidden, dflash.states), "dflash.state_norm": (spec.hidden,)}
    if spec.draft_layer:
        weights |= dict.fromkeys(("mtp.embed_norm", "mtp.state_norm"), (spec.hidden,))
        weights["mtp.project"] = (spec.hidden, 2 * spec.hidden)
    if eagle := spec.eagle:
        weights |= {"eagle.fc": (spec.hidden, eagle.states), "eagle.state_norm": (spec.hidden,)}
        weights |= {"eagle.input_norm": (eagle.states,)} if eagle.norm_states else {}
        weights |= {"eagle.ids": (eagle.vocab,)} if eagle.vocab != spec.vocab else {}
    if spec.learned_positions:
        weights["positions"] = (spec.trained_positions, spec.hidden)
    if spec.layer_input:
        width = len(spec.layers) * spec.layer_input
        weights["layer_inputs.embed"] = (spec.vocab, width)
        weights["layer_inputs.project"] = (width, spec.hidden)
        weights["layer_inputs.norm"] = (spec.layer_input,)
    for i in range(len(spec.layers)):
        weights |= {f"layers.{i}.{name}": shape for name, shape in _layer(spec, i).items()}
    weights |= _norm(spec, "final_norm")
    if not spec.tied:
        weights["head"] = (eagle.vocab if eagle else spec.vocab, spec.hidden)
    return weights


def parameters(spec: ModelSpec) -> int:
    """The number of weights; an embedding that is also the head counts once."""
    return sum(prod(shape) for shape in layout(spec).values())


def _norm(spec: ModelSpec, name: str) -> dict[str, Shape]:
    shape: Shape = (spec.hidden,)
    biased = spec.norm == "layer" and spec.norm_bias
    return {name: shape} | ({f"{name}.bias": shape} if biased else {})


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    return {name: (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _layer(spec: ModelSpec, i: int) -> dict[str, Shape]:
    hidden, layer = spec.hidden, spec.layers[i]
    weights = _norm(spec, "attn_norm") if spec.pre_norms else {}
    if layer.mixer == "attention":
        weights |= _attention(spec, i)
    else:
        weights |= _conv(spec) if layer.mixer == "conv" else _delta(spec)
    if spec.pre_norms and not spec.shared_norm:
        weights |= _norm(spec, "mlp_norm")
    if spec.post_norms:
        weights |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    if spec.layer_input:
        weights["input.gate"] = (spec.layer_input, hidden)
        weights["input.project"] = (hidden, spec.layer_input)
        weights["input_norm"] = (hidden,)
    if spec.layer_scale:
        weights["scale"] = (1,)
    if not layer.experts or spec.experts_beside:
        weights |= _mlp(spec, "mlp", spec.mlp_width(i))
    return weights | (_experts(spec, layer.experts) if layer.experts else {})


def _attention(spec: ModelSpec, i: int) -> dict[str, Shape]:
    kv_heads, head_dim = spec.kv_shape(i)
    layer, hidden, q, kv = spec.layers[i], spec.hidden, spec.heads * head_dim, kv_heads * head_dim
    read = 2 * hidden if spec.eagle and i == 0 else hidden
    weights = _linear("attn.q", q, read, spec.qkv_bias)
    if layer.kv_layer is None:
        weights |= _linear("attn.k", kv, read, spec.qkv_bias)
        if not layer.value_is_key:
            weights |= _linear("attn.v", kv, read, spec.qkv_bias)
    weights |= _linear("attn.o", hidden, q, spec.out_bias)
    if spec.qk_norm:
        wide = spec.qk_norm == "width"
        weights["attn.q_norm"] = (q if wide else head_dim,)
        if layer.kv_layer is None:
            weights["attn.k_norm"] = (kv if wide else head_dim,)
    if spec.sinks:
        weights["attn.sinks"] = (spec.heads,)
    return weights | (_linear("attn.gate", q, hidden, spec.qkv_bias) if spec.attention_gate else {})


def _conv(spec: ModelSpec) -> dict[str, Shape]:
    hidden, bias = spec.hidden, spec.conv_bias
    weights = _linear("conv.in", 3 * hidden, hidden, bias)
    weights |= _linear("conv.kernel", hidden, spec.conv_kernel, bias)
    return weights | _linear("conv.out", hidden, hidden, bias)


def _delta(spec: ModelSpec) -> dict[str, Shape]:
    delta, hidden = spec.delta, spec.hidden
    assert delta is not None, "a delta layer has sizes"
    return {
        "delta.qkv": (delta.qkv, hidden),
        "delta.z": (delta.values, hidden),
        "delta.b": (delta.value_heads, hidden),
        "delta.a": (delta.value_heads, hidden),
        "delta.kernel": (delta.qkv, spec.conv_kernel),
        "delta.decay": (delta.value_heads,),
        "delta.dt": (delta.value_heads,),
        "delta.norm": (delta.value_dim,),
        "delta.out": (hidden, delta.values),
    }


def _mlp(spec: ModelSpec, name: str, inner: int) -> dict[str, Shape]:
    weights: dict[str, Shape] = {}
    for part in ("gate", "up") if spec.gated else ("up",):
        weights |= _linear(f"{name}.{part}", inner, spec.hidden, spec.mlp_bias)
    return weights | _linear(f"{name}.down", spec.hidden, inner, spec.mlp_bias)


def _experts(spec: ModelSpec, experts: int) -> dict[str, Shape]:
    inner, hidden = spec.expert_mlp, spec.hidden
    weights = _linear("moe.router", experts, hidden, spec.router_bias)
    if spec.choice_bias:
        weights["moe.choice_bias"] = (experts,)
    for part, rows, columns in (
        ("gate", inner, hidden),
        ("up", inner, hidden),
        ("down", hidden, inner),
    ):
        weights[f"moe.{part}"] = (experts, rows, columns)
        if spec.expert_bias:
            weights[f"moe.{part}.bias"] = (experts, rows)
    if spec.experts_beside:
        names = ("mlp_own_norm", "moe_norm", "moe_post_norm", "router_norm")
        weights |= dict.fromkeys(names, (hidden,)) | {"moe.scales": (experts,)}
    if spec.shared_gate:
        weights["shared.scale"] = (1, hidden)
    return weights | (_mlp(spec, "shared", spec.shared_mlp) if spec.shared_mlp else {})
