"""The forward pass, written once for every family and every backend.

In: a ModelSpec, and the `ops` of a backend for one step (its tokens, positions and KV blocks).
Out: two handles: the final hidden states of the output rows, and the logits of those output rows
that are sampled or scored.

Control flow depends on the spec alone, never on tensor values. So a backend may execute `forward`
in every step (reference), or trace it once and replay the recorded operations (cpu, cuda).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

from verbatim.model.spec import ModelSpec

# A backend's handle of a [rows, width] matrix with one row per token of the step.
Rows = TypeVar("Rows")


class Ops(Protocol[Rows]):
    """Operations that a backend implements.

    Each row of a result depends on the same row of the inputs alone, which makes the logits
    independent of the batch. `attend` also reads the visible positions of the row's own sequence.
    Widths: hidden H, heads·head_dim Q, kv_heads·head_dim K, vocabulary V.

    A result may reuse the memory of an input that forward() does not read again. `add` may always
    write into its first argument."""

    def embed(self) -> Rows:
        """[rows, H]: the embedding of each token of the step, times spec.embed_scale."""

    def positions(self) -> Rows:
        """[rows, H]: the learned position embedding of each token."""

    def norm(self, x: Rows, name: str) -> Rows:
        """[rows, H]: spec.norm over the row, with epsilon spec.norm_eps, weight `name` +
        spec.norm_offset, and `name`.bias for layer norms if spec.norm_bias."""

    def qkv(self, h: Rows, layer: int) -> tuple[Rows, Rows, Rows]:
        """[rows, Q], [rows, K], [rows, K]: projections of the layer, biased if spec.qkv_bias."""

    def queries(self, h: Rows, layer: int) -> Rows:
        """[rows, Q]: the query projection of a layer without keys and values of its own."""

    def value_norm(self, v: Rows, layer: int) -> Rows:
        """RMS norm over the values of each head, without a weight."""

    def layer_inputs(self, x: Rows) -> Rows:
        """[rows, layers · spec.layer_input]: the inputs of all layers for the embeddings x. Each
        layer's part is (RMS norm of layer_inputs.project · x / root(H) with weight
        layer_inputs.norm + layer_inputs.embed of the token · root(spec.layer_input)) / root(2)."""

    def layer_input(self, x: Rows, inputs: Rows, layer: int) -> Rows:
        """[rows, H]: input.project · (act(input.gate · x) · the layer's part of `inputs`)."""

    def scale(self, x: Rows, name: str) -> Rows:
        """x times the one value of the weight. May write into x."""

    def head_norm(self, x: Rows, name: str) -> Rows:
        """RMS norm over the head_dim values of each head, or over the whole row if spec.qk_norm is
        width; weight `name` + spec.norm_offset."""

    def rope(self, x: Rows, layer: int) -> Rows:
        """Rotate each head by the angles of the row's position: halves (a, b) ->
        (a·cos - b·sin, b·cos + a·sin)."""

    def attend(self, q: Rows, k: Rows | None, v: Rows | None, layer: int) -> Rows:
        """[rows, Q]: write k and v of every row into the KV cache (None: the layer reads those of
        spec.layers[layer].kv_layer, of this step or the target), then compute attention of each
        row over the positions of its own sequence inside the layer's window, itself included: up
        to the row's end (SeqStep.block).
        Score: softcap(scale · q·k), then softmax. If spec.query_scale_beta, q is first multiplied
        by rope.query_scales of the position. If spec.sinks, the softmax has one more term per
        head, exp(sink), whose value is zero."""

    def short_conv(self, x: Rows, layer: int) -> Rows:
        """[rows, 3H] -> [rows, H]. A row has three parts b, c, u. The products b·u go into the
        cache, and the result is c · (convolution of the products over the last conv_kernel
        positions, tap j of conv.kernel[:, j] at position p - conv_kernel + 1 + j, added from the
        oldest on, + conv.kernel.bias if spec.conv_bias)."""

    def delta_net(self, h: Rows, layer: int) -> Rows:
        """[rows, values]: a gated delta net, one position after the other (docs/adr/0023).

        qkv, z, b, a are h times their matrices. q, k, v are silu(convolution of qkv with
        delta.kernel); q and k of each head are divided by
        the root of their sum of squares + 1e-6, and q by the root of key_dim. With
        beta = sigmoid(b) and decay = exp(delta.decay · softplus(a + delta.dt)), the state S of a
        value head becomes S' = decay S + k (beta (v - k·decay S)). The output q·S' gets an RMS norm
        with weight delta.norm (without norm_offset), and is multiplied by silu(z)."""

    def gated(self, x: Rows, gate: Rows) -> Rows:
        """x · sigmoid(gate). `gate` is as wide as x, or one column for the whole row."""

    def linear(self, x: Rows, name: str, bias: bool) -> Rows:
        """x · weightᵀ (+ `name`.bias): [rows, out]."""

    def mlp(self, h: Rows, name: str) -> Rows:
        """[rows, H]: down(act(gate(h)) · up(h)), or down(act(up(h))) if not spec.gated; biased if
        spec.mlp_bias. `name`: layers.{i}.mlp or layers.{i}.shared."""

    def moe(self, h: Rows, layer: int, router: Rows | None = None) -> Rows:
        """[rows, H]: spec.router of the router's logits (+ bias if spec.router_bias) gives a weight
        per expert. The top experts_used by weight (+ choice_bias if spec.choice_bias; ties go to
        the lower index) are used, of those in the best groups if spec.expert_groups > 1. Their
        weights are renormalised to sum to 1 if experts_renormalised, then multiplied by
        experts_scale. The result is the weighted sum of those experts' gated MLPs (biased if
        spec.expert_bias), added in order of rank. `router`: the router's input, where it is not h;
        then moe.scales multiply the experts' weights."""

    def add(self, x: Rows, y: Rows) -> Rows:
        """x + y · spec.residual_scale."""

    def take(self, x: Rows, which: Literal["outputs", "logits"]) -> Rows:
        """Select rows. "outputs": rows whose final hidden state is needed; "logits": those outputs
        whose logits are needed. A backend that selects the outputs in `norm` with the name
        final_norm may return x here."""

    def head(self, h: Rows) -> Rows:
        """[outputs, V]: h · headᵀ (embedᵀ if spec.tied), times spec.logit_scale, then softcap if
        spec.logit_softcap."""


class ContextOps(Ops[Rows], Protocol[Rows]):
    """What the backends that run DFlash heads implement, too."""

    def keys_values(self, h: Rows, layer: int) -> tuple[Rows, Rows]:
        """[rows, K], [rows, K]: the projections of rows without queries."""

    def store(self, k: Rows, v: Rows, layer: int) -> None:
        """Write k and v of every row into the KV cache."""


def forward(
    spec: ModelSpec,
    ops: Ops[Rows],
    x: Rows | None = None,
    h: Rows | None = None,
    capture: Callable[[Rows, int], None] | None = None,
) -> tuple[Rows, Rows]:
    """Run one step: (final hidden states of the outputs, logits of the rows that need them).

    Of a draft layer: `x` is the input of the first layer in place of the embedding, and `h` that of
    its attention in place of the norm of x. `capture` reads the input of every layer, with its
    index, and the last layer's output (of the output rows; of an assistant the state of its next
    draft) with the number of layers."""
    x = ops.embed() if x is None else x
    inputs = ops.layer_inputs(x) if spec.layer_input else None
    if spec.learned_positions:
        x = ops.add(x, ops.positions())
    for i in range(len(spec.layers)):
        if capture is not None:
            capture(x, i)
        x = _parallel(spec, ops, x, i) if spec.parallel else _sequential(spec, ops, x, i, h)
        h = None
        if inputs is not None:
            y = ops.layer_input(x, _needed(spec, ops, inputs, i), i)
            x = ops.add(x, ops.norm(y, f"layers.{i}.input_norm"))
        if spec.layer_scale:
            x = ops.scale(x, f"layers.{i}.scale")
    if capture is not None and spec.assistant is None:
        capture(x, len(spec.layers))
    h = ops.norm(x, "final_norm")
    if capture is not None and spec.assistant is not None:
        capture(ops.linear(h, "assistant.out", False), len(spec.layers))
    return h, ops.head(ops.take(h, "logits"))


def store_context(spec: ModelSpec, ops: ContextOps[Rows], x: Rows) -> None:
    """Write keys and values of the rows x, the same x in every layer, into the cache of a DFlash
    head."""
    for i in range(len(spec.layers)):
        k, v = ops.keys_values(x, i)
        k = ops.head_norm(k, f"layers.{i}.attn.k_norm")
        ops.store(ops.rope(k, i), v, i)


def _needed(spec: ModelSpec, ops: Ops[Rows], x: Rows, i: int) -> Rows:
    """In the last layer, select the output rows. The other rows end at the mixer, which has written
    their keys and values (or states) to the cache for later steps."""
    return ops.take(x, "outputs") if i == len(spec.layers) - 1 else x


def _sequential(spec: ModelSpec, ops: Ops[Rows], x: Rows, i: int, h: Rows | None = None) -> Rows:
    layer = f"layers.{i}"
    if h is None:
        h = ops.norm(x, f"{layer}.attn_norm") if spec.pre_norms else x
    a = _mixer(spec, ops, h, i)
    x = _needed(spec, ops, x, i)
    x = ops.add(x, ops.norm(a, f"{layer}.attn_post_norm") if spec.post_norms else a)
    h = ops.norm(x, f"{layer}.mlp_norm") if spec.pre_norms else x
    if not spec.layers[i].experts:
        y = ops.mlp(h, f"{layer}.mlp")
        return ops.add(x, ops.norm(y, f"{layer}.mlp_post_norm") if spec.post_norms else y)
    if spec.experts_beside:
        return _beside(ops, x, h, i)
    # `add` may write into x, which h may read: compute both parts before the first addition.
    shared = ops.mlp(h, f"{layer}.shared") if spec.shared_mlp else None
    if shared is not None and spec.shared_gate:
        shared = ops.gated(shared, ops.linear(h, f"{layer}.shared.scale", False))
    x = ops.add(x, ops.moe(h, i))
    return x if shared is None else ops.add(x, shared)


def _beside(ops: Ops[Rows], x: Rows, h: Rows, i: int) -> Rows:
    """A dense MLP and experts, which have norms of their own; the router has a norm, too."""
    layer = f"layers.{i}"
    y = ops.norm(ops.mlp(h, f"{layer}.mlp"), f"{layer}.mlp_own_norm")
    router, inner = ops.norm(x, f"{layer}.router_norm"), ops.norm(x, f"{layer}.moe_norm")
    y = ops.add(y, ops.norm(ops.moe(inner, i, router), f"{layer}.moe_post_norm"))
    return ops.add(x, ops.norm(y, f"{layer}.mlp_post_norm"))


def _parallel(spec: ModelSpec, ops: Ops[Rows], x: Rows, i: int) -> Rows:
    layer = f"layers.{i}"
    h = ops.norm(x, f"{layer}.attn_norm")
    a = _attention(spec, ops, h, i)
    h, x = _needed(spec, ops, h, i), _needed(spec, ops, x, i)
    y = ops.mlp(h if spec.shared_norm else ops.norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp")
    return ops.add(ops.add(x, a), y)


def _mixer(spec: ModelSpec, ops: Ops[Rows], h: Rows, i: int) -> Rows:
    """What mixes the positions of a sequence in layer i."""
    layer, mixer = f"layers.{i}", spec.layers[i].mixer
    if mixer == "conv":
        x = ops.short_conv(ops.linear(h, f"{layer}.conv.in", spec.conv_bias), i)
        return ops.linear(_needed(spec, ops, x, i), f"{layer}.conv.out", spec.conv_bias)
    if mixer == "delta":
        x = _needed(spec, ops, ops.delta_net(h, i), i)
        return ops.linear(x, f"{layer}.delta.out", False)
    return _attention(spec, ops, h, i)


def _attention(spec: ModelSpec, ops: Ops[Rows], h: Rows, i: int) -> Rows:
    layer = f"layers.{i}"
    if spec.layers[i].kv_layer is not None:
        return _shared_attention(spec, ops, h, i)
    q, k, v = ops.qkv(h, i)
    if spec.value_norm:
        v = ops.value_norm(v, i)
    if spec.qk_norm in ("head", "width"):
        q, k = _qk_norm(ops, q, k, layer)
    if spec.layers[i].rope is not None:
        q, k = ops.rope(q, i), ops.rope(k, i)
    if spec.qk_norm == "rotated_head":
        q, k = _qk_norm(ops, q, k, layer)
    a = _needed(spec, ops, ops.attend(q, k, v, i), i)
    if spec.attention_gate:
        h = _needed(spec, ops, h, i)
        a = ops.gated(a, ops.linear(h, f"{layer}.attn.gate", spec.qkv_bias))
    return ops.linear(a, f"{layer}.attn.o", spec.out_bias)


def _shared_attention(spec: ModelSpec, ops: Ops[Rows], h: Rows, i: int) -> Rows:
    """Attention over the keys and values of an earlier layer."""
    assert spec.qk_norm == "head", "no family with shared keys has another norm"
    q = ops.head_norm(ops.queries(h, i), f"layers.{i}.attn.q_norm")
    if spec.layers[i].rope is not None:
        q = ops.rope(q, i)
    a = _needed(spec, ops, ops.attend(q, None, None, i), i)
    return ops.linear(a, f"layers.{i}.attn.o", spec.out_bias)


def _qk_norm(ops: Ops[Rows], q: Rows, k: Rows, layer: str) -> tuple[Rows, Rows]:
    return ops.head_norm(q, f"{layer}.attn.q_norm"), ops.head_norm(k, f"{layer}.attn.k_norm")
