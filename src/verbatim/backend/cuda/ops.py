"""The operations of model/decoder.py on the GPU. A handle is a float32 tensor with one row for each token of the step, or what will be one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from verbatim.backend.cuda import kernels
from verbatim.backend.cuda.kernels import EXPERT_ROWS, Pieces, Runs
from verbatim.model.rope import tables
from verbatim.model.spec import ModelSpec, RopeSpec
from verbatim.weights.tensor import Tensor

Rows: TypeAlias = Any  # a tensor, Pieces, a Stream or Heads
MATRICES = (
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.o",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
    "moe.gate",
    "moe.up",
    "moe.down",
)
BUFFER = (
    256 << 20
)  # bytes that attention may use for what its spans leave; more rows than fit take turns


def load(
    source: Mapping[str, Tensor], spec: ModelSpec, device: torch.device
) -> dict[str, torch.Tensor]:
    """Weights as the kernels want them: matrices in half precision, what is read together stored together, the rest in float32."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in source.items():
        half = name in ("embed", "head", "positions") or name.endswith(MATRICES)
        out[name] = (
            _half(tensor, device) if half else torch.from_numpy(tensor.to_f32().copy()).to(device)
        )
    for i, layer in enumerate(spec.layers):
        _join(out, f"layers.{i}.attn", ("q", "k", "v"), spec.qkv_bias)
        if layer.experts:
            _join(out, f"layers.{i}.moe", ("gate", "up"), False)
        elif spec.gated:
            _join(out, f"layers.{i}.mlp", ("gate", "up"), spec.mlp_bias)
    return out


def _half(tensor: Tensor, device: torch.device) -> torch.Tensor:
    """bfloat16 stays what it is. Everything else becomes float16, which holds three more bits of it."""
    if tensor.type == "bf16":
        raw = np.ascontiguousarray(tensor.data).view(np.int16).reshape(tensor.shape)
        return torch.from_numpy(raw.copy()).to(device).view(torch.bfloat16)
    with np.errstate(
        over="ignore"
    ):  # what does not fit becomes infinite, and is reported where logits are read
        return torch.from_numpy(tensor.to_f32().astype(np.float16)).to(device)


def _join(
    weights: dict[str, torch.Tensor], prefix: str, parts: tuple[str, ...], bias: bool
) -> None:
    for tail in ("", ".bias") if bias else ("",):
        found = [weights.pop(f"{prefix}.{part}{tail}") for part in parts]
        types = {one.dtype for one in found}
        if len(types) > 1:  # a file that mixes them
            found = [one.to(torch.float32).to(torch.float16) for one in found]
        weights[f"{prefix}.{'+'.join(parts)}{tail}"] = torch.cat(
            found, -2 if found[0].ndim > 1 else 0
        )  # outputs; a mixture has its experts before them


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step's integers on the device (int32), and the sizes that the kernels' grids depend on."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: tuple[torch.Tensor, ...]  # per cache group [rows]: where a row's keys and values go
    runs: tuple[Runs, ...]  # per cache group
    outputs: torch.Tensor | None  # None: all rows
    logits: torch.Tensor | None  # None: all outputs
    spans: int


