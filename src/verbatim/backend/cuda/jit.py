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

ROW_GROUP: tl.constexpr = tl.constexpr(8)  # row tiles that share the weights of a column tile in L2


@triton.jit
def tile_position(program, ROW_TILES, COLUMN_TILES, GROUP: tl.constexpr):
    """(row tile, column tile) of a program. GROUP row tiles advance together through the columns,
    so that programs that run at the same time share weights and rows in the L2 cache."""
    group = program // (GROUP * COLUMN_TILES)
    first = group * GROUP
    height = tl.minimum(ROW_TILES - first, GROUP)
    inside = program - group * GROUP * COLUMN_TILES
    return first + inside % height, inside // height


@triton.jit(do_not_specialize=["M", "BLOCKS"])
def matmul(
    x, w, out, rows, experts, M, N, K, BLOCKS,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATHER: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Split-K matmul: out[m, n] = sum over k of x[m, k] w[n, k].

    A split is BLOCKS blocks of BK inputs. A program sums SPLITS splits: either all of them in
    order, or one split, whose partial sum it writes to out[split]; the reader then adds the partial
    sums in order (sum_splits). With TMA, x and w are tensor descriptors."""
    row_tile, column_tile = tile_position(
        tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), ROW_GROUP
    )
    m, n = row_tile * BM + tl.arange(0, BM), column_tile * BN + tl.arange(0, BN)
    inside, k0 = m < M, tl.arange(0, BK)
    source = m.to(tl.int64)
    if GATHER:  # mixture of experts: rows are sorted by expert; -1 pads a tile
        source = tl.load(rows + m, mask=inside, other=-1).to(tl.int64)
        w += tl.load(experts + row_tile).to(tl.int64) * N * K
    inside = inside & (source >= 0)
    first = tl.program_id(1)
    total = tl.zeros((BM, BN), tl.float32)
    for split in range(SPLITS):
        sum_ = tl.zeros((BM, BN), tl.float32)
        for block in range(BLOCKS):
            start = ((first + split) * BLOCKS + block) * BK
            if TMA:
                a = x.load([row_tile * BM, start])
                b = w.load([column_tile * BN, start]).T
            else:
                k = start + k0
                a = tl.load(
                    x + source[:, None] * K + k[None, :],
                    mask=inside[:, None] & (k < K)[None, :],
                    other=0.0,
                ).to(w.dtype.element_ty)
                b = tl.load(
                    w + n[None, :].to(tl.int64) * K + k[:, None],
                    mask=(n < N)[None, :] & (k < K)[:, None],
                    other=0.0,
                )
            # "ieee": full precision for a router, whose weights are float32
            sum_ = tl.dot(a, b, sum_, input_precision="ieee")
        total += sum_
    place = (first * M + m[:, None]).to(tl.int64) * N + n[None, :]
    tl.store(out + place, total, mask=(m < M)[:, None] & (n < N)[None, :])


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
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: reduce the splits, add them to the residual x (RESIDUAL), write the norm to `out`.

    KIND is the norm: none, rms or layer."""
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


@triton.jit(do_not_specialize=["SIZE"])
def qkv_rope_cache(
    splits, bias, q_norm, k_norm, positions, cos, sin, slots, q, keys, values,
    SIZE, HEADS, SHARED, DIM, HALF, eps, offset,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query, key or value head of one row: reduce the splits, norm, rotate (RoPE); then write
    queries to q, keys and values to the KV cache. NORM is none, first or last (after the rotation).

    HEADS is the number of KV heads; SHARED query heads share each of them. The cache is
    [blocks, HEADS, SLOTS, DIM]; a slot number is block * SLOTS + place in the block."""
    row, head = tl.program_id(0), tl.program_id(1)
    queries = HEADS * SHARED
    width = (queries + 2 * HEADS) * DIM
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    base = row.to(tl.int64) * width + head * DIM
    x = sum_splits(splits, bias, base + d, head * DIM + d, inside, SIZE, SPLITS, BIAS)
    is_qk = head < queries + HEADS
    if NORM == "first":
        root = tl.sqrt_rn(tl.sum(x * x, 0) / DIM + eps)
        scale = (
            tl.where(
                head < queries,
                tl.load(q_norm + d, mask=inside, other=0.0),
                tl.load(k_norm + d, mask=inside, other=0.0),
            )
            + offset
        )
        x = tl.where(is_qk, x / root * scale, x)
    if ROPE:
        other = tl.where(d < HALF, d + HALF, d - HALF)
        rotated = d < 2 * HALF
        y = sum_splits(splits, bias, base + other, head * DIM + other, rotated, SIZE, SPLITS, BIAS)
        if NORM == "first":
            scale = (
                tl.where(
                    head < queries,
                    tl.load(q_norm + other, mask=rotated, other=0.0),
                    tl.load(k_norm + other, mask=rotated, other=0.0),
                )
                + offset
            )
            y = y / root * scale
        at = tl.load(positions + row).to(tl.int64) * HALF + tl.where(d < HALF, d, d - HALF)
        c, s = (
            tl.load(cos + at, mask=rotated, other=0.0),
            tl.load(sin + at, mask=rotated, other=0.0),
        )
        x = tl.where(is_qk & rotated, tl.where(d < HALF, x * c - y * s, x * c + y * s), x)
    if NORM == "last":
        root = tl.sqrt_rn(tl.sum(x * x, 0) / DIM + eps)
        scale = (
            tl.where(
                head < queries,
                tl.load(q_norm + d, mask=inside, other=0.0),
                tl.load(k_norm + d, mask=inside, other=0.0),
            )
            + offset
        )
        x = tl.where(is_qk, x / root * scale, x)
    tl.store(
        q + (row.to(tl.int64) * queries + head) * DIM + d,
        x,
        mask=d < tl.where(head < queries, DIM, 0),
    )
    slot = tl.load(slots + row).to(tl.int64)
    key = head - queries
    place = ((slot // SLOTS * HEADS + key) * SLOTS + slot % SLOTS) * DIM + d
    tl.store(
        keys + place,
        x.to(keys.dtype.element_ty),
        mask=d < tl.where((head >= queries) & is_qk, DIM, 0),
    )
    tl.store(
        values + place - HEADS * SLOTS * DIM,
        x.to(values.dtype.element_ty),
        mask=d < tl.where(is_qk, 0, DIM),
    )


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


@triton.jit(do_not_specialize=["SIZE"])
def mlp_activation(
    splits, bias, out, SIZE, WIDTH,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """[rows, gate then up] -> activate(gate) * up, or [rows, up] -> activate(up): [rows, WIDTH]."""
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
def load_blocks(table, start, last, SIZE: tl.constexpr, SPAN: tl.constexpr):
    """The cache block of each position of a span; -1 after the last position."""
    p = start + tl.arange(0, SPAN)
    return tl.load(table + p // SIZE, mask=p <= last, other=-1).to(tl.int64)


@triton.jit
def attend_span(
    query, keys, values, block, start, head, position, HEADS, DIM, scale, cap, factor, window,
    SIZE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr,
    WINDOW: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The largest score (peak), the sum of weights (mass) and the weighted sum of values of each
    line over one span. A weight is 2^((score - peak) * factor)."""
    p, d = start + tl.arange(0, SPAN), tl.arange(0, BLOCK)
    place = ((block * HEADS + head) * SIZE + p % SIZE) * DIM
    held = (d < DIM)[None, :]
    if MASK:
        # a block that left the window is released (-1); its slot may hold another sequence's values
        held = held & (block >= 0)[:, None]
    k = tl.load(keys + place[:, None] + d[None, :], mask=held, other=0.0)
    v = tl.load(values + place[:, None] + d[None, :], mask=held, other=0.0)
    score = tl.dot(query, tl.trans(k))
    if CAP:
        score = cap - 2.0 * cap / (tl.exp(2.0 * (score * scale) / cap) + 1.0)
    if MASK:
        seen = p[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (p[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    peak = tl.max(score, 1)
    base = tl.where(peak == float("-inf"), 0.0, peak)  # -inf: the line sees no position
    weight = tl.exp2(tl.fma(score, factor, -(base * factor)[:, None])).to(values.dtype.element_ty)
    # The mass is a product with ones: unlike tl.sum, a tensor core adds in an order that does not
    # depend on the number of lines. All columns are equal.
    ones = tl.full((SPAN, 16), 1.0, values.dtype.element_ty)
    return peak, tl.max(tl.dot(weight, ones), 1), tl.dot(weight, v)


@triton.jit(do_not_specialize=["WIDTH", "ROWS"])
def attend(
    q, keys, values, table, WIDTH, first_row, count, first_position, sums, peaks, masses, sinks,
    out, ROWS, HEADS, DIM, scale, cap, factor, window,
    SHARED: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, MERGE: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Flash attention of one query tile (rows of one sequence) and one KV head.

    With MERGE a program reduces all spans of positions, merges them in order and writes the result
    to `out`. Otherwise it reduces the span of its program id, and merge_spans merges.
    A line of the tile is one query head of one row. A masked position has weight 0 and does not
    change the line's bits; a span in which a line sees no position does not change it either."""
    # the last tiles of a prompt have the most positions: they start first
    tile, head, span = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = tl.arange(0, LINES)
    row, shared = line // SHARED, line % SHARED
    used = (row < tl.load(count + tile)) & (line < LINES // SHARED * SHARED)
    first = tl.load(first_position + tile)
    position = first + row
    last = first + tl.load(count + tile) - 1
    row = (tl.load(first_row + tile) + row).to(tl.int64)
    heads = HEADS * SHARED
    query_head = head * SHARED + shared
    d = tl.arange(0, BLOCK)
    stored = used[:, None] & (d < DIM)[None, :]
    query = tl.load(
        q + (row * heads + query_head)[:, None] * DIM + d[None, :], mask=stored, other=0.0
    ).to(keys.dtype.element_ty)
    table += tile.to(tl.int64) * WIDTH
    if MERGE:
        peak = tl.full((LINES,), float("-inf"), tl.float32)
        mass = tl.zeros((LINES,), tl.float32)
        total = tl.zeros((LINES, BLOCK), tl.float32)
        begin, whole = 0, (first + 1) // SPAN * SPAN  # spans before `whole` need no mask
        if WINDOW:
            begin = tl.maximum(first - window + 1, 0) // SPAN * SPAN
            whole = begin
        block = load_blocks(table, begin, last, SIZE, SPAN)
        for start in range(begin, whole, SPAN):
            following = load_blocks(table, start + SPAN, last, SIZE, SPAN)
            span_peak, span_mass, span_total = attend_span(
                query, keys, values, block, start, head, position, HEADS, DIM,
                scale, cap, factor, window, SIZE, SPAN, BLOCK, CAP, WINDOW, False,
            )  # fmt: skip
            peak, mass, total = merge(peak, mass, total, span_peak, span_mass, span_total, factor)
            block = following
        for start in range(whole, last + 1, SPAN):
            following = load_blocks(table, start + SPAN, last, SIZE, SPAN)
            span_peak, span_mass, span_total = attend_span(
                query, keys, values, block, start, head, position, HEADS, DIM,
                scale, cap, factor, window, SIZE, SPAN, BLOCK, CAP, WINDOW, True,
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
        start = span * SPAN
        seen = start <= last
        if WINDOW:
            seen = seen & (start + SPAN > first - window + 1)
        if seen:
            block = load_blocks(table, start, last, SIZE, SPAN)
            peak, mass, total = attend_span(
                query, keys, values, block, start, head, position, HEADS, DIM,
                scale, cap, factor, window, SIZE, SPAN, BLOCK, CAP, WINDOW, True,
            )  # fmt: skip
            at = (span.to(tl.int64) * ROWS + row) * heads + query_head
            tl.store(peaks + at, peak, mask=used)
            tl.store(masses + at, mass, mask=used)
            tl.store(sums + at[:, None] * DIM + d[None, :], total, mask=stored)


@triton.jit(do_not_specialize=["ROWS"])
def merge_spans(
    sums, peaks, masses, sinks, out, first_row, count, first_position, ROWS, HEADS, DIM, factor,
    window, SPAN: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the spans of one query head of one row of a tile in order of position, and
    normalise."""
    tile, head, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if i < tl.load(count + tile):
        row = tl.load(first_row + tile).to(tl.int64) + i
        first = tl.load(first_position + tile)
        d = tl.arange(0, BLOCK)[None, :]
        peak, mass = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
        total = tl.zeros((1, BLOCK), tl.float32)
        begin = 0
        if WINDOW:
            begin = tl.maximum(first - window + 1, 0) // SPAN
        for span in range(begin, (first + i) // SPAN + 1):
            at = (span * ROWS + row) * HEADS + head + tl.arange(0, 1)
            part = tl.load(sums + at[:, None] * DIM + d, mask=d < DIM, other=0.0)
            peak, mass, total = merge(
                peak, mass, total, tl.load(peaks + at), tl.load(masses + at), part, factor
            )
        if SINKS:
            sink = tl.load(sinks + head + tl.arange(0, 1))
            mass, total = add_sink(peak, mass, total, sink, factor)
        result = (total / mass[:, None]).to(out.dtype.element_ty)
        tl.store(out + (row * HEADS + head) * DIM + d, result, mask=d < DIM)
