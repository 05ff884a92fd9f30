"""The backend interface. A backend owns weights, KV cache memory and kernels; it executes a
StepPlan and returns a StepResult.

A backend keeps no state about requests. The plan says which tokens, at which positions, in which
blocks, and how to sample. What one backend can do and another cannot is a typed member of the
protocol, stated by every backend; the engine never probes for an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from verbatim.base.records import Drawn, SeqStep, StateRows, StepPlan, StepResult
from verbatim.model.spec import ModelSpec

if TYPE_CHECKING:
    from verbatim.model.loading.load import Model


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Facts about an opened backend, for the fingerprint, the CLI's summary and the cost card."""

    name: str  # reference, cpu or cuda
    detail: str  # instruction set or device name
    threads: int
    numerics: str  # NUMERICS_VERSION of this backend
    weight_bytes: int  # weight bytes read per decode step, every expert counted
    kv_token_bytes: int  # KV cache bytes per token, all layers
    note: str = ""  # why backend=auto does not use the GPU of this machine
    expert_bytes: int = 0  # share of weight_bytes: all experts, of which a step reads a few


class Backend(Protocol):
    spec: ModelSpec
    block_size: int

    @property
    def info(self) -> BackendInfo: ...

    @property
    def launcher(self) -> StepLauncher | None:
        """For overlapped decoding (engine/step/overlap.py): launches step N+1 before the host has
        read step N's tokens. The scheduler then allocates the KV block of a sequence's next
        position one step early. None: the engine executes one step after the other."""

    def draft_layer(self, model: Model) -> DraftLayer | None:
        """Open a draft layer of this backend's model (speculate/layer_proposer.py); its steps come
        with states. None: this backend runs none."""

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


class DraftLayer(Backend, Protocol):
    """The backend of a draft layer: steps come with states (SeqStep.states)."""

    @property
    def chains(self) -> DraftChains | None:
        """Draws whole chains of drafts. None: each draft is a step."""


class DraftChains(Protocol):
    def start(self, steps: Sequence[SeqStep], count: int) -> Callable[[], list[list[Drawn]]]:
        """Start to draw `count` drafts per step, each from the one before; the result waits for
        them. A step comes with states and a DrawSpec, and has blocks for all drafts. Filters and
        penalties may be left out: they cost accepted drafts and change no output."""


class StepLauncher(Protocol):
    def can_launch(self, steps: Sequence[SeqStep]) -> bool:
        """Whether these decode steps fit one launch and the device samples their rows."""

    def launch(self, steps: tuple[SeqStep, ...]) -> LaunchedStep:
        """Start a decode step: one token and one draw per sequence."""


class LaunchedStep(Protocol):
    """A decode step on the device whose tokens the host has not read. One row per sequence."""

    def launch_next(self, steps: tuple[SeqStep, ...], rows: Sequence[int]) -> LaunchedStep:
        """Start the step after this one: steps[i] computes the token that rows[i] of this step
        draws, in place of its own. Called once at most, before collect()."""

    def collect(self, rows: Sequence[int]) -> list[Drawn | None]:
        """Wait for the draws of these rows. None: the device did not decide; execute the row."""

    def states(self, row: int) -> StateRows | None:
        """What a draft layer reads of this row, if its step is `hidden`."""


SMALL_MODEL = 1_000_000_000  # parameters; from so many on, int8 activations are fine enough


def activation_type(setting: str, parameters: int) -> str:
    """int8 or int12: the integers of the cpu backend's activations. The rule knows the size of the
    model only, so that one model has one arithmetic (docs/adr/0029).

    >>> activation_type("auto", 135_000_000), activation_type("auto", 8_000_000_000)
    ('int12', 'int8')
    """
    if setting != "auto":
        return setting
    return "int12" if parameters < SMALL_MODEL else "int8"


def kv_numerics(version: str, kv_type: str) -> str:
    """BackendInfo.numerics of a KV cache of this type: another type, other bits.

    >>> kv_numerics("cpu-2", "f16"), kv_numerics("cpu-2", "fp8")
    ('cpu-2', 'cpu-2-fp8')
    """
    return version if kv_type == "f16" else f"{version}-{kv_type}"
