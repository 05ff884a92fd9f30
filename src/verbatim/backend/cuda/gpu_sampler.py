"""GpuSampler: sample on the device, so that only token ids and no logits are copied to the host.

In: rows of logits on the device. Out: one token id per row, or -1 where the host must sample.

It is a float32 pre-selection that either proves the token or sends the row to the host. A draw is
the id with the largest key d + noise (sampling/draw.py), in float64. The device computes all keys
in float32, with an error below a fraction of SLACK. If the best key leads all others by more than
SLACK, float64 finds the same id. Otherwise (about one row in four thousand), and if a logit is not
finite, and for every sampling parameter that this file does not support, the result is -1 and the
host samples the row. An argmax involves no arithmetic and is always proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton

from verbatim.backend.cuda import jit
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec
from verbatim.sampling.pipeline import Row

SLACK = 2.0**-12  # six times the bound of the float32 error (docs/numerics.md, "The cuda backend")
MIN_TEMPERATURE = 2.0**-100  # below it the scale 1 / temperature could leave float32's range
ROWS, CHUNK = 1, 2048  # rows and token ids per program
MAX_CACHED = 4096  # requests whose parameters are cached; a full cache is cleared
COLUMNS = 5  # int32 values per row, see jit.chunk_top2

RowParams = tuple[float, float]  # scale and slack of a row
ARGMAX: RowParams = (0.0, -1.0)
HOST: RowParams = (0.0, float("inf"))  # an infinite slack: no lead is large enough


class PendingTokens(NamedTuple):
    """Token ids [rows] int32 of a launched sampler: on the device, and on their way to the host."""

    on_device: torch.Tensor
    on_host: torch.Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        ids: list[int] = self.on_host.tolist()
        return ids


class GpuSampler:
    """One per backend. `rows` counts the rows that the device samples, `undecided` those of them
    that it sends to the host."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self.rows = self.undecided = 0
        self._cache: dict[int, tuple[SamplingParams, RowParams]] = {}

    def __call__(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        """Token ids of the rows, -1 where the host must sample. Waits for the device."""
        params = [self._params(row.spec) if row.mask is None else HOST for row in rows]
        supported = len(params) - params.count(HOST)
        if not supported:
            return [-1] * len(rows)
        tokens = self._launch(
            logits, [row.spec for row in rows], [row.position for row in rows], params
        ).wait()
        self.rows += supported
        self.undecided += tokens.count(-1) - (len(params) - supported)
        return tokens

    def supports(self, spec: DrawSpec) -> bool:
        """Whether the device samples the rows of this spec, except for undecided ones."""
        return not spec.masks and self._params(spec) is not HOST

    def launch(
        self, logits: torch.Tensor, specs: Sequence[DrawSpec], positions: Sequence[int]
    ) -> PendingTokens:
        """Sample rows with supported specs for these positions, without waiting for the device."""
        return self._launch(logits, specs, positions, [self._params(spec) for spec in specs])

    def _launch(
        self,
        logits: torch.Tensor,
        specs: Sequence[DrawSpec],
        positions: Sequence[int],
        params: Sequence[RowParams],
    ) -> PendingTokens:
        on_device = self._sample(
            logits, self._send(specs, positions, params), any(scale for scale, _ in params)
        )
        if self.device.type != "cuda":
            return PendingTokens(on_device, on_device, None)
        on_host = torch.empty(len(on_device), dtype=torch.int32, pin_memory=True)
        on_host.copy_(on_device, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return PendingTokens(on_device, on_host, arrived)

    def _params(self, spec: DrawSpec) -> RowParams:
        if spec.beam or spec.withheld:
            return HOST
        # the cache keeps the params object alive, so no other object gets its id
        cached = self._cache.get(id(spec.params))
        if cached is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            cached = self._cache[id(spec.params)] = (spec.params, row_params(spec.params))
        return cached[1]

    def _send(
        self, specs: Sequence[DrawSpec], positions: Sequence[int], params: Sequence[RowParams]
    ) -> torch.Tensor:
        """The `row_params` table [COLUMNS, rows] of jit.chunk_top2, in one copy to the device.

        PyTorch does not reuse the pinned memory before the copy is done."""
        pinned = torch.empty(
            COLUMNS * len(specs), dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        table = pinned.numpy().reshape(COLUMNS, len(specs))
        table[:2] = np.array([spec.key for spec in specs], "<u8").view(np.int32).reshape(-1, 2).T
        table[2] = positions
        table[3:] = np.array(params, np.float32).view(np.int32).T
        return pinned.to(self.device, non_blocking=True)

    def _sample(self, logits: torch.Tensor, params: torch.Tensor, noise: bool) -> torch.Tensor:
        count, chunks = len(logits), triton.cdiv(self.vocab, CHUNK)
        assert logits.is_contiguous(), "the kernels need contiguous rows"
        row_max = logits.amax(1)
        bests, seconds = (
            torch.empty((count, chunks), dtype=torch.float32, device=self.device) for _ in range(2)
        )
        ids = torch.empty((count, chunks), dtype=torch.int32, device=self.device)
        out = torch.empty(count, dtype=torch.int32, device=self.device)
        programs, block = triton.cdiv(count, ROWS), triton.next_power_of_2(chunks)
        jit.chunk_top2[(programs, chunks)](
            logits, row_max, params, bests, seconds, ids, count, self.vocab, chunks,
            noise, ROWS, CHUNK, num_warps=4, enable_fp_fusion=False
        )  # fmt: skip
        jit.select_token[(programs,)](
            bests, seconds, ids, row_max, params, out, count, self.vocab, chunks,
            ROWS, block, num_warps=1,
        )  # fmt: skip
        return out


def row_params(p: SamplingParams) -> RowParams:
    """Scale and slack of a pure argmax or a pure temperature draw; HOST for everything else."""
    if (
        p.wants_logprob
        or p.explain
        or p.needs_history
        or p.logit_bias
        or p.banned_token_ids
        or p.allowed_token_ids is not None
    ):
        return HOST
    if p.greedy:
        return ARGMAX  # no filter runs at temperature 0
    if (
        p.top_k
        or p.top_p < 1.0
        or p.min_p
        or p.typical_p < 1.0
        or p.top_n_sigma
        or p.xtc_probability
        or p.temperature < MIN_TEMPERATURE
    ):
        return HOST
    return 1.0 / p.temperature, SLACK
