"""Launch the Triton kernels of jit.py.

Tensors are float32, except weights, the KV cache and matmul inputs, which their producer casts to
the weight's type once. Launch parameters that affect bits depend on the weight's shape or the
absolute position, never on the number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from verbatim.backend.cuda import jit

BN = 64  # outputs per matmul tile
BK = 128  # inputs per block of a split; with BN it determines the splits, so it affects the bits
PROGRAMS = 264  # programs that saturate a large GPU's memory: two per SM of 132
STAGES = 3  # blocks of weights prefetched at once
LARGE_TILE_ROWS = 256  # above this many rows the matmul uses larger tiles and shorter blocks
PARALLEL_SPLIT_ROWS = 16  # up to this many rows the splits of a matmul run in parallel
TILE = 64  # positions per attention tile
SPAN = 512  # positions that one attention program reduces in order; spans are merged afterwards
EXPERT_ROWS = 16  # rows per tile of a mixture-of-experts matmul
TILE_LINES = 16  # lines of a query tile: (row, query head) pairs that share a KV head


def split_k(n: int, k: int) -> tuple[int, int]:
    """(splits, blocks of BK inputs per split) of a matmul with a weight [n, k]."""
    blocks = triton.cdiv(k, BK)
    splits = max(1, min(PROGRAMS // triton.cdiv(n, BN), blocks // 2))
    blocks_per_split = triton.cdiv(blocks, splits)
    return triton.cdiv(blocks, blocks_per_split), blocks_per_split


# ---- matmul


@dataclass(frozen=True, slots=True, eq=False)
class SplitSums:
    """A matmul result as unreduced split-K sums [splits, rows, width], and a bias [width].

    The kernel that reads it sums the splits in order and adds the bias."""

    splits: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def width(self) -> int:
        return int(self.splits.shape[2])

    @property
    def rows(self) -> int:
        return int(self.splits.shape[1])


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> SplitSums:
    """x [m, k] times weightᵀ, weight [n, k] in half precision.

    x is rounded to the weight's type; sums are float32."""
    (m, k), n = x.shape, weight.shape[0]
    splits, blocks = split_k(n, k)
    parallel = m <= PARALLEL_SPLIT_ROWS
    out = torch.empty((splits if parallel else 1, m, n), dtype=torch.float32, device=x.device)
    bm, bk, stages = 16 if m <= 16 else 32 if m <= 32 else 64, BK, STAGES
    if m > LARGE_TILE_ROWS:
        bm, bk, stages = 128, BK // 2, STAGES + 1
    grid = (triton.cdiv(n, BN), triton.cdiv(m, bm), splits if parallel else 1)
    jit.matmul[grid](
        x, weight, out, x, x, m, n, k, 1 if parallel else splits, blocks * (BK // bk),
        bm, BN, bk, False, num_warps=4, num_stages=stages
    )  # fmt: skip
    return SplitSums(out, bias)


def expert_matmul(
    x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor
) -> SplitSums:
    """Row i of the result: x[rows[i]] times the weight of its tile's expert.

    weight is [experts, n, k]; a tile has EXPERT_ROWS rows, of which -1 is padding."""
    (_, k), m, n = x.shape, len(rows), weight.shape[1]
    splits, blocks = split_k(n, k)
    out = torch.empty((1, m, n), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n, BN), m // EXPERT_ROWS, 1)
    jit.matmul[grid](
        x, weight, out, rows, experts, m, n, k, splits, blocks,
        EXPERT_ROWS, BN, BK, True, num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    return SplitSums(out)


# ---- row by row


def reduce_splits(sums: SplitSums) -> torch.Tensor:
    """The reduced matrix [rows, width]."""
    if len(sums.splits) == 1 and sums.bias is None:
        return sums.splits[0]
    return add_norm(None, sums, None)


class Norm(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None  # set for a layer norm (zeros if it has none), None for an RMS norm
    eps: float
    offset: float


def add_norm(
    x: torch.Tensor | None,
    sums: SplitSums | None,
    norm: Norm | None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Add `sums` to x in place (into a new tensor without x); return the norm, if one is given."""
    given = x if x is not None else sums.splits[0]  # type: ignore[union-attr]
    rows, width = given.shape
    out = torch.empty_like(given, dtype=dtype) if norm is not None or x is None else given
    kind = "none" if norm is None else "rms" if norm.bias is None else "layer"
    weight, shift, eps, offset = (
        (norm.weight, norm.bias, norm.eps, norm.offset) if norm else (given, None, 0.0, 0.0)
    )
    splits, bias = (sums.splits, sums.bias) if sums is not None else (given[None], None)
    block = triton.next_power_of_2(width)
    # unused pointers are `given`: the kernel does not read them
    jit.add_norm[(rows,)](
        given, splits, given if bias is None else bias, weight, given if shift is None else shift,
        out, rows * width, width, eps, offset,
        len(splits) if sums is not None else 0, bias is not None, x is not None, kind, block,
        num_warps=min(8, max(1, block // 256)), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def qkv_rope_cache(
    qkv: SplitSums,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    offset: float,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    norm_last: bool = False,
) -> torch.Tensor:
    """Norm and rotate queries and keys (`norm_last`: in the other order). Returns queries; writes
    keys and values to the cache."""
    _, heads, size, dim = keys.shape
    queries, rows = qkv.width // dim - 2 * heads, qkv.rows
    q = torch.empty((rows, queries * dim), dtype=torch.float32, device=qkv.splits.device)
    q_norm, k_norm = norms or (q, q)
    cos, sin = angles or (q, q)
    bias = qkv.bias
    jit.qkv_rope_cache[(rows, queries + 2 * heads)](
        qkv.splits, q if bias is None else bias, q_norm, k_norm, positions, cos, sin, slots,
        q, keys, values, rows * qkv.width, heads,
        queries // heads, dim, cos.shape[1] if angles else 0, eps, offset,
        len(qkv.splits), bias is not None,
        "none" if norms is None else "last" if norm_last else "first", angles is not None,
        size, triton.next_power_of_2(dim), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return q


def mlp_activation(up: SplitSums, kind: str, gated: bool, dtype: torch.dtype) -> torch.Tensor:
    """activation(gate) * up, or activation(up) without a gate: [rows, mlp width] in `dtype`."""
    rows, width = up.rows, up.width // (2 if gated else 1)
    out = torch.empty((rows, width), dtype=dtype, device=up.splits.device)
    bias = up.bias
    jit.mlp_activation[(rows, triton.cdiv(width, 1024))](
        up.splits, up.splits if bias is None else bias, out, rows * up.width, width,
        len(up.splits), bias is not None, kind, gated, 1024, enable_fp_fusion=False,
    )  # fmt: skip
    return out


# ---- attention


@dataclass(frozen=True, slots=True, eq=False)
class QueryTiles:
    """Query tiles of attention: each is a run of adjacent rows of one sequence. All are [tiles]."""

    table: torch.Tensor  # [tiles, blocks]: the block table of the tile's sequence
    first_row: torch.Tensor
    count: torch.Tensor  # rows of the tile
    first_position: torch.Tensor
    max_rows: int  # most rows of a tile; 1: tile i is row i

    def part(self, start: int, end: int) -> tuple[int, int, QueryTiles]:
        """(first row, end row, tiles) of the tiles start to end, with rows counted from the first.

        Tiles of one row need no copy from the device, which a CUDA graph does not allow."""
        rows, count = self.first_row[start:end], self.count[start:end]
        first, last = (
            (start, start + len(rows))
            if self.max_rows == 1
            else (int(rows[0]), int(rows[-1] + count[-1]))
        )
        return (
            first,
            last,
            QueryTiles(
                self.table[start:end],
                rows - first,
                count,
                self.first_position[start:end],
                self.max_rows,
            ),
        )


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: QueryTiles,
    spans: int,
    scale: float,
    cap: float,
    window: int | None,
    dtype: torch.dtype,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [rows, heads * dim] over one layer's KV cache -> [rows, heads * dim].

    `sinks` [heads]: one more score per head, without a value."""
    _, kv_heads, size, dim = keys.shape
    rows, heads = len(q), q.shape[1] // dim
    shared = heads // kv_heads
    sums = torch.empty((spans, rows, heads, dim), dtype=torch.float32, device=q.device)
    peaks, masses = (
        torch.empty((spans, rows, heads), dtype=torch.float32, device=q.device) for _ in range(2)
    )
    block = max(16, triton.next_power_of_2(dim))
    lines = max(TILE_LINES, triton.next_power_of_2(shared))
    grid = (len(tiles.count), kv_heads, spans)
    jit.attend[grid](
        q, keys, values, tiles.table, tiles.table.shape[1],
        tiles.first_row, tiles.count, tiles.first_position, sums, peaks, masses,
        rows, kv_heads, dim, scale, cap, window or 0, shared, size, lines, TILE, SPAN, block,
        cap > 0, window is not None, num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    out = torch.empty_like(q, dtype=dtype)
    jit.merge_spans[(rows, heads)](
        sums, peaks, masses, peaks if sinks is None else sinks, out, rows, heads, dim, spans,
        sinks is not None, triton.next_power_of_2(dim),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def max_tile_rows(heads: int, kv_heads: int) -> int:
    """The most rows of a sequence that one query tile holds."""
    shared = heads // kv_heads
    return max(1, TILE_LINES // shared)


def attention_bytes(rows: int, heads: int, dim: int, spans: int) -> int:
    """Bytes of the buffers that hold the spans' partial results (sums, peaks, masses)."""
    return spans * rows * heads * (dim + 2) * 4


def span_count(positions: int) -> int:
    return math.ceil(positions / SPAN)
