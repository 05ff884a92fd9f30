"""Load the draft layer (multi-token prediction) of a model's file, as a model of one layer.

In: the model's weights and tensor names. Out: a ModelSpec and its weights: those of the layer, and
the model's embedding and output head, unless the file has others for the layer.

The layer reads the state of position p and the embedding of the token at p + 1, and predicts the
token at p + 2 (DeepSeek-V3, section 2.2). Its output, after its norm, is the state of p + 1 for
the next draft.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from verbatim.formats.tensor import Tensor, Weights
from verbatim.model.families.common.tensors import DraftNames
from verbatim.model.loading.collect_weights import WeightCollector
from verbatim.model.loading.names import Source
from verbatim.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DraftFinder:
    """Finds the weights of a draft layer in a file."""

    names: DraftNames
    collector: WeightCollector  # the model's
    find: Callable[[str], Source]  # locations of the model's weights
    layer: Callable[[str], Source]  # of the layers behind the model's own
    stem: str  # before the names of the layer's own tensors

    def has(self, name: str) -> bool:
        return name in self.names.own and self._own(name) in self.collector.tensors

    def _own(self, name: str) -> str:
        return f"{self.stem}{self.names.own[name]}.weight"

    def _differs(self, name: str, shared: str) -> bool:
        """Whether the layer has a tensor of its own in place of the model's weight `shared`."""
        tensors = self.collector.tensors
        theirs = tensors.get(self.find(shared).names[0])
        return self.has(name) and (theirs is None or differ(theirs, tensors[self._own(name)]))

    def source(self, name: str) -> Source:
        if name.startswith("layers."):
            return self.layer(name)
        if name in ("embed", "head"):
            own = self._differs(name, name)
        else:
            own = name != "final_norm" or self.has(name)
        return Source((self._own(name),)) if own else self.find(name)

    def load(self, weights: Weights) -> tuple[ModelSpec, Weights]:
        """Raises ModelError if a tensor is missing or has the wrong shape."""
        collector = copy(self.collector)
        target = collector.spec
        last = next(layer for layer in reversed(target.layers) if layer.mixer == "attention")
        tied = target.tied and not self._differs("head", "embed")
        collector.spec = replace(
            target, layers=(last,), delta=None, conv_kernel=0, tied=tied, draft_layer=True
        )
        shared = [name for name in ("embed", "head") if name in weights]
        given = {name: weights[name] for name in shared if self.source(name) == self.find(name)}
        found = collector.collect(self.source, lambda _: True, given)
        return collector.spec, Weights(found, weights.source, weights.digest)


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have other values or types."""
    if a.shape != b.shape or a.type != b.type:
        return True
    size = 1 << 24  # bytes compared at once, because the weights may exceed memory
    return any(
        not np.array_equal(a.data[i : i + size], b.data[i : i + size])
        for i in range(0, a.data.size, size)
    )
