"""Device code of the matmul, in Triton, and what it shares with the kernels of jit.py, whose
invariant it keeps. kernels.py launches it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROW_GROUP: tl.constexpr = tl.constexpr(8)  # row tiles that share the weights of a column tile in L2


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Programmatic dependent launch: a kernel starts while the one before it still runs, and waits
    here until that one's results are written. With 1 the next kernel may start after this wait, so
    at most two kernels are on the GPU at once; with 2, that of few rows, at once: their products
    load weights before their wait."""
    if DEPENDENT == 2:
        gdc_launch_dependents()
        gdc_wait()
    elif DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def tile_position(program, ROW_TILES, COLUMN_TILES, GROUP: tl.constexpr):
    """(row tile, column tile) of a program. GROUP row tiles advance together through the columns,
    so that programs that run at the same time share weights and rows in the L2 cache."""
    group = program // (GROUP * COLUMN_TILES)
    first = group * GROUP
    height = tl.minimum(ROW_TILES - first, GROUP)
    inside = program - group * GROUP * COLUMN_TILES
    return first + inside % height, inside // height


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = 0.5 * x * (1.0 + (1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)))
    elif KIND == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit
def activate_joined(x, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """activation(gate) * up of [rows, gate columns and up columns]."""
    gate, up = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS)), (0, 2, 1)))
    return activate(gate, KIND) * up


@triton.jit
def store_tile(out, x, m, n, M, N):
    place = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out + place, x.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M", "BLOCKS"])
def matmul(
    x, w, out, rows, experts, M, N, K, BLOCKS,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATHER: tl.constexpr, TMA: tl.constexpr, GATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Split-K matmul: out[m, n] = sum over k of x[m, k] w[n, k].

    A split is BLOCKS blocks of BK inputs. A program sums SPLITS splits: either all of them in
    order, or one split, whose partial sum it writes to out[split]; the reader then adds the partial
    sums in order (sum_splits). With TMA, x and w are tensor descriptors.
    With GATE, the name of an activation, w has 2 N rows ([2, N, K] with TMA), and a program sums
    all splits: out[m, n] = GATE(x · w[n]) * (x · w[N + n])."""
    row_tile, column_tile = tile_position(
        tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), ROW_GROUP
    )
    m, n = row_tile * BM + tl.arange(0, BM), column_tile * BN + tl.arange(0, BN)
    first = tl.program_id(1)
    wait_for_inputs(DEPENDENT)
    inside, k0 = m < M, tl.arange(0, BK)
    source = m.to(tl.int64)
    if GATHER:  # mixture of experts: rows are sorted by expert; -1 pads a tile
        expert = tl.load(experts + row_tile).to(tl.int64)
        if expert < 0:  # a tile that no expert needs
            return
        source = tl.load(rows + m, mask=inside, other=-1).to(tl.int64)
        w += expert * N * K * (1 if GATE == "none" else 2)
    inside = inside & (source >= 0)
    # With TMA, one instruction multiplies the gate's and the up columns: x is read once for both.
    JOINED: tl.constexpr = TMA and GATE != "none"
    COLUMNS: tl.constexpr = 2 * BN if JOINED else BN
    total, total_up = tl.zeros((BM, COLUMNS), tl.float32), tl.zeros((BM, BN), tl.float32)
    for split in range(SPLITS):
        sum_, up = tl.zeros((BM, COLUMNS), tl.float32), tl.zeros((BM, BN), tl.float32)
        for block in range(BLOCKS):
            start = ((first + split) * BLOCKS + block) * BK
            if TMA:
                a = x.load([row_tile * BM, start])
                if JOINED:
                    b = w.load([0, column_tile * BN, start]).reshape(COLUMNS, BK).T
                else:
                    b = w.load([column_tile * BN, start]).T
            else:
                k = start + k0
                a = tl.load(
                    x + source[:, None] * K + k[None, :],
                    mask=inside[:, None] & (k < K)[None, :],
                    other=0.0,
                ).to(w.dtype.element_ty)
                held = (n < N)[None, :] & (k < K)[:, None]
                b = tl.load(w + n[None, :].to(tl.int64) * K + k[:, None], mask=held, other=0.0)
            # "ieee": full precision for a router, whose weights are float32
            sum_ = tl.dot(a, b, sum_, input_precision="ieee")
            if GATE != "none" and not TMA:
                c = tl.load(
                    w + (N + n[None, :].to(tl.int64)) * K + k[:, None], mask=held, other=0.0
                )
                up = tl.dot(a, c, up)
        total += sum_
        if GATE != "none" and not TMA:
            total_up += up
    if JOINED:
        total = activate_joined(total, GATE, BM, BN)
    elif GATE != "none":
        total = activate(total, GATE) * total_up
    store_tile(out + (first * M).to(tl.int64) * N, total, m, n, M, N)


@triton.jit(do_not_specialize=["M", "BLOCKS"])
def matmul_parts(
    x, tail, w, out, M, N, K, BLOCKS,
    BM: tl.constexpr, TAIL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """matmul with TMA, one split per program, and a tile of BM + TAIL rows: sizes of operands are
    powers of two, and a tile of 192 rows reads the weights once where two of 128 would do it twice.
    `x` and `tail` are descriptors of the same rows."""
    ROWS: tl.constexpr = BM + TAIL
    row_tile, column_tile = tile_position(
        tl.program_id(0), tl.cdiv(M, ROWS), tl.cdiv(N, BN), ROW_GROUP
    )
    split, row = tl.program_id(1), row_tile * ROWS
    wait_for_inputs(DEPENDENT)
    COLUMNS: tl.constexpr = BN if GATE == "none" else 2 * BN
    first = tl.zeros((BM, COLUMNS), tl.float32)
    second = tl.zeros((TAIL, COLUMNS), tl.float32)
    for block in range(BLOCKS):
        start = (split * BLOCKS + block) * BK
        if GATE == "none":
            b = w.load([column_tile * BN, start]).T
        else:
            b = w.load([0, column_tile * BN, start]).reshape(COLUMNS, BK).T
        first = tl.dot(x.load([row, start]), b, first)
        second = tl.dot(tail.load([row + BM, start]), b, second)
    if GATE != "none":
        first = activate_joined(first, GATE, BM, BN)
        second = activate_joined(second, GATE, TAIL, BN)
    n = column_tile * BN + tl.arange(0, BN)
    out += (split * M).to(tl.int64) * N
    store_tile(out, first, row + tl.arange(0, BM), n, M, N)
    store_tile(out, second, row + BM + tl.arange(0, TAIL), n, M, N)
