"""GpuSampler: sample on the device, so that only token ids and no logits are copied to the host.

In: rows of logits on the device. Out: one Drawn per row, or None where the host must sample. The
tokens are those of sampling/pipeline.py, to the bit. jit_sampling.py, jit_list.py and
jit_filters.py have these ways to get them:

- A draw from all ids is the id with the largest key d + noise. The device computes all keys in
  float32, with an error below a fraction of SLACK. If the best key leads all others by more than
  SLACK, float64 finds the same id; otherwise (about one row in four thousand) the ids near the best
  are computed again in float64. An argmax involves no arithmetic and is always proven.
- A draw through top-k collects the best ids in a list and computes all filters, masses and noise of
  the list exactly, in float64. If the list does not hold the best k ids, the host samples.
- With filters but without top-k, the token drawn from all ids counts if the filters keep it;
  otherwise they remove ids (device_filters.py), and a second draw follows.
- Logit bias, grammar masks, bans and penalties are applied before, in float64, to a copy of the
  logits.

Rows with other parameters, and rows whose logits are not finite, go to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton

from verbatim.backend.cuda.kernels.launch import launch
from verbatim.backend.cuda.runtime.device import send
from verbatim.backend.cuda.runtime.device_step import aligned
from verbatim.backend.cuda.sampler import device_filters, jit_list, jit_sampling
from verbatim.backend.cuda.sampler.pending_tokens import PendingTokens, Report
from verbatim.backend.cuda.sampler.sampling_plan import (
    COLUMNS,
    POSITIONS,
    SHAPES,
    Bias,
    FilterRows,
    RowPlan,
    RowTable,
    ban_words,
    exact_argmax,
    list_size,
    mask_words,
    row_plan,
    row_table,
    same_rows,
)
from verbatim.backend.cuda.sampler.token_counts import MAX_HISTORY, TokenCounts
from verbatim.base.params import SamplingParams
from verbatim.base.records import Drawn, DrawSpec
from verbatim.sampling.pipeline import Row

ROWS, CHUNK = 1, 2048  # rows and token ids per program
GROUP = 32  # ids of which only the largest logit decides the list's threshold
MAX_CACHED = 4096  # requests whose plan is cached; a full cache is cleared


class GpuSampler:
    """One per backend. `rows` counts the rows that the device samples, `undecided` those of them
    that it sends to the host."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self.rows = self.undecided = 0
        self.counts = TokenCounts(vocab, device)
        self._cache: dict[int, tuple[SamplingParams, RowPlan | None]] = {}
        self._bans: dict[tuple[int, tuple[int, ...]], tuple[SamplingParams, np.ndarray]] = {}
        self._last = row_table((), ())  # table of the last launch()
        self._strengths = (self._last.strengths, torch.zeros((0, 3), dtype=torch.float64))
        self._bias: tuple[Bias | None, list[torch.Tensor]] = (None, [])
        self._flags: tuple[FilterRows | None, torch.Tensor] = (None, torch.zeros(0))
        # last reported rows: RowTable.logprobs, ids to list per row, shapes without effect
        self._listed: tuple[Sequence[int], list[int], torch.Tensor] = ((), [], torch.zeros(0))
        self._wanted: tuple[Sequence[int], torch.Tensor] = ((), torch.zeros(0))  # on the device

    def __call__(
        self, logits: torch.Tensor, rows: Sequence[Row], seq_ids: Sequence[int]
    ) -> list[Drawn | None]:
        """One Drawn per row, None where the host must sample. Waits for the device."""
        draws = Counter(seq_ids)
        plans = [
            # several rows of one sequence are drafts, each with its own history
            None if plan is not None and plan.penalties and draws[seq_id] > 1 else plan
            for plan, seq_id in zip(
                map(self._plan, [row.spec for row in rows]), seq_ids, strict=True
            )
        ]
        supported = len(plans) - plans.count(None)
        if not supported:
            return [None] * len(rows)
        table = row_table([row.spec for row in rows], plans)
        positions, masks = [row.position for row in rows], [row.mask for row in rows]
        pending = self._launch(logits, table, positions, seq_ids, masks)
        tokens = pending.wait()
        self.rows += supported
        drawn = pending.drawn(tokens)
        out = [
            one if plan is not None and one.token >= 0 else None
            for plan, one in zip(plans, drawn, strict=True)
        ]
        self.undecided += out.count(None) - (len(plans) - supported)
        return out

    def supports(self, spec: DrawSpec) -> bool:
        """Whether the device samples the rows of this spec, except for undecided ones, and can
        sample the next row before the host knows the token."""
        return not spec.masks and spec.step < 0 and self._plan(spec) is not None

    def launch(
        self,
        logits: torch.Tensor,
        specs: Sequence[DrawSpec],
        positions: Sequence[int],
        seq_ids: Sequence[int],
        drawn: torch.Tensor | None = None,
    ) -> PendingTokens:
        """Sample rows with supported specs for these positions, without waiting for the device.

        `drawn` [rows]: tokens that follow the histories of the specs, on the device."""
        if same_rows(specs, self._last, MAX_HISTORY):
            table = self._last._replace(specs=specs)
        else:
            table = row_table(specs, [self._plan(spec) for spec in specs])
        self._last = table
        return self._launch(logits, table, positions, seq_ids, None, drawn)

    def _plan(self, spec: DrawSpec) -> RowPlan | None:
        if spec.beam or len(spec.history) > MAX_HISTORY:
            return None
        # the cache keeps the params object alive, so no other object gets its id
        cached = self._cache.get(id(spec.params))
        if cached is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            cached = self._cache[id(spec.params)] = (spec.params, row_plan(spec.params))
        plan = cached[1]
        if (
            plan is not None
            and plan.slack < 0.0
            and not plan.list_k
            and (spec.withheld or spec.masks)
        ):
            return exact_argmax(plan)
        return plan

    def _launch(
        self,
        logits: torch.Tensor,
        table: RowTable,
        positions: Sequence[int],
        seq_ids: Sequence[int],
        masks: Sequence[bytes | None] | None,
        drawn: torch.Tensor | None = None,
    ) -> PendingTokens:
        assert logits.is_contiguous(), "the kernels need contiguous rows"
        x = logits
        edits = table.masked or table.penalised or table.bias is not None
        if edits or (masks is not None and any(mask is not None for mask in masks)):
            x = self._process(logits, table, positions, seq_ids, masks, drawn)
        row_params, shapes = self._send(table, positions)
        row_max = x.amax(1)
        if x is not logits:  # a logit that is not finite is an error, even if a mask removes it
            row_max = torch.where(logits.amax(1).isfinite(), row_max, torch.nan)
        if table.from_all:
            out = self._draw_from_all(x, row_max, row_params, shapes, table.noise)
            if table.filtered is not None:
                out = self._draw_filtered(x, row_max, row_params, shapes, table.filtered, out)
        else:
            out = torch.full((len(positions),), -1, dtype=torch.int32, device=self.device)
        if any(table.list_k):
            self._draw_from_list(x, row_max, row_params, shapes, table, out)
        report, tops = None, table.logprobs
        temperatures = table.shapes[:, 0] if table.certain else None
        if table.certain:
            report = self._report(logits, x, row_max, tops, out, shapes)
        elif max(tops) >= 0:
            report = self._report(
                logits, logits, row_max if x is logits else logits.amax(1), tops, out
            )
        if self.device.type != "cuda":
            return PendingTokens(out, out, None, report, tops, temperatures)
        on_host = to_pinned(out)
        if report is not None:
            report = report._replace(buffer=to_pinned(report.buffer))
        arrived = torch.cuda.Event()
        arrived.record()
        return PendingTokens(out, on_host, arrived, report, tops, temperatures)

    def _send(self, table: RowTable, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The `row_params` table [COLUMNS, rows] int32 and the `shapes` [rows, SHAPES] float64 of
        jit_sampling, in one copy to the device.

        PyTorch does not reuse the pinned memory before the copy is done."""
        count = len(positions)
        words = 2 * SHAPES * count
        first = aligned(words)
        pinned = torch.empty(
            first + COLUMNS * count, dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        flat = pinned.numpy()
        flat[:words] = table.shapes.view(np.int32).reshape(-1)
        columns = flat[first:].reshape(COLUMNS, count)
        columns[:] = table.columns
        columns[POSITIONS] = np.array(positions, np.int64).astype(np.int32)
        sent = pinned.to(self.device, non_blocking=True)
        return sent[first:], sent[:words].view(torch.float64)

    # ---- processors

    def _process(
        self,
        logits: torch.Tensor,
        table: RowTable,
        positions: Sequence[int],
        seq_ids: Sequence[int],
        masks: Sequence[bytes | None] | None,
        drawn: torch.Tensor | None,
    ) -> torch.Tensor:
        """The logits after bias, masks, bans and penalties, in float64; `logits` if no row has
        any."""
        specs, plans, rows = table.specs, table.plans, len(positions)
        if table.bias is not None:
            logits = self._add_bias(logits, table.bias)
        where = np.full((2, rows), -1, np.int32)  # the mask and the slot of each row
        given: list[np.ndarray] = []
        places: dict[int, int] = {}  # id of a mask -> its place: rows of a block share one
        if table.masked or masks is not None:
            columns = zip(specs, positions, plans, masks or [None] * rows, strict=True)
            for row, (spec, position, plan, grammar) in enumerate(columns):
                mask = None if plan is None else self._mask(spec, position, plan, grammar)
                if mask is not None:
                    where[0, row] = places.setdefault(id(mask), len(given))
                    given += [mask] if where[0, row] == len(given) else []
        if not given and not table.penalised:
            return logits
        if table.penalised:
            penalised = [
                spec if plan is not None and plan.penalties else None
                for spec, plan in zip(specs, plans, strict=True)
            ]
            where[1] = self.counts.slots(seq_ids, penalised, drawn)
            if self._strengths[0] is not table.strengths:
                self._strengths = (table.strengths, send(table.strengths, self.device))
        x = torch.empty(logits.shape, dtype=torch.float64, device=self.device)
        sent = send(where, self.device)
        # unused pointers: the kernel reads no mask and no count of a row with -1
        bits = send(np.stack(given), self.device) if given else sent
        strengths = self._strengths[1] if table.penalised else x
        counts = self.counts.table if len(self.counts.table) else x.view(torch.int16)
        launch(
            jit_sampling.process_logits,
            (rows, triton.cdiv(self.vocab, CHUNK), 1),
            (
                logits, sent, strengths, bits, counts, x,
                self.vocab, triton.cdiv(self.vocab, 32), len(counts),
            ),
            (CHUNK,),
        )  # fmt: skip
        return x

    def _add_bias(self, logits: torch.Tensor, bias: Bias) -> torch.Tensor:
        if self._bias[0] is not bias:
            self._bias = (bias, [send(part, self.device) for part in bias])
        rows, ids, values = self._bias[1]
        x = logits.double()
        x[rows, ids] += values
        return x

    def _mask(
        self, spec: DrawSpec, position: int, plan: RowPlan, grammar: bytes | None
    ) -> np.ndarray | None:
        """Bits of the ids that a row may draw, as int32 words; None: all."""
        withheld = spec.withheld if position - spec.prompt_len < spec.params.min_tokens else ()
        mask = None
        if plan.bans or withheld:
            key = (id(spec.params), withheld)
            if key not in self._bans:
                if len(self._bans) >= MAX_CACHED:
                    self._bans.clear()
                self._bans[key] = (spec.params, ban_words(spec.params, withheld, self.vocab))
            mask = self._bans[key][1]
        if grammar is not None:
            words = mask_words(np.frombuffer(grammar, np.uint8), self.vocab)
            mask = words if mask is None else words & mask
        return mask

    # ---- draws

    def _draw_from_all(
        self,
        x: torch.Tensor,
        row_max: torch.Tensor,
        row_params: torch.Tensor,
        shapes: torch.Tensor,
        noise: bool,
    ) -> torch.Tensor:
        count, chunks = len(x), triton.cdiv(self.vocab, CHUNK)
        bests = torch.empty((count, chunks), dtype=torch.float32, device=self.device)
        seconds = torch.empty_like(bests)
        ids = torch.empty((count, chunks), dtype=torch.int32, device=self.device)
        out = torch.empty(count, dtype=torch.int32, device=self.device)
        programs, block = triton.cdiv(count, ROWS), triton.next_power_of_2(chunks)
        launch(
            jit_sampling.chunk_top2,
            (programs, chunks, 1),
            (x, row_max, row_params, bests, seconds, ids, count, self.vocab, chunks),
            (noise, ROWS, CHUNK),
        )
        launch(
            jit_sampling.select_token,
            (programs, 1, 1),
            (bests, seconds, ids, row_max, row_params, out, count, self.vocab, chunks),
            (ROWS, block),
            warps=1,
        )
        if noise:
            launch(
                jit_sampling.resolve_ties,
                (count, 1, 1),
                (x, bests, row_max, row_params, shapes, out, count, self.vocab, chunks),
                (block, CHUNK),
            )
        return out

    def _draw_filtered(
        self,
        x: torch.Tensor,
        row_max: torch.Tensor,
        row_params: torch.Tensor,
        shapes: torch.Tensor,
        which: FilterRows,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """`tokens`, drawn from all ids, with another draw for the rows whose filters remove it."""
        if self._flags[0] is not which:
            self._flags = (which, send(which.flags, self.device))
        given = (x, row_max, shapes, which)
        flags = device_filters.rows_to_filter(*given, self._flags[1], tokens)
        kept, kept_max = device_filters.remove_filtered(*given, flags)
        again = self._draw_from_all(kept, kept_max, row_params, shapes, True)
        return torch.where(flags[0, : len(tokens)] > 0, again, tokens)

    def _draw_from_list(
        self,
        x: torch.Tensor,
        row_max: torch.Tensor,
        row_params: torch.Tensor,
        shapes: torch.Tensor,
        table: RowTable,
        out: torch.Tensor,
    ) -> None:
        best = self._best_ids(x, row_max, shapes, table.list_k, False)
        chunks = triton.cdiv(self.vocab, CHUNK)
        moments = shapes  # an unused pointer, if no row filters by sigma
        if table.sigma:
            moments = device_filters.chunk_sums(
                x, row_max, shapes, best.list_k, moments=True
            ).moments
        launch(
            jit_list.draw_from_list,
            (len(x), 1, 1),
            (
                best.ids, best.values, best.used, row_max, row_params, shapes, best.list_k, moments,
                out, self.vocab, chunks,
            ),
            (best.size, min(64, best.size), triton.next_power_of_2(chunks), table.sigma),
            warps=8 if best.size > 64 else 4,
        )  # fmt: skip

    def _best_ids(
        self,
        x: torch.Tensor,
        row_max: torch.Tensor,
        shapes: torch.Tensor,
        list_k: Sequence[int],
        mass: bool,
    ) -> BestIds:
        count, chunks = len(x), triton.cdiv(self.vocab, CHUNK)
        size = list_size(max(list_k))
        if self._wanted[0] is not list_k:
            self._wanted = (list_k, send(np.array(list_k, np.int32), self.device))
        wanted = self._wanted[1]
        # fewer ids per group where a small vocabulary would have too few groups for the threshold
        group = min(GROUP, 1 << max(0, (self.vocab // (4 * max(list_k))).bit_length() - 1))
        groups = chunks * (CHUNK // group)
        maxima = torch.empty((count, groups), dtype=torch.float32, device=self.device)
        masses = torch.empty((count, chunks), dtype=torch.int64, device=self.device)
        tau = torch.empty(count, dtype=torch.float32, device=self.device)
        used = torch.zeros(count, dtype=torch.int32, device=self.device)
        ids = torch.empty((count, size), dtype=torch.int32, device=self.device)
        values = torch.empty((count, size), dtype=torch.float64, device=self.device)
        launch(
            jit_sampling.group_maxima,
            (count, chunks, 1),
            (x, row_max, shapes, wanted, maxima, masses, self.vocab, chunks),
            (group, CHUNK, mass),
        )
        launch(
            jit_sampling.list_threshold,
            (count, 1, 1),
            (maxima, wanted, tau, groups),
            (triton.next_power_of_2(groups), not mass),
        )
        launch(
            jit_sampling.collect_list,
            (count, chunks, 1),
            (x, wanted, tau, used, ids, values, self.vocab),
            (CHUNK, size),
        )
        return BestIds(ids, values, used, tau, wanted, masses, size)

    def _report(
        self,
        logits: torch.Tensor,
        x: torch.Tensor,
        row_max: torch.Tensor,
        tops: Sequence[int],
        tokens: torch.Tensor,
        shapes: torch.Tensor | None = None,
    ) -> Report:
        """Best ids of x, their logits and scores, see report_list. x: the logits, or those that
        bans leave. `shapes`: the masses are those at the rows' temperatures."""
        count, chunks = len(tops), triton.cdiv(self.vocab, CHUNK)
        if self._listed[0] is not tops:
            list_k = [max(1, top) if top >= 0 else 0 for top in tops]
            ones = torch.ones(SHAPES * count, dtype=torch.float64, device=self.device)
            self._listed = (tops, list_k, ones)
        _, list_k, ones = self._listed
        best = self._best_ids(x, row_max, ones if shapes is None else shapes, list_k, True)
        report = Report.empty(count, max(list_k), best.size, self.device)
        launch(
            jit_list.report_list,
            (count, 1, 1),
            (
                best.ids, best.values, best.used, logits, row_max.float(), tokens, best.list_k,
                best.mass, *report.parts(count), self.vocab, chunks, report.top,
            ),
            (best.size, min(64, best.size), triton.next_power_of_2(chunks)),
            warps=8 if best.size > 64 else 4,
        )  # fmt: skip
        return report


class BestIds(NamedTuple):
    """The ids of each row that reach its threshold, in any order, and masses per chunk."""

    ids: torch.Tensor  # [rows, size] int32
    values: torch.Tensor  # [rows, size] float64
    used: torch.Tensor  # [rows] int32; more than `size`: the list is not complete
    tau: torch.Tensor  # [rows] float32: the threshold
    list_k: torch.Tensor  # [rows] int32; 0: the row has no list
    mass: torch.Tensor  # [rows, chunks] int64
    size: int


def to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Start the copy of a tensor to the host."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    out.copy_(tensor, non_blocking=True)
    return out
