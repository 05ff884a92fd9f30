"""What a rank of a tensor-parallel group does between its kernels: gather the columns of all ranks.

In: this rank's columns of all rows, on the device. Out: all columns, on the device. The exchange
goes through main memory and the group's sockets, so that several ranks can share a GPU; a step
therefore waits for the device at every gather and replays no CUDA graph. Invariant: bits are
copied, never added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from verbatim.backend.ranks import Ranks
from verbatim.model.layout import Shape, layout
from verbatim.model.row_split import Split


class RankExchange:
    def __init__(self, ranks: Ranks) -> None:
        assert isinstance(ranks.split, Split), "a GPU runs no pipeline"
        self._ranks, self._split = ranks, ranks.split
        self._shapes: Mapping[str, Shape] = layout(ranks.split.spec)

    def whole_rows(self, name: str) -> int:
        """Rows of a matrix, or of several that are joined as "attn.q+k+v", on all ranks."""
        block, _, parts = name.rpartition(".")
        names = [f"{block}.{part}" if block else part for part in parts.split("+")]
        return sum(self._shapes[one][-2] for one in names)

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """[rows, sum of widths] of the pieces [rows, widths[rank]]; no widths: all ranks have x."""
        if not widths:
            return x
        parts = [part.view(len(x), -1) for part in self._pieces(x, [len(x) * w for w in widths])]
        return torch.cat(parts, 1).to(x.device)

    def rows(self, name: str) -> tuple[int, ...]:
        return self._split.widths(name)

    def own_rows(self, name: str) -> int:
        return self.rows(name)[self._ranks.rank]

    def heads(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """The attention's output of all heads."""
        return self.gather(x, self._split.attention_widths(layer))

    def own_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's part of the embedding; of other ranks' tokens, any row."""
        first, last = self._split.rows("embed", self._ranks.rank) or (0, 0)
        return (tokens - first).clamp(0, last - first - 1)

    def picked(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of the embedding, each from the rank that has its token."""
        widths = self.rows("embed")
        parts = torch.stack([p.view(x.shape) for p in self._pieces(x, [x.numel()] * len(widths))])
        ends = torch.tensor(widths).cumsum(0)
        owners = torch.searchsorted(ends, tokens.cpu().long(), right=True)
        return parts[owners, torch.arange(len(x))].to(x.device)

    def _pieces(self, x: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
        """What each rank has: counts[rank] values."""
        own = x.contiguous().cpu().view(-1).view(torch.uint8).numpy()
        size = x.element_size()
        joined = self._ranks.mesh.gather(own, [count * size for count in counts])
        values = torch.frombuffer(bytearray(joined), dtype=x.dtype)
        assert prod(values.shape) == sum(counts), "every rank has sent its piece"
        parts: Sequence[torch.Tensor] = values.split(list(counts))
        return parts
