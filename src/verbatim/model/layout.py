"""Which weights a ModelSpec has, by our names, and their shapes. The loader proves the file against this; backends may rely on it."""

from __future__ import annotations

from verbatim.model.spec import ModelSpec

Shape = tuple[int, ...]

# What --quant turns into blocks: the big matrices. Norms, biases, routers and learned positions stay as they are.
QUANTISED = ("embed", "head", "attn.q", "attn.k", "attn.v", "attn.o")
_QUANTISED_PARTS = ("mlp.gate", "mlp.up", "mlp.down", "moe.gate", "moe.up", "moe.down")


def is_quantisable(name: str) -> bool:
    """Whether --quant applies to the weight of this name."""
    part = name.split(".", 2)[2] if name.startswith("layers.") else name
    return part in QUANTISED or part in _QUANTISED_PARTS


def layout(spec: ModelSpec) -> dict[str, Shape]:
    """Every weight of the model: name -> shape. `head` is absent where it is tied to `embed`."""
    weights: dict[str, Shape] = {"embed": (spec.vocab, spec.hidden)}
    if spec.learned_positions:
        weights["positions"] = (spec.trained_positions, spec.hidden)
    for i in range(len(spec.layers)):
        weights |= {f"layers.{i}.{name}": shape for name, shape in _layer(spec, spec.layers[i].experts).items()}
    weights |= _norm(spec, "final_norm")
    if not spec.tied:
        weights["head"] = (spec.vocab, spec.hidden)
    return weights


def _norm(spec: ModelSpec, name: str) -> dict[str, Shape]:
    shape: Shape = (spec.hidden,)
    return {name: shape} | ({f"{name}.bias": shape} if spec.norm == "layer" else {})


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    return {name: (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _layer(spec: ModelSpec, experts: int) -> dict[str, Shape]:
    hidden, q, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    weights = _norm(spec, "attn_norm")
    weights |= _linear("attn.q", q, hidden, spec.qkv_bias)
    weights |= _linear("attn.k", kv, hidden, spec.qkv_bias)
    weights |= _linear("attn.v", kv, hidden, spec.qkv_bias)
    weights |= _linear("attn.o", hidden, q, spec.out_bias)
    if spec.qk_norm:
        weights |= {"attn.q_norm": (spec.head_dim,), "attn.k_norm": (spec.head_dim,)}
    weights |= _norm(spec, "mlp_norm")
    if spec.post_norms:
        weights |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    if experts:
        inner = spec.expert_mlp
        weights["moe.router"] = (experts, hidden)
        weights |= {f"moe.{p}": (experts, inner, hidden) for p in ("gate", "up")}
        weights["moe.down"] = (experts, hidden, inner)
        return weights
    for part in ("gate", "up") if spec.gated else ("up",):
        weights |= _linear(f"mlp.{part}", spec.mlp, hidden, spec.mlp_bias)
    return weights | _linear("mlp.down", hidden, spec.mlp, spec.mlp_bias)
