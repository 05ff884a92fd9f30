"""Draws without their logits leaving the device: rows of logits in, one token id each out, or -1 where the host must draw.

A draw is the id with the largest d + noise (sampling/draw.py), in float64. The device computes every id's key in float32. That is off by less than a
fraction of SLACK, so where the best key is ahead of all others by SLACK, its id is the one that float64 would find: proven, not likely. Where
it is not (one row in four thousand, or fewer), where a logit is no number, and for all rows with a parameter that this file does not know, the
answer is -1 and the sampler draws from the row itself. An argmax needs no arithmetic and is always sure.
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

SLACK = 2.0**-12  # six times what float32 may be off (docs/numerics.md, "Draws")
COLDEST = 2.0**-100  # temperatures below would leave float32
ROWS, CHUNK = 1, 2048  # rows and ids that one program looks at
KEPT = 4096  # requests whose parameters are remembered
COLUMNS = 5  # of `asked`, see jit.screen

Asked = tuple[float, float]  # scale and slack of a row
ARGMAX: Asked = (0.0, -1.0)
HOST: Asked = (0.0, float("inf"))  # no lead is enough


class Answer(NamedTuple):
    """Ids on their way: on the device at once, on the host when the device has come so far."""

    there: torch.Tensor  # [rows] int32
    here: torch.Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        ids: list[int] = self.here.tolist()
        return ids


class Screen:
    """One for a backend. `rows` and `unsure` count what it was given to draw and what of that it gave back."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self.rows = self.unsure = 0
        self._known: dict[int, tuple[SamplingParams, Asked]] = {}

    def __call__(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        asked = [self._ask(row.spec) if row.mask is None else HOST for row in rows]
        ours = len(asked) - asked.count(HOST)
        if not ours:
            return [-1] * len(rows)
        found = self._begin(
            logits, [row.spec for row in rows], [row.position for row in rows], asked
        ).wait()
        self.rows += ours
        self.unsure += found.count(-1) - (len(asked) - ours)
        return found

    def knows(self, spec: DrawSpec) -> bool:
        """Its rows are drawn here, but for the unsure ones."""
        return not spec.masks and self._ask(spec) is not HOST

    def begin(
        self, logits: torch.Tensor, specs: Sequence[DrawSpec], positions: Sequence[int]
    ) -> Answer:
        """Of rows that it knows: what is drawn for these positions."""
        return self._begin(logits, specs, positions, [self._ask(spec) for spec in specs])

    def _begin(
        self,
        logits: torch.Tensor,
        specs: Sequence[DrawSpec],
        positions: Sequence[int],
        asked: Sequence[Asked],
    ) -> Answer:
        there = self._found(
            logits, self._send(specs, positions, asked), any(scale for scale, _ in asked)
        )
        if self.device.type != "cuda":
            return Answer(there, there, None)
        here = torch.empty(len(there), dtype=torch.int32, pin_memory=True)
        here.copy_(there, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Answer(there, here, arrived)

    def _ask(self, spec: DrawSpec) -> Asked:
        if spec.beam or spec.withheld:
            return HOST
        known = self._known.get(
            id(spec.params)
        )  # what is kept stays alive, so no other object has its id
        if known is None:
            if len(self._known) >= KEPT:
                self._known.clear()
            known = self._known[id(spec.params)] = (spec.params, asked_of(spec.params))
        return known[1]

    def _send(
        self, specs: Sequence[DrawSpec], positions: Sequence[int], asked: Sequence[Asked]
    ) -> torch.Tensor:
        """jit.screen's `asked` [COLUMNS, rows], in one copy. PyTorch keeps pinned memory until what was copied from it has arrived."""
        here = torch.empty(
            COLUMNS * len(specs), dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        table = here.numpy().reshape(COLUMNS, len(specs))
        table[:2] = np.array([spec.key for spec in specs], "<u8").view(np.int32).reshape(-1, 2).T
        table[2] = positions
        table[3:] = np.array(asked, np.float32).view(np.int32).T
        return here.to(self.device, non_blocking=True)

    def _found(self, logits: torch.Tensor, asked: torch.Tensor, noise: bool) -> torch.Tensor:
        count, chunks = len(logits), triton.cdiv(self.vocab, CHUNK)
        assert logits.is_contiguous(), "the kernels count on whole rows"
        tops = logits.amax(1)
        bests, seconds = (
            torch.empty((count, chunks), dtype=torch.float32, device=self.device) for _ in range(2)
        )
        ids = torch.empty((count, chunks), dtype=torch.int32, device=self.device)
        out = torch.empty(count, dtype=torch.int32, device=self.device)
        programs, block = triton.cdiv(count, ROWS), triton.next_power_of_2(chunks)
        jit.screen[(programs, chunks)](
            logits, tops, asked, bests, seconds, ids, count, self.vocab, chunks, noise, ROWS, CHUNK, num_warps=4, enable_fp_fusion=False
        )  # fmt: skip
        jit.choose[(programs,)](
            bests,
            seconds,
            ids,
            tops,
            asked,
            out,
            count,
            self.vocab,
            chunks,
            ROWS,
            block,
            num_warps=1,
        )
        return out


def asked_of(p: SamplingParams) -> Asked:
    """Nothing but an argmax, or nothing but a temperature, over the model's own logits; else it is for the host."""
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
        or p.temperature < COLDEST
    ):
        return HOST
    return 1.0 / p.temperature, SLACK
