"""Record the forward pass of model/decoder.py as a list of fused native operations.

In: a Model and an empty native engine. Out: the engine holds packed weights and a list of fused
operations, which it replays for any step.

decoder.forward runs once, on symbolic handles instead of arrays. Cheap operations stay pending in
the handle until their consumer is known. So a norm is fused into the matmul that reads it, RoPE
into the QKV projection before it, and a residual addition into the matmul before it:

    norm -> qkv -> head_norm -> rope   one operation, which also writes the KV cache
    linear | mlp | moe -> add          one operation (two for an MLP), which adds to the residual
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from verbatim.backend.cpu.repack import repack
from verbatim.backend.cpu.weight_packer import WeightPacker
from verbatim.backend.ranks import Ranks
from verbatim.base.config import BLOCK_SIZE
from verbatim.base.errors import ModelError
from verbatim.base.records import CacheGroup
from verbatim.formats.registry import SIZES
from verbatim.formats.tensor import Tensor
from verbatim.model.decoder import forward, store_context
from verbatim.model.layer_split import LayerSplit
from verbatim.model.loading.load import Model
from verbatim.model.rope import query_scales
from verbatim.model.spec import AssistantSpec, DFlashSpec, EagleSpec, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Handle:
    """Rows in `buffer`, or rows that the operation `pending` will compute, once its destination is
    known."""

    buffer: int = -1
    norm: str = ""  # weight of the norm that the consumer applies first
    pending: tuple[str, dict[str, Any]] | None = None
    qkv: dict[str, Any] = field(default_factory=dict)  # fields of the pending qkv operation
    widths: tuple[int, ...] = ()  # columns of the pending result on each rank; empty: all on each


class ProgramRecorder(WeightPacker):
    """The operations of model.decoder, recorded: each call appends one native operation to the
    engine's program, which then runs for every step. A Handle names the buffer of a result."""

    def __init__(self, model: Model, engine: Any, ranks: Ranks | None = None) -> None:
        super().__init__(model, engine)
        self._ranks = ranks
        self._parts: dict[int, int] = {}  # width -> buffer of this rank's columns
        self._ropes: dict[RopeSpec, int] = {}
        spec = self.spec
        self._x = engine.buffer(spec.hidden)
        self._y = engine.buffer(spec.hidden)  # block outputs that are normed before the addition
        self._h = engine.buffer(spec.hidden)
        # size of a head -> queries and outputs of attention
        sizes = sorted({spec.kv_shape(i)[1] for i in range(len(spec.layers))})
        self._q = {size: engine.buffer(spec.heads * size) for size in sizes}
        self._o = {size: engine.buffer(spec.heads * size) for size in sizes}
        if ranks is not None and ranks.split.heads:
            whole = ranks.split.spec.heads
            self._whole_o = {size: engine.buffer(whole * size) for size in sizes}
        if spec.qk_norm == "width":  # the norm needs whole rows of keys, before the KV cache
            self._kv = [engine.buffer(spec.kv_heads * spec.head_dim) for _ in range(2)]
        widths = {spec.mlp_width(i) for i in range(len(spec.layers))} | {spec.shared_mlp}
        self._inner = {width: engine.buffer(width) for width in sorted(widths) if width}
        if width := spec.layer_input:
            self._inputs = engine.buffer(len(spec.layers) * width)
            self._input = {"src": engine.buffer(width), "dst": engine.buffer(width)}
        if spec.experts_beside:
            self._beside, self._router = engine.buffer(spec.hidden), engine.buffer(spec.hidden)
        if spec.attention_gate or spec.shared_gate:
            self._gates = {n: engine.buffer(n) for n in (1, spec.heads * spec.head_dim)}
            self._gated = engine.buffer(spec.heads * spec.head_dim)
        if (delta := spec.delta) is not None:
            self._delta = {
                name: engine.buffer(width)
                for name, width in (
                    *(("src", delta.qkv), ("keys", delta.qkv), ("values", delta.values)),
                    *(("betas", delta.value_heads), ("alphas", delta.value_heads)),
                    ("dst", delta.values),
                )
            }
        elif spec.recurrent:
            self._conv = {"src": engine.buffer(3 * spec.hidden), "dst": engine.buffer(spec.hidden)}
        self._logits = engine.buffer(spec.vocab)
        if captured := model.captured:
            width = spec.assistant.target.hidden if spec.assistant else spec.hidden
            self._captured = {layer: i * width for i, layer in enumerate(captured)}
            self._states = engine.buffer(len(captured) * width)

    def _normed(self, h: Handle) -> dict[str, int]:
        """Source and norm fields of an operation that reads `h`."""
        if not h.norm:
            return {"src": h.buffer}
        biased = self.spec.norm == "layer" and self.spec.norm_bias
        bias = self._vector(f"{h.norm}.bias") if biased else -1
        return {
            "src": h.buffer,
            "norm": self._vector(h.norm, self.spec.norm_offset),
            "norm_bias": bias,
        }

    def _part(self, width: int) -> int:
        if width not in self._parts:
            self._parts[width] = self.engine.buffer(width)
        return self._parts[width]

    def _widths(self, name: str) -> tuple[int, ...]:
        """Rows of the matrix on each rank; empty: it is whole."""
        return () if self._ranks is None else self._ranks.split.widths(name)

    def _emit(self, h: Handle, dst: int, add: bool, scaled: bool = False) -> None:
        """`scaled`: the result is added to the residual later."""
        assert h.pending is not None
        name, fields = h.pending
        if h.widths:
            assert self._ranks is not None, "only a rank's matrix has widths"
            part = self._part(h.widths[self._ranks.rank])
            self._emit(replace(h, widths=()), part, add=False, scaled=add)
            self.engine.op("gather", src=part, dst=dst, widths=list(h.widths), add=add)
            return
        if (add or scaled) and self.spec.residual_scale != 1.0:
            assert name in ("linear", "moe"), f"{name} has no scale"
            fields = {**fields, "scale": self.spec.residual_scale}
        self.engine.op(name, dst=dst, add=add, **fields)

    # ---- operations

    def embed(self) -> Handle:
        widths = list(self._widths("embed"))
        dst = self._part(self.spec.hidden) if widths else self._x
        first = sum(widths[: self._ranks.rank]) if self._ranks else 0
        mat, scale = [self._matrix("embed")], self.spec.embed_scale
        self.engine.op("embed", dst=dst, mat=mat, scale=scale, offset=first)
        if widths:
            self.engine.op("gather", src=dst, dst=self._x, widths=widths, picks=True)
        return Handle(self._x)

    def draft_input(self) -> Handle:
        """The input of a draft layer (ModelSpec.draft_layer) or an assistant, as the sum of two
        products: of the embedding with the first half of the columns, of the state with the
        second."""
        given = self.engine.buffer(self.weights["embed"].shape[1])
        for half, (name, scale) in enumerate((("embed", self.spec.embed_scale), ("state", 1.0))):
            if half:
                self.engine.op("states", dst=given)
            else:
                mat = [self._matrix("embed")]
                self.engine.op("embed", dst=given, mat=mat, scale=scale)
            t = columns(self.weights["mtp.project"], half)
            norm = f"mtp.{name}_norm" if self.spec.draft_layer else ""
            self.engine.op(
                "linear",
                dst=self._x,
                mat=[self._pack(t, *repack(t), t.rows)],
                add=bool(half),
                **self._normed(Handle(given, norm=norm)),
            )
        return Handle(self._x)

    def context_input(self, dflash: DFlashSpec) -> Handle:
        """What a DFlash head reads of the target's states."""
        given = self.engine.buffer(dflash.states)
        self.engine.op("states", dst=given)
        self.engine.op("embed", dst=self._x, mat=[-1])  # the angles of the positions only
        self._emit(self.linear(Handle(given), "dflash.fc", False), self._x, add=False)
        return Handle(self._x, norm="dflash.state_norm")

    def capture(self, x: Handle, layer: int) -> None:
        if layer not in self._captured:
            return
        if x.pending:  # the state of an assistant's next draft
            made = self.engine.buffer(self.weights["assistant.out"].shape[0])
            self._emit(x, made, add=False)
            x = Handle(made)
        self.engine.op("capture", src=x.buffer, dst=self._states, offset=self._captured[layer])

    def eagle_input(self, eagle: EagleSpec) -> tuple[Handle, Handle]:
        """The inputs of an EAGLE-3 layer and of its attention. A step comes with the target's
        states or with the layer's own; the operations for the other ones do not run."""
        hidden = self.spec.hidden
        given, both = self.engine.buffer(eagle.states), self.engine.buffer(2 * hidden)
        self.engine.op("states", dst=given, states_width=eagle.states)
        source = Handle(given, norm="eagle.input_norm" if eagle.norm_states else "")
        fields = (self.linear(source, "eagle.fc", False).pending or ("", {}))[1]
        self.engine.op("linear", dst=self._x, states_width=eagle.states, **fields)
        self.engine.op("states", dst=self._x, states_width=hidden)
        mat = [self._matrix("embed")]
        self.engine.op("embed", dst=self._y, mat=mat, scale=self.spec.embed_scale)
        embedding = Handle(self._y, norm="layers.0.attn_norm")
        self.engine.op("norm", dst=both, **self._normed(embedding))
        state = self._normed(Handle(self._x, norm="eagle.state_norm"))
        self.engine.op("norm", dst=both, offset=hidden, **state)
        if eagle.norm_first:
            self.engine.op("norm", dst=self._x, **state)
        return Handle(self._x), Handle(both)

    def positions(self) -> Handle:
        return Handle(pending=("positions", {"mat": [self._matrix("positions")]}))

    def layer_inputs(self, x: Handle) -> Handle:
        width, hidden = self.spec.layer_input, self.spec.hidden
        name, fields = self.linear(x, "layer_inputs.project", False).pending or ("", {})
        self.engine.op(name, dst=self._inputs, add=False, **{**fields, "scale": hidden**-0.5})
        self.engine.op(
            "layer_inputs",
            dst=self._inputs,
            mat=[self._matrix("layer_inputs.embed")],
            norm=self._vector("layer_inputs.norm", self.spec.norm_offset),
            scale=math.sqrt(width),
        )
        return Handle(self._inputs)

    def layer_input(self, x: Handle, inputs: Handle, layer: int) -> Handle:
        prefix, offset = f"layers.{layer}.input", layer * self.spec.layer_input
        self._emit(self.linear(x, f"{prefix}.gate", False), self._input["src"], add=False)
        self.engine.op("layer_gate", keys=inputs.buffer, offset=offset, **self._input)
        return self.linear(Handle(self._input["dst"]), f"{prefix}.project", False)

    def scale(self, x: Handle, name: str) -> Handle:
        self.engine.op("scale", dst=x.buffer, norm=self._vector(name))
        return x

    def norm(self, x: Handle, name: str) -> Handle:
        if name.endswith(".mlp_own_norm"):  # the experts' output is added before the next norm
            self._emit(x, self._y, add=False)
            self.engine.op("norm", dst=self._beside, **self._normed(Handle(self._y, norm=name)))
            return Handle(self._beside)
        if name == "final_norm":  # only the rows in Batch.outputs
            self.engine.op(
                "norm", dst=self._h, outputs=True, **self._normed(Handle(x.buffer, norm=name))
            )
            return Handle(self._h)
        if x.pending:  # gemma norms a block's output before the addition, so it needs a buffer
            self._emit(x, self._y, add=False)
            return Handle(pending=("normadd", self._normed(Handle(self._y, norm=name))))
        return Handle(x.buffer, norm=name)

    def qkv(self, h: Handle, layer: int) -> tuple[Handle, Handle, Handle]:
        head_dim = self.spec.kv_shape(layer)[1]
        names = [f"layers.{layer}.attn.{p}" for p in "qkv"]
        if self.spec.layers[layer].value_is_key:
            names[2] = names[1]
        if self.spec.qk_norm == "width":
            for name, dst in zip(names, (self._q[head_dim], *self._kv), strict=True):
                self._emit(self.linear(h, name, self.spec.qkv_bias), dst, add=False)
            fields = {"layer": layer, "keys": self._kv[0], "values": self._kv[1]}
        else:
            fields = {**self._normed(h), "layer": layer, **self._heads_of(names, head_dim)}
        return (
            Handle(qkv={**fields, "part": "q"}),
            Handle(qkv={"part": "k"}),
            Handle(qkv={"part": "v"}),
        )

    def _heads_of(self, names: list[str], head_dim: int) -> dict[str, list[int]]:
        """The matrices, biases and adapters of projections to heads."""
        return {
            "mat": [self._matrix(n, head_dim) for n in names],
            "bias": [self._bias(n, self.spec.qkv_bias) for n in names],
            "lora": [self._lora(n, head_dim) for n in names],
        }

    def queries(self, h: Handle, layer: int) -> Handle:
        heads = self._heads_of([f"layers.{layer}.attn.q"], self.spec.kv_shape(layer)[1])
        # -1: no keys and values
        fields = {name: [*found, -1, -1] for name, found in heads.items()}
        source = self.spec.layers[layer].kv_layer
        return Handle(qkv={**self._normed(h), "layer": source, **fields, "part": "q"})

    def keys_values(self, h: Handle, layer: int) -> tuple[Handle, Handle]:
        head_dim = self.spec.kv_shape(layer)[1]
        heads = self._heads_of([f"layers.{layer}.attn.{p}" for p in "kv"], head_dim)
        fields = {name: [-1, *found] for name, found in heads.items()}  # -1: no queries
        return (
            Handle(qkv={**self._normed(h), "layer": layer, **fields, "part": "k"}),
            Handle(qkv={"part": "v"}),
        )

    def store(self, k: Handle, v: Handle, layer: int) -> None:
        fields = {name: value for name, value in (v.qkv | k.qkv).items() if name != "part"}
        self.engine.op("qkv", dst=self._q[self.spec.kv_shape(layer)[1]], **fields)

    def value_norm(self, v: Handle, layer: int) -> Handle:
        ones = self.engine.vector(np.ones(self.spec.kv_shape(layer)[1], np.float32))
        return replace(v, qkv={**v.qkv, "vnorm": ones})

    def head_norm(self, x: Handle, name: str) -> Handle:
        return replace(
            x, qkv={**x.qkv, f"{x.qkv['part']}norm": self._vector(name, self.spec.norm_offset)}
        )

    def rope(self, x: Handle, layer: int) -> Handle:
        spec = self.spec.layers[layer].rope
        assert spec is not None
        if spec not in self._ropes:
            self._ropes[spec] = self.engine.rope(
                np.array(spec.inv_freq, np.float64), spec.attention_factor
            )
        return replace(x, qkv={**x.qkv, "rope": self._ropes[spec]})

    def attend(self, q: Handle, k: Handle | None, v: Handle | None, layer: int) -> Handle:
        spec, parts = self.spec, dict(q.qkv)
        if k is not None and v is not None:
            assert q.qkv.get("rope") == k.qkv.get("rope"), "queries and keys use the same rope"
            parts = v.qkv | k.qkv | q.qkv
        fields = {name: value for name, value in parts.items() if name != "part"}
        head_dim = spec.kv_shape(layer)[1]
        queries, out = self._q[head_dim], self._o[head_dim]
        if spec.qk_norm == "rotated_head":
            fields["norm_last"] = True
        if spec.query_scale_beta:
            length = spec.query_scale_length
            steps = np.arange(0, spec.context + length, length)
            fields["query_scales"] = self.engine.vector(query_scales(spec, steps))
            fields["query_length"] = length
        self.engine.op("heads" if spec.qk_norm == "width" else "qkv", dst=queries, **fields)
        sinks = {"sinks": self._vector(f"layers.{layer}.attn.sinks")} if spec.sinks else {}
        self.engine.op(
            "attend",
            src=queries,
            dst=out,
            layer=fields["layer"],
            scale=spec.scale,
            softcap=spec.attention_softcap,
            **sinks,
        )
        return Handle(out)

    def short_conv(self, x: Handle, layer: int) -> Handle:
        self._emit(x, self._conv["src"], add=False)
        self.engine.op("conv", layer=layer, **self._conv, **self._kernel(f"layers.{layer}.conv"))
        return Handle(self._conv["dst"])

    def delta_net(self, h: Handle, layer: int) -> Handle:
        delta, prefix = self.spec.delta, f"layers.{layer}.delta"
        assert delta is not None
        for part, name in (("qkv", "src"), ("z", "values"), ("b", "betas"), ("a", "alphas")):
            y = self.linear(h, f"{prefix}.{part}", False)
            if self._ranks is not None:
                self._emit(y, self._delta[name], add=False)
                continue
            op, fields = y.pending or ("", {})
            joined = part != "qkv" and not self._adapters
            self.engine.op(op, dst=self._delta[name], joined=joined, **fields)
        self.engine.op(
            "delta",
            layer=layer,
            **self._delta,
            **self._kernel(prefix),
            decay=self._vector(f"{prefix}.decay"),
            dt=self._vector(f"{prefix}.dt"),
            qnorm=self._vector(f"{prefix}.norm"),
            key_heads=delta.key_heads,
            value_heads=delta.value_heads,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
            tiled=delta.tiled,
        )
        return Handle(self._delta["dst"])

    def gated(self, x: Handle, gate: Handle) -> Handle:
        """The attention's output is gated into a buffer, and the shared MLP's output into the
        residual. Both products are computed now, because an addition may change their input."""
        if x.pending is None:
            gates = self._gates[self.spec.heads * self.spec.head_dim]
            self._emit(gate, gates, add=False)
            self.engine.op("gated", src=x.buffer, keys=gates, dst=self._gated)
            return Handle(self._gated)
        self._emit(x, self._y, add=False)
        self._emit(gate, self._gates[1], add=False)
        return Handle(pending=("gated", {"src": self._y, "keys": self._gates[1]}))

    def linear(self, x: Handle, name: str, bias: bool) -> Handle:
        if name.endswith(".attn.o"):
            x = self._whole_heads(x, int(name.split(".")[1]))
        fields = {
            **self._normed(x),
            "mat": [self._matrix(name)],
            "bias": [self._bias(name, bias)],
            "lora": [self._lora(name)],
        }
        return Handle(pending=("linear", fields), widths=self._widths(name))

    def _whole_heads(self, x: Handle, layer: int) -> Handle:
        """The attention's output of all heads, of which a rank computes some."""
        widths = self._ranks.split.attention_widths(layer) if self._ranks else ()
        if not widths:
            return x
        dst = self._whole_o[self.spec.kv_shape(layer)[1]]
        self.engine.op("gather", src=x.buffer, dst=dst, widths=list(widths))
        return Handle(dst)

    def mlp(self, h: Handle, name: str) -> Handle:
        widths = list(self._widths(f"{name}.up"))
        rows = self.weights[f"{name}.up"].shape[0]
        inner = self._inner[sum(widths) or rows]
        part = self._part(rows) if widths else inner
        parts = ["gate", "up"] if self.spec.gated else ["up"]
        mats = [self._matrix(f"{name}.{p}") for p in parts]
        biases = [self._bias(f"{name}.{p}", self.spec.mlp_bias) for p in parts]
        loras = [self._lora(f"{name}.{p}") for p in parts]
        if not self.spec.gated:
            mats, biases, loras = [-1, *mats], [-1, *biases], [-1, *loras]
        self.engine.op("gateup", dst=part, mat=mats, bias=biases, lora=loras, **self._normed(h))
        if widths:
            self.engine.op("gather", src=part, dst=inner, widths=widths)
        return self.linear(Handle(inner), f"{name}.down", self.spec.mlp_bias)

    def moe(self, h: Handle, layer: int, router: Handle | None = None) -> Handle:
        name = f"layers.{layer}.moe"
        own: dict[str, Any] = {}
        if router is not None:
            kind = self.weights[f"{name}.router"].type
            if kind not in ("f32", "f16", "bf16"):  # the kernel reads float rows only
                raise ModelError(
                    f"{name}.router is {kind}: a float type is needed", file=self._file
                )
            self.engine.op("norm", dst=self._router, **self._normed(router))
            own = {"keys": self._router, "expert_scales": self._vector(f"{name}.scales")}
        fields = {
            **own,
            **self._normed(h),
            "mat": [self._matrix(f"{name}.router")],
            "gates": self._experts(f"{name}.gate"),
            "ups": self._experts(f"{name}.up"),
            "downs": self._experts(f"{name}.down"),
            "used": self.spec.experts_used,
            "renormalise": self.spec.experts_renormalised,
        }
        spec = self.spec
        if spec.router_bias:
            fields["bias"] = [self._vector(f"{name}.router.bias")]
        if spec.expert_bias:
            fields["expert_bias"] = [
                self._vector(f"{name}.{part}.bias") for part in ("gate", "up", "down")
            ]
        if spec.router == "sigmoid":
            fields["sigmoid"] = True
        if spec.choice_bias:
            fields["choice_bias"] = self._vector(f"{name}.choice_bias")
        if spec.expert_groups > 1:
            fields |= {"groups": spec.expert_groups, "groups_used": spec.expert_groups_used}
        if spec.experts_scale != 1.0:
            fields["experts_scale"] = spec.experts_scale
        if widths := self._widths(f"{name}.up"):
            fields["widths"] = list(widths)
        return Handle(pending=("moe", fields), widths=self._widths(f"{name}.down"))

    def add(self, x: Handle, y: Handle) -> Handle:
        if y.pending is None:
            self.engine.op("normadd", dst=x.buffer, **self._normed(y))
        else:
            self._emit(y, x.buffer, add=True)
        return x

    def take(self, x: Handle, which: Literal["outputs", "logits"]) -> Handle:
        return x  # the final norm selects the outputs, and the head the logits

    def head(self, h: Handle) -> Handle:
        if (clusters := self.spec.assistant) is not None and clusters.centroids:
            return self._head_clusters(h, clusters)
        mat = self._matrix("embed" if self.spec.tied else "head")
        scale, cap = self.spec.logit_scale, self.spec.logit_softcap
        widths, eagle = list(self._widths("head")), self.spec.eagle
        few = eagle is not None and eagle.vocab < self.spec.vocab
        dst = self._logits
        if widths and self._ranks:
            dst = self._part(widths[self._ranks.rank])
        elif eagle is not None and few:
            dst = self.engine.buffer(eagle.vocab)
        self.engine.op("head", src=h.buffer, dst=dst, mat=[mat], scale=scale, softcap=cap)
        if widths:
            self.engine.op("gather", src=dst, dst=self._logits, widths=widths, logits=True)
        elif few:
            ids = self._vector("eagle.ids")
            self.engine.op("scatter", src=dst, dst=self._logits, ids=ids)
        return Handle(self._logits)

    def _head_clusters(self, h: Handle, spec: AssistantSpec) -> Handle:
        scores = self.engine.buffer(spec.centroids)
        self._emit(self.linear(h, "assistant.centroids", False), scores, add=False)
        self.engine.op(
            "clusters",
            src=h.buffer,
            keys=scores,
            dst=self._logits,
            mat=[self._matrix("head", self.spec.vocab // spec.centroids)],
            ids=self._vector("assistant.ids"),
            used=spec.used,
        )
        return Handle(self._logits)


class StageRecorder(ProgramRecorder):
    """The program of one rank of a pipeline (model/layer_split.py). Every rank takes part in every
    hand-over: a gather of which one rank has all columns."""

    def _hand_over(self, owners: range) -> None:
        for owner in owners:
            width = self.spec.hidden
            widths = [width if rank == owner else 0 for rank in range(self._count)]
            dst = self._y if owner == self._rank else self._x
            self.engine.op("gather", src=self._x, dst=dst, widths=widths)

    def embed(self) -> Handle:
        assert self._ranks is not None, "a stage is of a rank"
        self._count, self._rank = self._ranks.split.ranks, self._ranks.rank
        if self._rank:
            self.engine.op("embed", dst=self._x, mat=[-1])  # the angles of the positions only
            self._hand_over(range(self._rank))
            return Handle(self._x)
        x = super().embed()
        if self._ranks.split.spec.learned_positions:
            x = self.add(x, self.positions())
        self._hand_over(range(self._count))
        return x

    def norm(self, x: Handle, name: str) -> Handle:
        return x if self._rank and name == "final_norm" else super().norm(x, name)

    def head(self, h: Handle) -> Handle:
        if not self._rank:
            return super().head(h)
        self._hand_over(range(self._rank, self._count))
        return h


def columns(t: Tensor, half: int) -> Tensor:
    """The first or the second half of a matrix's columns."""
    width = t.shape[1] // 2
    if width % SIZES[t.type][0]:  # the cut is inside a block
        t = Tensor(t.name, "f32", t.shape, t.to_f32().reshape(-1).view(np.uint8))
    data = t.row_view().reshape(t.rows, 2, -1)[:, half]
    return Tensor(t.name, t.type, (t.rows, width), np.ascontiguousarray(data).reshape(-1))


def record(
    model: Model, engine: Any, shared: Mapping[str, int] | None = None, ranks: Ranks | None = None
) -> dict[str, int]:
    """Pack the model's weights into `engine` and record its forward pass there.

    `shared`: matrices that the engine has already. `ranks`: the model is one rank's part. Returns
    the engine's number of every matrix."""
    kinds = ("attention", "conv", "state")
    cached = model.spec if model.spec.assistant is None else model.spec.assistant.target
    for group in cached.groups:
        kv_heads, head_dim = cached.kv_shape(group.layers[0])
        engine.group(
            group.window or 0,
            list(group.layers),
            kinds.index(group.kind),
            block_floats(cached, group),
            kv_heads,
            head_dim,
        )
    split = ranks and ranks.split
    kind = StageRecorder if isinstance(split, LayerSplit) else ProgramRecorder
    recorder = kind(model, engine, ranks)
    recorder._matrices |= shared or {}
    x = h = None
    if model.spec.draft_layer or model.spec.assistant is not None:
        x = recorder.draft_input()
    elif model.spec.eagle is not None:
        x, h = recorder.eagle_input(model.spec.eagle)
    elif (dflash := model.spec.dflash) is not None:
        engine.runs_with(dflash.states)
        store_context(model.spec, recorder, recorder.context_input(dflash))
        engine.runs_with(-1)
    forward(model.spec, recorder, x, h, recorder.capture if model.captured else None)
    engine.finish()
    if "embed" in model.weights:
        recorder._matrix("embed")
    return recorder._matrices


def block_floats(spec: ModelSpec, group: CacheGroup) -> int:
    """Floats in a block of one layer of a recurrent group; 0 for attention. A value head of a delta
    net has its own copy of the keys, so that the value heads can be computed in parallel."""
    if group.kind == "attention":
        return 0
    if group.kind == "conv":
        return BLOCK_SIZE * spec.conv_channels
    delta = spec.delta
    assert delta is not None
    updates = BLOCK_SIZE * (delta.key_dim + delta.value_dim + 2)
    return delta.value_heads * (delta.key_dim * delta.value_dim + updates)
