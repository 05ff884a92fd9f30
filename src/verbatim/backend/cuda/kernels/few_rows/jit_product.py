"""Device code of the product of few rows, in Gluon. product.py launches it.

Invariant: the bits of jit_matmul.matmul, and with NORM those of jit.add_norm before it. A sum over
k is one chain of the tensor core's instructions of 16 inputs, in ascending order, and Gluon states
the layout in which a norm is reduced.

The rows of weights are the first operand, so a warp multiplies 16 of them with up to 8 rows of x.
Their asynchronous copies start before the kernel that writes x has ended (programmatic dependent
launch): weights never change, and everything else is read after `wait`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

# the names in Triton 3.9, then those in 3.6
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

PIECE: gl.constexpr = gl.constexpr(256)  # values of a norm that a warp reduces: 8 per thread


@gluon.jit
def start_next():
    """The next kernel may start as soon as every program of this one has."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def wait():
    """Wait until the kernels before this one have ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store_norm(
    x, sums, weight, moved, to, first, WIDTH, eps, offset,
    SUMS: gl.constexpr, REDUCERS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """jit.add_norm of one row, into shared memory [pieces, PIECE]. REDUCERS is the number of its
    warps: line r of the values here are those of its warp r. The first program writes the sum of x
    and `sums` to `moved`: other programs still read x."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    PARTS: gl.constexpr = to.shape[0] * to.shape[1] // (REDUCERS * PIECE)
    line = gl.arange(0, REDUCERS, gl.SliceLayout(1, layout))
    j = gl.arange(0, PARTS * PIECE, gl.SliceLayout(0, layout))
    i = (j // PIECE * (REDUCERS * PIECE) + j % PIECE)[None, :] + line[:, None] * PIECE
    inside = i < WIDTH
    values = gl.load(x + i, mask=inside, other=0.0)
    if SUMS:
        total = gl.load(sums + i, mask=inside, other=0.0)
        for split in gl.static_range(1, SUMS):
            total += gl.load(sums + split * WIDTH + i, mask=inside, other=0.0)
        values = values + total
        gl.store(moved + i, values, mask=inside & first)
    scale = gl.load(weight + i, mask=inside, other=0.0) + offset
    by_line = gl.sum(values * values, 1)
    by_line = gl.convert_layout(by_line, gl.BlockedLayout([1], [32], [WARPS], [0]))
    scaled = values / gl.sqrt_rn(gl.sum(by_line, 0) / WIDTH + eps) * scale
    scaled = scaled.to(to.dtype)
    scaled = scaled.reshape([REDUCERS, PARTS, PIECE]).permute([1, 0, 2])
    to.store(scaled.reshape([to.shape[0], to.shape[1]]))


@gluon.jit
def store_row(x, to, COUNT: gl.constexpr, WARPS: gl.constexpr):
    """COUNT inputs of one row, into shared memory [pieces, inputs of a piece]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    piece = gl.arange(0, to.shape[0], gl.SliceLayout(1, layout))
    k = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))
    i = piece[:, None] * to.shape[1] + k[None, :]
    to.store(gl.load(x + i, mask=i < COUNT, other=0.0).to(to.dtype))


@gluon.jit
def copy_weights(
    ring, w, at, BEHIND, PLACE: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr
):
    """Start to copy piece PLACE of some rows; BEHIND: from the gate's weights to the up weights,
    which have places of their own in the ring, if any."""
    at += PLACE * CHUNK
    _copy(ring.index(PLACE % STAGES), w + at)
    if ring.shape[0] > STAGES:
        _copy(ring.index(STAGES + PLACE % STAGES), w + BEHIND + at)


@gluon.jit
def activate(gate, up, GATE: gl.constexpr):
    if GATE == "silu":
        y = gate / (1.0 + gl.exp(-gate)) * up
    else:
        gl.static_assert(GATE == "relu2")
        y = gl.maximum(gate, 0.0) * gl.maximum(gate, 0.0) * up
    return y


@gluon.jit(do_not_specialize=["M"])
def product(
    x, sums, norm, moved, w, out, M, N, WIDTH, eps, offset,
    K: gl.constexpr, INPUTS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    COLUMNS: gl.constexpr, GATE: gl.constexpr, NORM: gl.constexpr, SUMS: gl.constexpr,
    LINES: gl.constexpr, REDUCERS: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """out[split, m, n] = sum over the split's INPUTS of x[m, k] w[n, k], 16 * WARPS rows of w per
    program; with GATE as in jit_matmul.matmul. STAGES pieces of CHUNK inputs are copied ahead.

    COLUMNS: 8 or 16 rows of x, or 1 row, which goes to shared memory at once, as LINES pieces.
    NORM: the row is the norm of x and `sums`; SUMS is their number."""
    ROWS: gl.constexpr = 16 * WARPS
    PIECES: gl.constexpr = INPUTS // CHUNK
    HELD: gl.constexpr = STAGES if GATE == "none" else 2 * STAGES
    WIDE: gl.constexpr = 16 if COLUMNS == 16 else 8
    half: gl.constexpr = w.dtype.element_ty
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    tiled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    if EARLY:
        start_next()
    tile, split = gl.program_id(0), gl.program_id(1)
    rows = gl.minimum(tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, copied)), N - 1)
    k = split * INPUTS + gl.arange(0, CHUNK, gl.SliceLayout(0, copied))
    at = rows.to(gl.int64)[:, None] * K + k[None, :]
    behind = N.to(gl.int64) * K
    ring = gl.allocate_shared_memory(half, [HELD, ROWS, CHUNK], tiled)
    for i in gl.static_range(STAGES):
        copy_weights(ring, w, at, behind, i, STAGES, CHUNK)
        async_copy.commit_group()
    if EARLY:
        wait()
    if COLUMNS == 1:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        row = gl.allocate_shared_memory(half, [LINES, CHUNK], flat)
        if NORM:
            first = (tile == 0) & (split == 0)
            store_norm(x, sums, norm, moved, row, first, WIDTH, eps, offset, SUMS, REDUCERS, WARPS)
        else:
            store_row(x + split * INPUTS, row, INPUTS, WARPS)
        _barrier()
    else:
        m = gl.minimum(gl.arange(0, WIDE, gl.SliceLayout(1, copied)), M - 1)  # more are not stored
        inputs = x + m[:, None] * K + k[None, :]
        x_ring = gl.allocate_shared_memory(half, [STAGES, WIDE, CHUNK], tiled)
        for i in gl.static_range(STAGES):
            _copy(x_ring.index(i), inputs + i * CHUNK)
            async_copy.commit_group()
    total = gl.zeros([ROWS, WIDE], gl.float32, mma)
    up = gl.zeros([ROWS, WIDE], gl.float32, mma)
    for i in gl.static_range(PIECES):
        if STAGES < PIECES:  # the piece before this one is read: its place is free at the barrier
            async_copy.wait_group(STAGES - 1 if i == 0 else STAGES - 2)
            _barrier()
            if i > 0:
                if i - 1 + STAGES < PIECES:
                    copy_weights(ring, w, at, behind, i - 1 + STAGES, STAGES, CHUNK)
                    if COLUMNS > 1:
                        _copy(x_ring.index((i - 1) % STAGES), inputs + (i - 1 + STAGES) * CHUNK)
                async_copy.commit_group()
        else:
            async_copy.wait_group(PIECES - 1 - i)
            _barrier()
        if COLUMNS == 1:
            b = row.slice(i, 1).permute([1, 0]).load(right)
            b, _ = gl.broadcast(b, gl.zeros([CHUNK, WIDE], b.dtype, right))
        else:
            b = x_ring.index(i % STAGES).permute([1, 0]).load(right)
        total = mma_v2(ring.index(i % STAGES).load(left), b, total)
        if GATE != "none":
            up = mma_v2(ring.index(STAGES + i % STAGES).load(left), b, up)
    if GATE != "none":
        total = activate(total, up, GATE)
    n = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, mma))
    m = gl.arange(0, WIDE, gl.SliceLayout(0, mma))
    place = (split * M + m)[None, :].to(gl.int64) * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    gl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
