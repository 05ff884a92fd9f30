"""Launch the Triton kernels of jit.py and jit_matmul.py.

Tensors are float32, except weights, the KV cache and matmul inputs, which their producer casts to
the weight's type once. Launch parameters that affect bits depend on the weight's shape or the
absolute position, never on the number of rows.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton

from verbatim.backend.cuda.kernels import jit, jit_matmul
from verbatim.backend.cuda.kernels.experts import ExpertTiles
from verbatim.backend.cuda.kernels.few_rows import jit_attend as few_rows_attend
from verbatim.backend.cuda.kernels.few_rows import product as few_rows
from verbatim.backend.cuda.kernels.few_rows.product import FEW_ROWS, dependence
from verbatim.backend.cuda.kernels.kv_cache import KvLayer
from verbatim.backend.cuda.kernels.launch import launch
from verbatim.backend.cuda.kernels.matmul_tile import BN, MatmulTile, choose_tile, float32_tile
from verbatim.backend.gpu_weights import BK, split_k

TensorDescriptor: Any = None  # an older Triton has none
with contextlib.suppress(ImportError):
    TensorDescriptor = import_module("triton.tools.tensor_descriptor").TensorDescriptor

PROGRAMS = 264  # programs that fill a large GPU: two per SM of 132
FULL = 248  # programs that leave less of it empty than merging spans would cost
SPAN = 128  # positions that attention reduces at once; spans are merged in order
# columns, warps and stages of an expert's tile, by its height; then with gate and up in one
EXPERT_TILES = {16: (BN, 4, 3), 64: (128, 8, 4), 128: (128, 8, 3)}
GATED_EXPERT_TILES = {16: (32, 4, 3), 64: (64, 8, 4), 128: (64, 8, 3)}
DECODE_LINES = 16  # lines of a query tile of few rows: (row, query head) pairs that share a KV head
PREFILL_LINES = 128  # lines of a query tile of a prompt
# Keys, values and queries share the 227 KiB of an SM (99 KiB of a small GPU). 128 positions of keys
# and values need 128 KiB with heads of 256 (Gemma 3), so a prompt's tile is smaller and has one
# stage; heads larger than WIDE_HEAD (Gemma 4 has 512) also need shorter spans.
LARGE_HEAD = 128
LARGE_LINES = 64
WIDE_HEAD = 256
WIDE_SPAN = 32  # positions per span of such heads; another number changes their bits
WIDE_LINES = 32
LOG2E = 1.4426950408889634
ATTENTION_BUFFER = 256 << 20  # most bytes for the partial results of attention's spans
# activations whose arithmetic has no multiplication that is added to something: fused into the
# matmul, which allows fused multiply-add, they have the bits of their own kernel
FUSED_ACTIVATIONS = ("silu", "relu2")
MOST_SHARED = 4  # query heads per KV head of attend_one
HEADS_PER_PROGRAM = 4  # norm and RoPE: one warp each, so it does not affect the bits


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


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: MatmulTile | None = None,
    out: torch.Tensor | None = None,
    whole: int | None = None,
) -> SplitSums:
    """x [m, k] times weightᵀ, weight [n, k] in half precision.

    x is rounded to the weight's type; sums are float32. `out` [m, n]: where to write them, unless
    they are split. `whole`: rows of the matrix of which a rank has n, which decide the splits."""
    (m, k), n = x.shape, weight.shape[0]
    splits, blocks = split_k(whole or n, k)
    if tile is None and whole is None and few_rows.takes(weight, m):
        return SplitSums(few_rows.product(x, weight, out=out)[0], bias)
    if tile is None:
        tile = (
            float32_tile(m, splits)
            if weight.dtype == torch.float32
            else choose_tile(m, n, k, splits, has_tma(weight))
        )
    if out is None or tile.parallel > 1:
        out = torch.empty((tile.parallel, m, n), dtype=torch.float32, device=x.device)
    else:
        out = out[None]
    _launch_matmul(x, weight, out, tile, n, tile.columns, splits, blocks)
    return SplitSums(out, bias)


def gated_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    kind: str,
    dtype: torch.dtype,
    tile: MatmulTile | None = None,
    whole: int | None = None,
) -> torch.Tensor:
    """mlp_activation(matmul(x, weight)) in one kernel, for weights and activations for which
    can_fuse() is true: [m, n / 2] in `dtype`."""
    (m, k), n = x.shape, weight.shape[0] // 2
    splits, blocks = split_k(whole or 2 * n, k)
    if tile is None and whole is None and few_rows.takes(weight, m):
        return few_rows.product(x, weight, kind, dtype)[0][0]
    if tile is None:
        tile = choose_tile(m, 2 * n, k, splits, has_tma(weight))
        if m <= FEW_ROWS:  # twice as many loads of half the width: keep more of them in flight
            tile = tile._replace(stages=5)
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    _launch_matmul(x, weight, out, tile, n, tile.columns // 2, splits, blocks, kind)
    return out


def can_fuse(weight: torch.Tensor, kind: str, whole: int | None = None) -> bool:
    """Whether gated_matmul computes this activation of a matmul with this weight."""
    n, k = weight.shape
    half = weight.element_size() == 2
    one = split_k(whole or n, k)[0] == 1
    return kind in FUSED_ACTIVATIONS and n % 2 == 0 and one and half


def _launch_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: MatmulTile,
    n: int,
    columns: int,
    splits: int,
    blocks: int,
    gate: str = "none",
) -> None:
    m, k = x.shape
    grid = (triton.cdiv(n, columns) * triton.cdiv(m, tile.rows), tile.parallel, 1)
    a, b, blocks = x, weight, blocks * (BK // tile.inputs)
    rows, tail = tile.parts
    if tile.tma:
        x = x.to(weight.dtype)
        a = TensorDescriptor.from_tensor(x, [rows, tile.inputs])
        if gate == "none":
            b = TensorDescriptor.from_tensor(weight, [columns, tile.inputs])
        else:
            b = TensorDescriptor.from_tensor(weight.view(2, n, k), [2, columns, tile.inputs])
    kernel: object = jit_matmul.matmul
    args: tuple[object, ...] = (a, b, out, out, out, m, n, k, blocks)
    constants: tuple[object, ...] = (
        splits // tile.parallel, rows, columns, tile.inputs, False, tile.tma, gate,
    )  # fmt: skip
    if tail:
        kernel = jit_matmul.matmul_parts
        args = (a, TensorDescriptor.from_tensor(x, [tail, tile.inputs]), b, out, m, n, k, blocks)
        constants = (rows, tail, columns, tile.inputs, gate)
    launch(
        kernel,
        grid,
        args,
        constants,
        warps=tile.warps,
        stages=tile.stages,
        fuse=True,  # for the tensor cores; nothing else multiplies
        dependent=dependence(m),
    )


@functools.cache
def is_large(device: torch.device) -> bool:
    """Whether the GPU has tensor descriptors and the shared memory of a Hopper (227 KiB per block),
    which the largest tiles need."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return bool(properties.major >= 9 and properties.shared_memory_per_block_optin >= 227 << 10)


