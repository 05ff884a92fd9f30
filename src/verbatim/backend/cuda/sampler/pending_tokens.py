"""PendingTokens: results of a launched sampler that are on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from verbatim.backend.cuda.runtime.device_step import aligned
from verbatim.base.records import Drawn
from verbatim.sampling.numerics import MASS_ONE, log


class Report(NamedTuple):
    """What log-probabilities are made of, in one buffer of int32, for one copy to the host: the
    best ids and their logits (float32), `top` per row, and the scores (int64, four per row) of
    jit_list.report_list. Rows without log-probabilities hold no values."""

    buffer: torch.Tensor
    top: int
    list_size: int  # most ids of the list from which the best ones were taken

    @classmethod
    def empty(cls, rows: int, top: int, list_size: int, device: torch.device) -> Report:
        size = 2 * aligned(rows * top) + 8 * rows
        return cls(torch.empty(size, dtype=torch.int32, device=device), top, list_size)

    def parts(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [rows, top], logits [rows, top] and scores [rows, 4]."""
        used, size = rows * self.top, aligned(rows * self.top)
        return (
            self.buffer[:used].view(rows, self.top),
            self.buffer[size : size + used].view(torch.float32).view(rows, self.top),
            self.buffer[2 * size :].view(torch.int64).view(rows, 4),
        )


class PendingTokens(NamedTuple):
    """Results of a launched sampler: on the device, and on their way to the host."""

    on_device: torch.Tensor  # token ids [rows] int32, -1: the host must sample
    on_host: torch.Tensor
    arrived: torch.cuda.Event | None
    report: Report | None = None  # on the host
    tops: Sequence[int] = ()  # alternatives to report per row, -1: no log-probabilities
    temperatures: np.ndarray | None = None  # denoising only: the report is its confidence

    def wait(self) -> list[int]:
        """The token ids; -1 where the host must sample."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens: list[int] = self.on_host.tolist()
        if self.report is not None:
            lengths = self.report.parts(len(tokens))[2][:, 1].tolist()
            for row, (top, length) in enumerate(zip(self.tops, lengths, strict=True)):
                if top >= 0 and not top <= length <= self.report.list_size:
                    tokens[row] = -1  # the list is not the row's best ids
        return tokens

    def drawn(self, tokens: Sequence[int]) -> list[Drawn]:
        """One Drawn per token of wait(), with log-probabilities where they are requested."""
        if self.report is None:
            return [Drawn(token, 0.0) for token in tokens]
        ids, values, scores = (part.numpy() for part in self.report.parts(len(tokens)))
        with np.errstate(all="ignore"):
            norms = log(np.maximum(scores[:, 0], 1).astype(np.float64) / MASS_ONE)
            words = np.ascontiguousarray(scores[:, 2:].astype(np.int32)).view(np.float32)
            own, peak = words[:, 0].astype(np.float64), words[:, 1].astype(np.float64)
            if self.temperatures is not None:
                sure = (((own - peak) / self.temperatures) - norms).tolist()
                return [Drawn(t, 0.0, confidence=c) for t, c in zip(tokens, sure, strict=True)]
            logprobs = ((own - peak) - norms).tolist()
            listed = ((values.astype(np.float64) - peak[:, None]) - norms[:, None]).tolist()
        columns = zip(tokens, self.tops, logprobs, ids.tolist(), listed, strict=True)
        return [
            Drawn(token, 0.0)
            if top < 0
            else Drawn(token, logprob, tuple(zip(best[:top], scored[:top], strict=True)))
            for token, top, logprob, best, scored in columns
        ]
