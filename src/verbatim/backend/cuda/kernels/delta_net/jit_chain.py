"""Device code of the chain of blocks of a delta net, in Gluon. recurrent.py launches it.

Invariant: the bits of jit_recurrent.delta_advance and delta_outputs, if all numbers are finite.
Each sum is the same chain of the tensor core's instructions of 8 inputs.

Everything is transposed: a warp owns 16 values of a head, and their state [values, keys] stays in
its registers from block to block (`bad` is NaN for values whose state is not finite, which rounding
would hide, and 0 for others). A result of the tensor core is the next product's first operand
without moving between threads, if its columns are permuted: column 8h + 2q + e of 16 holds key, or
position, 8e + 4h + q. Row 8r + g of 16 holds value 2g + r, so a thread stores pairs of values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from verbatim.backend.cuda.kernels.few_rows.jit_product import _barrier, _copy, start_next, wait

SIZE: gl.constexpr = gl.constexpr(16)  # positions of a block


@gluon.jit
def wait_for_inputs(DEPENDENT: gl.constexpr):
    """jit_matmul.wait_for_inputs; with 2, the next kernel has been started."""
    if DEPENDENT:
        wait()
    if DEPENDENT == 1:
        start_next()


@gluon.jit
def place_of(c):
    """The position in column c of a result."""
    return c % 2 * 8 + c // 8 * 4 + c // 2 % 4


@gluon.jit
def natural(x, pairs: gl.constexpr):
    """A result [rows, columns] as [keys or positions, values]."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    x = x.reshape([M // 16, 2, 8, N // 16, 2, 4, 2]).permute([3, 6, 4, 5, 0, 2, 1])
    return gl.convert_layout(x.reshape([N, M]), pairs, assert_trivial=True)


