"""Device code of products of FP8 (e4m3) on tensor cores, in Triton. scaled_product.py launches it.

Invariant: the bits of an output depend on its row and its weights alone. Weights are the first
operand of the tensor core for any number of rows, because another instruction adds in another way.
"""

import triton
import triton.language as tl

from verbatim.backend.cuda.kernels.jit_kv import e4m3_codes
from verbatim.backend.cuda.kernels.jit_matmul import (
    ROW_GROUP,
    activate_joined,
    store_tile,
    tile_position,
    wait_for_inputs,
)

GROUP: tl.constexpr = tl.constexpr(128)  # inputs that share a scale
LARGEST: tl.constexpr = tl.constexpr(448.0)  # of e4m3
SMALLEST: tl.constexpr = tl.constexpr(2.0**-100)  # the largest input of a group counts as this


@triton.jit(do_not_specialize=["M"])
def quantise_rows(x, codes, scales, M, K, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr):
    """Codes [M, K] and scales [K / GROUP, M] of rows in bfloat16: a group's scale is its largest
    magnitude / 448, both divisions are rounded to nearest."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    wait_for_inputs(DEPENDENT)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), 1), SMALLEST)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + LARGEST)
    code = e4m3_codes(tl.div_rn(values, tl.broadcast_to(scale[:, None], (GROUPS, GROUP))))
    tl.store(codes + row * K + k, code, mask=k < K)
    tl.store(scales + group.to(tl.int64) * M + row, scale, mask=group * GROUP < K)


@triton.jit(do_not_specialize=["M", "BLOCKS"])
def matmul_scaled(
    x, x_scales, w, w_scales, out, M, N, GROUPS, BLOCKS,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """jit_matmul.matmul with TMA: out[m, n] = sum over the groups, in order, of the product of
    their codes times x_scales[group, m] * w_scales[n / GROUP, group].

    A split is BLOCKS groups. BN rows of weights per program, with GATE half of them of the gate."""
    COLUMNS: tl.constexpr = BN if GATE == "none" else BN // 2
    row_tile, column_tile = tile_position(
        tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, COLUMNS), ROW_GROUP
    )
    first, column = tl.program_id(1), column_tile * COLUMNS
    m = row_tile * BM + tl.arange(0, BM)
    of_tile = w_scales + column // GROUP * GROUPS
    wait_for_inputs(DEPENDENT)
    total = tl.zeros((BN, BM), tl.float32)
    for split in range(SPLITS):
        sum_ = tl.zeros((BN, BM), tl.float32)
        for block in range(BLOCKS):
            group = (first + split) * BLOCKS + block
            held = tl.minimum(group, GROUPS - 1)  # codes behind the last group are zeros
            scale = tl.load(x_scales + held * M + m, mask=m < M, other=0.0)
            b = x.load([row_tile * BM, group * GROUP]).T
            if GATE == "none":
                a = w.load([column, group * GROUP])
                scale = scale * tl.load(of_tile + held)
                sum_ += tl.dot(a, b) * scale[None, :]
            else:
                a = w.load([0, column, group * GROUP]).reshape(BN, GROUP)
                gate = tl.load(of_tile + held)
                up = tl.load(of_tile + N // GROUP * GROUPS + held)
                of_row = tl.where(tl.arange(0, BN) < COLUMNS, gate, up)
                sum_ += tl.dot(a, b) * (of_row[:, None] * scale[None, :])
        total += sum_
    rows = total.T
    if GATE != "none":
        rows = activate_joined(rows, GATE, BM, COLUMNS)
    n = column + tl.arange(0, COLUMNS)
    store_tile(out + (first * M).to(tl.int64) * N, rows, m, n, M, N)
