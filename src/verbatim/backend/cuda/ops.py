"""The operations of model/decoder.py on the GPU.

In and out: handles with one row per token of the step. A handle is a float32 tensor, or a record of
operations that the consuming kernel runs (SplitSums, Residual, PendingNorm, PendingHeads). So
element-wise work is fused into the next kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from verbatim.backend.cuda.device_weights import Weight
from verbatim.backend.cuda.kernels import experts, kernels, quant, recurrent
from verbatim.backend.cuda.kernels.experts import ExpertTiles
from verbatim.backend.cuda.kernels.few_rows import product as few_rows
from verbatim.backend.cuda.kernels.kernels import SplitSums
from verbatim.backend.cuda.kernels.kv_cache import KvLayer
from verbatim.backend.cuda.kernels.lora import DeviceAdapter, add_low_rank
from verbatim.backend.cuda.rank_exchange import RankExchange
from verbatim.backend.cuda.runtime.device_step import DeviceStep
from verbatim.model.rope import tables
from verbatim.model.spec import EagleSpec, ModelSpec, RopeSpec

Rows: TypeAlias = Any  # a tensor, SplitSums, Residual, PendingNorm or PendingHeads


@dataclass(slots=True, eq=False)
class Residual:
    """The residual stream x and a pending addition, which the next norm's kernel runs."""

    x: torch.Tensor
    pending: SplitSums | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PendingNorm:
    """The norm of a residual stream of one row, which the product that reads it computes."""

    x: Residual
    norm: kernels.Norm

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True, slots=True, eq=False)
class PendingHeads:
    """Queries, keys or values before norm and RoPE: one kernel in `attend` runs both for all
    three."""

    qkv: SplitSums
    norm: str | None = None
    rotated: bool = False
    normed_values: bool = False  # the values' norm without a weight


