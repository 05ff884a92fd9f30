"""Device code of recurrent layers, in Triton. recurrent.py launches it and documents its tensors.

Invariant: as in jit.py. A delta net advances block by block, at the borders of the cache's blocks:
a step computes the whole block of each of its rows from the state before the block and the keys,
values and gates of the positions before the row, and writes the outputs of its own rows. So the
bits of a position do not depend on the cut of the sequence into steps.

Tensor cores multiply float32 with 10 bits of mantissa ("tf32"), as many as the float16 of attention
has. Queries and keys are rounded to it when they are stored, so products between them are exact.
"""

import triton
import triton.language as tl

from verbatim.backend.cuda.kernels.jit_matmul import wait_for_inputs


@triton.jit
def finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def to_tf32(x):
    """Round to 10 bits of mantissa: a tensor core would cut the others off."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(finite(x), bits.to(tl.float32, bitcast=True), x)


@triton.jit
def convolved(
    x, inputs, kernel, slots, ages, row, column, real, inside, STRIDE, CHANNELS,
    TAPS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """The causal convolution of some rows and channels, the oldest input first. Writes the rows'
    inputs to the cache. `slots` [rows, TAPS]: the cache slot of each input, -1: none. An input of
    this step is read from x: it is the row's age, its number in its sequence, or fewer rows before
    the row. PRODUCT: an input is the product of two columns of x."""
    total = tl.zeros(inside.shape, tl.float32)
    age = tl.load(ages + row, mask=real, other=-1)
    for tap in tl.static_range(TAPS):
        before = TAPS - 1 - tap
        own = inside & (age >= before)[:, None]
        at = (row - before).to(tl.int64)[:, None] * STRIDE + column[None, :]
        value = tl.load(x + at, mask=own, other=0.0)
        if PRODUCT:
            value = value * tl.load(x + at + 2 * CHANNELS, mask=own, other=0.0)
        slot = tl.load(slots + row * TAPS + tap, mask=age >= 0, other=-1).to(tl.int64)
        cached = inputs + slot[:, None] * CHANNELS + column[None, :]
        held = inside & (slot >= 0)[:, None]
        if before == 0:
            tl.store(cached, value, mask=held)
        else:
            old = tl.load(cached, mask=held & (age < before)[:, None], other=0.0)
            value = tl.where(own, value, old)
        weight = tl.load(kernel + column * TAPS + tap, mask=column < CHANNELS, other=0.0)
        total = total + value * weight[None, :]
    return total


@triton.jit(do_not_specialize=["ROWS"])
def short_conv(
    x, inputs, kernel, bias, slots, ages, out, ROWS, CHANNELS,
    TAPS: tl.constexpr, BIAS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """c * (convolution of b * u) of some rows and channels; a row of x has the parts b, c, u."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real, width = row < ROWS, 3 * CHANNELS
    inside = real[:, None] & (column < CHANNELS)[None, :]
    y = convolved(
        x, inputs, kernel, slots, ages, row, column, real, inside, width, CHANNELS, TAPS, True
    )
    if BIAS:
        y = y + tl.load(bias + column, mask=column < CHANNELS, other=0.0)[None, :]
    at = row.to(tl.int64)[:, None]
    c = tl.load(x + at * width + CHANNELS + column[None, :], mask=inside, other=0.0)
    tl.store(out + at * CHANNELS + column[None, :], (c * y).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["ROWS"])
