"""Filters without top-k on the device: top-p, min-p, typical-p, top-n-sigma.

`rows_to_filter`: the rows whose filters remove the token that was drawn from all ids, or may remove
it. `remove_filtered`: a copy of the logits of these rows in which the removed ids are -inf, and the
rows' maxima, NaN for a row that the host must sample. The draw from all ids follows. The cost does
not depend on how many ids a filter keeps; jit_filters.py explains how they are found.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from verbatim.backend.cuda.kernels.launch import launch
from verbatim.backend.cuda.sampler import jit_filters
from verbatim.backend.cuda.sampler.sampling_plan import FilterRows

CHUNK = 2048  # ids per program
LIST = 1024  # ids of a bucket


class Sums(NamedTuple):
    mass: torch.Tensor  # [rows, chunks] int64
    spread: torch.Tensor
    moments: torch.Tensor  # [3, rows, chunks] float64
    buckets: torch.Tensor  # [rows, BUCKETS] int64, the masses by key


def rows_to_filter(
    x: torch.Tensor,
    row_max: torch.Tensor,
    shapes: torch.Tensor,
    which: FilterRows,
    flags: torch.Tensor,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """`flags` without those of rows whose token the filters keep. `tokens`: drawn from all ids."""
    rows, vocab = x.shape
    chunks = triton.cdiv(vocab, CHUNK)
    block = triton.next_power_of_2(chunks)
    given = (x, row_max, shapes)
    sums = which.top_p or which.typical
    mass = before = tokens  # unused pointers without sums
    if sums:
        found = chunk_sums(*given, flags[1], spread=which.typical)
        mass, before = found.mass, torch.empty_like(found.mass)
        launch(
            jit_filters.mass_before,
            (rows, chunks, 1),
            (*given, flags[1], tokens, mass, found.spread, before, vocab, chunks),
            (CHUNK, block, which.typical),
        )
    out = torch.empty_like(flags)
    launch(
        jit_filters.drop_kept,
        (rows, 1, 1),
        (*given, flags, tokens, mass, before, out, vocab, chunks, flags.shape[1]),
        (block, sums),
        warps=1,
    )
    return out


def remove_filtered(
    x: torch.Tensor,
    row_max: torch.Tensor,
    shapes: torch.Tensor,
    which: FilterRows,
    flags: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, maxima) of the rows with a flag. `flags` are those of `which`, on the device."""
    rows, vocab = x.shape
    chunks = triton.cdiv(vocab, CHUNK)
    block = triton.next_power_of_2(chunks)
    cuts = torch.full(
        (rows, jit_filters.CUTS.value), torch.inf, dtype=torch.float64, device=x.device
    )
    cuts[:, 4] = 0.0
    given = (x, row_max, shapes)
    first = later = _empty_sums(rows, chunks, x.device)
    if which.top_p or which.sigma:
        first = chunk_sums(*given, flags[1], moments=which.sigma, buckets=which.top_p)
    if which.top_p:
        _find_cut(given, flags[2], cuts, first, typical=False)
    if which.typical:
        later = chunk_sums(*given, flags[3], cuts, spread=True)
        launch(
            jit_filters.typical_histogram,
            (rows, chunks, 1),
            (*given, flags[3], cuts, later.mass, later.spread, later.buckets, vocab, chunks),
            (CHUNK, block),
        )
        _find_cut(given, flags[3], cuts, later, typical=True)
    out, out_max = torch.empty_like(x), row_max.clone()
    launch(
        jit_filters.remove_filtered,
        (rows, chunks, 1),
        (
            x, row_max, shapes, flags[0], cuts, later.mass, later.spread, first.moments,
            out, out_max, vocab, chunks,
        ),
        (CHUNK, block, which.typical, which.sigma),
    )  # fmt: skip
    return out, out_max


def chunk_sums(
    x: torch.Tensor,
    row_max: torch.Tensor,
    shapes: torch.Tensor,
    wanted: torch.Tensor,
    cuts: torch.Tensor | None = None,
    *,
    spread: bool = False,
    moments: bool = False,
    buckets: bool = False,
) -> Sums:
    """Masses, and what else is wanted, over the live ids of the wanted rows; with `cuts` over the
    ids after top-p and min-p. `buckets`: of -d."""
    rows, vocab = x.shape
    chunks = triton.cdiv(vocab, CHUNK)
    sums = _empty_sums(rows, chunks, x.device)
    launch(
        jit_filters.chunk_sums,
        (rows, chunks, 1),
        (x, row_max, shapes, wanted, shapes if cuts is None else cuts, *sums, vocab, chunks),
        (CHUNK, cuts is not None, spread, moments, buckets),
    )
    return sums


def _empty_sums(rows: int, chunks: int, device: torch.device) -> Sums:
    mass = torch.empty((rows, chunks), dtype=torch.int64, device=device)
    moments = torch.empty((3, rows, chunks), dtype=torch.float64, device=device)
    buckets = torch.zeros((rows, jit_filters.BUCKETS.value), dtype=torch.int64, device=device)
    return Sums(mass, torch.empty_like(mass), moments, buckets)


def _find_cut(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    wanted: torch.Tensor,
    cuts: torch.Tensor,
    sums: Sums,
    typical: bool,
) -> None:
    x, row_max, shapes = given
    rows, vocab = x.shape
    chunks = triton.cdiv(vocab, CHUNK)
    block = triton.next_power_of_2(chunks)
    bucket = torch.empty(rows, dtype=torch.int32, device=x.device)
    missing = torch.empty(rows, dtype=torch.int64, device=x.device)
    used = torch.zeros(rows, dtype=torch.int32, device=x.device)
    ids = torch.empty((rows, LIST), dtype=torch.int32, device=x.device)
    values = torch.empty((rows, LIST), dtype=torch.float64, device=x.device)
    mass, spread = sums.mass, sums.spread
    launch(
        jit_filters.find_bucket,
        (rows, 1, 1),
        (shapes, wanted, mass, sums.buckets, bucket, missing, chunks),
        (block, typical),
    )
    launch(
        jit_filters.collect_bucket,
        (rows, chunks, 1),
        (
            x, row_max, shapes, wanted, cuts, mass, spread, bucket, used, ids, values,
            vocab, chunks,
        ),
        (CHUNK, block, LIST, typical),
    )  # fmt: skip
    launch(
        jit_filters.find_cut,
        (rows, 1, 1),
        (wanted, mass, spread, bucket, missing, used, ids, values, cuts, chunks),
        (block, LIST, typical),
    )