@gluon.jit
def as_result(x, mma: gl.constexpr):
    """The inverse of `natural`."""
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    x = x.reshape([N // 16, 2, 2, 4, M // 16, 8, 2]).permute([4, 6, 5, 0, 2, 3, 1])
    return gl.convert_layout(x.reshape([M, N]), mma, assert_trivial=True)


@gluon.jit
def multiply(x, y, total):
    """x times y, added to total. x is a result, whose columns become those of a first operand."""
    left: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 1)
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    x = x.reshape([M, N // 16, 2, 4, 2]).permute([0, 1, 4, 2, 3]).reshape([M, N])
    x = gl.convert_layout(x, left, assert_trivial=True)
    return mma_v2(x, y, total, input_precision="tf32")


@gluon.jit
def cut(x):
    """Round finite values to tf32. A value that is not finite becomes any number."""
    bits = x.to(gl.int32, bitcast=True) + 0x1000 & -0x2000
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def times_matrix(x, matrix):
    """tl.dot(matrixᵀ, xᵀ) with three tf32 parts. A value of x that is not finite counts as 0 for
    others, and becomes NaN itself. If one of the matrix is not, its small part is NaN."""
    nothing = x * 0.0  # NaN where x is not finite
    x = gl.where(nothing == 0.0, x, 0.0)
    big, x_big = cut(matrix), cut(x)
    y = multiply(x_big, matrix - big, gl.zeros_like(x))
    y = multiply(x - x_big, big, y)
    return multiply(x_big, big, y) + nothing


@gluon.jit
def make_rings(DK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr):
    """Places for the keys, the queries and the values of some blocks."""
    lines: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    short: gl.constexpr = gl.SwizzledSharedLayout(8, 2, min(4, BV // 8), [1, 0])
    return (
        gl.allocate_shared_memory(gl.float32, [STAGES, SIZE, DK], lines),
        gl.allocate_shared_memory(gl.float32, [STAGES, SIZE, DK], lines),
        gl.allocate_shared_memory(gl.float32, [STAGES, SIZE, BV], short),
    )


@gluon.jit
def copy_block(
    rings, inputs, slot, block, tile, run, head, part, DV: gl.constexpr,
    KEY_HEADS: gl.constexpr, VALUE_HEADS: gl.constexpr, TILED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start to copy a block's keys and values, and its queries of this step, zeros for all others.
    What lies behind `end` may be anything. Row q0 + 2e + 4q1 + 8h is position 8e + 4h + 2q1 + q0,
    so that no read has bank conflicts. Rows of values are in the order of columns."""
    tile0, _, first, start, end, row0 = run
    position = first + (tile - tile0) * SIZE
    DK: gl.constexpr = rings[0].shape[2]
    BV: gl.constexpr = 16 * WARPS
    key_head = head % KEY_HEADS if TILED else head * KEY_HEADS // VALUE_HEADS
    ACROSS: gl.constexpr = min(32, DK // 4)
    lines: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    r = gl.arange(0, SIZE, gl.SliceLayout(1, lines))
    t = r % 2 + r // 4 % 2 * 2 + r // 8 * 4 + r // 2 % 2 * 8
    i = gl.arange(0, DK, gl.SliceLayout(0, lines))[None, :]
    keys = inputs[1] + (block * KEY_HEADS + key_head) * SIZE * DK
    _copy(rings[0].index(slot), keys + (t[:, None] * DK + i))
    queries = inputs[0] + ((row0 + position - start).to(gl.int64) * KEY_HEADS + key_head) * DK
    fresh = ((position + t < end) & (position + t >= start))[:, None] & (i < DK)
    _copy(rings[1].index(slot), queries + ((t * KEY_HEADS * DK)[:, None] + i), mask=fresh)
    short: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BV, BV // 4], [WARPS, 1], [1, 0])
    t = place_of(gl.arange(0, SIZE, gl.SliceLayout(1, short)))[:, None]
    j = part * BV + gl.arange(0, BV, gl.SliceLayout(0, short))[None, :]
    values = inputs[2] + (block * VALUE_HEADS + head) * SIZE * DV
    _copy(rings[2].index(slot), values + (t * DV + j))
    async_copy.commit_group()


@gluon.jit
def load_solved(solved, tile, head, mma: gl.constexpr, VALUE_HEADS: gl.constexpr):
    """What delta_solve computed for a tile."""
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 1)
    own = tile.to(gl.int64) * VALUE_HEADS + head
    s = gl.arange(0, SIZE, gl.SliceLayout(1, right))[:, None]
    at = place_of(gl.arange(0, SIZE, gl.SliceLayout(0, right)))[None, :] * SIZE + s
    matrix = gl.load(solved[0] + own * SIZE * SIZE + at)
    scores = gl.load(solved[1] + own * SIZE * SIZE + at)
    t = place_of(gl.arange(0, SIZE, gl.SliceLayout(0, mma)))
    decays = solved[2] + own * 2 * SIZE
    whole = gl.load(decays + (SIZE - 1))
    return matrix, scores, gl.load(decays + t), gl.load(decays + SIZE + t), whole


@gluon.jit
def times_state(rings, slot, state):
    """The products of a state with the keys and with the queries of a block."""
    mma: gl.constexpr = state.type.layout
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 1)
    DK: gl.constexpr = state.shape[1]
    by_row: gl.constexpr = [4, 0, 1, 3, 2]  # rows h, q1, e, q0 as columns h, q, e
    k = rings[0].index(slot).reshape([2, 2, 2, 2, DK]).permute(by_row).reshape([DK, SIZE])
    q = rings[1].index(slot).reshape([2, 2, 2, 2, DK]).permute(by_row).reshape([DK, SIZE])
    # the tensor core cuts the last bits off; NaN becomes a number, see `bad`
    rounded = (state.to(gl.int32, bitcast=True) + 0x1000).to(gl.float32, bitcast=True)
    zero = gl.zeros([state.shape[0], SIZE], gl.float32, mma)
    return multiply(rounded, k.load(right), zero), multiply(rounded, q.load(right), zero)


@gluon.jit
def changes(rings, slot, by_k, grown, bad):
    """Values less what the state holds for their keys; NaN where the state is."""
    BV: gl.constexpr = by_k.shape[0]
    v = rings[2].index(slot).reshape([SIZE, BV // 16, 8, 2]).permute([1, 3, 2, 0])
    v = v.reshape([BV, SIZE]).load(by_k.type.layout)
    return v - grown[None, :] * by_k + bad[:, None]


@gluon.jit
def advanced(rings, slot, state, added, whole):
    """The state after a block. `whole`: the decay of each value."""
    DK: gl.constexpr = state.shape[1]
    k = rings[0].index(slot).reshape([2, 2, 2, 2, DK // 16, 2, 2, 4])
    k = k.permute([2, 0, 1, 3, 4, 6, 7, 5]).reshape([SIZE, DK])
    added = gl.inline_asm_elementwise(  # jit_recurrent.to_tf32
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [added], dtype=gl.float32, is_pure=True, pack=1
    )
    k = k.load(gl.DotOperandLayout(1, state.type.layout, 1))
    return multiply(added, k, state * whole[:, None])


@gluon.jit
def store_rows(out, y, change, grown, tile, run, line, ROW: gl.constexpr, pairs: gl.constexpr):
    """The outputs of a block's rows in this step, of ROW values each."""
    tile0, _, first, start, end, row0 = run
    position = first + (tile - tile0) * SIZE
    y = natural(grown[None, :] * y + change, pairs)
    at = position + gl.arange(0, SIZE, gl.SliceLayout(1, pairs))[:, None]
    to = out + (row0 + position - start).to(gl.int64) * ROW + line
    gl.store(to, y, mask=(at >= start) & (at < end))


@gluon.jit
def next_block(
    carried, tile, run, rings, inputs, solved, states, blocks, out, cell, line, head, part,
    pairs: gl.constexpr, KEY_HEADS: gl.constexpr, VALUE_HEADS: gl.constexpr, DV: gl.constexpr,
    TILED: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """From a tile to the next: the state between them, its products, and the outputs of the tile
    before, which are computed while the products of this one are."""
    state, bad, by_k, by_q, y, added, before, now, block = carried
    matrix, scores, grown, rest, whole = now
    mma: gl.constexpr = by_k.type.layout
    DK: gl.constexpr = state.shape[1]
    slot, tile0, last = (tile - run[0]) % STAGES, run[0], run[1]
    following = gl.load(blocks + tile + 1).to(gl.int64)
    behind = load_solved(solved, tile + 1, head, mma, VALUE_HEADS)
    change = changes(rings, slot, by_k, grown, bad)
    bad += gl.sum(change * 0.0, 1)
    outputs = times_matrix(added, before[0])
    added = times_matrix(change, matrix)
    store_rows(out, y, outputs, before[1], tile - 1, run, line, VALUE_HEADS * DV, pairs)
    kept = added * rest[None, :]
    state = advanced(rings, slot, state, kept, whole + bad)
    bad += gl.sum(kept * 0.0, 1)
    async_copy.wait_group(STAGES - 2)
    _barrier()  # the next block is there, and every warp has read this one
    y = by_q
    by_k, by_q = times_state(rings, (tile + 1 - tile0) % STAGES, state)
    place = (following * VALUE_HEADS + head) * DK * DV
    gl.store(states + place + cell, natural(state, pairs))
    copy_block(
        rings, inputs, slot, block.to(gl.int64), tile + STAGES, run, head, part, DV,
        KEY_HEADS, VALUE_HEADS, TILED, WARPS,
    )  # fmt: skip
    block = gl.load(blocks + gl.minimum(tile + STAGES + 1, last))
    return state, bad, by_k, by_q, y, added, (scores, grown), behind, block


@gluon.jit
def first_state(states, block, first, head, cell, VALUE_HEADS: gl.constexpr, DV: gl.constexpr):
    """The state before a run's first block: zero before a sequence."""
    place = (block.to(gl.int64) * VALUE_HEADS + head) * cell.shape[0] * DV
    held = gl.full(cell.shape, 1, gl.int1, cell.type.layout) & (first > 0)
    return gl.load(states + place + cell, mask=held, other=0.0)


@gluon.jit
def last_rows(
    carried, run, rings, out, line, ROW: gl.constexpr, pairs: gl.constexpr, STAGES: gl.constexpr
):
    """The outputs of the last two tiles."""
    _, bad, by_k, by_q, y, added, before, now, _ = carried
    tile0, last, _, _, _, _ = run
    outputs = times_matrix(added, before[0])
    store_rows(out, y, outputs, before[1], last - 1, run, line, ROW, pairs)
    added = changes(rings, (last - tile0) % STAGES, by_k, now[2], bad)
    outputs = times_matrix(times_matrix(added, now[0]), now[1])
    store_rows(out, by_q, outputs, now[2], last, run, line, ROW, pairs)


@gluon.jit
def chain(
    queries, keys, values, states, solved, mixed, decays, tiles, blocks, positions, starts, ends,
    rows, out,
    KEY_HEADS: gl.constexpr, VALUE_HEADS: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr,
    TILED: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The blocks of a sequence, for 16 * WARPS values of one value head: the state before each
    block but the first, and the outputs of the rows of this step, before norm and gate."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    pairs: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [1, WARPS], [0, 1])
    BV: gl.constexpr = 16 * WARPS
    if DEPENDENT == 2:
        start_next()
    head, part = gl.program_id(1), gl.program_id(2)
    tiles += gl.program_id(0)
    tile0, last = gl.load(tiles), gl.load(tiles + 1) - 1
    if tile0 <= last:
        first, end = gl.load(positions + tile0), gl.load(ends + tile0)
        run = tile0, last, first, gl.load(starts + tile0), end, gl.load(rows + tile0)
        j = part * BV + gl.arange(0, BV, gl.SliceLayout(0, pairs))[None, :]
        cell = gl.arange(0, DK, gl.SliceLayout(1, pairs))[:, None] * DV + j
        t = gl.arange(0, SIZE, gl.SliceLayout(1, pairs))[:, None]
        line = t * VALUE_HEADS * DV + head * DV + j
        state = first_state(states, gl.load(blocks + tile0), first, head, cell, VALUE_HEADS, DV)
        wait_for_inputs(DEPENDENT)  # the kernels before this one do not write states
        rings, inputs = make_rings(DK, BV, STAGES), (queries, keys, values)
        for ahead in gl.static_range(STAGES):
            block = gl.load(blocks + gl.minimum(tile0 + ahead, last)).to(gl.int64)
            copy_block(
                rings, inputs, ahead, block, tile0 + ahead, run, head, part, DV,
                KEY_HEADS, VALUE_HEADS, TILED, WARPS,
            )  # fmt: skip
        state, of_tile = as_result(state, mma), (solved, mixed, decays)
        now = load_solved(of_tile, tile0, head, mma, VALUE_HEADS)
        block = gl.load(blocks + gl.minimum(tile0 + STAGES, last))
        async_copy.wait_group(STAGES - 1)
        _barrier()
        by_k, by_q = times_state(rings, 0, state)
        # there is no tile before the first: the mask of its rows is empty
        bad = gl.sum(state * 0.0, 1)
        carried = (state, bad, by_k, by_q, by_q, by_q, (now[1], now[2]), now, block)
        for tile in range(tile0, last):
            carried = next_block(
                carried, tile, run, rings, inputs, of_tile, states, blocks, out, cell, line, head,
                part, pairs, KEY_HEADS, VALUE_HEADS, DV, TILED, WARPS, STAGES,
            )  # fmt: skip
        last_rows(carried, run, rings, out, line, VALUE_HEADS * DV, pairs, STAGES)
    else:
        wait_for_inputs(DEPENDENT)