def has_tma(weight: torch.Tensor) -> bool:
    """Whether tensor descriptors can load this weight: half precision, rows aligned to 16 bytes."""
    return (
        TensorDescriptor is not None
        and weight.element_size() == 2
        and weight.shape[1] % 8 == 0
        and is_large(weight.device)
    )


def expert_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: ExpertTiles,
    rows: torch.Tensor,
    gate: str = "none",
    dtype: torch.dtype = torch.float32,
    whole: int | None = None,
) -> torch.Tensor:
    """Line i of the result: x[rows[i]] times the weight of its tile's expert.

    weight is [experts, n, k]. With `gate`, an activation of FUSED_ACTIVATIONS, it is gate and up,
    and the result is mlp_activation's. Lines of tiles without an expert are not written."""
    (_, k), m, n = x.shape, len(rows), weight.shape[1]
    splits, blocks = split_k(whole or n, k)
    if gate != "none":
        n //= 2
    columns, warps, stages = (EXPERT_TILES if gate == "none" else GATED_EXPERT_TILES)[tiles.height]
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    launch(
        jit_matmul.matmul,
        (triton.cdiv(n, columns) * len(tiles.experts), 1, 1),
        (x, weight, out, rows, tiles.experts, m, n, k, blocks),
        (splits, tiles.height, columns, BK, True, False, gate),
        warps=warps,
        stages=stages,
        fuse=True,
        dependent=dependence(len(tiles.place)),
    )
    return out


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
    launch(
        jit.add_norm,
        (rows, 1, 1),
        (
            given, splits, given if bias is None else bias, weight,
            given if shift is None else shift, out, rows * width, width, eps, offset,
        ),
        (len(splits) if sums is not None else 0, bias is not None, x is not None, kind, block),
        warps=min(8, max(1, block // 256)),
        dependent=dependence(rows),
    )  # fmt: skip
    return out


def heads_per_program(block: int) -> int:
    """Heads of `block` values per program of `qkv_rope_cache`."""
    return HEADS_PER_PROGRAM if 32 <= block <= 128 else 1


def heads_dependence(rows: int, dim: int) -> int:
    """Programs of large heads would wait in the shared memory that the next weights need."""
    return 0 if rows == 1 and dim > LARGE_HEAD else dependence(rows)


class Heads(NamedTuple):
    """Norm and rotation of queries and keys."""

    norms: tuple[torch.Tensor, torch.Tensor] | None  # weights, of queries and of keys
    eps: float
    offset: float
    angles: tuple[torch.Tensor, torch.Tensor] | None
    positions: torch.Tensor
    norm_last: bool = False  # after the rotation

    @property
    def order(self) -> str:
        """The constant NORM of the kernels."""
        return "none" if self.norms is None else "last" if self.norm_last else "first"


def qkv_rope_cache(
    qkv: SplitSums,
    given: Heads,
    kv: KvLayer,
    slots: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Norm and rotate queries and keys. Returns queries in `dtype`; writes keys and values to the
    cache."""
    _, heads, size, dim = kv.keys.shape
    queries, rows = qkv.width // dim - 2 * heads, qkv.rows
    q = torch.empty((rows, queries * dim), dtype=dtype, device=qkv.splits.device)
    block = triton.next_power_of_2(dim)
    group = heads_per_program(block)
    q_norm, k_norm = given.norms or (q, q)
    cos, sin = given.angles or (q, q)
    bias = qkv.bias
    launch(
        jit.qkv_rope_cache,
        (rows, triton.cdiv(queries + 2 * heads, group), 1),
        (
            qkv.splits, q if bias is None else bias, q_norm, k_norm, given.positions, cos, sin,
            slots, q, kv.keys, kv.values, *kv.scales(q), rows * qkv.width, heads, queries // heads,
            dim, cos.shape[1] if given.angles else 0, given.eps, given.offset,
        ),
        (
            len(qkv.splits), bias is not None, given.order, given.angles is not None,
            size, group, block, kv.kind,
        ),
        warps=group,
        dependent=heads_dependence(rows, dim),
    )  # fmt: skip
    return q


def mlp_activation(up: SplitSums, kind: str, gated: bool, dtype: torch.dtype) -> torch.Tensor:
    """activation(gate) * up, or activation(up) without a gate: [rows, mlp width] in `dtype`."""
    rows, width = up.rows, up.width // (2 if gated else 1)
    out = torch.empty((rows, width), dtype=dtype, device=up.splits.device)
    bias = up.bias
    launch(
        jit.mlp_activation,
        (rows, triton.cdiv(width, 1024), 1),
        (up.splits, up.splits if bias is None else bias, out, rows * up.width, width),
        (len(up.splits), bias is not None, kind, gated, 1024),
        dependent=dependence(rows),
    )
    return out


def gated(x: torch.Tensor, gate: SplitSums) -> torch.Tensor:
    """x * sigmoid(gate) [rows, width]."""
    rows, width = x.shape
    out, bias = torch.empty_like(x), gate.bias
    launch(
        jit.gated,
        (rows, triton.cdiv(width, 1024), 1),
        (x, gate.splits, gate.splits if bias is None else bias, out, rows * width, width),
        (len(gate.splits), bias is not None, 1024),
        dependent=dependence(rows),
    )
    return out


# ---- attention


@dataclass(frozen=True, slots=True, eq=False)
class QueryTiles:
    """Query tiles of attention: each is a run of adjacent rows of one sequence. All are [tiles]."""

    table: torch.Tensor  # [tiles, blocks]: the block table of the tile's sequence
    first_row: torch.Tensor
    count: torch.Tensor  # rows of the tile
    first_position: torch.Tensor
    lines: int  # lines of each tile: (row, query head) pairs that share a KV head
    rows: int  # most rows of a tile
    ends: torch.Tensor | None = None  # [rows of the step]: Batch.ends; None: causal


def attend(
    q: torch.Tensor,
    kv: KvLayer,
    tilings: Sequence[QueryTiles],
    spans: int,
    scale: float,
    cap: float,
    window: int | None,
    dtype: torch.dtype,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [rows, heads * dim] over one layer's KV cache -> [rows, heads * dim].

    Each row is in one tile of one of the tilings. `sinks` [heads]: one more score per head,
    without a value."""
    _, kv_heads, size, dim = kv.keys.shape
    rows, heads = len(q), q.shape[1] // dim
    shared, span = heads // kv_heads, span_size(dim)
    spans *= SPAN // span
    factor = LOG2E if cap else LOG2E * scale  # weights are powers of two
    out = torch.empty_like(q, dtype=dtype)
    for tiles in tilings:
        # a program of a prompt's tile or of large heads uses a whole SM, others half of it
        half = tiles.lines == DECODE_LINES and dim <= LARGE_HEAD
        programs = len(tiles.count) * kv_heads * (1 if half else 2)
        merged = merge_in_program(programs, rows * heads * dim, spans)
        sums, peaks, masses = (
            (q, q, q)  # not used
            if merged
            else torch.empty(
                (spans, rows * heads * (dim + 2)), dtype=torch.float32, device=q.device
            )
            .view(-1)
            .split([spans * rows * heads * dim, spans * rows * heads, spans * rows * heads])
        )
        # One stage needs fewer registers. With few lines over fp8 that is faster (168 instead of
        # 203 µs, ADR 24); the bits are the same.
        few = tiles.lines == DECODE_LINES and kv.kind == "fp8"
        full = LARGE_HEAD < dim <= WIDE_HEAD and tiles.lines > WIDE_LINES  # no room for two stages
        launch(
            jit.attend,
            (kv_heads, len(tiles.count), 1 if merged else spans),
            (
                q, kv.keys, kv.values, *kv.scales(q), tiles.table, tiles.table.shape[1],
                tiles.first_row, tiles.count, tiles.first_position, sums, peaks, masses,
                q if merged else span_counters(q.device),
                q if sinks is None else sinks, q if tiles.ends is None else tiles.ends,
                out, rows, kv_heads, dim, scale, cap, factor, window or 0,
            ),
            (
                shared, size, tiles.lines, span, max(16, triton.next_power_of_2(dim)),
                cap > 0, window is not None, kv.kind, merged, sinks is not None,
                kv.keys.numel() >= 1 << 31, tiles.ends is not None,
            ),
            warps=8 if tiles.lines > 64 or full or (dim > WIDE_HEAD and tiles.lines > 16) else 4,
            stages=2 if is_large(q.device) and not few and not full else 1,
            dependent=heads_dependence(rows, dim),
        )  # fmt: skip
    return out


def attend_one(
    qkv: SplitSums,
    heads: Heads,
    kv: KvLayer,
    slots: torch.Tensor,
    tiles: QueryTiles,
    spans: int,
    scale: float,
    cap: float,
    window: int | None,
    dtype: torch.dtype,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """qkv_rope_cache and attend of one row, if takes_one() is true."""
    _, kv_heads, size, dim = kv.keys.shape
    queries = qkv.width // dim - 2 * kv_heads
    block, x, bias = max(16, triton.next_power_of_2(dim)), qkv.splits, qkv.bias
    out = torch.empty((1, queries * dim), dtype=dtype, device=x.device)
    parts = [spans * queries * dim, spans * queries, spans * queries]
    partial = torch.empty(sum(parts), dtype=torch.float32, device=x.device).split(parts)
    q_norm, k_norm = heads.norms or (x, x)
    cos, sin = heads.angles or (x, x)
    launch(
        few_rows_attend.attend_one,
        (kv_heads, spans, 1),
        (
            x, x if bias is None else bias, q_norm, k_norm, heads.positions, cos, sin, slots,
            kv.keys, kv.values, tiles.table, *partial, span_counters(x.device),
            x if sinks is None else sinks, out, qkv.width, kv_heads, dim,
            cos.shape[1] if heads.angles else 0, heads.eps, heads.offset, scale, cap,
            LOG2E if cap else LOG2E * scale, window or 0,
        ),
        (
            len(x), bias is not None, heads.order, heads.angles is not None,
            queries // kv_heads, size, tiles.lines, SPAN, block, cap > 0, window is not None,
            sinks is not None, kv.keys.numel() >= 1 << 31,
        ),
        dependent=dependence(1),
    )  # fmt: skip
    return out


def takes_one(qkv: SplitSums, kv: KvLayer, tilings: Sequence[QueryTiles], spans: int) -> bool:
    """Whether attend_one computes this step: one row, a float16 cache, few query heads per KV head,
    heads that fit into registers, and spans that are not merged in one program."""
    _, kv_heads, _, dim = kv.keys.shape
    shared = qkv.width // dim // kv_heads - 2
    return (
        qkv.rows == 1
        and few_rows.available()
        and kv.kind == "f16"
        and shared <= MOST_SHARED
        and 64 <= triton.next_power_of_2(dim) <= LARGE_HEAD
        and tilings[0].lines == DECODE_LINES
        and not merge_in_program(kv_heads, kv_heads * shared * dim, spans)
    )


@functools.cache
def span_counters(device: torch.device) -> torch.Tensor:
    """Zeros, one per tile and KV head of a launch whose spans are not merged in one program (see
    merge_in_program). Every launch leaves them zero, so all launches share them."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


def merge_in_program(programs: int, values: int, spans: int) -> bool:
    """Whether one program reduces all spans of a tile: there is one, or enough programs fill the
    GPU, or the spans' partial results need too much memory."""
    return spans == 1 or programs >= FULL or spans * values * 4 > ATTENTION_BUFFER


def tile_lines(heads: int, kv_heads: int, dim: int, rows: int, device: torch.device) -> int:
    """Lines of the query tiles of a sequence that computes this many rows in a step. kv_heads: the
    fewest of a layer; dim: the largest head."""
    shared = heads // kv_heads
    most = LARGE_LINES if dim > LARGE_HEAD else PREFILL_LINES
    if not is_large(device):
        most //= 2
    if dim > WIDE_HEAD:
        most = WIDE_LINES
    lines = DECODE_LINES if rows * shared <= DECODE_LINES else most
    return max(lines, int(triton.next_power_of_2(shared)))


def span_size(dim: int) -> int:
    """Positions that attention with heads of `dim` reduces at once."""
    return SPAN if dim <= WIDE_HEAD else min(SPAN, WIDE_SPAN)


def span_count(positions: int) -> int:
    return math.ceil(positions / SPAN)
