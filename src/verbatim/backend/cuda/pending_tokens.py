"""PendingTokens: results of a launched sampler that are on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from verbatim.base.records import Drawn
from verbatim.sampling.numerics import MASS_ONE, log


class PendingTokens(NamedTuple):
    """Results of a launched sampler: on the device, and on their way to the host.

    `reported` are host tensors for log-probabilities: the best ids and their logits [rows, top],
    and the scores [rows, 4] of jit_list.report_list; `tops`: alternatives per row, -1: none."""

    on_device: torch.Tensor  # token ids [rows] int32, -1: the host must sample
    on_host: torch.Tensor
    arrived: torch.cuda.Event | None
    reported: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    tops: Sequence[int] = ()
    list_size: int = 0

    def wait(self) -> list[int]:
        """The token ids; -1 where the host must sample."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens: list[int] = self.on_host.tolist()
        if self.reported is not None:
            lengths = self.reported[2][:, 1].tolist()
            for row, (top, length) in enumerate(zip(self.tops, lengths, strict=True)):
                if top >= 0 and not top <= length <= self.list_size:
                    tokens[row] = -1  # the list is not the row's best ids
        return tokens

    def drawn(self, tokens: Sequence[int]) -> list[Drawn]:
        """One Drawn per token of wait(), with log-probabilities where they are requested."""
        if self.reported is None:
            return [Drawn(token, 0.0) for token in tokens]
        ids, values, scores = (tensor.numpy() for tensor in self.reported)
        with np.errstate(all="ignore"):
            norms = log(np.maximum(scores[:, 0], 1).astype(np.float64) / MASS_ONE)
            words = np.ascontiguousarray(scores[:, 2:].astype(np.int32)).view(np.float32)
            own, peak = words[:, 0].astype(np.float64), words[:, 1].astype(np.float64)
            logprobs = ((own - peak) - norms).tolist()
            listed = ((values.astype(np.float64) - peak[:, None]) - norms[:, None]).tolist()
        out = []
        for row, (token, top) in enumerate(zip(tokens, self.tops, strict=True)):
            if top < 0:
                out.append(Drawn(token, 0.0))
            else:
                best = tuple(zip(ids[row, :top].tolist(), listed[row][:top], strict=True))
                out.append(Drawn(token, logprobs[row], best))
        return out
