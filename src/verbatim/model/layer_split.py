"""Split of a model over ranks by layers (pipeline parallelism).

In: a ModelSpec and a number of ranks. Out: the layers and weights of each rank. Ranks 1, 2, … have
the first layers in their order; rank 0 has the embedding, the last layers and the head, so that the
rows of a step go round once and end where they are sampled. Invariant: a layer is computed on one
rank by the operations of one process, so the bits are those of one process.

A step exchanges the residual once per rank, where a split by rows exchanges four times per layer;
the ranks compute one after the other. For slow links (docs/adr/0033).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TypeVar

from verbatim.base.errors import ParameterError
from verbatim.formats.tensor import Tensor
from verbatim.model.adapter import Adapter
from verbatim.model.layout import layout
from verbatim.model.spec import ModelSpec

T = TypeVar("T")


@dataclass(frozen=True)
class LayerSplit:
    """The same questions as model.row_split.Split answers."""

    spec: ModelSpec
    ranks: int
    heads = None  # attention is whole

    def __post_init__(self) -> None:
        spec = self.spec
        for rank in range(self.ranks):
            first, last = self.layers(rank)
            sources = [at.kv_layer for at in spec.layers[first:last] if at.kv_layer is not None]
            why = ""
            if first == last:
                why = f"{len(spec.layers)} layers are too few for {self.ranks} ranks"
            elif spec.layer_input:
                why = "this model's layers have inputs of their own"
            elif any(not first <= source < last for source in sources):
                why = "a layer reads the keys of one on another rank"
            elif _groups(self.local(rank)) != _groups(spec):
                why = f"rank {rank} would not have layers of all kinds"
            if why:
                raise ParameterError("pipeline_parallel", f"{why}; use tensor_parallel")

    @cached_property
    def _ends(self) -> list[int]:
        """The first layer behind each stage. Stages have equal weights, the head counted."""
        sizes = [0] * len(self.spec.layers)
        for name, shape in layout(self.spec).items():
            if name.startswith("layers."):
                sizes[int(name.split(".")[1])] += prod(shape)
        share = (sum(sizes) + self.spec.vocab * self.spec.hidden) / self.ranks
        stages = [int((sum(sizes[:i]) + size / 2) / share) for i, size in enumerate(sizes)]
        stages[-1] = self.ranks - 1
        return [sum(s <= stage for s in stages) for stage in range(self.ranks - 1)]

    def layers(self, rank: int) -> tuple[int, int]:
        """The first and the last layer (exclusive)."""
        ends = [0, *self._ends, len(self.spec.layers)]
        stage = (rank or self.ranks) - 1
        return ends[stage], ends[stage + 1]

    def widths(self, name: str) -> tuple[int, ...]:
        return ()  # no matrix is cut

    def attention_widths(self, layer: int) -> tuple[int, ...]:
        return ()

    def local(self, rank: int) -> ModelSpec:
        """The spec of the rank's layers, counted from 0."""
        first, last = self.layers(rank)
        own = (
            at if at.kv_layer is None else replace(at, kv_layer=at.kv_layer - first)
            for at in self.spec.layers[first:last]
        )
        return replace(self.spec, layers=tuple(own), learned_positions=False)

    def cut(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        """While a model loads: an empty tensor in place of one of another rank."""
        if self._own_name(name, rank):
            return tensor
        return Tensor(tensor.name, tensor.type, (0, *tensor.shape[1:]), tensor.data[:0])

    def part(self, tensors: Mapping[str, T], rank: int) -> dict[str, T]:
        """The rank's weights, under the names of its own layers."""
        named = ((self._own_name(name, rank), tensor) for name, tensor in tensors.items())
        return {name: tensor for name, tensor in named if name}

    def cut_adapter(self, adapter: Adapter, rank: int) -> Adapter:
        return replace(adapter, parts=self.part(adapter.parts, rank))

    def _own_name(self, name: str, rank: int) -> str:
        """The name of the weight on the rank; empty: it is on another one."""
        if not name.startswith("layers."):
            return name if rank == 0 else ""
        _, layer, rest = name.split(".", 2)
        first, last = self.layers(rank)
        return f"layers.{int(layer) - first}.{rest}" if first <= int(layer) < last else ""


def _groups(spec: ModelSpec) -> list[tuple[object, ...]]:
    return [(g.window, g.kind, *spec.kv_shape(g.layers[0])) for g in spec.groups]
