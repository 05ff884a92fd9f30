"""RowDraws: sample rows of logits, on the device where it can prove the token, else on the host.

In: logits on the device, and the rows' parameters. Out: Drawn tokens. The host samples with the cpu
backend's sampler, so every parameter has the same meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verbatim.backend.cuda.device_rows import with_states
from verbatim.backend.cuda.sampler.gpu_sampler import GpuSampler
from verbatim.backend.cuda.sampler.host_sampler import host_sampler
from verbatim.backend.cuda.sampler.token_counts import TokenCounts
from verbatim.backend.step_rows import only_draws, split_draws
from verbatim.base.config import EngineConfig
from verbatim.base.records import Drawn, StepPlan, StepResult
from verbatim.sampling.pipeline import Row, rows_of

HOST_ROWS = 512  # rows of logits that the host's buffer holds: 0.3 GB for 152,000 ids
COPY_ROWS = 64  # rows of logits per copy to the host; sampling overlaps the following copies


class RowDraws:
    def __init__(self, vocab: int, device: torch.device, config: EngineConfig) -> None:
        self._vocab, self._device = vocab, device
        self.gpu = GpuSampler(vocab, device)
        self.host_rows = host_sampler(config)
        self._logits: torch.Tensor | None = None  # pinned [rows, vocab]

    def of_plan(
        self, plan: StepPlan, logits: torch.Tensor, states: torch.Tensor, hidden: int
    ) -> StepResult:
        """The result of a plan without scores. `states` [outputs, width]: `hidden` values of the
        final state, then those of the captured layers."""
        rows = [row for s in plan.sequences for row in rows_of(s)]
        seq_ids = [s.seq_id for s in plan.sequences for _ in range(s.draws)]
        kept = None if only_draws(plan) else states.clone()  # the next step overwrites them
        done = split_draws(plan, self.draw(logits, rows, seq_ids))
        return done if kept is None else with_states(plan, done, kept, hidden)

    def draw(
        self, logits: torch.Tensor, rows: Sequence[Row], seq_ids: Sequence[int]
    ) -> list[Drawn]:
        """Sample on the device. Copy the logits of undecided rows only; the host samples those."""
        denoised = [row.spec.step >= 0 for row in rows]
        if any(denoised) and not all(denoised):  # the device reports other facts of them
            return self._draw_apart(logits, rows, seq_ids, denoised)
        drawn = self.gpu(logits, rows, seq_ids)
        left = [i for i, one in enumerate(drawn) if one is None]
        if left:
            if len(left) < len(rows):
                logits = logits[torch.tensor(left, device=self._device)]
            on_host = self._on_host(logits, [rows[i] for i in left])
            for i, one in zip(left, on_host, strict=True):
                drawn[i] = one
        return [one for one in drawn if one is not None]

    def _draw_apart(
        self,
        logits: torch.Tensor,
        rows: Sequence[Row],
        seq_ids: Sequence[int],
        denoised: Sequence[bool],
    ) -> list[Drawn]:
        found: dict[int, Drawn] = {}
        for kind in (False, True):
            at = [i for i, one in enumerate(denoised) if one is kind]
            some = logits[torch.tensor(at, device=self._device)]
            drawn = self.draw(some, [rows[i] for i in at], [seq_ids[i] for i in at])
            found.update(zip(at, drawn, strict=True))
        return [found[i] for i in range(len(rows))]

    def _on_host(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[Drawn]:
        if len(rows) > HOST_ROWS:
            head = self._on_host(logits[:HOST_ROWS], rows[:HOST_ROWS])
            return head + self._on_host(logits[HOST_ROWS:], rows[HOST_ROWS:])
        if self._logits is None or len(self._logits) < len(rows):
            capacity = 1 << max(0, len(rows) - 1).bit_length()
            self._logits = torch.empty(
                (capacity, self._vocab), dtype=torch.float32, pin_memory=self._device.type == "cuda"
            )
        on_host, arrived = self._logits[: len(rows)], []
        # queue all copies first: the first rows are sampled while the next ones are copied
        chunks = [slice(start, start + COPY_ROWS) for start in range(0, len(rows), COPY_ROWS)]
        for chunk in chunks:
            on_host[chunk].copy_(logits[chunk], non_blocking=True)
            arrived.append(self._record_event())
        drawn: list[Drawn] = []
        for chunk, event in zip(chunks, arrived, strict=True):
            if event is not None:
                event.synchronize()
            drawn += self.host_rows(on_host[chunk].numpy()).draw(rows[chunk])
        return drawn

    def _record_event(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def drop(self) -> None:
        """Release the host's buffer."""
        self._logits = None

    def close(self) -> None:
        self.drop()
        self.gpu.counts = TokenCounts(self._vocab, self._device)
