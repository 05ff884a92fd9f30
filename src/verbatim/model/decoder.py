"""The forward pass, written once for every family and every backend.

In: a ModelSpec, and `ops`, which a backend made for one step (it knows the step's tokens, positions and cache blocks).
Out: two handles: the final hidden states of the rows that somebody asked for, and the logits of those that are drawn from or scored.

`forward` has no control flow that depends on numbers, only on the spec. So a backend may run it for every step (reference),
or run it once with operations that write down what they are asked, and replay that list afterwards (cpu, cuda).
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar

from verbatim.model.spec import ModelSpec

Rows = TypeVar(
    "Rows"
)  # a backend's handle on a matrix with one row for each token of the step: [rows, width] numbers


class Ops(Protocol[Rows]):
    """What a backend supplies. Each row of a result depends on that row of the inputs alone, `attend` excepted, which also
    reads the row's own earlier positions. Widths: hidden H, heads·head_dim Q, kv_heads·head_dim K, vocabulary V.

    A handle is used only until the operation that consumes it for the last time; results may reuse memory of inputs that
    forward() does not touch again, except that `add` may always write into its first argument."""

    def embed(self) -> Rows:
        """[rows, H]: row of `embed` for each token of the step, times spec.embed_scale."""

    def positions(self) -> Rows:
        """[rows, H]: row of `positions` for each token's position (learned positions)."""

    def norm(self, x: Rows, name: str) -> Rows:
        """[rows, H]: spec.norm over the row with eps, weight `name` + spec.norm_offset, and `name`.bias for layer norms."""

    def qkv(self, h: Rows, layer: int) -> tuple[Rows, Rows, Rows]:
        """[rows, Q], [rows, K], [rows, K]: the three projections of the layer, with biases where spec.qkv_bias."""

    def head_norm(self, x: Rows, name: str) -> Rows:
        """RMS norm of each head of the row on its own (head_dim numbers), weight `name` + spec.norm_offset."""

    def rope(self, x: Rows, layer: int) -> Rows:
        """Rotate each head of the row by the angles of its position: halves (a, b) -> (a·cos - b·sin, b·cos + a·sin)."""

    def attend(self, q: Rows, k: Rows, v: Rows, layer: int) -> Rows:
        """[rows, Q]: write k and v of every row into the cache, then let each row attend to the positions of its own
        sequence that the layer's window shows it, itself included. Score: softcap(scale · q·k); then softmax."""

    def linear(self, x: Rows, name: str, bias: bool) -> Rows:
        """x · weightᵀ (+ `name`.bias): [rows, out]."""

    def mlp(self, h: Rows, layer: int) -> Rows:
        """[rows, H]: down(act(gate(h)) · up(h)), or down(act(up(h))) where not spec.gated; biases where spec.mlp_bias."""

    def moe(self, h: Rows, layer: int) -> Rows:
        """[rows, H]: softmax of the router over all experts, the experts_used best (ties to the lower index), their
        weights made to sum to 1 where experts_renormalised, and the weighted sum of those experts' gated MLPs in
        order of rank."""

    def add(self, x: Rows, y: Rows) -> Rows: ...

    def take(self, x: Rows, which: Literal["outputs", "logits"]) -> Rows:
        """Keep some rows. "outputs": rows of the step whose final state is needed; "logits": those outputs whose logits are."""

    def head(self, h: Rows) -> Rows:
        """[outputs, V]: h · headᵀ (or embedᵀ where spec.tied), then softcap where spec.logit_softcap."""


def forward(spec: ModelSpec, ops: Ops[Rows]) -> tuple[Rows, Rows]:
    """One step through the model: (final hidden states of the outputs, logits of those that need them)."""
    x = ops.embed()
    if spec.learned_positions:
        x = ops.add(x, ops.positions())
    for i in range(len(spec.layers)):
        x = ops.add(x, _attention(spec, ops, x, i))
        x = ops.add(x, _mixer(spec, ops, x, i))
    h = ops.norm(ops.take(x, "outputs"), "final_norm")
    return h, ops.head(ops.take(h, "logits"))


def _attention(spec: ModelSpec, ops: Ops[Rows], x: Rows, i: int) -> Rows:
    layer = f"layers.{i}"
    h = ops.norm(x, f"{layer}.attn_norm")
    q, k, v = ops.qkv(h, i)
    if spec.qk_norm:
        q = ops.head_norm(q, f"{layer}.attn.q_norm")
        k = ops.head_norm(k, f"{layer}.attn.k_norm")
    if spec.layers[i].rope is not None:
        q, k = ops.rope(q, i), ops.rope(k, i)
    o = ops.linear(ops.attend(q, k, v, i), f"{layer}.attn.o", spec.out_bias)
    return ops.norm(o, f"{layer}.attn_post_norm") if spec.post_norms else o


def _mixer(spec: ModelSpec, ops: Ops[Rows], x: Rows, i: int) -> Rows:
    layer = f"layers.{i}"
    h = ops.norm(x, f"{layer}.mlp_norm")
    y = ops.moe(h, i) if spec.layers[i].experts else ops.mlp(h, i)
    return ops.norm(y, f"{layer}.mlp_post_norm") if spec.post_norms else y
