"""CudaLauncher: run decode steps on the device without waiting for their tokens.

In: the SeqSteps of a decode step; the tokens are the plan's, or those that the step before has
drawn, which only the device has. Out: one draw per row, later. engine/step/overlap.py decides which
steps are launched, and which of their rows are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from verbatim.backend.cuda.device_rows import DeviceRows
from verbatim.backend.cuda.sampler.gpu_sampler import GpuSampler
from verbatim.base.records import Drawn, SeqStep, StepPlan

Forward = Callable[[StepPlan, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


class CudaLauncher:
    """`forward` launches the forward pass of a plan; `max_rows` is the most that it can replay;
    `out_of_memory` returns the error of a step for which the memory does not suffice. A draft layer
    reads the states of a row from column `skipped` on."""

    def __init__(
        self,
        forward: Forward,
        sampler: GpuSampler,
        max_rows: int,
        out_of_memory: Callable[[], Exception],
        skipped: int = 0,
    ) -> None:
        self.forward, self.sampler, self.skipped = forward, sampler, skipped
        self._max_rows, self._out_of_memory = max_rows, out_of_memory

    def can_launch(self, steps: Sequence[SeqStep]) -> bool:
        if len(steps) > self._max_rows:
            return False
        return all(step.draw is not None and self.sampler.supports(step.draw) for step in steps)

    def launch(self, steps: tuple[SeqStep, ...], tokens: torch.Tensor | None = None) -> CudaLaunch:
        """`tokens` [rows] replaces the tokens of the steps."""
        try:
            return CudaLaunch(self, steps, tokens)
        except torch.OutOfMemoryError:
            raise self._out_of_memory() from None


class CudaLaunch:
    """A launched decode step. `tokens` [rows] replaces the tokens of the steps."""

    def __init__(
        self, launcher: CudaLauncher, steps: tuple[SeqStep, ...], tokens: torch.Tensor | None = None
    ) -> None:
        self._launcher = launcher
        self._continued: tuple[tuple[int, int], ...] = ()  # (sequence id, row) of the next step
        states, logits = launcher.forward(StepPlan(0, steps), tokens)
        # a copy: the next step overwrites them
        self._states = states.clone() if any(s.hidden for s in steps) else None
        specs = [step.draw for step in steps if step.draw is not None]
        assert len(specs) == len(steps), "every row is sampled"
        positions, seq_ids = [s.start + 1 for s in steps], [s.seq_id for s in steps]
        self._pending = launcher.sampler.launch(logits, specs, positions, seq_ids, tokens)

    def launch_next(self, steps: tuple[SeqStep, ...], rows: Sequence[int]) -> CudaLaunch:
        drawn = self._pending.on_device
        if list(rows) != list(range(len(drawn))):
            index = torch.tensor(rows, pin_memory=drawn.is_cuda)
            drawn = drawn[index.to(drawn.device, non_blocking=True)]
        self._continued = tuple(zip([step.seq_id for step in steps], rows, strict=True))
        # an undecided token is -1: compute its row with token 0, and discard the row later
        return self._launcher.launch(steps, drawn.clamp_min(0))

    def states(self, row: int) -> DeviceRows | None:
        if self._states is None:
            return None
        return DeviceRows(self._states[row : row + 1, self._launcher.skipped :])

    def collect(self, rows: Sequence[int]) -> list[Drawn | None]:
        """A row that the device did not decide must be computed again: the next step may have
        overwritten its logits."""
        sampler, tokens = self._launcher.sampler, self._pending.wait()
        for seq_id, row in self._continued:
            sampler.counts.confirm(seq_id, tokens[row])
        drawn = self._pending.drawn(tokens)
        found = [drawn[row] if tokens[row] >= 0 else None for row in rows]
        sampler.rows += len(found) - found.count(None)
        return found
