"""Device code of the cuda backend, in Triton. kernels.py launches it and says what goes in and what comes out.

Every program gives a row the same bits whatever other rows are there. A row's reduction is cut into pieces whose size and place depend on the
shape of the weights (kernels.parts_of) or on the absolute position (SPAN, TILE), never on the number of rows. Each piece is added up in one
order, then the pieces in theirs. Whether one program computes all pieces of a row or several do at once is a matter of speed only.

Two variants of a kernel could round differently, so a variant must not depend on the rows: numbers that do are not specialised on, and all
kernels but the product are launched without fused multiply-adds, since which ones a compiler finds is its own affair.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def product(x, w, out, rows, experts, M, N, K, PIECES: tl.constexpr, EACH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATHER: tl.constexpr):  # fmt: skip
    """out[m, n] = sum over k of x[m, k] w[n, k]. A program adds up PIECES pieces of k: all of them, or its own, whose sum it leaves in out[piece]."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    inside, k0 = m < M, tl.arange(0, BK)
    source = m.to(tl.int64)
    if GATHER:  # a mixture's rows, sorted by expert; -1 fills a tile up
        source = tl.load(rows + m, mask=inside, other=-1).to(tl.int64)
        w += tl.load(experts + tl.program_id(1)).to(tl.int64) * N * K
    inside = inside & (source >= 0)
    total, sum_ = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    first = tl.program_id(2)
    for block in range(
        PIECES * EACH
    ):  # one loop, not one in another: loads run ahead of the products across the pieces' borders too
        k = (first * EACH + block) * BK + k0
        a = tl.load(
            x + source[:, None] * K + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0
        )
        b = tl.load(
            w + n[None, :].to(tl.int64) * K + k[:, None],
            mask=(n < N)[None, :] & (k < K)[:, None],
            other=0.0,
        )
        sum_ = tl.dot(
            a.to(w.dtype.element_ty), b, sum_, input_precision="ieee"
        )  # for a router, which is float32
        if block % EACH == EACH - 1:
            total += sum_
            sum_ = tl.zeros((BM, BN), tl.float32)
    place = (first * M + m[:, None]).to(tl.int64) * N + n[None, :]
    tl.store(out + place, total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def added(parts, bias, at, column, inside, SIZE, PARTS: tl.constexpr, BIAS: tl.constexpr):
    """The pieces of some numbers, added in order, then the bias."""
    total = tl.load(parts + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):  # unrolled: all loads are on their way at once
        total += tl.load(parts + part * SIZE + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["SIZE"])
def settle(x, parts, bias, weight, shift, out, SIZE, WIDTH, eps, offset, PARTS: tl.constexpr, BIAS: tl.constexpr, OLD: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row: what was to be added up, to x where there is one (OLD), and its norm (KIND) into `out`."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    if PARTS:
        values = added(parts, bias, row + i, i, inside, SIZE, PARTS, BIAS)
        if OLD:
            values = tl.load(x + row + i, mask=inside, other=0.0) + values
            tl.store(x + row + i, values, mask=inside)
    else:
        values = tl.load(x + row + i, mask=inside, other=0.0)
    if KIND == "none":
        if not OLD:
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
def prepare(parts, bias, q_norm, k_norm, positions, cos, sin, slots, q, keys, values, SIZE, HEADS, SHARED, DIM, HALF, eps, offset, PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One head of one row of queries, keys or values: added up, normed, rotated; then queries to q, the rest into the cache.

    HEADS are the key heads; SHARED query heads belong to each. The cache is [blocks, HEADS, SLOTS, DIM]; a slot is block * SLOTS + place."""
    row, head = tl.program_id(0), tl.program_id(1)
    queries = HEADS * SHARED
    width = (queries + 2 * HEADS) * DIM
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    base = row.to(tl.int64) * width + head * DIM
    x = added(parts, bias, base + d, head * DIM + d, inside, SIZE, PARTS, BIAS)
    turned = head < queries + HEADS  # a query or a key
    if NORM:
        root = tl.sqrt_rn(tl.sum(x * x, 0) / DIM + eps)
        scale = (
            tl.where(
                head < queries,
                tl.load(q_norm + d, mask=inside, other=0.0),
                tl.load(k_norm + d, mask=inside, other=0.0),
            )
            + offset
        )
        x = tl.where(turned, x / root * scale, x)
    if ROPE:
        other = tl.where(d < HALF, d + HALF, d - HALF)
        moved = d < 2 * HALF
        y = added(parts, bias, base + other, head * DIM + other, moved, SIZE, PARTS, BIAS)
        if NORM:
            scale = (
                tl.where(
                    head < queries,
                    tl.load(q_norm + other, mask=moved, other=0.0),
                    tl.load(k_norm + other, mask=moved, other=0.0),
                )
                + offset
            )
            y = y / root * scale
        at = tl.load(positions + row).to(tl.int64) * HALF + tl.where(d < HALF, d, d - HALF)
        c, s = tl.load(cos + at, mask=moved, other=0.0), tl.load(sin + at, mask=moved, other=0.0)
        x = tl.where(turned & moved, tl.where(d < HALF, x * c - y * s, x * c + y * s), x)
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
        mask=d < tl.where((head >= queries) & turned, DIM, 0),
    )
    tl.store(
        values + place - HEADS * SLOTS * DIM,
        x.to(values.dtype.element_ty),
        mask=d < tl.where(turned, 0, DIM),
    )


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = 0.5 * x * (1.0 + (1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit(do_not_specialize=["SIZE"])
def inner(
    parts,
    bias,
    out,
    SIZE,
    WIDTH,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[rows, gate then up] or [rows, up] -> [rows, WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    if GATED:
        gate = added(parts, bias, row * 2 * WIDTH + i, i, inside, SIZE, PARTS, BIAS)
        up = added(parts, bias, row * 2 * WIDTH + WIDTH + i, WIDTH + i, inside, SIZE, PARTS, BIAS)
        y = activate(gate, KIND) * up
    else:
        y = activate(added(parts, bias, row * WIDTH + i, i, inside, SIZE, PARTS, BIAS), KIND)
    tl.store(out + row * WIDTH + i, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["WIDTH", "ROWS"])
def attend(q, keys, values, table, WIDTH, first_row, count, first_position, sums, peaks, masses, ROWS, HEADS, DIM, scale, cap, window, SHARED: tl.constexpr, SIZE: tl.constexpr, SCORES: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """One run of rows of one sequence, one key head, one span of positions: unnormalised sums, their greatest scores, their masses.

    A line of the tile is one query head of one row. Positions that a line may not see have mass 0 and leave its bits alone."""
    run, head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = tl.arange(0, SCORES)
    row, mine = line // SHARED, line % SHARED
    here = (row < tl.load(count + run)) & (line < SCORES // SHARED * SHARED)
    position = tl.load(first_position + run) + row
    last = tl.max(tl.where(here, position, -1), 0)
    row = (tl.load(first_row + run) + row).to(tl.int64)
    heads = HEADS * SHARED
    query = head * SHARED + mine
    d = tl.arange(0, BLOCK)
    asked = tl.load(
        q + (row * heads + query)[:, None] * DIM + d[None, :],
        mask=here[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    asked = asked.to(keys.dtype.element_ty)
    peak = tl.full((SCORES,), float("-inf"), tl.float32)
    mass = tl.zeros((SCORES,), tl.float32)
    total = tl.zeros((SCORES, BLOCK), tl.float32)
    begin = span * SPAN
    if WINDOW:
        begin = tl.maximum(
            begin, tl.maximum(tl.load(first_position + run) - window + 1, 0) // TILE * TILE
        )
    for start in range(begin, tl.minimum(span * SPAN + SPAN, last + 1), TILE):
        p = start + tl.arange(0, TILE)
        block = tl.load(table + run.to(tl.int64) * WIDTH + p // SIZE, mask=p <= last, other=-1).to(
            tl.int64
        )
        place = ((block * HEADS + head) * SIZE + p % SIZE) * DIM
        there = (block >= 0)[:, None] & (d < DIM)[
            None, :
        ]  # a block behind the window was released, and what it holds now is another's
        k = tl.load(keys + place[:, None] + d[None, :], mask=there, other=0.0)
        score = tl.dot(asked, tl.trans(k)) * scale
        if CAP:
            score = cap - 2.0 * cap / (tl.exp(2.0 * score / cap) + 1.0)
        seen = here[:, None] & (p[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (p[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        floor = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        fade = tl.exp(peak - floor)
        weight = tl.exp(score - floor[:, None])
        v = tl.load(values + place[:, None] + d[None, :], mask=there, other=0.0)
        mass = mass * fade + tl.sum(weight, 1)
        total = tl.dot(weight.to(values.dtype.element_ty), v, total * fade[:, None])
        peak = higher
    at = (span.to(tl.int64) * ROWS + row) * heads + query
    tl.store(peaks + at, peak, mask=here)
    tl.store(masses + at, mass, mask=here)
    tl.store(sums + at[:, None] * DIM + d[None, :], total, mask=here[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["ROWS", "SPANS"])
def add_spans(sums, peaks, masses, out, ROWS, HEADS, DIM, SPANS, BLOCK: tl.constexpr):
    """The spans of one query head of one row, in order of position."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    peak, mass = float("-inf"), 0.0
    total = tl.zeros((BLOCK,), tl.float32)
    for span in range(SPANS):
        at = (span * ROWS + row) * HEADS + head
        its_peak = tl.load(peaks + at)
        higher = tl.maximum(peak, its_peak)
        floor = tl.where(higher == float("-inf"), 0.0, higher)
        keep, take = tl.exp(peak - floor), tl.exp(its_peak - floor)
        mass = mass * keep + tl.load(masses + at) * take
        total = total * keep + tl.load(sums + at * DIM + d, mask=d < DIM, other=0.0) * take
        peak = higher
    tl.store(
        out + (row * HEADS + head) * DIM + d, (total / mass).to(out.dtype.element_ty), mask=d < DIM
    )


# ----------------------------------------------------------------------------------------------------------------- draws
# The noise of sampling/draw.py in float32: from the same bits, but rounded. docs/numerics.md bounds what that may cost; screen.py says what it is for.


@triton.jit
def noise_words(counter, position, k0, k1):
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
def unit(high, low):
    """(the upper 52 of 64 bits + 1/2) / 2^52. Small ones are as precise as large ones."""
    return (
        high.to(tl.float32) * 1048576.0 + ((low >> 12).to(tl.float32) + 0.5)
    ) * 2.220446049250313e-16


@triton.jit
def parted(x):
    """x = 2^k (1 + f), 1 + f from sqrt(1/2) to sqrt(2); both are exact."""
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    return k, (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def log_of(k, f):
    """log(2^k (1 + f)). With k = 0 its error is relative, however small f is."""
    s = f / (2.0 + f)
    z = s * s
    tail = z * (0.3333333333333333 + z * (0.2 + z * (0.14285714285714285 + z * 0.1111111111111111)))
    return k.to(tl.float32) * 0.6931471805599453 + (s + s) * (1.0 + tail)


@triton.jit
def gumbel(high, low):
    """-log(-log(u)) of 64 random bits. Next to 1 it is 1 - u that counts, which is made of the same bits, inverted."""
    k, f = parted(unit(high, low))
    k, f = parted(-log_of(k, tl.where(k == 0, -unit(high ^ 0xFFFFFFFF, low ^ 0xFFFFFFFF), f)))
    return -log_of(k, f)


@triton.jit
def noise_of(first, position, k0, k1, BV: tl.constexpr):
    """The noise of BV ids, the first of which is 2 * first; position and key are [rows, 1] and uint32. Two neighbours share their bits' making."""
    pair = (first + tl.arange(0, BV // 2)).to(tl.uint32, bitcast=True)[None, :]
    pair, position = tl.broadcast(pair, position)
    even_low, even_high, odd_low, odd_high = noise_words(pair, position, k0, k1)
    return gumbel(tl.interleave(even_high, odd_high), tl.interleave(even_low, odd_low))


@triton.jit(do_not_specialize=["ROWS"])
def screen(logits, tops, asked, bests, seconds, ids, ROWS, VOCAB, CHUNKS, NOISE: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One chunk of BV ids of BR rows: the best key, the lowest id that has it, and the best key of all other ids.

    A key is the logit, or (logit - top) * scale + noise where a row is drawn. `asked` holds, for all rows: the two halves of the noise key, the
    position, scale, slack (floats by their bits; a slack below 0 is an argmax)."""
    row, chunk = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1)
    here = row < ROWS
    id = (chunk * BV + tl.arange(0, BV))[None, :]
    key = tl.load(
        logits + row.to(tl.int64)[:, None] * VOCAB + id,
        mask=here[:, None] & (id < VOCAB),
        other=float("-inf"),
    )
    if NOISE:
        k0 = tl.load(asked + row, mask=here, other=0).to(tl.uint32, bitcast=True)[:, None]
        k1 = tl.load(asked + ROWS + row, mask=here, other=0).to(tl.uint32, bitcast=True)[:, None]
        position = tl.load(asked + 2 * ROWS + row, mask=here, other=0).to(tl.uint32, bitcast=True)[
            :, None
        ]
        scale = tl.load(asked + 3 * ROWS + row, mask=here, other=0).to(tl.float32, bitcast=True)[
            :, None
        ]
        slack = tl.load(asked + 4 * ROWS + row, mask=here, other=0).to(tl.float32, bitcast=True)[
            :, None
        ]
        top = tl.load(tops + row, mask=here, other=0.0)[:, None]
        noise = noise_of(chunk * (BV // 2), position, k0, k1, BV)
        key = tl.where(slack < 0.0, key, (key - top) * scale + noise)
    best = tl.max(key, 1)
    first = tl.min(tl.where(key == best[:, None], id, VOCAB), 1)
    at = row * CHUNKS + chunk
    tl.store(bests + at, best, mask=here)
    tl.store(ids + at, first, mask=here)
    tl.store(seconds + at, tl.max(tl.where(id == first[:, None], float("-inf"), key), 1), mask=here)


@triton.jit(do_not_specialize=["ROWS"])
def choose(
    bests,
    seconds,
    ids,
    tops,
    asked,
    out,
    ROWS,
    VOCAB,
    CHUNKS,
    BR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The chunks of BR rows: a row's best id where no other key comes within `slack` of its key, else -1. A row that is not all numbers is never sure."""
    row, i = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BLOCK)[None, :]
    here = row < ROWS
    at, inside = row[:, None] * CHUNKS + i, here[:, None] & (i < CHUNKS)
    peaks, id = (
        tl.load(bests + at, mask=inside, other=float("-inf")),
        tl.load(ids + at, mask=inside, other=VOCAB),
    )
    best = tl.max(peaks, 1)
    first = tl.min(tl.where(peaks == best[:, None], id, VOCAB), 1)
    others = tl.where(id == first[:, None], float("-inf"), peaks)
    second = tl.max(tl.maximum(others, tl.load(seconds + at, mask=inside, other=float("-inf"))), 1)
    slack = tl.load(asked + 4 * ROWS + row, mask=here, other=0).to(tl.float32, bitcast=True)
    sure = (best - second > slack) & (
        tl.abs(tl.load(tops + row, mask=here, other=0.0)) < float("inf")
    )
    tl.store(out + row, tl.where(sure, first, -1), mask=here)
