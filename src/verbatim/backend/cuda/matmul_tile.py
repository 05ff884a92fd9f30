"""MatmulTile: how a matmul is launched, and the choice of the fastest one for a shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

from verbatim.backend.gpu_layout import BK

BN = 64  # outputs per tile of a matmul without tensor descriptors


class MatmulTile(NamedTuple):
    """How a matmul is launched. None of it affects the bits."""

    rows: int
    columns: int
    inputs: int  # of a block
    warps: int
    stages: int  # blocks prefetched at once
    parallel: int  # programs that share the splits of a tile: 1, or one per split
    tma: bool  # loads by tensor descriptors; the GPU is Hopper or newer


# Tiles of the tensor-core kernel (rows, columns, inputs, warps, stages) and the rate that each
# reaches on an H200 when it fills all 132 SMs, in TFLOP/s (docs/gpu-performance.md).
TILES = {
    (128, 256, 64, 8, 4): 740.0,
    (128, 128, 64, 4, 4): 640.0,
    (64, 256, 64, 4, 4): 640.0,
    (64, 128, 64, 4, 5): 460.0,
    (64, 64, 128, 4, 4): 340.0,
}
SMS = 132
SUM_BANDWIDTH = 4.5e6  # bytes per µs at which partial sums are written and read
SPLIT_TIME = 1.0  # µs to drain and refill the prefetched blocks at the end of a split


@functools.cache
def choose_tile(m: int, n: int, k: int, splits: int, tma: bool) -> MatmulTile:
    """The tile with the shortest predicted time: whole waves of programs over the SMs, and the
    traffic of partial sums."""
    if m <= 16:
        columns = 64 if triton.cdiv(n, 64) * splits >= SMS else 32
        return MatmulTile(16, columns, BK, 4, 3, splits, False)
    if not tma:
        rows = 32 if m <= 32 else 64 if m <= 256 else 128
        block = BK if m <= 256 else BK // 2
        return MatmulTile(rows, BN, block, 4, 3 if m <= 256 else 4, 1, False)

    def microseconds(tile: MatmulTile) -> float:
        programs = triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns) * tile.parallel
        flops = 2.0 * tile.rows * tile.columns * k / tile.parallel
        sums = 8.0 * m * n * tile.parallel if tile.parallel > 1 else 0.0
        rate = TILES[tile[:5]] / SMS * 1e6  # of one SM, per µs
        program = flops / rate + SPLIT_TIME * splits / tile.parallel
        return float(triton.cdiv(programs, SMS) * program + sums / SUM_BANDWIDTH)

    return min(tma_tiles(splits), key=microseconds)


def tma_tiles(splits: int) -> list[MatmulTile]:
    return [MatmulTile(*tile, parallel, True) for tile in TILES for parallel in {1, splits}]


def all_tiles(splits: int, tma: bool) -> list[MatmulTile]:
    """Every tile that choose_tile may return for a weight with this number of splits."""
    few = [MatmulTile(16, columns, BK, 4, 3, splits, False) for columns in (32, 64)]
    if tma:
        return few + tma_tiles(splits)
    return few + [choose_tile(m, BN, BK, splits, False) for m in (32, 256, 512)]
