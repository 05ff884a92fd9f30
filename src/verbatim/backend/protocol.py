"""What a backend is: it owns weights, cache memory and kernels, and turns a StepPlan into a StepResult.

It keeps no state about requests: the plan says which tokens, at which positions, in which blocks, and how to draw. Two things it may have beside
what is below: `available_memory()`, where it has memory of its own, and `ahead`, if it begins steps before it is asked and wants their blocks early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verbatim.base.records import StepPlan, StepResult
from verbatim.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """For the fingerprint, the closing line and the cost card."""

    name: str  # reference, cpu, cuda
    detail: str  # instruction set, device
    threads: int
    numerics: str  # NUMERICS_VERSION of this backend
    weight_bytes: int  # read for every token
    kv_token_bytes: int  # added to the cache by one token, all layers
    note: str = ""  # why backend=auto does not use the GPU that is there


class Backend(Protocol):
    spec: ModelSpec
    block_size: int

    @property
    def info(self) -> BackendInfo: ...

    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each cache group (all layers of the group, keys and values)."""

    def allocate(self, blocks: tuple[int, ...]) -> None:
        """Take memory for this many blocks of each group. Called once, before the first step."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...