class CudaOps:
    """The operations of one step. model.decoder.Ops is the protocol and defines each of them."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, Weight],
        caches: tuple[tuple[torch.Tensor, ...], ...],
        angles: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]],
        step: DeviceStep,
        adapters: tuple[DeviceAdapter, ...] = (),
        ranks: RankExchange | None = None,
        captured: tuple[int, ...] = (),
    ) -> None:
        self._ranks, self._captured = ranks, captured
        self.states: list[torch.Tensor] = []  # captured layers' states, output rows only
        self.spec, self.weights, self.caches, self.adapters = spec, weights, caches, adapters
        self.angles, self.step = angles, step
        # kind of group, layer -> (cache group, index of the layer in that group's cache)
        self._cache_of = {
            (group.kind, layer): (g, i)
            for g, group in enumerate(spec.groups)
            for i, layer in enumerate(group.layers)
        }

    # ---- row by row

    def embed(self) -> Rows:
        rows = self._embedded("embed")
        if self._ranks is not None:
            rows = self._ranks.picked(rows, self.step.tokens)
        return Residual(rows if self.spec.embed_scale == 1.0 else rows * self.spec.embed_scale)

    def capture(self, x: Rows, layer: int) -> None:
        if layer in self._captured:
            rows, done = self.flushed(x), layer == len(self.spec.layers)
            outputs = None if done else self.step.outputs
            # a copy: the residual goes on in the same memory
            self.states.append(rows.clone() if outputs is None else rows[outputs])

    def draft_input(self, states: torch.Tensor) -> Rows:
        """The input of a draft layer (ModelSpec.draft_layer)."""
        both = [self._rms(self.flushed(self.embed()), "mtp.embed_norm")]
        both.append(self._rms(states, "mtp.state_norm"))
        return Residual(self._product(torch.cat(both, 1), "mtp.project"))

    def eagle_input(self, states: torch.Tensor, eagle: EagleSpec) -> tuple[Rows, Rows]:
        """The inputs of an EAGLE-3 layer and of its attention, for the target's states or for the
        layer's own."""
        x = states
        if x.shape[1] == eagle.states:
            x = self._rms(x, "eagle.input_norm") if eagle.norm_states else x
            x = self._product(x, "eagle.fc")
        normed = self._rms(x, "eagle.state_norm")
        embedding = self._rms(self.flushed(self.embed()), "layers.0.attn_norm")
        both = torch.cat([embedding, normed], 1).to(self._readers("layers.0.attn_norm")[0].dtype)
        return Residual(normed if eagle.norm_first else x), both

    def _rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        spec = self.spec
        norm = kernels.Norm(self.weights[name], None, spec.norm_eps, spec.norm_offset)
        return kernels.add_norm(x, None, norm)

    def _product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return kernels.reduce_splits(self.linear(x.to(self.weights[name].dtype), name, False))

    def _embedded(self, name: str) -> torch.Tensor:
        """The rows of an embedding for the tokens of the step."""
        weight, tokens = self.weights[name], self.step.tokens
        if self._ranks is not None and name == "embed":
            tokens = self._ranks.own_tokens(tokens)
        if isinstance(weight, quant.BlockWeight):
            if weight.unpacked is None:
                return quant.unpack(weight, rows=tokens).float()
            weight = weight.unpacked
        return weight.index_select(0, tokens).float()

    def positions(self) -> Rows:
        return self.weights["positions"].index_select(0, self.step.positions).float()

    def layer_inputs(self, x: Rows) -> Rows:
        spec, width = self.spec, self.spec.layer_input
        y = kernels.reduce_splits(self.linear(x, "layer_inputs.project", False))
        norm = kernels.Norm(
            self.weights["layer_inputs.norm"], None, spec.norm_eps, spec.norm_offset
        )
        y = kernels.add_norm((y * spec.hidden**-0.5).view(-1, width), None, norm).view(y.shape)
        return (y + self._embedded("layer_inputs.embed") * math.sqrt(width)) * math.sqrt(0.5)

    def layer_input(self, x: Rows, inputs: Rows, layer: int) -> Rows:
        prefix, width = f"layers.{layer}.input", self.spec.layer_input
        gate = kernels.reduce_splits(self.linear(x, f"{prefix}.gate", False))
        own = inputs[:, layer * width : (layer + 1) * width]
        both = SplitSums(torch.cat([gate, own], 1)[None])
        dtype = self.weights[f"{prefix}.project"].dtype
        inner = kernels.mlp_activation(both, self.spec.activation, True, dtype)
        return self.linear(inner, f"{prefix}.project", False)

    def scale(self, x: Rows, name: str) -> Rows:
        self.flushed(x).mul_(self.weights[name])
        return x

    def norm(self, x: Rows, name: str) -> Rows:
        if isinstance(x, torch.Tensor):
            x = Residual(x)
        bias = self.weights[f"{name}.bias"] if self.spec.norm == "layer" else None
        norm = kernels.Norm(self.weights[name], bias, self.spec.norm_eps, self.spec.norm_offset)
        if isinstance(x, SplitSums):
            return kernels.add_norm(None, x, norm)
        readers = self._readers(name)
        if self._can_delay(x, norm, readers):
            return PendingNorm(x, norm)
        pending, x.pending = x.pending, None
        found = {weight.dtype for weight in readers}
        dtype = found.pop() if len(found) == 1 else torch.float32
        return kernels.add_norm(x.x, pending, norm, dtype)

    def _can_delay(self, x: Residual, norm: kernels.Norm, readers: list[Weight]) -> bool:
        """Whether the products that read this norm's output can compute it."""
        step, bias = self.step, None if x.pending is None else x.pending.bias
        if len(x.x) != 1 or norm.bias is not None or bias is not None or not readers:
            return False
        if step.outputs is not None or step.adapters or self._ranks is not None:
            return False
        one_type = len({weight.dtype for weight in readers}) == 1
        return one_type and all(few_rows.takes_norm(weight) for weight in readers)

    def _readers(self, norm: str) -> list[Weight]:
        """The weights that read this norm's output, in their type. None for a router and the final
        states, which need float32."""
        layer, _, kind = norm.rpartition(".")
        mlp = ("mlp.gate+up", "mlp.up")
        attention = ("attn.q+k+v", "attn.gate", *(mlp if self.spec.shared_norm else ()))
        # layers whose values are their keys, and layers that use another layer's keys
        attention += ("attn.q+k", "attn.q")
        attention += ("conv.in", "delta.qkv+z+b+a", "delta.qkv+z", "delta.b+a")
        consumers = {"attn_norm": attention, "mlp_norm": mlp}.get(kind, ())
        names = [f"{layer}.{consumer}" for consumer in consumers]
        return [self.weights[name] for name in names if name in self.weights]

    def linear(self, x: Rows, name: str, bias: bool) -> Rows:
        if isinstance(x, Residual):  # a block without a norm before it
            x = self.flushed(x)
        if self._ranks is not None and name.endswith(".attn.o"):
            x = self._ranks.heads(x, int(name.split(".")[1]))
        bias_row = self.weights[f"{name}.bias"] if bias else None
        if isinstance(x, PendingNorm):
            return SplitSums(self._normed_product(x, self.weights[name]), bias_row)
        sums = quant.matmul(x, self.weights[name], bias_row, whole=self._whole(name))
        # after `take`, in the last layer, the rows are the outputs
        step = self.step
        adapters = step.adapters if len(x) == len(step.tokens) else step.output_adapters
        for adapter, rows in adapters:
            sums = add_low_rank(sums, x, rows, self.adapters[adapter].get(name, ()))
        if self._ranks is None or not (widths := self._ranks.rows(name)):
            return sums
        return SplitSums(self._ranks.gather(kernels.reduce_splits(sums), widths)[None])

    def _whole(self, name: str) -> int | None:
        """Rows of the matrix on all ranks, which decide the order of additions."""
        return None if self._ranks is None else self._ranks.whole_rows(name)

    def _joined(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The columns of all ranks of what this rank's rows of the matrix led to."""
        return x if self._ranks is None else self._ranks.gather(x, self._ranks.rows(name))

    def _normed_product(
        self, h: PendingNorm, weight: torch.Tensor, gate: str = "none",
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:  # fmt: skip
        """Partial sums; the pending addition to the residual is done, too."""
        pending, norm = h.x.pending, h.norm
        sums = None if pending is None else pending.splits
        row = few_rows.Normed(h.x.x, sums, norm.weight, norm.eps, norm.offset)
        out, moved = few_rows.product(row, weight, gate, dtype)
        if moved is not None:
            h.x.x, h.x.pending = moved, None
        return out

    def qkv(self, h: Rows, layer: int) -> tuple[Rows, Rows, Rows]:
        same = self.spec.layers[layer].value_is_key
        name = f"layers.{layer}.attn.{'q+k' if same else 'q+k+v'}"
        heads = PendingHeads(self.linear(h, name, self.spec.qkv_bias))
        return heads, heads, heads

    def queries(self, h: Rows, layer: int) -> Rows:
        return PendingHeads(self.linear(h, f"layers.{layer}.attn.q", self.spec.qkv_bias))

    def value_norm(self, v: Rows, layer: int) -> Rows:
        return replace(v, normed_values=True)

    def head_norm(self, x: Rows, name: str) -> Rows:
        return replace(x, norm=name)

    def rope(self, x: Rows, layer: int) -> Rows:
        return replace(x, rotated=True)

    def add(self, x: Rows, y: Rows) -> Rows:
        if isinstance(x, torch.Tensor):
            return x + y  # the outputs of an MLP and of experts, after their norms
        self.flushed(x)
        if (scale := self.spec.residual_scale) != 1.0:
            y = (kernels.reduce_splits(y) if isinstance(y, SplitSums) else y) * scale
        x.pending = y if isinstance(y, SplitSums) else SplitSums(y[None])
        return x

    def flushed(self, x: Residual) -> torch.Tensor:
        if x.pending is not None:
            pending, x.pending = x.pending, None
            kernels.add_norm(x.x, pending, None)
        return x.x

    def take(self, x: Rows, which: Literal["outputs", "logits"]) -> Rows:
        rows = self.step.outputs if which == "outputs" else self.step.logits
        if rows is None:
            return x
        if isinstance(x, Residual):
            return Residual(self.flushed(x).index_select(0, rows))
        return x.index_select(0, rows)

    def head(self, h: Rows) -> Rows:
        name = "embed" if self.spec.tied else "head"
        weight, whole = self.weights[name], self._whole(name)
        if whole is not None or not few_rows.takes(weight, len(h)):  # that product casts its rows
            h = h.to(weight.dtype)
        logits = quant.matmul(h, weight, out=self.step.logits_out, whole=whole)
        logits = self._joined(kernels.reduce_splits(logits), name)
        if self.spec.logit_scale != 1.0:
            logits *= self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    # ---- attention

    def attend(self, q: Rows, k: Rows | None, v: Rows | None, layer: int) -> Rows:
        spec, step = self.spec, self.step
        source = spec.layers[layer].kv_layer
        group, index = self._cache_of["attention", layer if source is None else source]
        kv = KvLayer(*(cache[index] for cache in self.caches[group]))
        rope, window = spec.layers[layer].rope, spec.layers[layer].window
        qkv, slots, stored = q.qkv, step.slots[group], kv
        norms = None
        if q.norm:
            norms = self.weights[q.norm], self.weights[q.norm if k is None else k.norm]
        if k is None or v is None:
            qkv, slots = self._only_queries(q.qkv, kv.keys), torch.zeros_like(slots)
            stored = kv.one_block()
        elif spec.qk_norm == "width":
            qkv, norms = self._norm_width(q, k), None
        elif v.normed_values:
            qkv = self._norm_values(q.qkv, layer)
        angles = self.angles[rope] if rope is not None and q.rotated else None
        sinks = self.weights[f"layers.{layer}.attn.sinks"] if spec.sinks else None
        dtype = self.weights[f"layers.{layer}.attn.o"].dtype
        if spec.attention_gate:
            dtype = torch.float32  # `gated` reads it
        scale, cap = spec.scale, spec.attention_softcap
        last = spec.qk_norm == "rotated_head"
        heads = kernels.Heads(norms, spec.norm_eps, spec.norm_offset, angles, step.positions, last)
        tiles, spans = step.tiles[group], step.spans
        if k is not None and not spec.query_scale_beta and kernels.takes_one(qkv, kv, tiles, spans):
            return kernels.attend_one(
                qkv, heads, kv, slots, tiles[0], spans, scale, cap, window, dtype, sinks
            )
        wide = torch.float32 if spec.query_scale_beta else torch.float16
        queries = kernels.qkv_rope_cache(qkv, heads, stored, slots, wide)
        if spec.query_scale_beta:
            queries *= self.weights["query_scales"].index_select(0, step.positions)[:, None]
        return kernels.attend(queries, kv, tiles, spans, scale, cap, window, dtype, sinks)

    def _only_queries(self, qkv: SplitSums, keys: torch.Tensor) -> SplitSums:
        """The queries with zeros for keys and values, which go to a cache that is not read."""
        x = kernels.reduce_splits(qkv)
        _, heads, _, dim = keys.shape
        return SplitSums(torch.cat([x, x.new_zeros(len(x), 2 * heads * dim)], 1)[None])

    def _norm_values(self, qkv: SplitSums, layer: int) -> SplitSums:
        """The projections with a norm of each head of the values, which may be the keys."""
        spec, x = self.spec, kernels.reduce_splits(qkv)
        kv_heads, dim = spec.kv_shape(layer)
        queries = x[:, : spec.heads * dim]
        keys = x[:, spec.heads * dim : (spec.heads + kv_heads) * dim]
        values = keys if spec.layers[layer].value_is_key else x[:, (spec.heads + kv_heads) * dim :]
        ones = torch.ones(dim, dtype=torch.float32, device=x.device)
        norm = kernels.Norm(ones, None, spec.norm_eps, 0.0)
        # contiguous: with one key head, `reshape` would return the slice itself
        rows = values.contiguous().view(-1, dim)
        normed = kernels.add_norm(rows, None, norm).view(len(x), -1)
        return SplitSums(torch.cat([queries, keys, normed], 1)[None])

    def _norm_width(self, q: Rows, k: Rows) -> SplitSums:
        """The projections with norms over all query heads and over all key heads."""
        spec, x = self.spec, kernels.reduce_splits(q.qkv)
        widths = [n * spec.head_dim for n in (spec.heads, spec.kv_heads, spec.kv_heads)]
        queries, keys, values = torch.split(x, widths, 1)
        parts = [
            kernels.add_norm(
                part.contiguous(),
                None,
                kernels.Norm(self.weights[name], None, spec.norm_eps, spec.norm_offset),
            )
            for part, name in ((queries, q.norm), (keys, k.norm))
        ]
        return SplitSums(torch.cat([*parts, values], 1)[None])

    # ---- recurrent layers

    def short_conv(self, x: Rows, layer: int) -> Rows:
        prefix = f"layers.{layer}.conv"
        group, index = self._cache_of["conv", layer]
        bias = self.weights[f"{prefix}.kernel.bias"] if self.spec.conv_bias else None
        return recurrent.short_conv(
            kernels.reduce_splits(x),
            self.weights[f"{prefix}.kernel"],
            bias,
            self.caches[group][0][index],
            self._recurrent,
            self.weights[f"{prefix}.out"].dtype,
        )

    def delta_net(self, h: Rows, layer: int) -> Rows:
        prefix, weights = f"layers.{layer}.delta", self.weights
        conv, conv_index = self._cache_of["conv", layer]
        state, state_index = self._cache_of["state", layer]
        of_layer = recurrent.DeltaLayer(
            kernel=weights[f"{prefix}.kernel"],
            decay=weights[f"{prefix}.decay"],
            dt=weights[f"{prefix}.dt"],
            norm=weights[f"{prefix}.norm"],
            inputs=self.caches[conv][0][conv_index],
            caches=tuple(cache[state_index] for cache in self.caches[state]),
        )
        products, slots = self._delta_products(h, prefix), self.step.slots[state]
        dtype = weights[f"{prefix}.out"].dtype
        return recurrent.delta_net(self.spec, of_layer, products, slots, self._recurrent, dtype)

    def _delta_products(self, h: Rows, prefix: str) -> tuple[torch.Tensor, ...]:
        """qkv, z, b, a: columns of one product or of two (device_weights.join_layer)."""
        delta = self.spec.delta
        assert delta is not None
        widths = (delta.qkv, delta.values), (delta.value_heads, delta.value_heads)

        def product(name: str) -> torch.Tensor:
            return kernels.reduce_splits(self.linear(h, f"{prefix}.{name}", False))

        if self._ranks is not None:
            own = [self._ranks.own_rows(f"{prefix}.{name}") for name in ("qkv", "z")]
            widths = (own[0], own[1]), widths[1]
        if f"{prefix}.qkv+z+b+a" in self.weights:
            qkv, z, b, a = product("qkv+z+b+a").split([*widths[0], *widths[1]], 1)
        else:
            (qkv, z), (b, a) = (
                product(name).split(own, 1)
                for name, own in zip(("qkv+z", "b+a"), widths, strict=True)
            )
        return self._joined(qkv, f"{prefix}.qkv"), self._joined(z, f"{prefix}.z"), b, a

    @property
    def _recurrent(self) -> recurrent.RecurrentStep:
        assert self.step.recurrent is not None, "the step of a recurrent model"
        return self.step.recurrent

    def gated(self, x: Rows, gate: Rows) -> Rows:
        rows = kernels.reduce_splits(x) if isinstance(x, SplitSums) else x
        if isinstance(gate, SplitSums) and gate.width == rows.shape[1]:
            return kernels.gated(rows, gate)
        return rows * (1.0 / (1.0 + torch.exp(-kernels.reduce_splits(gate))))

    # ---- MLP and mixture of experts

    def mlp(self, h: Rows, name: str) -> Rows:
        spec, prefix = self.spec, name
        if isinstance(h, Residual):  # a block without a norm before it
            h = self.flushed(h)
        dtype = self.weights[f"{prefix}.down"].dtype
        inner = self._fused_gate(h, prefix, dtype)
        if inner is None:
            up_name = f"{prefix}.gate+up" if spec.gated else f"{prefix}.up"
            up = self.linear(h, up_name, spec.mlp_bias)
            inner = kernels.mlp_activation(up, spec.activation, spec.gated, dtype)
        if spec.gated:  # without a gate, `linear` has gathered the rows of up
            inner = self._joined(inner, f"{prefix}.up")
        return self.linear(inner, f"{prefix}.down", spec.mlp_bias)

    def _fused_gate(self, h: torch.Tensor, prefix: str, dtype: torch.dtype) -> torch.Tensor | None:
        """activation(gate(h)) * up(h) in one kernel; None: it needs two. The bits are the same."""
        spec = self.spec
        fusable = spec.gated and spec.activation in kernels.FUSED_ACTIVATIONS
        if not fusable or spec.mlp_bias or self.step.adapters:
            return None
        weight = quant.plain_weight(self.weights[f"{prefix}.gate+up"], len(h))
        whole = self._whole(f"{prefix}.gate+up")
        if weight is None or not kernels.can_fuse(weight, spec.activation, whole):
            return None
        if isinstance(h, PendingNorm):
            return self._normed_product(h, weight, spec.activation, dtype)[0]
        return kernels.gated_matmul(h, weight, spec.activation, dtype, whole=whole)

    def moe(self, h: Rows, layer: int, router: Rows | None = None) -> Rows:
        """Rows are sorted by expert into tiles; a row's experts are summed in order of rank."""
        spec, prefix = self.spec, f"layers.{layer}.moe"
        chosen, shares = self._route(h if router is None else router, prefix)
        tiles = experts.sort(chosen, spec.layers[layer].experts)
        up, down = self.weights[f"{prefix}.gate+up"], self.weights[f"{prefix}.down"]
        wholes = self._whole(f"{prefix}.gate+up"), self._whole(f"{prefix}.down")
        fused = spec.activation in kernels.FUSED_ACTIVATIONS and not spec.expert_bias
        if fused and not isinstance(up, quant.BlockWeight):
            inner = kernels.expert_matmul(
                h, up, tiles, tiles.rows, spec.activation, down.dtype, wholes[0]
            )
        else:
            sums = self._expert_bias(
                expert_matmul(h, up, tiles, tiles.rows, wholes[0]), f"{prefix}.gate+up", tiles
            )
            inner = kernels.mlp_activation(SplitSums(sums[None]), spec.activation, True, down.dtype)
        # the second matmul reads the sorted rows as they are
        inner = self._joined(inner, f"{prefix}.up")
        sums = expert_matmul(inner, down, tiles, tiles.lines, wholes[1])
        added = experts.add(self._expert_bias(sums, f"{prefix}.down", tiles), tiles, shares)
        return self._joined(added, f"{prefix}.down")

    def _expert_bias(self, sums: torch.Tensor, name: str, tiles: ExpertTiles) -> torch.Tensor:
        """Add the bias of each line's expert."""
        if not self.spec.expert_bias:
            return sums
        bias = self.weights[f"{name}.bias"].index_select(0, tiles.experts.clamp(min=0))
        return sums + bias.repeat_interleave(tiles.height, 0)

    def _route(self, h: Rows, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each row, best first (ties go to the lower index), and their shares."""
        spec, bias = self.spec, self.weights.get(f"{prefix}.router.bias")
        sums = kernels.matmul(h, self.weights[f"{prefix}.router"], bias)
        scores = kernels.reduce_splits(sums)
        if spec.router == "softmax":
            scores = torch.exp(scores - scores.amax(1, keepdim=True))
        else:
            scores = 1.0 / (1.0 + torch.exp(-scores))
        choice_bias = self.weights[f"{prefix}.choice_bias"] if spec.choice_bias else None
        scales = self.weights[f"{prefix}.scales"] if spec.experts_beside else None
        return experts.choose(scores, spec, choice_bias, scales)


def expert_matmul(
    x: torch.Tensor,
    weight: Weight,
    tiles: ExpertTiles,
    rows: torch.Tensor,
    whole: int | None = None,
) -> torch.Tensor:
    in_blocks = isinstance(weight, quant.BlockWeight)
    return (quant if in_blocks else kernels).expert_matmul(x, weight, tiles, rows, whole=whole)


def rope_tables(
    spec: ModelSpec, positions: int, device: torch.device
) -> dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin [positions, dim / 2] for each RopeSpec of the model."""
    angles: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in spec.layers:
        if layer.rope is not None and layer.rope not in angles:
            cos, sin = tables(layer.rope, np.arange(positions))
            angles[layer.rope] = torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)
    return angles
