"""The backend interface. A backend owns weights, KV cache memory and kernels; it executes a
StepPlan and returns a StepResult.

A backend keeps no state about requests. The plan says which tokens, at which positions, in which
blocks, and how to sample. What one backend can do and another cannot is a typed member of the
protocol, stated by every backend; the engine never probes for an attribute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verbatim.base.records import StepPlan, StepResult
from verbatim.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Facts about an opened backend, for the fingerprint, the CLI's summary and the cost card."""

    name: str  # reference, cpu or cuda
    detail: str  # instruction set or device name
    threads: int
    numerics: str  # NUMERICS_VERSION of this backend
    weight_bytes: int  # weight bytes read per decode step
    kv_token_bytes: int  # KV cache bytes per token, all layers
    note: str = ""  # why backend=auto does not use the GPU of this machine


class Backend(Protocol):
    spec: ModelSpec
    block_size: int
    overlap: bool
    """Whether the backend launches step N+1 before the host has read step N's tokens. The scheduler
    then allocates the KV block of a sequence's next position one step early."""

    @property
    def info(self) -> BackendInfo: ...

    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each cache group (all layers of the group, keys and values)."""

    def available_memory(self) -> int | None:
        """Free device memory in bytes; None if the KV cache is in the machine's main memory, where
        the operating system's figure holds."""

    def allocate(self, blocks: tuple[int, ...]) -> None:
        """Allocate this many blocks of each group. Called once, before the first step."""

    def read_block(self, group: int, block: int) -> bytes:
        """The contents of a KV block, for the disk cache. The next step does not change them."""

    def write_block(self, group: int, block: int, data: bytes) -> None:
        """Restore what read_block returned, perhaps in another process with the same fingerprint.
        ValueError if the length does not match."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy plan.copies' blocks, run the forward pass, sample and score. Result i belongs to
        plan.sequences[i]."""

    def close(self) -> None: ...


def kv_numerics(version: str, kv_type: str) -> str:
    """BackendInfo.numerics of a KV cache of this type: another type, other bits.

    >>> kv_numerics("cpu-2", "f16"), kv_numerics("cpu-2", "fp8")
    ('cpu-2', 'cpu-2-fp8')
    """
    return version if kv_type == "f16" else f"{version}-{kv_type}"
