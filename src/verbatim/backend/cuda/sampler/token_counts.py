"""TokenCounts: how often each sequence has written each token, on the device, for the penalties.

In: the history of a sequence when it is first sampled; afterwards one token per step, which may be
known to the device only. Out: the sequence's slot in a table [slots, vocabulary] of int16: twice
the count in the output, plus one if the id is in the prompt.

A slot records how many tokens it covers and the last of them. A slot that does not fit a sequence's
history (a discarded launch, a draft, a preempted sequence that comes back) is filled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verbatim.backend.cuda.kernels.launch import launch
from verbatim.backend.cuda.runtime.device import send
from verbatim.backend.cuda.sampler import jit_sampling
from verbatim.base.records import DrawSpec

FIRST_SLOTS = 16
MAX_HISTORY = 16_000  # twice the count of a token stays below 2^15


@dataclass(slots=True)
class Slot:
    index: int
    length: int = -1  # tokens covered
    last: int = -1  # the last of them; -1: not known yet


class TokenCounts:
    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self.table = torch.zeros((0, vocab), dtype=torch.int16, device=device)
        self._slots: dict[int, Slot] = {}  # least recently used first

    def slots(
        self,
        seq_ids: Sequence[int],
        specs: Sequence[DrawSpec | None],
        drawn: torch.Tensor | None = None,
    ) -> list[int]:
        """The slot of each sequence, up to date; -1 where the spec is None.

        `drawn` [rows] int32 are tokens after the histories that only the device has."""
        self._reserve(seq_ids, specs)
        indices, add = [-1] * len(specs), [-1] * len(specs)
        known = np.zeros(len(specs), np.int32)
        for row, (seq_id, spec) in enumerate(zip(seq_ids, specs, strict=True)):
            if spec is None:
                continue
            slot, history = self._slots[seq_id], spec.history
            indices[row] = slot.index
            if slot.length == len(history) - 1 and slot.last == history[-2]:
                add[row], known[row] = slot.index, history[-1]
            elif slot.length != len(history) or slot.last != history[-1]:
                self._fill(slot.index, history, spec.prompt_len)
            slot.length, slot.last = len(history), history[-1]
            if drawn is not None:
                slot.length, slot.last = slot.length + 1, -1
        if max(add, default=-1) >= 0:
            self._add(add, send(known, self.device))
        if drawn is not None:
            self._add(indices, drawn)
        return indices

    def confirm(self, seq_id: int, token: int) -> None:
        """The token that was added as a part of `drawn`; -1 if it was not decided."""
        if (slot := self._slots.get(seq_id)) is not None:
            slot.last = token

    def _reserve(self, seq_ids: Sequence[int], specs: Sequence[DrawSpec | None]) -> None:
        wanted = [seq_id for seq_id, spec in zip(seq_ids, specs, strict=True) if spec is not None]
        for seq_id in wanted:  # move to the end: most recently used
            if (slot := self._slots.pop(seq_id, None)) is not None:
                self._slots[seq_id] = slot
        new = [seq_id for seq_id in wanted if seq_id not in self._slots]
        if len(wanted) > len(self.table):
            size = max(FIRST_SLOTS, 1 << (len(wanted) - 1).bit_length())
            table = torch.zeros((size, self.vocab), dtype=torch.int16, device=self.device)
            table[: len(self.table)] = self.table
            self.table = table
        used = {slot.index for slot in self._slots.values()}
        free = [index for index in range(len(self.table)) if index not in used] if new else []
        for seq_id in new:
            if not free:
                oldest = next(iter(self._slots))
                free.append(self._slots.pop(oldest).index)
            self._slots[seq_id] = Slot(free.pop())

    def _fill(self, index: int, history: Sequence[int], prompt_len: int) -> None:
        ids, place = np.unique(np.array(tuple(history), np.int64), return_inverse=True)
        values = 2 * np.bincount(place[prompt_len:], minlength=len(ids))
        values[np.unique(place[:prompt_len])] += 1
        row = self.table[index].zero_()
        row.index_copy_(0, send(ids, self.device), send(values.astype(np.int16), self.device))

    def _add(self, slots: list[int], tokens: torch.Tensor) -> None:
        where = send(np.array(slots, np.int32), self.device)
        launch(
            jit_sampling.add_tokens,
            (len(slots), 1, 1),
            (self.table, where, tokens, self.vocab),
            (),
            warps=1,
        )
