"""Remove the ids that filters without top-k do not keep: top-p, min-p, typical-p, top-n-sigma.

In: rows of logits on the device and a FilterRows. Out: a copy in which the removed ids are -inf,
and the rows' maxima, NaN for a row that the host must sample. The draw from all ids follows. The
cost does not depend on how many ids a filter keeps; jit_filters.py explains how the cut is found.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from verbatim.backend.cuda import jit_filters
from verbatim.backend.cuda.launch import launch
from verbatim.backend.cuda.sampling_plan import FilterRows

CHUNK = 2048  # ids per program
LIST = 1024  # ids of a bucket


class Sums(NamedTuple):
    mass: torch.Tensor  # [rows, chunks] int64
    spread: torch.Tensor
    moments: torch.Tensor  # [3, rows, chunks] float64
    buckets: torch.Tensor  # [rows, BUCKETS] int64, the masses by key


def remove_filtered(
    x: torch.Tensor,
    row_max: torch.Tensor,
    shapes: torch.Tensor,
    which: FilterRows,
    flags: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, maxima). `flags` are those of `which`, on the device."""
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
        first = chunk_sums(*given, flags[1], top_p=which.top_p)
    if which.top_p:
        _find_cut(given, flags[2], cuts, first, typical=False)
    if which.typical:
        later = chunk_sums(*given, flags[3], cuts)
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
    top_p: bool = False,
) -> Sums:
    """Sums over the live ids of the wanted rows; with `cuts` over the ids after top-p and min-p.
    `top_p`: also the buckets of -d."""
    rows, vocab = x.shape
    chunks = triton.cdiv(vocab, CHUNK)
    sums = _empty_sums(rows, chunks, x.device)
    launch(
        jit_filters.chunk_sums,
        (rows, chunks, 1),
        (x, row_max, shapes, wanted, shapes if cuts is None else cuts, *sums, vocab, chunks),
        (CHUNK, cuts is not None, top_p),
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
        (block, LIST, 16, typical),
        warps=8,
    )
