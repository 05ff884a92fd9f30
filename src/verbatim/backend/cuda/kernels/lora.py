"""LoRA adapters on the GPU: x · Wᵀ + B · (scale · A · x) for the rows of a step that use one.

The base product runs for all rows; then each adapter in the step adds its low-rank sums to its own
rows. Both products are float32 and go through kernels.matmul, so a row's bits depend neither on the
other rows nor on their adapters. Steps with an adapter launch each kernel and replay no CUDA graph,
because the rows of each adapter differ from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from verbatim.backend.cuda.kernels import kernels
from verbatim.backend.cuda.kernels.kernels import SplitSums
from verbatim.model.adapter import Adapter
from verbatim.model.layout import layout
from verbatim.model.spec import ModelSpec


class LowRankPart(NamedTuple):
    """The matrices for one weight, which has the columns first .. first + len(b) of a product."""

    first: int
    a: torch.Tensor  # float32 [rank, in]
    b: torch.Tensor  # float32 [out, rank]
    scale: float


# name of a product (its weights joined: attn.q+k+v) -> parts
DeviceAdapter: TypeAlias = dict[str, list[LowRankPart]]
# (number of an adapter, int64 rows that use it)
AdapterRows: TypeAlias = tuple[tuple[int, torch.Tensor], ...]


def load_adapter(adapter: Adapter, spec: ModelSpec, device: torch.device) -> DeviceAdapter:
    shapes = layout(spec)
    out: DeviceAdapter = {}
    for name, part in adapter.parts.items():
        block, _, last = name.rpartition(".")
        group = next((group for group in _joined(spec) if last in group), (last,))
        joined = tuple(part for part in group if f"{block}.{part}" in shapes)
        first = sum(shapes[f"{block}.{other}"][0] for other in joined[: joined.index(last)])
        a, b = (torch.from_numpy(t.to_f32().copy()).to(device) for t in (part.a, part.b))
        out.setdefault(f"{block}.{'+'.join(joined)}", []).append(
            LowRankPart(first, a, b, part.scale)
        )
    return out


def _joined(spec: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Weights that ops.load concatenates."""
    return (("q", "k", "v"), ("gate", "up")) if spec.gated else (("q", "k", "v"),)


def adapter_rows(adapters: np.ndarray, device: torch.device) -> AdapterRows:
    """The rows of each adapter of a step; `adapters` [rows]: their numbers, -1: none."""
    return tuple(
        (int(number), torch.from_numpy(np.flatnonzero(adapters == number)).to(device))
        for number in np.unique(adapters[adapters >= 0])
    )


def add_low_rank(
    sums: SplitSums, x: torch.Tensor, rows: torch.Tensor, parts: Iterable[LowRankPart]
) -> SplitSums:
    """The product with the low-rank sums of these rows. Its splits are summed first: their number
    depends on the number of rows, and so would the order of the additions."""
    for part in parts:
        if len(sums.splits) > 1:
            sums = SplitSums(kernels.reduce_splits(SplitSums(sums.splits))[None], sums.bias)
        inputs = x.index_select(0, rows)
        low = kernels.reduce_splits(kernels.matmul(inputs, part.a)) * part.scale
        delta = kernels.reduce_splits(kernels.matmul(low, part.b))
        target = sums.splits[0, :, part.first : part.first + len(part.b)]
        target[rows] = target[rows] + delta
    return sums
