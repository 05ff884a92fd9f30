"""Device code of the cuda backend, in Triton. kernels.py launches it and documents its tensors.

Invariant: a row gets the same bits whatever other rows are in the batch. A row's reduction is split
into parts whose size and place depend on the weight's shape (kernels.split_k) or on the absolute
position (SPAN, TILE), never on the number of rows. Each part is summed in a fixed order, then the
parts are summed in order. Whether one program computes all parts of a row or several programs
compute them in parallel only changes the speed.

Two compiled variants of a kernel may round differently, so a variant must not depend on the rows.
Arguments that depend on the rows are therefore not specialised. All kernels but the matmul are
launched without fused multiply-add, because the compiler decides where to fuse.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from verbatim.backend.cuda.kernels.jit_kv import dequantise, store_heads
from verbatim.backend.cuda.kernels.jit_matmul import activate, wait_for_inputs
from verbatim.backend.cuda.kernels.launch import INTERPRETED

PRECISE: tl.constexpr = tl.constexpr(not INTERPRETED)  # the interpreter has no libdevice


@triton.jit
def sum_splits(splits, bias, at, column, inside, SIZE, SPLITS: tl.constexpr, BIAS: tl.constexpr):
    """Sum the matmul's partial sums at the offsets `at` in split order, then add the bias."""
    total = tl.load(splits + at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):  # unrolled, so that all loads are in flight at once
        total += tl.load(splits + split * SIZE + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["SIZE"])
