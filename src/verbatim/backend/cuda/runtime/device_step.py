"""DeviceStep: the integers of one step as device tensors, which the CUDA graph reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verbatim.backend.cuda.kernels.kernels import QueryTiles
from verbatim.backend.cuda.kernels.lora import AdapterRows
from verbatim.backend.cuda.kernels.recurrent import RecurrentStep


def aligned(size: int) -> int:
    """The size of an int32 array after which another one starts at a multiple of 16 bytes. Triton
    compiles one kernel for pointers that are such multiples, and another one for those that are
    not."""
    return -(-size // 4) * 4


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStep:
    """The integers of one step on the device (int32), and the sizes of the kernels' grids."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: tuple[torch.Tensor, ...]  # per cache group [rows]: cache slot of the row's key and value
    tiles: tuple[tuple[QueryTiles, ...], ...]  # per cache group: tiles of few query lines, of many
    outputs: torch.Tensor | None  # rows whose final state is needed; None: all rows
    logits: torch.Tensor | None  # outputs whose logits are needed; None: all outputs
    spans: int  # attention spans of the longest sequence
    logits_out: torch.Tensor | None = None  # [logits, vocabulary]: where to write the logits
    adapters: AdapterRows = ()  # rows of each LoRA adapter in this step
    output_adapters: AdapterRows = ()  # the same for the output rows
    recurrent: RecurrentStep | None = None  # None: the model has no recurrent layers
