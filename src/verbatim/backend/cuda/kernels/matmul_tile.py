"""MatmulTile: how a matmul is launched, and the choice of the fastest one for a shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

from verbatim.backend.gpu_weights import BK

BN = 64  # outputs per tile of a matmul without tensor descriptors


class MatmulTile(NamedTuple):
    """How a matmul is launched. None of it affects the bits."""

    rows: int
    columns: int
    inputs: int  # inputs per block
    warps: int
    stages: int  # blocks prefetched at once
    parallel: int  # programs that share the splits of a tile: 1, or one per split
    tma: bool  # loads by tensor descriptors; the GPU is Hopper or newer

    @property
    def parts(self) -> tuple[int, int]:
        """Rows of the two operands of a tile with 192 rows; otherwise all rows, and none."""
        return (128, 64) if self.rows == 192 else (self.rows, 0)


class TileRate(NamedTuple):
    """TFLOP/s that a tile reaches on all SMs of an H200 (docs/gpu-performance.md): with one program
    per SM, and with two, which hide each other's start and end; 0: two do not fit into an SM."""

    alone: float
    paired: float = 0.0


# Tiles of the tensor-core kernel: rows, columns, inputs, warps, stages. As many stages as fit into
# an SM, except for a tile of which two share one.
TILES = {
    (128, 256, 64, 8, 4): TileRate(740.0),
    (192, 256, 64, 8, 4): TileRate(725.0),
    (192, 128, 64, 4, 5): TileRate(690.0),
    (128, 128, 64, 4, 6): TileRate(720.0),
    (128, 128, 64, 4, 3): TileRate(470.0, 690.0),
    (64, 256, 64, 4, 5): TileRate(700.0),
    (64, 128, 64, 4, 7): TileRate(490.0),
    (64, 64, 128, 4, 6): TileRate(340.0),
}
SMS = 132
SUM_BANDWIDTH = 4.5e6  # bytes per µs at which partial sums are written and read
START_TIME = 1.0  # µs until the first blocks of a program are loaded, if it is alone on its SM
# share of the time that rows beyond the last one cost on top: their loads are slower than others
PADDING_COST = 0.5
SPLIT_TIME = 1.0  # µs to drain and refill the prefetched blocks at the end of a split, likewise


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
        flops = 2.0 * tile.rows * tile.columns * k / tile.parallel * SMS / 1e6
        sums = 8.0 * m * n * tile.parallel if tile.parallel > 1 else 0.0
        rate = TILES[tile[:5]]
        busiest = triton.cdiv(programs, SMS)  # programs of the SM that has the most
        pairs, single = divmod(busiest, 2) if rate.paired else (0, busiest)
        exposed = START_TIME + SPLIT_TIME * splits / tile.parallel
        time = single * (flops / rate.alone + exposed)
        if pairs:
            time += 2 * pairs * flops / rate.paired
        rows = triton.cdiv(m, tile.rows) * tile.rows
        time *= 1.0 + PADDING_COST * (rows - m) / rows
        return float(time + sums / SUM_BANDWIDTH)

    return min(tma_tiles(splits), key=microseconds)


def float32_tile(m: int, splits: int) -> MatmulTile:
    """The tile for float32 weights, which are those of a router: few outputs, and tensor cores do
    not multiply them in full precision. So small tiles, and a program per split."""
    if m <= 16:
        return MatmulTile(2, 32, BK // 2, 2, 6, splits, False)
    if m <= 64:
        return MatmulTile(8, 32, BK // 2, 4, 4, splits, False)
    size = 32 if m <= 512 else 64
    return MatmulTile(size, size, BK // 4, 4, 3, splits, False)


def tma_tiles(splits: int) -> list[MatmulTile]:
    """Tiles of which two share an SM were not faster with parallel splits. Tiles of two parts have
    no registers for the sums of several splits."""
    tiles = [
        MatmulTile(*tile, parallel, True)
        for tile, rate in TILES.items()
        for parallel in ({1} if rate.paired else {1, splits})
    ]
    return [tile for tile in tiles if tile.parallel == splits or not tile.parts[1]]


def all_tiles(splits: int, tma: bool) -> list[MatmulTile]:
    """Every tile that choose_tile may return for a weight with this number of splits."""
    few = [MatmulTile(16, columns, BK, 4, 3, splits, False) for columns in (32, 64)]
    if tma:
        return few + tma_tiles(splits)
    return few + [choose_tile(m, BN, BK, splits, False) for m in (32, 256, 512)]
