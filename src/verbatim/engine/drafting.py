"""Speculation's place in the engine: before each step, guesses for the sequences that are about to write; after it, what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verbatim.base.config import EngineConfig
from verbatim.base.errors import UnsupportedError
from verbatim.base.params import SamplingParams
from verbatim.base.records import StepPlan
from verbatim.schedule.sequence import Sequence

if TYPE_CHECKING:
    from verbatim.engine.job import Job
    from verbatim.engine.parts import Parts
    from verbatim.schedule.scheduler import Scheduler


class Drafting:
    def __init__(self, parts: Parts, config: EngineConfig, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._speculator: Any = None

    def check(self, params: SamplingParams) -> None:
        if params.speculate not in (None, "off", "auto") and self._speculator is None:
            raise UnsupportedError(
                "speculate", f"{params.speculate!r} is not available in this engine; leave it out, or use 'off'"
            )

    def propose(self, jobs: Mapping[int, Job]) -> None: ...

    def learn(self, plan: StepPlan, seconds: float) -> None: ...

    def finish(self, seq: Sequence, tenant: str) -> None: ...

    def close(self) -> None: ...
