"""The operations of model/decoder.py in NumPy.

In and out: float32 arrays with one row per token of the step. Invariant: a row's bits do not depend
on the other rows, nor on the address of an array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from verbatim.backend.reference.cache import AttentionCache, ConvCache, GroupCache, StateCache
from verbatim.backend.reference.kv_types import round_kv
from verbatim.backend.reference.recurrent_layers import convolve, delta_states, l2_normed, softplus
from verbatim.backend.step_rows import Batch
from verbatim.formats.tensor import Tensor
from verbatim.model.adapter import Adapter
from verbatim.model.rope import query_scales, tables
from verbatim.model.spec import AssistantSpec, EagleSpec, ModelSpec, RopeSpec

F32 = np.float32
# a float32 array; NumPy's stubs lose the type in indexing and mixed arithmetic
Array: TypeAlias = Any
# weight name -> A [rank, in], B [out, rank], scale
FloatAdapter: TypeAlias = dict[str, tuple[Array, Array, Any]]
_GELU = F32(math.sqrt(2.0 / math.pi))
_ERF = np.frompyfunc(math.erf, 1, 1)
NO_LOGIT = F32(-1e30)  # logit of a token that a draft layer cannot draw
SWIGLU_LIMIT, SWIGLU_ALPHA = F32(7.0), F32(1.702)  # constants of swiglu_oai


class FloatWeights:
    """Weights as float32 arrays, dequantised on first use and cached.

    Each array starts on a 64-byte boundary, so that no code path of the BLAS library depends on the
    address that the allocator returned."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        self.source = source
        self._arrays: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = aligned(self.source[name].to_f32())
        return array

    def clear(self) -> None:
        self._arrays.clear()