@dataclass(slots=True, eq=False)
class Stream:
    """The residual stream x, and what is still to be added to it: done together with the norm that follows."""

    x: torch.Tensor
    more: Pieces | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Queries, keys or values, not yet normed and rotated: `attend` does that for all three at once."""

    joined: Pieces
    norm: str | None = None
    rotated: bool = False


class CudaOps:
    """One step's operations (the protocol is model.decoder.Ops, which also says what each means). What only moves numbers from one kernel to
    the next is put off and done by the kernel that reads them: hence the handles above."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, torch.Tensor],
        caches: tuple[tuple[torch.Tensor, torch.Tensor], ...],
        angles: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]],
        step: Step,
    ) -> None:
        self.spec, self.weights, self.caches, self.angles, self.step = (
            spec,
            weights,
            caches,
            angles,
            step,
        )
        self._place = {
            layer: (g, i)
            for g, group in enumerate(spec.groups)
            for i, layer in enumerate(group.layers)
        }

    # ---------------------------------------------------------------------------------------------------- row by row

    def embed(self) -> Rows:
        rows = self.weights["embed"].index_select(0, self.step.tokens).float()
        return Stream(rows if self.spec.embed_scale == 1.0 else rows * self.spec.embed_scale)

    def positions(self) -> Rows:
        return self.weights["positions"].index_select(0, self.step.positions).float()

    def norm(self, x: Rows, name: str) -> Rows:
        bias = self.weights[f"{name}.bias"] if self.spec.norm == "layer" else None
        norm = kernels.Norm(self.weights[name], bias, self.spec.norm_eps, self.spec.norm_offset)
        if isinstance(x, Pieces):
            return kernels.settle(None, x, norm)
        more, x.more = x.more, None
        return kernels.settle(x.x, more, norm, self._reader(name))

    def _reader(self, norm: str) -> torch.dtype:
        """The type of the matrix that reads it. A router reads float32, and so does who asks for final states."""
        layer, _, kind = norm.rpartition(".")
        readers = {"attn_norm": ("attn.q+k+v",), "mlp_norm": ("mlp.gate+up", "mlp.up")}.get(
            kind, ()
        )
        found = [
            self.weights[name].dtype
            for reader in readers
            if (name := f"{layer}.{reader}") in self.weights
        ]
        return found[0] if found else torch.float32

    def linear(self, x: Rows, name: str, bias: bool) -> Rows:
        return kernels.product(
            x, self.weights[name], self.weights[f"{name}.bias"] if bias else None
        )

    def qkv(self, h: Rows, layer: int) -> tuple[Rows, Rows, Rows]:
        heads = Heads(self.linear(h, f"layers.{layer}.attn.q+k+v", self.spec.qkv_bias))
        return heads, heads, heads

    def head_norm(self, x: Rows, name: str) -> Rows:
        return replace(x, norm=name)

    def rope(self, x: Rows, layer: int) -> Rows:
        return replace(x, rotated=True)

    def add(self, x: Rows, y: Rows) -> Rows:
        self._flush(x)
        x.more = y if isinstance(y, Pieces) else Pieces(y[None])
        return x

    def _flush(self, x: Stream) -> torch.Tensor:
        if x.more is not None:
            more, x.more = x.more, None
            kernels.settle(x.x, more, None)
        return x.x

    def take(self, x: Rows, which: Literal["outputs", "logits"]) -> Rows:
        rows = self.step.outputs if which == "outputs" else self.step.logits
        if rows is None:
            return x
        return (
            Stream(self._flush(x).index_select(0, rows))
            if isinstance(x, Stream)
            else x.index_select(0, rows)
        )

    def head(self, h: Rows) -> Rows:
        weight = self.weights["embed" if self.spec.tied else "head"]
        logits = kernels.whole(kernels.product(h.to(weight.dtype), weight))
        cap = self.spec.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    # ---------------------------------------------------------------------------------------------------- attention

    def attend(self, q: Rows, k: Rows, v: Rows, layer: int) -> Rows:
        spec, step = self.spec, self.step
        group, index = self._place[layer]
        keys, values = (cache[index] for cache in self.caches[group])
        rope, window = spec.layers[layer].rope, spec.layers[layer].window
        norms = (self.weights[q.norm], self.weights[k.norm]) if q.norm else None
        angles = self.angles[rope] if rope is not None and q.rotated else None
        asked = kernels.prepare(
            q.joined,
            norms,
            spec.norm_eps,
            spec.norm_offset,
            angles,
            step.positions,
            keys,
            values,
            step.slots[group],
        )
        each = kernels.attention_bytes(1, spec.heads, spec.head_dim, step.spans)
        runs = step.runs[group]
        most = max(1, BUFFER // each // runs.most)
        dtype = self.weights[f"layers.{layer}.attn.o"].dtype
        if len(runs.count) <= most:
            return kernels.attend(
                asked,
                keys,
                values,
                runs,
                step.spans,
                spec.scale,
                spec.attention_softcap,
                window,
                dtype,
            )
        out = torch.empty_like(asked, dtype=dtype)
        for start in range(
            0, len(runs.count), most
        ):  # a long prompt in a long context: some rows after the others
            first, last, part = runs.part(start, start + most)
            out[first:last] = kernels.attend(
                asked[first:last],
                keys,
                values,
                part,
                step.spans,
                spec.scale,
                spec.attention_softcap,
                window,
                dtype,
            )
        return out

    # ---------------------------------------------------------------------------------------------------------- mixers

    def mlp(self, h: Rows, layer: int) -> Rows:
        spec, prefix = self.spec, f"layers.{layer}.mlp"
        wide = self.linear(h, f"{prefix}.gate+up" if spec.gated else f"{prefix}.up", spec.mlp_bias)
        dtype = self.weights[f"{prefix}.down"].dtype
        return self.linear(
            kernels.inner(wide, spec.activation, spec.gated, dtype), f"{prefix}.down", spec.mlp_bias
        )

    def moe(self, h: Rows, layer: int) -> Rows:
        """Rows are sorted by expert into tiles; each row's experts are added in order of rank."""
        spec, prefix = self.spec, f"layers.{layer}.moe"
        chosen, shares = self._route(h, prefix)
        rows, experts, place = tiles_of(chosen, spec.layers[layer].experts)
        wide = kernels.expert_product(h, self.weights[f"{prefix}.gate+up"], rows, experts)
        narrow = kernels.inner(wide, spec.activation, True, self.weights[f"{prefix}.down"].dtype)
        filled = torch.where(
            rows >= 0, torch.arange(len(rows), device=h.device, dtype=rows.dtype), rows
        )
        found = kernels.expert_product(
            narrow, self.weights[f"{prefix}.down"], filled, experts
        ).parts[0]
        out = torch.zeros_like(h)
        for rank in range(spec.experts_used):
            out += shares[:, rank : rank + 1] * found.index_select(0, place[:, rank])
        return out

    def _route(self, h: Rows, prefix: str) -> tuple[torch.Tensor, Rows]:
        """The experts of each row, best first (ties to the lower index), and their shares."""
        scores = kernels.whole(kernels.product(h, self.weights[f"{prefix}.router"]))
        scores = torch.exp(scores - scores.amax(1, keepdim=True))
        scores = scores / in_order(scores)
        best, chosen = torch.sort(scores, dim=1, descending=True, stable=True)
        best, chosen = best[:, : self.spec.experts_used], chosen[:, : self.spec.experts_used]
        return chosen, best / in_order(best) if self.spec.experts_renormalised else best


def in_order(x: Rows) -> Rows:
    """Row sums [rows, 1], added from left to right."""
    total = x[:, :1].clone()
    for i in range(1, x.shape[1]):
        total += x[:, i : i + 1]
    return total


def tiles_of(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """chosen [rows, used] -> source row of each line of the tiles (-1: none), expert of each tile, line of each (row, rank)."""
    used = chosen.shape[1]
    picks = chosen.reshape(-1).cpu().numpy()
    order = np.argsort(picks, kind="stable")
    counts = np.bincount(picks, minlength=experts)
    sizes = -(-counts // EXPERT_ROWS) * EXPERT_ROWS
    starts = np.concatenate([[0], np.cumsum(sizes)])
    before = np.concatenate([[0], np.cumsum(counts)])
    lines = np.arange(len(picks)) - before[picks[order]] + starts[picks[order]]
    rows = np.full(starts[-1], -1, np.int32)
    rows[lines] = order // used
    place = np.empty(len(picks), np.int64)
    place[order] = lines
    tiles = np.repeat(np.arange(experts, dtype=np.int32), sizes // EXPERT_ROWS)
    device = chosen.device
    return (
        torch.from_numpy(rows).to(device),
        torch.from_numpy(tiles).to(device),
        torch.from_numpy(place.reshape(-1, used)).to(device),
    )


def angles_of(
    spec: ModelSpec, positions: int, device: torch.device
) -> dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin of every position, for each kind of rotation that the model has."""
    found: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in spec.layers:
        if layer.rope is not None and layer.rope not in found:
            cos, sin = tables(layer.rope, np.arange(positions))
            found[layer.rope] = torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)
    return found
