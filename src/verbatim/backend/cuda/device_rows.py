"""Final states that stay on the device, where a draft layer reads them.

In: the states of a step. Out: its result with DeviceRows, of which NumPy makes a copy on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from verbatim.backend.step_rows import needed_logits
from verbatim.base.records import StepPlan, StepResult


class DeviceRows:
    """StateRows on the device."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows  # [rows, width] float32

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.rows.unbind(0))

    def __getitem__(self, rows: slice, /) -> DeviceRows:
        return DeviceRows(self.rows[rows])

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        found: np.ndarray = self.rows.cpu().numpy()
        return found


def with_states(
    plan: StepPlan, result: StepResult, states: torch.Tensor, hidden: int
) -> StepResult:
    """The result with the states of the sequences that ask for them (RowDraws.of_plan)."""
    found, start = [], 0
    for step, done in zip(plan.sequences, result.sequences, strict=True):
        count = len(step.tokens) if step.hidden else len(needed_logits(step))
        rows, start = states[start : start + count], start + count
        if step.hidden:
            captured = DeviceRows(rows[:, hidden:]) if states.shape[1] > hidden else None
            done = done._replace(hidden=DeviceRows(rows[:, :hidden]), captured=captured)
        found.append(done)
    return result._replace(sequences=tuple(found))
