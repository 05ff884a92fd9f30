"""Split of a model over ranks (tensor parallelism): which rows of which weight a rank has.

In: a ModelSpec and a number of ranks. Out: per weight the rows of each rank, and what a rank has of
a tensor. Invariant: matrices are cut by output rows, never along a sum. So each value of the
forward pass is computed on one rank, by the operations of one process, and the bits are those of
one process (docs/adr/0033).

Queries, keys, values and attention are cut by heads, where the heads divide; otherwise attention is
whole on every rank. Recurrent states, norms, routers and what is read by row (learned positions,
gemma4's second embedding) are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod

import numpy as np

from verbatim.base.errors import ParameterError
from verbatim.formats.tensor import Tensor
from verbatim.model.adapter import Adapter
from verbatim.model.layout import layout
from verbatim.model.spec import LayerSpec, ModelSpec

# Parts of a layer that are cut by rows, and whose result every rank gathers.
_BY_ROWS = {
    *("attn.o", "conv.in", "conv.out", "delta.qkv", "delta.z", "delta.out"),
    *(f"{block}.{part}" for block in ("mlp", "shared", "moe") for part in ("gate", "up", "down")),
}
_BY_QUERY_HEADS = {"attn.q", "attn.gate", "attn.sinks"}
_BY_KV_HEADS = {"attn.k", "attn.v"}
PANEL = 16  # rows that the kernels compute together; a cut inside one wastes the rest of it


@dataclass(frozen=True)
class Split:
    """The query heads of one KV head may be on several ranks, which all have the KV head then."""

    spec: ModelSpec
    ranks: int

    def __post_init__(self) -> None:
        least = min(self.spec.hidden, self.spec.vocab)
        if self.ranks > least:
            raise ParameterError(
                "tensor_parallel", f"{self.ranks} is more than the {least} rows of a matrix"
            )

    @cached_property
    def heads(self) -> tuple[int, ...] | None:
        """Query heads of each rank; None: attention is whole on every rank."""
        spec = self.spec
        attention = [i for i, layer in enumerate(spec.layers) if layer.mixer == "attention"]
        shares = {spec.heads // spec.kv_shape(i)[0] for i in attention}
        unit = lcm(*shares)  # query heads of whole KV heads in every layer
        if spec.qk_norm == "width" or not shares:  # a norm over all heads
            return None
        if spec.heads // unit >= self.ranks:
            counts = [n * unit for n in _even(spec.heads // unit, self.ranks)]
        else:
            each = spec.heads // self.ranks
            fits = all(share % each == 0 or each % share == 0 for share in shares if each)
            if spec.heads % self.ranks or not fits:
                return None
            counts = [each] * self.ranks
        groups = {self._local(tuple(counts), rank).groups for rank in range(self.ranks)}
        # KV heads that differ in number only in the whole model would change the cache groups
        return tuple(counts) if groups == {spec.groups} else None

    def widths(self, name: str) -> tuple[int, ...]:
        """Rows of the matrix on each rank, whose results are gathered; empty: it is whole, or cut
        by heads."""
        if name in ("embed", "head"):
            return _rows(self.spec.vocab, self.ranks)
        part = name.split(".", 2)[-1].removesuffix(".bias")
        if part not in _BY_ROWS:
            return ()
        return _rows(self._shapes[name.removesuffix(".bias")][-2], self.ranks)

    def attention_widths(self, layer: int) -> tuple[int, ...]:
        """Columns of the attention's output on each rank; empty: it is whole."""
        head_dim = self.spec.kv_shape(layer)[1]
        return tuple(count * head_dim for count in self.heads or ())

    def rows(self, name: str, rank: int) -> tuple[int, int] | None:
        """The first and the last row (exclusive) of the weight on a rank; None: all of them."""
        if widths := self.widths(name):
            return sum(widths[:rank]), sum(widths[: rank + 1])
        part = name.split(".", 2)[-1].removesuffix(".bias")
        if self.heads is None or part not in _BY_QUERY_HEADS | _BY_KV_HEADS:
            return None
        first, last = sum(self.heads[:rank]), sum(self.heads[: rank + 1])
        kv_heads, head_dim = self.spec.kv_shape(int(name.split(".")[1]))
        if part in _BY_KV_HEADS:
            share = self.spec.heads // kv_heads
            first, last = first // share, -(-last // share)
        size = 1 if part == "attn.sinks" else head_dim
        return first * size, last * size

    @property
    def kv_copies(self) -> float:
        """Copies of the KV cache on all ranks together."""
        if self.heads is None:
            return float(self.ranks)
        return sum(self.local(r).kv_heads for r in range(self.ranks)) / self.spec.kv_heads

    def share(self, name: str, rank: int) -> float:
        """The rank's part of a weight, from 0 to 1."""
        rows, shape = self.rows(name, rank), self._shapes[name]
        if rows is None:
            return 1.0
        return (rows[1] - rows[0]) / shape[-1 if _is_vector(name) else -2]

    @cached_property
    def gathered(self) -> int:
        """Values of a token's row that the ranks gather in a step, logits included."""
        spec, total = self.spec, self.spec.hidden
        for name in self._shapes:
            part = name.split(".", 2)[-1]
            gates = part.endswith(".gate")  # multiplied with up before the gather
            if not part.endswith(".bias") and name != "embed" and not gates:
                total += sum(self.widths(name)) * (spec.experts_used if part == "moe.up" else 1)
        mixers = [i for i, layer in enumerate(spec.layers) if layer.mixer == "attention"]
        return total + sum(sum(self.attention_widths(i)) for i in mixers) + spec.tied * spec.vocab

    def local(self, rank: int) -> ModelSpec:
        """The spec of the heads of one rank; all other sizes are those of the whole model."""
        return self.spec if self.heads is None else self._local(self.heads, rank)

    def cut(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        """The rank's rows of a weight: of a matrix, of each expert's, or values of a vector. A
        tensor that has been cut stays as it is."""
        rows, shape = self.rows(name, rank), tensor.shape
        axis = len(shape) - (1 if _is_vector(name) else 2)
        if rows is None or shape[axis] == rows[1] - rows[0]:
            return tensor
        part = tensor.data.reshape(prod(shape[:axis]), shape[axis], -1)[:, rows[0] : rows[1]]
        shape = (*shape[:axis], rows[1] - rows[0], *shape[axis + 1 :])
        return Tensor(tensor.name, tensor.type, shape, np.ascontiguousarray(part).reshape(-1))

    def part(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        return {name: self.cut(name, tensor, rank) for name, tensor in tensors.items()}

    def cut_adapter(self, adapter: Adapter, rank: int) -> Adapter:
        parts = adapter.parts.items()
        cut = {name: replace(part, b=self.cut(name, part.b, rank)) for name, part in parts}
        return replace(adapter, parts=cut)

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return layout(self.spec)

    def _local(self, heads: tuple[int, ...], rank: int) -> ModelSpec:
        first, count = sum(heads[:rank]), heads[rank]

        def kv_heads(whole: int) -> int:
            share = self.spec.heads // whole
            return -(-(first + count) // share) - first // share

        def layer(i: int, of: LayerSpec) -> LayerSpec:
            return replace(of, kv_heads=kv_heads(self.spec.kv_shape(i)[0]))

        layers = tuple(layer(i, of) for i, of in enumerate(self.spec.layers))
        least = kv_heads(self.spec.kv_heads)
        return replace(self.spec, heads=count, kv_heads=least, layers=layers)


def _is_vector(name: str) -> bool:
    """Whether the last axis of the weight is that of the rows."""
    return name.endswith((".bias", ".sinks"))


def _even(count: int, ranks: int) -> list[int]:
    return [count * (r + 1) // ranks - count * r // ranks for r in range(ranks)]


def _rows(count: int, ranks: int) -> tuple[int, ...]:
    """Rows per rank, in whole panels where there are enough of them; the last rank has the rest."""
    unit = PANEL if count >= PANEL * ranks else 1
    shares = [n * unit for n in _even(count // unit, ranks)]
    shares[-1] += count % unit
    return tuple(shares)
