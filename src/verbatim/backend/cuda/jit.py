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


@triton.jit(do_not_specialize=["M"])
def matmul(
    x, w, out, rows, experts, M, N, K,
    SPLITS: tl.constexpr, BLOCKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Split-K matmul: out[m, n] = sum over k of x[m, k] w[n, k].

    A split is BLOCKS blocks of BK inputs. A program sums SPLITS splits: either all of them, or one
    split, whose partial sum it writes to out[split]."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    inside, k0 = m < M, tl.arange(0, BK)
    source = m.to(tl.int64)
    if GATHER:  # mixture of experts: rows are sorted by expert; -1 pads a tile
        source = tl.load(rows + m, mask=inside, other=-1).to(tl.int64)
        w += tl.load(experts + tl.program_id(1)).to(tl.int64) * N * K
    inside = inside & (source >= 0)
    total, sum_ = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    first = tl.program_id(2)
    # one flat loop instead of two nested ones, so that loads are prefetched across split borders
    for block in range(SPLITS * BLOCKS):
        k = (first * BLOCKS + block) * BK + k0
        a = tl.load(
            x + source[:, None] * K + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0
        )
        b = tl.load(
            w + n[None, :].to(tl.int64) * K + k[:, None],
            mask=(n < N)[None, :] & (k < K)[:, None],
            other=0.0,
        )
        # "ieee": full precision for a router, whose weights are float32
        sum_ = tl.dot(a.to(w.dtype.element_ty), b, sum_, input_precision="ieee")
        if block % BLOCKS == BLOCKS - 1:
            total += sum_
            sum_ = tl.zeros((BM, BN), tl.float32)
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


@triton.jit(do_not_specialize=["WIDTH", "ROWS"])
def attend(
    q, keys, values, table, WIDTH, first_row, count, first_position, sums, peaks, masses,
    ROWS, HEADS, DIM, scale, cap, window,
    SHARED: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Flash attention of one query tile (rows of one sequence), one KV head, one span of positions.

    Writes per line the unnormalised sum, the largest score (peak) and the sum of weights (mass).
    A line of the tile is one query head of one row. A masked position has weight 0 and does not
    change the line's bits."""
    tile, head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = tl.arange(0, LINES)
    row, shared = line // SHARED, line % SHARED
    used = (row < tl.load(count + tile)) & (line < LINES // SHARED * SHARED)
    position = tl.load(first_position + tile) + row
    last = tl.max(tl.where(used, position, -1), 0)
    row = (tl.load(first_row + tile) + row).to(tl.int64)
    heads = HEADS * SHARED
    query_head = head * SHARED + shared
    d = tl.arange(0, BLOCK)
    query = tl.load(
        q + (row * heads + query_head)[:, None] * DIM + d[None, :],
        mask=used[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    query = query.to(keys.dtype.element_ty)
    peak = tl.full((LINES,), float("-inf"), tl.float32)
    mass = tl.zeros((LINES,), tl.float32)
    total = tl.zeros((LINES, BLOCK), tl.float32)
    begin = span * SPAN
    if WINDOW:
        begin = tl.maximum(
            begin, tl.maximum(tl.load(first_position + tile) - window + 1, 0) // TILE * TILE
        )
    for start in range(begin, tl.minimum(span * SPAN + SPAN, last + 1), TILE):
        p = start + tl.arange(0, TILE)
        block = tl.load(table + tile.to(tl.int64) * WIDTH + p // SIZE, mask=p <= last, other=-1).to(
            tl.int64
        )
        place = ((block * HEADS + head) * SIZE + p % SIZE) * DIM
        # a block that left the window is released (-1); its slot may hold another sequence's values
        held = (block >= 0)[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + place[:, None] + d[None, :], mask=held, other=0.0)
        score = tl.dot(query, tl.trans(k)) * scale
        if CAP:
            score = cap - 2.0 * cap / (tl.exp(2.0 * score / cap) + 1.0)
        seen = used[:, None] & (p[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (p[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf: no position seen yet
        fade = tl.exp(peak - base)
        weight = tl.exp(score - base[:, None])
        v = tl.load(values + place[:, None] + d[None, :], mask=held, other=0.0)
        mass = mass * fade + tl.sum(weight, 1)
        total = tl.dot(weight.to(values.dtype.element_ty), v, total * fade[:, None])
        peak = new_peak
    at = (span.to(tl.int64) * ROWS + row) * heads + query_head
    tl.store(peaks + at, peak, mask=used)
    tl.store(masses + at, mass, mask=used)
    tl.store(sums + at[:, None] * DIM + d[None, :], total, mask=used[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["ROWS", "SPANS"])
def merge_spans(
    sums, peaks, masses, sinks, out, ROWS, HEADS, DIM, SPANS, SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the spans of one query head of one row in order of position, and normalise.

    SINKS: a score per head whose weight counts in the sum, with a value of zero."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    peak, mass = float("-inf"), 0.0
    total = tl.zeros((BLOCK,), tl.float32)
    for span in range(SPANS):
        at = (span * ROWS + row) * HEADS + head
        span_peak = tl.load(peaks + at)
        new_peak = tl.maximum(peak, span_peak)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        fade, gain = tl.exp(peak - base), tl.exp(span_peak - base)
        mass = mass * fade + tl.load(masses + at) * gain
        total = total * fade + tl.load(sums + at * DIM + d, mask=d < DIM, other=0.0) * gain
        peak = new_peak
    if SINKS:
        sink = tl.load(sinks + head)
        base = tl.maximum(peak, sink)
        fade = tl.exp(peak - base)
        mass = mass * fade + tl.exp(sink - base)
        total = total * fade
    tl.store(
        out + (row * HEADS + head) * DIM + d, (total / mass).to(out.dtype.element_ty), mask=d < DIM
    )


# ---- sampling
# The Gumbel noise of sampling/draw.py in float32: the same random bits, rounded. docs/numerics.md
# bounds the error; gpu_sampler.py uses the bound.


@triton.jit
def philox(counter, position, k0, k1):
    """Philox4x32-10 for counters (counter, position, 0, 0); all uint32."""
    c0, c1 = counter, position
    c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def uniform(high, low):
    """(the upper 52 of 64 bits + 1/2) / 2^52. The relative error does not grow for small values."""
    return (
        high.to(tl.float32) * 1048576.0 + ((low >> 12).to(tl.float32) + 0.5)
    ) * 2.220446049250313e-16


@triton.jit
def split_exponent(x):
    """x = 2^k (1 + f), with 1 + f from sqrt(1/2) to sqrt(2); k and f are exact."""
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    return k, (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def log_of(k, f):
    """log(2^k (1 + f)). For k = 0 the relative error stays bounded however small f is."""
    s = f / (2.0 + f)
    z = s * s
    tail = z * (0.3333333333333333 + z * (0.2 + z * (0.14285714285714285 + z * 0.1111111111111111)))
    return k.to(tl.float32) * 0.6931471805599453 + (s + s) * (1.0 + tail)


@triton.jit
def gumbel(high, low):
    """-log(-log(u)) of 64 random bits. Near u = 1 it uses 1 - u, made of the inverted bits."""
    k, f = split_exponent(uniform(high, low))
    k, f = split_exponent(
        -log_of(k, tl.where(k == 0, -uniform(high ^ 0xFFFFFFFF, low ^ 0xFFFFFFFF), f))
    )
    return -log_of(k, f)


@triton.jit
def gumbel_noise(first, position, k0, k1, BV: tl.constexpr):
    """The noise of BV token ids from id 2 * first on. position, k0, k1 are uint32 [rows, 1].

    One Philox call gives the bits of two neighbouring ids."""
    pair = (first + tl.arange(0, BV // 2)).to(tl.uint32, bitcast=True)[None, :]
    pair, position = tl.broadcast(pair, position)
    even_low, even_high, odd_low, odd_high = philox(pair, position, k0, k1)
    return gumbel(tl.interleave(even_high, odd_high), tl.interleave(even_low, odd_low))


@triton.jit(do_not_specialize=["ROWS"])
def chunk_top2(
    logits, row_max, row_params, bests, seconds, ids, ROWS, VOCAB, CHUNKS,
    NOISE: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One chunk of BV ids of BR rows: the best key, the lowest id with that key, and the best key
    of all other ids.

    A key is the logit, or (logit - row_max) * scale + noise if the row has a temperature.
    `row_params` is [5, rows] int32: the two halves of the noise key, the position, scale and slack
    (float32 bits; a slack below 0 means argmax). Triton's launcher owns the name `params`."""
    row, chunk = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1)
    used = row < ROWS
    id = (chunk * BV + tl.arange(0, BV))[None, :]
    key = tl.load(
        logits + row.to(tl.int64)[:, None] * VOCAB + id,
        mask=used[:, None] & (id < VOCAB),
        other=float("-inf"),
    )
    if NOISE:
        k0 = tl.load(row_params + row, mask=used, other=0).to(tl.uint32, bitcast=True)[:, None]
        k1 = tl.load(row_params + ROWS + row, mask=used, other=0).to(tl.uint32, bitcast=True)[
            :, None
        ]
        position = tl.load(row_params + 2 * ROWS + row, mask=used, other=0).to(
            tl.uint32, bitcast=True
        )[:, None]
        scale = tl.load(row_params + 3 * ROWS + row, mask=used, other=0).to(
            tl.float32, bitcast=True
        )[:, None]
        slack = tl.load(row_params + 4 * ROWS + row, mask=used, other=0).to(
            tl.float32, bitcast=True
        )[:, None]
        top = tl.load(row_max + row, mask=used, other=0.0)[:, None]
        noise = gumbel_noise(chunk * (BV // 2), position, k0, k1, BV)
        key = tl.where(slack < 0.0, key, (key - top) * scale + noise)
    best = tl.max(key, 1)
    first = tl.min(tl.where(key == best[:, None], id, VOCAB), 1)
    at = row * CHUNKS + chunk
    tl.store(bests + at, best, mask=used)
    tl.store(ids + at, first, mask=used)
    tl.store(seconds + at, tl.max(tl.where(id == first[:, None], float("-inf"), key), 1), mask=used)


@triton.jit(do_not_specialize=["ROWS"])
def select_token(
    bests, seconds, ids, row_max, row_params, out, ROWS, VOCAB, CHUNKS,
    BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce the chunks of BR rows: the row's best id if every other key is more than `slack` below
    its key, else -1. A row whose maximum is infinite or NaN always gives -1."""
    row, i = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BLOCK)[None, :]
    used = row < ROWS
    at, inside = row[:, None] * CHUNKS + i, used[:, None] & (i < CHUNKS)
    peaks, id = (
        tl.load(bests + at, mask=inside, other=float("-inf")),
        tl.load(ids + at, mask=inside, other=VOCAB),
    )
    best = tl.max(peaks, 1)
    first = tl.min(tl.where(peaks == best[:, None], id, VOCAB), 1)
    others = tl.where(id == first[:, None], float("-inf"), peaks)
    second = tl.max(tl.maximum(others, tl.load(seconds + at, mask=inside, other=float("-inf"))), 1)
    slack = tl.load(row_params + 4 * ROWS + row, mask=used, other=0).to(tl.float32, bitcast=True)
    proven = (best - second > slack) & (
        tl.abs(tl.load(row_max + row, mask=used, other=0.0)) < float("inf")
    )
    tl.store(out + row, tl.where(proven, first, -1), mask=used)