def delta_inputs(
    x, STRIDE, b, a, GATES, inputs, kernel, slots, ages, decay, dt, places,
    queries, keys, values, gates, ROWS, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SIZE: tl.constexpr, TAPS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One head of some rows: the convolution of its columns of x, then silu. Queries and keys are
    divided by their norm. Keys, values and gates (logarithm of the decay, beta) go to the cache, at
    the slots `places`. One warp reduces a row, so LINES does not affect the bits."""
    wait_for_inputs(DEPENDENT)
    unit = tl.program_id(1)
    row, d = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, BLOCK)
    value_head = unit - 2 * KEY_HEADS
    start, width = unit * DK, DK
    if value_head >= 0:
        start, width = 2 * KEY_HEADS * DK + value_head * DV, DV
    real = row < ROWS
    inside = real[:, None] & (d < width)[None, :]
    channels: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    y = convolved(
        x, inputs, kernel, slots, ages, row, start + d, real, inside, STRIDE, channels, TAPS, False
    )
    y = y / (1.0 + tl.exp(-y))
    place = tl.load(places + row, mask=real, other=0).to(tl.int64)
    block, slot, wide = place // SIZE, place % SIZE, row.to(tl.int64)
    if value_head >= 0:
        at = (block * VALUE_HEADS + value_head) * SIZE + slot
        tl.store(values + at[:, None] * DV + d[None, :], y, mask=inside)
        drive = tl.load(a + wide * GATES + value_head, mask=real, other=0.0)
        drive = drive + tl.load(dt + value_head)
        softplus = tl.maximum(drive, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(drive)))
        tl.store(gates + at * 2, tl.load(decay + value_head) * softplus, mask=real)
        raw = tl.load(b + wide * GATES + value_head, mask=real, other=0.0)
        tl.store(gates + at * 2 + 1, 1.0 / (1.0 + tl.exp(-raw)), mask=real)
    else:
        y = y / tl.sqrt_rn(tl.sum(y * y, 1) + 1e-6)[:, None]
        if unit < KEY_HEADS:
            at = wide * KEY_HEADS + unit
            tl.store(queries + at[:, None] * DK + d[None, :], to_tf32(y * scale), mask=inside)
        else:
            at = (block * KEY_HEADS + unit - KEY_HEADS) * SIZE + slot
            tl.store(keys + at[:, None] * DK + d[None, :], to_tf32(y), mask=inside)


@triton.jit
def key_head_of(head, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, TILED: tl.constexpr):
    """The key head that a value head reads (DeltaSpec.key_head)."""
    if TILED:
        key_head = head % KEY_HEADS
    else:
        key_head = head * KEY_HEADS // VALUE_HEADS
    return key_head


@triton.jit
def load_block(
    queries, keys, place, position, start, end, row0, key_head, i,
    KEY_HEADS: tl.constexpr, DK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Values i of the queries of a block's rows in this step, and of the keys of its positions
    before the step's end, [SIZE, i] each; zeros for all others."""
    slot = tl.arange(0, SIZE)
    at = position + slot
    known, fresh = at < end, (at < end) & (at >= start)
    row = (row0 + at - start).to(tl.int64) * KEY_HEADS + key_head
    line = (place * KEY_HEADS + key_head) * SIZE + slot
    in_k = (i < DK)[None, :]
    q = tl.load(queries + row[:, None] * DK + i[None, :], mask=fresh[:, None] & in_k, other=0.0)
    k = tl.load(keys + line[:, None] * DK + i[None, :], mask=known[:, None] & in_k, other=0.0)
    return q, k


@triton.jit
def delta_solve(
    queries, keys, gates, blocks, positions, starts, ends, rows, solved, mixed, decays,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr,
    SIZE: tl.constexpr, TILED: tl.constexpr, BK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """What a block of one value head needs beside its state S; t and s are positions of the block,
    D(t) the product of the decays up to t, and E(t) what position t adds to the state's key k(t):

        E = solved · (v - D (k · S))      solved = (1 + lower triangle of beta(t) k(t)·k(s)
                                                   D(t)/D(s))^-1 · beta
        outputs = D (q · S) + mixed · E   mixed(t, s) = q(t)·k(s) D(t)/D(s) for s <= t

    `decays`: D(t), and the decay from t to the block's end. Row t of each depends on the positions
    up to t alone; a later one may hold anything, also NaN."""
    wait_for_inputs(DEPENDENT)
    tile, head = tl.program_id(0), tl.program_id(1)
    place, position = tl.load(blocks + tile).to(tl.int64), tl.load(positions + tile)
    start, end, row0 = tl.load(starts + tile), tl.load(ends + tile), tl.load(rows + tile)
    if end > position:
        key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, TILED)
        q, k = load_block(
            queries, keys, place, position, start, end, row0, key_head, tl.arange(0, BK),
            KEY_HEADS, DK, SIZE,
        )  # fmt: skip
        t, s = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
        gate = gates + ((place * VALUE_HEADS + head) * SIZE + tl.arange(0, SIZE)) * 2
        known = position + tl.arange(0, SIZE) < end
        log_decay = tl.load(gate, mask=known, other=0.0)
        beta = tl.load(gate + 1, mask=known, other=0.0)
        total = tl.sum(tl.where(s <= t, log_decay[None, :], 0.0), 1)
        total_s = tl.sum(tl.where(t <= s, log_decay[:, None], 0.0), 0)
        ratio = tl.exp(tl.where(s <= t, total[:, None] - total_s[None, :], 0.0))
        keys_t = tl.trans(k)
        gram = tl.dot(k, keys_t, input_precision="tf32") * ratio * beta[:, None]
        lower = tl.trans(tl.where(s < t, gram, 0.0))
        inverse = tl.zeros((SIZE, SIZE), tl.float32)
        for i in range(SIZE):  # row i from the rows before it
            weights = tl.sum(tl.where(s == i, lower, 0.0), 1)
            row = tl.where(s == i, 1.0, 0.0)
            row = row - tl.sum(tl.where(t < i, weights[:, None] * inverse, 0.0), 0)[None, :]
            inverse = tl.where(t == i, row, inverse)
        beta_s = tl.sum(tl.where(t == s, beta[:, None], 0.0), 0)
        cell = (tile.to(tl.int64) * VALUE_HEADS + head) * SIZE * SIZE + t * SIZE + s
        tl.store(solved + cell, tl.where(s <= t, inverse * beta_s[None, :], 0.0))
        scores = tl.dot(q, keys_t, input_precision="tf32") * ratio
        tl.store(mixed + cell, tl.where(s <= t, scores, 0.0))
        of_tile = decays + (tile.to(tl.int64) * VALUE_HEADS + head) * 2 * SIZE
        tl.store(of_tile + tl.arange(0, SIZE), tl.exp(total))
        tl.store(of_tile + SIZE + tl.arange(0, SIZE), tl.exp(tl.sum(log_decay, 0) - total))


@triton.jit
def delta_advance(
    keys, values, states, solved, decays, tiles, blocks, positions,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SIZE: tl.constexpr, TILED: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The state before each block of a sequence but the first, for BV values of one value head,
    from the block before it, whose positions are all known."""
    wait_for_inputs(DEPENDENT)
    sequence, head = tl.program_id(0), tl.program_id(1)
    tile0, last = tl.load(tiles + sequence), tl.load(tiles + sequence + 1) - 1
    if tile0 < last:
        key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, TILED)
        i, slot = tl.arange(0, BK), tl.arange(0, SIZE)
        j = tl.program_id(2) * BV + tl.arange(0, BV)
        in_k, in_v = (i < DK)[None, :], (j < DV)[None, :]
        cell, held = i[:, None] * DV + j[None, :], (i < DK)[:, None] & in_v
        square = slot[:, None] * SIZE + slot[None, :]
        place = tl.load(blocks + tile0).to(tl.int64) * VALUE_HEADS + head
        state = tl.load(
            states + place * DK * DV + cell,
            mask=held & (cell * 0 + tl.load(positions + tile0) > 0), other=0.0,
        )  # fmt: skip
        for tile in range(tile0, last):
            block = tl.load(blocks + tile).to(tl.int64)
            following = tl.load(blocks + tile + 1).to(tl.int64) * VALUE_HEADS + head
            own = (tile0 * 0 + tile).to(tl.int64) * VALUE_HEADS + head
            line = (block * KEY_HEADS + key_head) * SIZE + slot
            k = tl.load(keys + line[:, None] * DK + i[None, :], mask=in_k, other=0.0)
            line = (block * VALUE_HEADS + head) * SIZE + slot
            v = tl.load(values + line[:, None] * DV + j[None, :], mask=in_v, other=0.0)
            grown = tl.load(decays + own * 2 * SIZE + slot)[:, None]
            rest = tl.load(decays + own * 2 * SIZE + SIZE + slot)[:, None]
            whole = tl.load(decays + own * 2 * SIZE + SIZE - 1)
            change = v - grown * tl.dot(k, to_tf32(state), input_precision="tf32")
            change = tl.dot(
                tl.load(solved + own * SIZE * SIZE + square), change, input_precision="tf32x3"
            )
            change = to_tf32(change * rest)
            state = state * whole + tl.dot(tl.trans(k), change, input_precision="tf32")
            tl.store(states + following * DK * DV + cell, state, mask=held)


@triton.jit
def times_lower(matrix, x):
    """A lower triangular matrix times x. A row of x that is not finite must not change the rows
    before it, which a product with zeros would do: it is left out, and becomes NaN itself."""
    right = finite(x)
    y = tl.dot(matrix, tl.where(right, x, 0.0), input_precision="tf32x3")
    return tl.where(right, y, float("nan"))


@triton.jit
def delta_outputs(
    queries, keys, values, states, solved, mixed, decays, blocks, positions, starts, ends, rows,
    out,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SIZE: tl.constexpr, TILED: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The outputs q·S of the rows of one block, for BV values of one value head. S is read by PART
    keys."""
    wait_for_inputs(DEPENDENT)
    tile, head = tl.program_id(0), tl.program_id(1)
    block, position = tl.load(blocks + tile).to(tl.int64), tl.load(positions + tile)
    start, end, row0 = tl.load(starts + tile), tl.load(ends + tile), tl.load(rows + tile)
    if (end > position) & (start < position + SIZE):
        key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, TILED)
        slot, j = tl.arange(0, SIZE), tl.program_id(2) * BV + tl.arange(0, BV)
        in_v = (j < DV)[None, :]
        square = slot[:, None] * SIZE + slot[None, :]
        place, own = block * VALUE_HEADS + head, tile.to(tl.int64) * VALUE_HEADS + head
        change, y = tl.zeros((SIZE, BV), tl.float32), tl.zeros((SIZE, BV), tl.float32)
        for part in range(0, BK, PART):
            i = part + tl.arange(0, PART)
            q, k = load_block(
                queries, keys, block, position, start, end, row0, key_head, i, KEY_HEADS, DK, SIZE
            )
            state = tl.load(
                states + place * DK * DV + i[:, None] * DV + j[None, :],
                mask=(i < DK)[:, None] & in_v & (i[:, None] * 0 + position > 0), other=0.0,
            )  # fmt: skip
            state = to_tf32(state)
            change = tl.dot(k, state, change, input_precision="tf32")
            y = tl.dot(q, state, y, input_precision="tf32")
        at = position + slot
        v = tl.load(
            values + (place * SIZE + slot)[:, None] * DV + j[None, :],
            mask=(at < end)[:, None] & in_v, other=0.0,
        )  # fmt: skip
        grown = tl.load(decays + own * 2 * SIZE + slot)[:, None]
        change = times_lower(tl.load(solved + own * SIZE * SIZE + square), v - grown * change)
        y = grown * y + times_lower(tl.load(mixed + own * SIZE * SIZE + square), change)
        row = (row0 + at - start).to(tl.int64) * VALUE_HEADS + head
        tl.store(
            out + row[:, None] * DV + j[None, :], y,
            mask=((at >= start) & (at < end))[:, None] & in_v,
        )  # fmt: skip


@triton.jit(do_not_specialize=["LINES"])
def gated_norm(
    y, gate, STRIDE, norm, out, LINES, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """RMS norm of each head of y [rows, HEADS * DIM], times silu(gate). A line is one head of one
    row, and one warp reduces it."""
    wait_for_inputs(DEPENDENT)
    line, d = tl.program_id(0) * GROUP + tl.arange(0, GROUP), tl.arange(0, BLOCK)
    inside = (line < LINES)[:, None] & (d < DIM)[None, :]
    at = line.to(tl.int64)[:, None] * DIM + d[None, :]
    x = tl.load(y + at, mask=inside, other=0.0)
    x = x / tl.sqrt_rn(tl.sum(x * x, 1) / DIM + eps)[:, None]
    x = x * tl.load(norm + d, mask=d < DIM, other=0.0)[None, :]
    column = (line // HEADS).to(tl.int64) * STRIDE + line % HEADS * DIM
    z = tl.load(gate + column[:, None] + d[None, :], mask=inside, other=0.0)
    tl.store(out + at, (x * (z / (1.0 + tl.exp(-z)))).to(out.dtype.element_ty), mask=inside)
