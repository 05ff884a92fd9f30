"""Step budget: the prompt tokens that a step may compute so that it takes at most step_ms.

In: each executed plan and its seconds. Out: a number of tokens, charged by depth as in
schedule/token_cost.py. Chunk sizes change no token of an output, so a wrong prediction costs time
only. Reads no clock.

    tokens = (step_ms - seconds of a step that only decodes) / seconds per prompt token

The rate is the median of the last steps: one that another program interrupted changes nothing.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from verbatim.base.config import STEP_MS, EngineConfig
from verbatim.base.records import StepPlan
from verbatim.engine.loaded_model import LoadedModel
from verbatim.schedule.scheduler import Scheduler
from verbatim.speculate.step_cost import StepCost

STEPS = 9  # prefill steps whose median is the rate
# Tokens that a step may always compute, however slow: prefill advances beside 256 streams. Fewer
# rows than a kernel's tile cost as much as a whole one.
LEAST_TOKENS = 16


def step_limit(loaded: LoadedModel, config: EngineConfig) -> int | None:
    """step_ms as configured, or the backend's default; None: no limit."""
    if config.step_ms is None and loaded.backend.info.name == "cpu" and loaded.task == "generate":
        return STEP_MS
    return config.step_ms


class StepBudget:
    def __init__(self, step_ms: float | None, scheduler: Scheduler, cost: StepCost) -> None:
        self._seconds = None if step_ms is None else step_ms / 1000
        self._scheduler = scheduler
        self._decoding = cost  # measured seconds of steps that only decode
        self._rates: deque[float] = deque(maxlen=STEPS)  # seconds per charged token

    def set(self) -> None:
        """Limit the next plan."""
        if self._seconds is not None:
            left = self._seconds - self._decoding.seconds(len(self._scheduler.running))
            tokens = int(left / median(self._rates)) if self._rates else 0
            self._scheduler.prompt_tokens = max(LEAST_TOKENS, tokens)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Learn the rate from an executed plan with a prefill chunk."""
        if self._seconds is None:
            return
        scheduler, decoded, charged = self._scheduler, 0, 0
        for step in plan.sequences:
            if step.draws == len(step.tokens):
                decoded += step.draws
            else:
                charged += scheduler.cost.of_step(step, scheduler.cache.groups)
        if charged >= LEAST_TOKENS:
            # At least a tenth of the step: the predicted rest may be too long.
            prefill = max(seconds - self._decoding.seconds(decoded), seconds / 10)
            self._rates.append(prefill / charged)