def aligned(array: Array) -> Array:
    """The array, or a copy, as C-contiguous float32 whose address is a multiple of 64."""
    array = np.ascontiguousarray(array, F32)
    if array.ctypes.data % 64 == 0:
        return array
    buffer = np.empty(array.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    copy = buffer[start : start + array.nbytes].view(F32).reshape(array.shape)
    copy[...] = array
    return copy


class ReferenceOps:
    """The operations of one step. model.decoder.Ops is the protocol and defines each of them."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: FloatWeights,
        caches: tuple[GroupCache, ...],
        batch: Batch,
        adapters: tuple[FloatAdapter, ...] = (),
        kv_type: str = "f16",
        captured: tuple[int, ...] = (),
    ) -> None:
        self.spec, self.weights, self.caches, self.batch = spec, weights, caches, batch
        self._adapters, self._kv_type = adapters, kv_type
        self._captured = captured
        self.states: list[Array] = []  # states of the captured layers, output rows only
        # kind of group, layer -> (cache group, index of the layer in that group's cache)
        self._cache_of = {
            (group.kind, layer): (g, i)
            for g, group in enumerate(spec.groups)
            for i, layer in enumerate(group.layers)
        }
        self._angles: dict[RopeSpec, tuple[Array, Array]] = {}

    # ---- row by row

    def embed(self) -> Array:
        rows = self.weights["embed"][self.batch.tokens]
        return rows if self.spec.embed_scale == 1.0 else rows * F32(self.spec.embed_scale)

    def capture(self, x: Array, layer: int) -> None:
        if layer in self._captured:
            done = layer == len(self.spec.layers)
            self.states.append(x if done else x[self.batch.outputs])

    def eagle_input(self, eagle: EagleSpec) -> tuple[Array, Array]:
        """[rows, H] and [rows, 2H]: the inputs of the layer and of its attention."""
        x = self.batch.states
        assert x is not None, "steps of a draft layer come with states"
        if x.shape[1] == eagle.states:
            x = self.norm(x, "eagle.input_norm") if eagle.norm_states else x
            x = self.linear(x, "eagle.fc", False)
        normed = self.norm(x, "eagle.state_norm")
        embedding = self.norm(self.embed(), "layers.0.attn_norm")
        return normed if eagle.norm_first else x, np.concatenate([embedding, normed], axis=1)

    def draft_input(self) -> Array:
        """[rows, H]: the input of a draft layer (ModelSpec.draft_layer) or an assistant."""
        embedding, state = self.embed(), self.batch.states
        if self.spec.draft_layer:
            embedding = self.norm(embedding, "mtp.embed_norm")
            state = self.norm(state, "mtp.state_norm")
        return self.linear(np.concatenate([embedding, state], axis=1), "mtp.project", False)

    def context_input(self) -> Array:
        """[rows, H]: what a DFlash head reads of the target's states."""
        x = self.linear(self.batch.states, "dflash.fc", False)
        return self.norm(x, "dflash.state_norm")

    def positions(self) -> Array:
        return self.weights["positions"][self.batch.positions]

    def norm(self, x: Array, name: str) -> Array:
        if self.spec.norm == "rms":
            return self._rms(x, name)
        centred = x - x.mean(axis=-1, keepdims=True, dtype=F32)
        variance = (centred * centred).mean(axis=-1, keepdims=True, dtype=F32)
        scaled = centred / np.sqrt(variance + F32(self.spec.norm_eps))
        scaled = scaled * self.weights[name]
        return scaled + self.weights[f"{name}.bias"] if self.spec.norm_bias else scaled

    def head_norm(self, x: Array, name: str) -> Array:
        if self.spec.qk_norm == "width":
            return self._rms(x, name)
        heads = x.reshape(len(x), -1, len(self.weights[name]))
        return self._rms(heads, name).reshape(x.shape)

    def value_norm(self, v: Array, layer: int) -> Array:
        heads = v.reshape(len(v), -1, self.spec.kv_shape(layer)[1])
        return self._root_mean_square(heads).reshape(v.shape)

    def _rms(self, x: Array, name: str, offset: float | None = None) -> Array:
        scaled = self._root_mean_square(x)
        weight = self.weights[name]
        offset = self.spec.norm_offset if offset is None else offset
        return scaled * (weight + F32(offset) if offset else weight)

    def _root_mean_square(self, x: Array) -> Array:
        """x divided by the root of its mean square."""
        square = (x * x).mean(axis=-1, keepdims=True, dtype=F32)
        return x / np.sqrt(square + F32(self.spec.norm_eps))

    def scale(self, x: Array, name: str) -> Array:
        return x * self.weights[name]

    def layer_inputs(self, x: Array) -> Array:
        width = self.spec.layer_input
        y = self.linear(x, "layer_inputs.project", False) * F32(self.spec.hidden**-0.5)
        y = self._rms(y.reshape(len(x), -1, width), "layer_inputs.norm").reshape(y.shape)
        rows = self.weights["layer_inputs.embed"][self.batch.tokens]
        return (y + rows * F32(math.sqrt(width))) * F32(math.sqrt(0.5))

    def layer_input(self, x: Array, inputs: Array, layer: int) -> Array:
        prefix, width = f"layers.{layer}.input", self.spec.layer_input
        own = inputs[:, layer * width : (layer + 1) * width]
        gate = self.linear(x, f"{prefix}.gate", False)
        return self.linear(act_mul(gate, own, self.spec.activation), f"{prefix}.project", False)

    def linear(self, x: Array, name: str, bias: bool) -> Array:
        y = rows_times(x, self.weights[name])
        number = self.batch.adapters  # per row
        if self._adapters and len(x) < len(number):  # the output rows in the last layer
            number = number[self.batch.outputs]
        for adapter in {*number} - {-1}:
            part = self._adapters[adapter].get(name)
            if part is not None:
                rows = np.flatnonzero(number == adapter)
                y[rows] += low_rank(x[rows], *part)
        return y + self.weights[f"{name}.bias"] if bias else y

    def qkv(self, h: Array, layer: int) -> tuple[Array, Array, Array]:
        own = "qk" if self.spec.layers[layer].value_is_key else "qkv"
        parts = [self.linear(h, f"layers.{layer}.attn.{p}", self.spec.qkv_bias) for p in own]
        return parts[0], parts[1], parts[-1]

    def queries(self, h: Array, layer: int) -> Array:
        return self.linear(h, f"layers.{layer}.attn.q", self.spec.qkv_bias)

    def keys_values(self, h: Array, layer: int) -> tuple[Array, Array]:
        k, v = (self.linear(h, f"layers.{layer}.attn.{p}", self.spec.qkv_bias) for p in "kv")
        return k, v

    def rope(self, x: Array, layer: int) -> Array:
        rope = self.spec.layers[layer].rope
        assert rope is not None, "the decoder rotates only where the layer has a rope"
        if rope not in self._angles:
            self._angles[rope] = tables(rope, self.batch.positions)
        # [rows, 1, dim / 2]: the same for every head
        cos, sin = (t[:, None, :] for t in self._angles[rope])
        heads = x.reshape(len(x), -1, self.spec.kv_shape(layer)[1])
        half = rope.dim // 2
        a, b = heads[..., :half], heads[..., half : rope.dim]
        result = heads.copy()
        result[..., :half] = a * cos - b * sin
        result[..., half : rope.dim] = b * cos + a * sin
        return result.reshape(x.shape)

    def add(self, x: Array, y: Array) -> Array:
        scale = self.spec.residual_scale
        return x + y if scale == 1.0 else x + y * F32(scale)

    def take(self, x: Array, which: Literal["outputs", "logits"]) -> Array:
        rows = self.batch.outputs if which == "outputs" else self.batch.logits
        return x if len(rows) == len(x) else x[rows]

    def head(self, h: Array) -> Array:
        logits = rows_times(h, self.weights["embed" if self.spec.tied else "head"])
        if self.spec.logit_scale != 1.0:
            logits = logits * F32(self.spec.logit_scale)
        logits = soft_cap(logits, self.spec.logit_softcap)
        if self.spec.assistant is not None and self.spec.assistant.centroids:
            logits = self._best_clusters(h, logits, self.spec.assistant)
        ids = next((n for n in ("eagle.ids", "assistant.ids") if n in self.weights.source), None)
        if ids is None:
            return logits
        every = np.full((len(h), self.spec.vocab), NO_LOGIT, F32)
        every[:, self.weights[ids].astype(np.int64)] = logits
        return every

    def _best_clusters(self, h: Array, logits: Array, spec: AssistantSpec) -> Array:
        """NO_LOGIT where another cluster's centroid scores higher; ties go to the lower index."""
        scores = rows_times(h, self.weights["assistant.centroids"])
        best = np.argsort(-scores, axis=1, kind="stable")[:, : spec.used]
        chosen = np.zeros(scores.shape, np.bool_)
        np.put_along_axis(chosen, best, True, axis=1)
        size = self.spec.vocab // spec.centroids
        return np.where(np.repeat(chosen, size, axis=1), logits, NO_LOGIT)

    # ---- attention

    def attend(self, q: Array, k: Array | None, v: Array | None, layer: int) -> Array:
        spec, batch = self.spec, self.batch
        kv_heads, head_dim = spec.kv_shape(layer)
        if spec.query_scale_beta:
            q = q * query_scales(spec, batch.positions)[:, None]
        group, keys, values = self._cache(layer)
        # the query heads of one KV head are adjacent
        heads = (len(q), kv_heads, -1, head_dim)
        queries, out = q.reshape(heads), np.empty_like(q).reshape(heads)
        if k is not None and v is not None:
            self.store(k, v, layer)
        for s, table in enumerate(batch.tables[group]):
            self._attend_sequence(queries, out, keys, values, s, table, layer)
        return out.reshape(q.shape)

    def _cache(self, layer: int) -> tuple[int, Array, Array]:
        """The cache group of a layer, and the keys and values that it reads."""
        source = self.spec.layers[layer].kv_layer
        group, index = self._cache_of["attention", layer if source is None else source]
        cache = self.caches[group]
        assert isinstance(cache, AttentionCache)
        return group, cache.keys[index], cache.values[index]

    def store(self, k: Array, v: Array, layer: int) -> None:
        kv_heads, (group, keys, values) = self.spec.kv_shape(layer)[0], self._cache(layer)
        k, v = (round_kv(part.reshape(len(k), kv_heads, -1), self._kv_type) for part in (k, v))
        batch, size = self.batch, keys.shape[2]
        for s, table in enumerate(batch.tables[group]):
            rows = slice(batch.first[s], batch.first[s + 1])
            positions = batch.positions[rows]
            blocks, slots = table[positions // size], positions % size
            assert blocks.min() >= 0, "a token's own block is in the table"
            keys[blocks, :, slots], values[blocks, :, slots] = k[rows], v[rows]

    def _attend_sequence(
        self,
        queries: Array,
        out: Array,
        keys: Array,
        values: Array,
        s: int,
        table: Array,
        layer: int,
    ) -> None:
        """All rows of one sequence: gather the blocks from the first row's window on, then attend
        one row at a time."""
        first, last = self.batch.first[s], self.batch.first[s + 1]
        start, end = int(self.batch.positions[first]), int(self.batch.ends[last - 1])
        size, window = keys.shape[2], self.spec.layers[layer].window
        sinks = None
        if self.spec.sinks:  # [kv_heads, group, 1]
            sinks = self.weights[f"layers.{layer}.attn.sinks"].reshape(keys.shape[1], -1, 1)
        first_block = first_visible(start, window) // size
        used = table[first_block : -(-end // size)]
        assert used.min() >= 0, "a visible block is in the table"
        # [kv_heads, positions, head_dim]
        seq_keys, seq_values = _gather(keys, used), _gather(values, used)
        for row in range(first, last):
            position = start + row - int(first)
            offset = first_block * size
            seen = slice(first_visible(position, window) - offset, self.batch.ends[row] - offset)
            out[row] = attend_row(
                queries[row],
                seq_keys[:, seen],
                seq_values[:, seen],
                self.spec.scale,
                self.spec.attention_softcap,
                sinks,
            )

    # ---- recurrent layers

    def short_conv(self, x: Array, layer: int) -> Array:
        b, c, u = np.split(x, 3, axis=1)
        y = self._convolved(b * u, f"layers.{layer}.conv.kernel", layer)
        if self.spec.conv_bias:
            y = y + self.weights[f"layers.{layer}.conv.kernel.bias"]
        return c * y

    def _convolved(self, x: Array, kernel: str, layer: int) -> Array:
        group, index = self._cache_of["conv", layer]
        cache = self.caches[group]
        assert isinstance(cache, ConvCache)
        return convolve(x, self.weights[kernel], cache.inputs[index], self.batch, group)

    def delta_net(self, h: Array, layer: int) -> Array:
        prefix, delta, rows = f"layers.{layer}.delta", self.spec.delta, len(h)
        assert delta is not None
        qkv, z, b, a = (
            self.linear(h, f"{prefix}.{part}", False) for part in ("qkv", "z", "b", "a")
        )
        mixed = activate(self._convolved(qkv, f"{prefix}.kernel", layer), "silu")
        q, k, v = np.split(mixed, [delta.keys, 2 * delta.keys], axis=1)
        q, k = (l2_normed(part.reshape(rows, delta.key_heads, -1)) for part in (q, k))
        q = q * F32(delta.key_dim**-0.5)
        decay = np.exp(self.weights[f"{prefix}.decay"] * softplus(a + self.weights[f"{prefix}.dt"]))
        group, index = self._cache_of["state", layer]
        cache = self.caches[group]
        assert isinstance(cache, StateCache)
        updates = np.concatenate([k.reshape(rows, -1), v, decay, sigmoid(b)], axis=1)
        y = delta_states(q, updates, cache.layer(index), delta, self.batch, group)
        y = self._rms(y, f"{prefix}.norm", offset=0.0).reshape(rows, -1)
        return y * activate(z, "silu")

    def gated(self, x: Array, gate: Array) -> Array:
        return x * sigmoid(gate)

    # ---- MLP and mixture of experts

    def mlp(self, h: Array, name: str) -> Array:
        spec = self.spec
        up = self.linear(h, f"{name}.up", spec.mlp_bias)
        gate = self.linear(h, f"{name}.gate", spec.mlp_bias) if spec.gated else None
        return self.linear(act_mul(gate, up, spec.activation), f"{name}.down", spec.mlp_bias)

    def moe(self, h: Array, layer: int, router: Array | None = None) -> Array:
        prefix = f"layers.{layer}.moe"
        out = np.zeros_like(h)
        logits = self.linear(
            h if router is None else router, f"{prefix}.router", self.spec.router_bias
        )
        for row, x, y in zip(logits, h, out, strict=True):
            for expert, share in zip(*self._route(row, prefix), strict=True):
                y += share * self._expert(x, prefix, expert)
        return out

    def _route(self, logits: Array, prefix: str) -> tuple[Array, Array]:
        """The experts of one row, best first, and their weights."""
        spec = self.spec
        scores = softmax(logits) if spec.router == "softmax" else sigmoid(logits)
        choice = scores + self.weights[f"{prefix}.choice_bias"] if spec.choice_bias else scores
        if spec.expert_groups > 1:
            choice = _in_best_groups(choice, spec)
        # stable: ties go to the lower index
        chosen = np.argsort(-choice, kind="stable")[: spec.experts_used]
        shares = scores[chosen]
        if spec.experts_renormalised:
            shares = shares / shares.sum(dtype=F32)
        if spec.experts_scale != 1.0:
            shares = shares * F32(spec.experts_scale)
        if spec.experts_beside:
            shares = shares * self.weights[f"{prefix}.scales"][chosen]
        return chosen, shares

    def _expert(self, x: Array, prefix: str, expert: int) -> Array:
        def linear(part: str, x: Array) -> Array:
            y = self.weights[f"{prefix}.{part}"][expert] @ x
            biased = self.spec.expert_bias
            return y + self.weights[f"{prefix}.{part}.bias"][expert] if biased else y

        inner = act_mul(linear("gate", x), linear("up", x), self.spec.activation)
        return linear("down", inner)


# ---- functions


def _in_best_groups(choice: Array, spec: ModelSpec) -> Array:
    """-inf for experts outside the groups whose two best have the largest sums."""
    groups = choice.reshape(spec.expert_groups, -1)
    sums = np.sort(groups, axis=1)[:, -2:].sum(1, dtype=F32)
    out = np.full_like(groups, -np.inf)
    kept = np.argsort(-sums, kind="stable")[: spec.expert_groups_used]
    out[kept] = groups[kept]
    return out.reshape(-1)


def float_adapter(adapter: Adapter) -> FloatAdapter:
    return {
        name: (aligned(part.a.to_f32()), aligned(part.b.to_f32()), F32(part.scale))
        for name, part in adapter.parts.items()
    }


def low_rank(x: Array, a: Array, b: Array, scale: object) -> Array:
    """B · (scale · A · x) of each row."""
    return rows_times(rows_times(x, a) * scale, b)


def rows_times(x: Array, weight: Array) -> Array:
    """x · weightᵀ as one matrix-vector product per row.

    Each product has the same shape, so its bits do not depend on the batch: NumPy runs a stack of
    matrix-vector products as one BLAS gemv call per row."""
    x = np.ascontiguousarray(x)
    return np.matmul(weight, x[:, :, None])[:, :, 0]


def first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _gather(cache: Array, blocks: Array) -> Array:
    """[blocks, kv_heads, size, dim] and block ids -> [kv_heads, len(blocks) * size, dim]."""
    found = cache[blocks].transpose(1, 0, 2, 3)
    return np.ascontiguousarray(found).reshape(found.shape[0], -1, found.shape[3])


def attend_row(
    q: Array, keys: Array, values: Array, scale: float, cap: float, sinks: Array | None = None
) -> Array:
    """q [kv_heads, group, dim], keys and values [kv_heads, visible, dim] -> [kv_heads, group, dim].

    `group`: query heads per KV head. `sinks` [kv_heads, group, 1]: scores without a value."""
    scores = soft_cap(np.matmul(q, keys.transpose(0, 2, 1)) * F32(scale), cap)
    if sinks is None:
        return np.matmul(softmax(scores), values)
    weights = softmax(np.concatenate([scores, sinks], axis=-1))[..., :-1]
    return np.matmul(np.ascontiguousarray(weights), values)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True, dtype=F32)


def sigmoid(x: Array) -> Array:
    return F32(1) / (F32(1) + np.exp(-x))


def soft_cap(x: Array, cap: float) -> Array:
    return F32(cap) * np.tanh(x / F32(cap)) if cap else x


def act_mul(gate: Array | None, up: Array, kind: str) -> Array:
    """act(gate) * up; without a gate, act(up)."""
    if kind == "swiglu_oai":
        assert gate is not None, "swiglu_oai is gated"
        gate, up = np.minimum(gate, SWIGLU_LIMIT), np.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate / (F32(1) + np.exp(-SWIGLU_ALPHA * gate)) * (up + F32(1))
    return activate(up, kind) if gate is None else activate(gate, kind) * up


def activate(x: Array, kind: str) -> Array:
    if kind == "silu":
        return x / (F32(1) + np.exp(-x))
    if kind == "gelu_tanh":
        return F32(0.5) * x * (F32(1) + np.tanh(_GELU * (x + F32(0.044715) * x * x * x)))
    if kind == "relu2":
        return np.maximum(x, F32(0)) ** 2
    assert kind == "gelu", kind
    return F32(0.5) * x * (F32(1) + _ERF(x * F32(math.sqrt(0.5))).astype(F32))