def add_norm(
    x, splits, bias, weight, shift, out, SIZE, WIDTH, eps, offset,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row: reduce the splits, add them to the residual x (RESIDUAL), write the norm to `out`.

    KIND is the norm: none, rms or layer."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * WIDTH
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    if SPLITS:
        values = sum_splits(splits, bias, row + i, i, inside, SIZE, SPLITS, BIAS)
        if RESIDUAL:
            values = tl.load(x + row + i, mask=inside, other=0.0) + values
            tl.store(x + row + i, values, mask=inside)
    else:
        values = tl.load(x + row + i, mask=inside, other=0.0)
    if KIND == "none":
        if not RESIDUAL:
            tl.store(out + row + i, values, mask=inside)
    else:
        if KIND == "layer":
            values = tl.where(inside, values - tl.sum(values, 0) / WIDTH, 0.0)
        scaled = values / tl.sqrt_rn(tl.sum(values * values, 0) / WIDTH + eps)
        scaled = scaled * (tl.load(weight + i, mask=inside, other=0.0) + offset)
        if KIND == "layer":
            scaled = scaled + tl.load(shift + i, mask=inside, other=0.0)
        tl.store(out + row + i, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def head_scales(q_norm, k_norm, d, inside, is_query, offset):
    """The norm weights [HEADS, BLOCK] of some query and key heads."""
    query = tl.load(q_norm + d, mask=inside, other=0.0)
    return tl.where(is_query, query, tl.load(k_norm + d, mask=inside, other=0.0)) + offset


@triton.jit
def rotated_heads(
    splits, bias, q_norm, k_norm, position, cos, sin, row, head, d,
    SIZE, HEADS, SHARED, DIM, HALF, eps, offset,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Some query, key or value heads [heads, BLOCK] of a row: reduce the splits, norm, rotate. One
    warp reduces a head."""
    queries = HEADS * SHARED
    real, is_query, is_qk = head < queries + 2 * HEADS, head < queries, head < queries + HEADS
    inside = real & (d < DIM)
    base, column = row.to(tl.int64) * (queries + 2 * HEADS) * DIM, head * DIM
    x = sum_splits(splits, bias, base + column + d, column + d, inside, SIZE, SPLITS, BIAS)
    if NORM == "first":
        root = tl.sqrt_rn(tl.sum(x * x, 1) / DIM + eps)[:, None]
        scale = head_scales(q_norm, k_norm, d, d < DIM, is_query, offset)
        x = tl.where(is_qk, x / root * scale, x)
    if ROPE:
        other = tl.where(d < HALF, d + HALF, d - HALF)
        rotated = d < 2 * HALF
        y = sum_splits(
            splits, bias, base + column + other, column + other, real & rotated, SIZE, SPLITS, BIAS
        )
        if NORM == "first":
            y = y / root * head_scales(q_norm, k_norm, other, rotated, is_query, offset)
        at = position.to(tl.int64) * HALF + tl.where(d < HALF, d, d - HALF)
        c, s = (
            tl.load(cos + at, mask=rotated, other=0.0),
            tl.load(sin + at, mask=rotated, other=0.0),
        )
        x = tl.where(is_qk & rotated, tl.where(d < HALF, x * c - y * s, x * c + y * s), x)
    if NORM == "last":
        root = tl.sqrt_rn(tl.sum(x * x, 1) / DIM + eps)[:, None]
        scale = head_scales(q_norm, k_norm, d, d < DIM, is_query, offset)
        x = tl.where(is_qk, x / root * scale, x)
    return x


@triton.jit(do_not_specialize=["SIZE"])
def qkv_rope_cache(
    splits, bias, q_norm, k_norm, positions, cos, sin, slots, q,
    keys, values, key_scales, value_scales, SIZE, HEADS, SHARED, DIM, HALF, eps, offset,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    SLOTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, KV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """GROUP query, key or value heads of one row: reduce the splits, norm, rotate (RoPE); then
    write queries to q, keys and values to the KV cache. NORM is none, first or last (after the
    rotation). One warp reduces a head, so GROUP does not affect the bits.

    HEADS is the number of KV heads; SHARED query heads share each of them. The cache is
    [blocks, HEADS, SLOTS, DIM]; a slot number is block * SLOTS + place in the block. KV is its
    type (jit_kv.py)."""
    wait_for_inputs(DEPENDENT)
    row, head = tl.program_id(0), tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    queries = HEADS * SHARED
    d = tl.arange(0, BLOCK)[None, :] + tl.zeros((GROUP, 1), tl.int32)
    real, is_query, is_qk = head < queries + 2 * HEADS, head < queries, head < queries + HEADS
    inside = real & (d < DIM)
    x = rotated_heads(
        splits, bias, q_norm, k_norm, tl.load(positions + row), cos, sin, row, head, d,
        SIZE, HEADS, SHARED, DIM, HALF, eps, offset, SPLITS, BIAS, NORM, ROPE,
    )  # fmt: skip
    tl.store(
        q + (row.to(tl.int64) * queries + head) * DIM + d,
        x.to(q.dtype.element_ty),
        mask=inside & is_query,
    )
    slot = tl.load(slots + row).to(tl.int64)
    key = head - queries
    at = (slot // SLOTS * HEADS + key) * SLOTS + slot % SLOTS
    is_key, is_value = (head >= queries) & is_qk, real & (head >= queries + HEADS)
    store_heads(x, keys, key_scales, at, d, DIM, inside, is_key, KV)
    store_heads(x, values, value_scales, at - HEADS * SLOTS, d, DIM, inside, is_value, KV)


@triton.jit(do_not_specialize=["SIZE"])
def mlp_activation(
    splits, bias, out, SIZE, WIDTH,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """[rows, gate then up] -> activate(gate) * up, or [rows, up] -> activate(up): [rows, WIDTH]."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    if GATED:
        gate = sum_splits(splits, bias, row * 2 * WIDTH + i, i, inside, SIZE, SPLITS, BIAS)
        up = sum_splits(
            splits, bias, row * 2 * WIDTH + WIDTH + i, WIDTH + i, inside, SIZE, SPLITS, BIAS
        )
        if KIND == "swiglu_oai":
            gate = tl.minimum(gate, 7.0)
            y = gate / (1.0 + tl.exp(-1.702 * gate)) * (tl.clamp(up, -7.0, 7.0) + 1.0)
        else:
            y = activate(gate, KIND) * up
    else:
        y = activate(sum_splits(splits, bias, row * WIDTH + i, i, inside, SIZE, SPLITS, BIAS), KIND)
    tl.store(out + row * WIDTH + i, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["SIZE"])
def gated(
    x, splits, bias, out, SIZE, WIDTH,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x * sigmoid(gate) [rows, WIDTH], with the exponential function of torch."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * WIDTH
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = -sum_splits(splits, bias, row + i, i, inside, SIZE, SPLITS, BIAS)
    grown = libdevice.exp(gate) if PRECISE else tl.exp(gate)
    share = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), 1.0 + grown)
    y = tl.load(x + row + i, mask=inside, other=0.0) * share
    tl.store(out + row + i, y, mask=inside)


@triton.jit
def merge(peak, mass, total, span_peak, span_mass, span_total, factor):
    """Add one span's result to the result of the spans before it, line by line."""
    new_peak = tl.maximum(peak, span_peak)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf: no position seen yet
    fade, gain = tl.exp2((peak - base) * factor), tl.exp2((span_peak - base) * factor)
    total = total * fade[:, None] + span_total * gain[:, None]
    return new_peak, mass * fade + span_mass * gain, total


@triton.jit
def add_sink(peak, mass, total, sink, factor):
    """Add an attention sink to each line: a score in nats that has a weight and no value."""
    level, sink_level = peak * factor, sink * 1.4426950408889634
    top = tl.maximum(level, sink_level)
    fade = tl.exp2(level - top)
    return mass * fade + tl.exp2(sink_level - top), total * fade[:, None]


@triton.jit
def load_blocks(table, start, last, SIZE: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr):
    """The cache block of each position of a span; -1 after the last position. WIDE: offsets into
    the cache need 64 bits, which cost registers: two programs per SM instead of three."""
    p = start + tl.arange(0, SPAN)
    block = tl.load(table + p // SIZE, mask=p <= last, other=-1)
    if WIDE:
        block = block.to(tl.int64)
    return block


@triton.jit
def load_span(
    keys, values, block, start, head, HEADS, DIM,
    SIZE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Keys and values of a span [SPAN, BLOCK], and the number of each of them in the cache."""
    p, d = start + tl.arange(0, SPAN), tl.arange(0, BLOCK)
    vector = (block * HEADS + head) * SIZE + p % SIZE
    place = vector * DIM
    held = (d < DIM)[None, :]
    if MASK:
        # a block that left the window is released (-1); its slot may hold another sequence's values
        held = held & (block >= 0)[:, None]
    k = tl.load(keys + place[:, None] + d[None, :], mask=held, other=0)
    v = tl.load(values + place[:, None] + d[None, :], mask=held, other=0)
    return k, v, vector


@triton.jit
def attend_span(
    query, keys, values, key_scales, value_scales, block, start, head, position, HEADS, DIM,
    scale, cap, factor, window, SIZE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
    CAP: tl.constexpr, WINDOW: tl.constexpr, KV: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """reduce_span of the keys and values in the cache."""
    k, v, vector = load_span(keys, values, block, start, head, HEADS, DIM, SIZE, SPAN, BLOCK, MASK)
    return reduce_span(
        query, k, v, key_scales, value_scales, vector, block, start, position, scale, cap, factor,
        window, SPAN, CAP, WINDOW, KV, MASK,
    )  # fmt: skip


@triton.jit
def reduce_span(
    query, k, v, key_scales, value_scales, vector, block, start, position, scale, cap, factor,
    window, SPAN: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, KV: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """The largest score (peak), the sum of weights (mass) and the weighted sum of values of each
    line over one span. A weight is 2^((score - peak) * factor)."""
    p = start + tl.arange(0, SPAN)
    # converted right before use: keys and values then share one buffer in shared memory
    score = tl.dot(query, tl.trans(dequantise(k, key_scales, vector, block, KV, MASK)))
    if CAP:
        score = cap - 2.0 * cap / (tl.exp(2.0 * (score * scale) / cap) + 1.0)
    if MASK:
        seen = p[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (p[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    peak = tl.max(score, 1)
    base = tl.where(peak == float("-inf"), 0.0, peak)  # -inf: the line sees no position
    weight = tl.exp2(tl.fma(score, factor, -(base * factor)[:, None])).to(tl.float16)
    # The mass is a product with ones: unlike tl.sum, a tensor core adds in an order that does not
    # depend on the number of lines. All columns are equal.
    ones = tl.full((SPAN, 16), 1.0, tl.float16)
    mass = tl.max(tl.dot(weight, ones), 1)
    total = tl.dot(weight, dequantise(v, value_scales, vector, block, KV, MASK))
    return peak, mass, total


@triton.jit
def write_lines(
    peak, mass, total, sinks, out, at, query_head, d, DIM, factor, used, SINKS: tl.constexpr
):
    """The result of all spans."""
    if SINKS:
        sink = tl.load(sinks + query_head, mask=used, other=0.0)
        mass, total = add_sink(peak, mass, total, sink, factor)
    result = (total / mass[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * DIM + d[None, :], result, mask=used[:, None] & (d < DIM)[None, :])


@triton.jit
def finish_span(
    peak, mass, total, sums, peaks, masses, counter, sinks, out, span, begin, end, row, ROWS, heads,
    query_head, d, DIM, factor, used,
    LINES: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write the result of a span; the last program of a tile to do so merges those of all spans
    from `begin` to `end`, in order, and writes the tile's result."""
    stored = used[:, None] & (d < DIM)[None, :]
    no_peak = tl.full((LINES,), float("-inf"), tl.float32)
    no_mass, no_total = tl.zeros((LINES,), tl.float32), tl.zeros((LINES, BLOCK), tl.float32)
    place = row * heads + query_head
    if begin == end:  # the only span
        peak, mass, total = merge(no_peak, no_mass, no_total, peak, mass, total, factor)
        write_lines(peak, mass, total, sinks, out, place, query_head, d, DIM, factor, used, SINKS)
    else:
        at = (span.to(tl.int64) * ROWS + row) * heads + query_head
        tl.store(peaks + at, peak, mask=used)
        tl.store(masses + at, mass, mask=used)
        tl.store(sums + at[:, None] * DIM + d[None, :], total, mask=stored)
        tl.debug_barrier()  # every thread has written its part
        if tl.atomic_add(counter, 1) == end - begin:
            tl.debug_barrier()
            peak, mass, total = no_peak, no_mass, no_total
            for part in range(begin, end + 1):
                # .cg: from the L2 cache, where the other programs' results are
                at = (part * ROWS + row) * heads + query_head
                peak, mass, total = merge(
                    peak, mass, total,
                    tl.load(peaks + at, mask=used, other=0.0, cache_modifier=".cg"),
                    tl.load(masses + at, mask=used, other=0.0, cache_modifier=".cg"),
                    tl.load(
                        sums + at[:, None] * DIM + d[None, :],
                        mask=stored, other=0.0, cache_modifier=".cg",
                    ),
                    factor,
                )  # fmt: skip
            write_lines(
                peak, mass, total, sinks, out, place, query_head, d, DIM, factor, used, SINKS
            )
            tl.store(counter, 0)


@triton.jit(do_not_specialize=["WIDTH", "ROWS"])
def attend(
    q, keys, values, key_scales, value_scales, table, WIDTH, first_row, count, first_position,
    sums, peaks, masses, done, sinks, ends, out, ROWS, HEADS, DIM, scale, cap, factor, window,
    SHARED: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, KV: tl.constexpr,
    MERGE: tl.constexpr, SINKS: tl.constexpr, WIDE: tl.constexpr, ENDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Flash attention of one query tile (rows of one sequence) and one KV head.

    With MERGE a program reduces all spans of positions, merges them in order and writes the result
    to `out`. Otherwise it reduces the span of its program id, and the last program of the tile to
    finish merges all of them in order; `done` counts those that have, and is 0 again afterwards.
    A line of the tile is one query head of one row. A masked position has weight 0 and does not
    change the line's bits; a span in which a line sees no position does not change it either.
    ENDS: a row sees the positions before its entry of `ends` [rows], not those up to its own."""
    wait_for_inputs(DEPENDENT)
    # tiles are sorted by position: those with the most positions start first
    head, tile, span = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    line = tl.arange(0, LINES)
    row, shared = line // SHARED, line % SHARED
    used = (row < tl.load(count + tile)) & (line < LINES // SHARED * SHARED)
    first = tl.load(first_position + tile)
    position = first + row  # the last one that a row sees
    last = first + tl.load(count + tile) - 1
    if ENDS:
        ends += tl.load(first_row + tile)
        position = tl.load(ends + row, mask=used, other=1) - 1
        rows = tl.load(count + tile)  # 0: a tile that pads a graph, which sees no position
        last = tl.where(rows > 0, tl.load(ends + tl.maximum(rows, 1) - 1), 0) - 1
        first = tl.where(rows > 0, tl.load(ends) - 1, 0)
    row = (tl.load(first_row + tile) + row).to(tl.int64)
    heads = HEADS * SHARED
    query_head = head * SHARED + shared
    d = tl.arange(0, BLOCK)
    stored = used[:, None] & (d < DIM)[None, :]
    query = tl.load(
        q + (row * heads + query_head)[:, None] * DIM + d[None, :], mask=stored, other=0.0
    ).to(tl.float16)
    table += tile.to(tl.int64) * WIDTH
    if MERGE:
        peak = tl.full((LINES,), float("-inf"), tl.float32)
        mass = tl.zeros((LINES,), tl.float32)
        total = tl.zeros((LINES, BLOCK), tl.float32)
        begin, whole = 0, (first + 1) // SPAN * SPAN  # spans before `whole` need no mask
        if WINDOW:
            begin = tl.maximum(first - window + 1, 0) // SPAN * SPAN
            whole = begin
        block = load_blocks(table, begin, last, SIZE, SPAN, WIDE)
        for start in range(begin, whole, SPAN):
            following = load_blocks(table, start + SPAN, last, SIZE, SPAN, WIDE)
            span_peak, span_mass, span_total = attend_span(
                query, keys, values, key_scales, value_scales, block, start, head, position, HEADS,
                DIM, scale, cap, factor, window, SIZE, SPAN, BLOCK, CAP, WINDOW, KV, False,
            )  # fmt: skip
            peak, mass, total = merge(peak, mass, total, span_peak, span_mass, span_total, factor)
            block = following
        for start in range(whole, last + 1, SPAN):
            following = load_blocks(table, start + SPAN, last, SIZE, SPAN, WIDE)
            span_peak, span_mass, span_total = attend_span(
                query, keys, values, key_scales, value_scales, block, start, head, position, HEADS,
                DIM, scale, cap, factor, window, SIZE, SPAN, BLOCK, CAP, WINDOW, KV, True,
            )  # fmt: skip
            peak, mass, total = merge(peak, mass, total, span_peak, span_mass, span_total, factor)
            block = following
        if SINKS:
            sink = tl.load(sinks + query_head, mask=used, other=0.0)
            mass, total = add_sink(peak, mass, total, sink, factor)
        at = row * heads + query_head
        result = (total / mass[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * DIM + d[None, :], result, mask=stored)
    else:
        start, begin = span * SPAN, 0
        if WINDOW:
            begin = tl.maximum(first - window + 1, 0) // SPAN
        if (start <= last) & (span >= begin):
            block = load_blocks(table, start, last, SIZE, SPAN, WIDE)
            peak, mass, total = attend_span(
                query, keys, values, key_scales, value_scales, block, start, head, position, HEADS,
                DIM, scale, cap, factor, window, SIZE, SPAN, BLOCK, CAP, WINDOW, KV, True,
            )  # fmt: skip
            finish_span(
                peak, mass, total, sums, peaks, masses, done + tile * HEADS + head, sinks, out,
                span, begin, last // SPAN, row, ROWS, heads, query_head, d, DIM, factor, used,
                LINES, BLOCK, SINKS,
            )  # fmt: skip
