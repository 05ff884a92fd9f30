"""A draft head in a directory of its own: what the kinds of heads have in common.

In: a spec, tensors and their names, which eagle3.py, assistant.py and dflash.py read. Out: a Model
that a backend opens as a draft layer. A wrong draft costs time, never an output, so the matrices
are quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.files.safetensors import SafetensorsDir
from verbatim.formats.packed.packed_checkpoint import RawTensor
from verbatim.formats.tensor import Tensor, Weights
from verbatim.model.config_fields import Fields
from verbatim.model.layout import HF_KEY_NAMES
from verbatim.model.loading.collect_weights import WeightCollector
from verbatim.model.loading.load import Model
from verbatim.model.loading.names import Source, hf_source
from verbatim.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DraftHead:
    """An opened head: its spec, where its weights are, and what it reads of the target."""

    spec: ModelSpec
    source: SafetensorsDir
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]  # weights that a model of this family does not have
    captured: tuple[int, ...] = ()  # layers of the target whose inputs it reads, ascending
    shared: tuple[str, ...] = ()  # weights of the target
    chained: bool = True  # a step returns the state of its next draft
    quant: Literal["q4_0", "q8_0"] = "q4_0"
    prefix: str = ""  # before the other names
    order: np.ndarray | None = None  # rows of the output matrix, where not those of the file

    def find(self, name: str) -> Source:
        own = self.names.get(name)
        return hf_source(self.spec.family, self.prefix, name, 0) if own is None else Source((own,))

    def load(self, target: Model) -> Model:
        file = str(self.source.path)
        given = {name: target.weights[name] for name in self.shared}
        located = {self.find(name).names[0]: tensor for name, tensor in given.items()}
        tensors = dict(self.tensors) | located
        collector = WeightCollector(self.spec, tensors, file, self.quant, HF_KEY_NAMES)
        found = collector.collect(self.find, lambda name: name == "lm_head.weight", given)
        if self.order is not None:
            rows = found["head"].row_view()[self.order].reshape(-1)
            found["head"] = replace(found["head"], data=rows)
        weights = Weights(found, file, self.source.digest)
        own = (len(self.spec.layers),) if self.chained else ()
        return Model(self.spec, weights, self.source, captured=own)


def id_tensor(name: str, ids: np.ndarray) -> Tensor:
    """Token ids as a weight: float32 holds them exactly."""
    return Tensor(name, "f32", ids.shape, ids.astype("<f4").view(np.uint8))


def whole_numbers(others: Mapping[str, RawTensor], name: str, count: int, file: str) -> np.ndarray:
    found = others.get(name)
    if found is None or found.dtype not in ("I64", "I32") or found.shape != (count,):
        raise ModelError(f"{name} is not a list of {count} whole numbers", file=file)
    return found.array()


def refuse_others(others: Mapping[str, RawTensor], known: tuple[str, ...], file: str) -> None:
    if unknown := sorted(others.keys() - set(known)):
        raise ModelError(f"tensor {unknown[0]} is not known for this kind of head", file=file)


def check_fit(vocab: int, width: int, target: ModelSpec, file: str) -> None:
    """Whether the head has the target's vocabulary, and states of its width."""
    if vocab != target.vocab:
        raise ModelError(
            f"a head for a vocabulary of {vocab} tokens; the model has {target.vocab}", file=file
        )
    if width != target.hidden:
        raise ModelError(
            f"a head for states of {width} values; the model's have {target.hidden}", file=file
        )


def read_layers(fields: Fields, key: str, default: object, last: int) -> tuple[int, ...]:
    """Layers of the target in ascending order, two or more."""
    given = fields.raw(key, default)
    found = given if isinstance(given, list) else []
    whole = all(type(one) is int and 0 <= one <= last for one in found)
    if len(found) < 2 or not whole or sorted(set(found)) != found:
        raise ModelError(
            f"{key} is {given!r:.80}: two or more layers from 0 to {last} in ascending order are "
            "needed",
            file=fields.file,
        )
    return tuple(found)
