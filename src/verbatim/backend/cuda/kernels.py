"""What launches the device code (jit.py). In and out: torch tensors, float32 unless a weight or the cache is meant, or what is written for a product
to read: that is rounded to the weight's type once, where it is written, and not wherever it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from verbatim.backend.cuda import jit

BN, BK = (
    64,
    128,
)  # a product's tile: outputs, and inputs of one turn. They decide its pieces, so they are not for tuning
PROGRAMS = 264  # programs that keep the memory of a large GPU busy: two for each of 132 processors
STAGES = 3  # turns whose weights are on their way at once
MANY = 256  # beyond so many rows a product's tiles are larger, and their turns shorter
FEW = 16  # up to so many rows the pieces of a product are computed side by side
TILE = 64  # positions that attention looks at together
SPAN = 512  # positions whose tiles are added up in order before spans are
EXPERT_ROWS = 16  # rows of a tile of a mixture's products
SCORES = 16  # rows of a tile of scores: query heads that share a key head, and positions


def parts_of(n: int, k: int) -> tuple[int, int]:
    """(pieces, blocks of BK inputs in each) of a product with a weight [n, k]."""
    blocks = triton.cdiv(k, BK)
    parts = max(1, min(PROGRAMS // triton.cdiv(n, BN), blocks // 2))
    each = triton.cdiv(blocks, parts)
    return triton.cdiv(blocks, each), each


# ------------------------------------------------------------------------------------------------------------- products


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A matrix that is still to be added up, by whoever reads it: [pieces, rows, width], and a bias [width]."""

    parts: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def width(self) -> int:
        return int(self.parts.shape[2])

    @property
    def rows(self) -> int:
        return int(self.parts.shape[1])


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Pieces:
    """x [m, k] times weightᵀ, weight [n, k] in half precision; x is rounded to the weight's type, sums are float32."""
    (m, k), n = x.shape, weight.shape[0]
    parts, each = parts_of(n, k)
    apart = m <= FEW
    found = torch.empty((parts if apart else 1, m, n), dtype=torch.float32, device=x.device)
    bm, bk, stages = 16 if m <= 16 else 32 if m <= 32 else 64, BK, STAGES
    if m > MANY:
        bm, bk, stages = 128, BK // 2, STAGES + 1
    grid = (triton.cdiv(n, BN), triton.cdiv(m, bm), parts if apart else 1)
    jit.product[grid](
        x, weight, found, x, x, m, n, k, 1 if apart else parts, each * (BK // bk), bm, BN, bk, False, num_warps=4, num_stages=stages
    )  # fmt: skip
    return Pieces(found, bias)


def expert_product(
    x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor
) -> Pieces:
    """Row i of the result: x[rows[i]] times the weight of its tile's expert; weight [experts, n, k], EXPERT_ROWS a tile, -1: no row."""
    (_, k), m, n = x.shape, len(rows), weight.shape[1]
    parts, each = parts_of(n, k)
    out = torch.empty((1, m, n), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n, BN), m // EXPERT_ROWS, 1)
    jit.product[grid](
        x,
        weight,
        out,
        rows,
        experts,
        m,
        n,
        k,
        parts,
        each,
        EXPERT_ROWS,
        BN,
        BK,
        True,
        num_warps=4,
        num_stages=STAGES,
    )
    return Pieces(out)


# ------------------------------------------------------------------------------------------------------------ row by row


def whole(pieces: Pieces) -> torch.Tensor:
    """The matrix itself."""
    if len(pieces.parts) == 1 and pieces.bias is None:
        return pieces.parts[0]
    return settle(None, pieces, None)


class Norm(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None  # a layer norm has one, an RMS norm none
    eps: float
    offset: float


def settle(
    x: torch.Tensor | None,
    pieces: Pieces | None,
    norm: Norm | None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """x + pieces, in place of x (or anew where there is no x); returns its norm where one is given."""
    given = x if x is not None else pieces.parts[0]  # type: ignore[union-attr]
    rows, width = given.shape
    out = torch.empty_like(given, dtype=dtype) if norm is not None or x is None else given
    kind = "none" if norm is None else "rms" if norm.bias is None else "layer"
    weight, shift, eps, offset = (
        (norm.weight, norm.bias, norm.eps, norm.offset) if norm else (given, None, 0.0, 0.0)
    )
    parts, bias = (pieces.parts, pieces.bias) if pieces is not None else (given[None], None)
    block = triton.next_power_of_2(width)
    jit.settle[(rows,)](
        given, parts, given if bias is None else bias, weight, given if shift is None else shift, out, rows * width, width, eps, offset,
        len(parts) if pieces is not None else 0, bias is not None, x is not None, kind, block, num_warps=min(8, max(1, block // 256)), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def prepare(
    joined: Pieces,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    offset: float,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Queries, ready to ask; keys and values are in the cache afterwards."""
    _, heads, size, dim = keys.shape
    queries, rows = joined.width // dim - 2 * heads, joined.rows
    q = torch.empty((rows, queries * dim), dtype=torch.float32, device=joined.parts.device)
    q_norm, k_norm = norms or (q, q)
    cos, sin = angles or (q, q)
    bias = joined.bias
    jit.prepare[(rows, queries + 2 * heads)](
        joined.parts, q if bias is None else bias, q_norm, k_norm, positions, cos, sin, slots, q, keys, values, rows * joined.width, heads,
        queries // heads, dim, cos.shape[1] if angles else 0, eps, offset, len(joined.parts), bias is not None, norms is not None, angles is not None,
        size, triton.next_power_of_2(dim), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return q


def inner(wide: Pieces, kind: str, gated: bool, dtype: torch.dtype) -> torch.Tensor:
    rows, width = wide.rows, wide.width // (2 if gated else 1)
    out = torch.empty((rows, width), dtype=dtype, device=wide.parts.device)
    bias = wide.bias
    jit.inner[(rows, triton.cdiv(width, 1024))](
        wide.parts,
        wide.parts if bias is None else bias,
        out,
        rows * wide.width,
        width,
        len(wide.parts),
        bias is not None,
        kind,
        gated,
        1024,
        enable_fp_fusion=False,
    )
    return out


# ------------------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """What attention takes together: runs of adjacent rows of one sequence. Its own blocks for each run, all [runs]."""

    table: torch.Tensor  # [runs, blocks]
    first_row: torch.Tensor
    count: torch.Tensor
    first_position: torch.Tensor
    most: int  # rows of a run; 1: run i is row i

    def part(self, start: int, end: int) -> tuple[int, int, Runs]:
        """Some of the runs, as if they were all, and the rows that are theirs. Runs of one row are told apart without a look at the device, which no graph allows."""
        rows, count = self.first_row[start:end], self.count[start:end]
        first, last = (
            (start, start + len(rows))
            if self.most == 1
            else (int(rows[0]), int(rows[-1] + count[-1]))
        )
        return (
            first,
            last,
            Runs(
                self.table[start:end],
                rows - first,
                count,
                self.first_position[start:end],
                self.most,
            ),
        )


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, runs: Runs, spans: int, scale: float, cap: float, window: int | None, dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """q [rows, heads * dim] over the cache of one layer."""
    _, kv_heads, size, dim = keys.shape
    rows, heads = len(q), q.shape[1] // dim
    shared = heads // kv_heads
    sums = torch.empty((spans, rows, heads, dim), dtype=torch.float32, device=q.device)
    peaks, masses = (
        torch.empty((spans, rows, heads), dtype=torch.float32, device=q.device) for _ in range(2)
    )
    block = max(16, triton.next_power_of_2(dim))
    lines = max(SCORES, triton.next_power_of_2(shared))
    grid = (len(runs.count), kv_heads, spans)
    jit.attend[grid](
        q, keys, values, runs.table, runs.table.shape[1], runs.first_row, runs.count, runs.first_position, sums, peaks, masses,
        rows, kv_heads, dim, scale, cap, window or 0, shared, size, lines, TILE, SPAN, block, cap > 0, window is not None, num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    out = torch.empty_like(q, dtype=dtype)
    jit.add_spans[(rows, heads)](
        sums,
        peaks,
        masses,
        out,
        rows,
        heads,
        dim,
        spans,
        triton.next_power_of_2(dim),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def rows_in_a_run(heads: int, kv_heads: int) -> int:
    """How many rows of a sequence one program of `attend` may take."""
    shared = heads // kv_heads
    return max(1, SCORES // shared)


def attention_bytes(rows: int, heads: int, dim: int, spans: int) -> int:
    return spans * rows * heads * (dim + 2) * 4


def spans_of(positions: int) -> int:
    return math.ceil(positions / SPAN)
