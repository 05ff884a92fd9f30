"""Device code of the GPU sampler, in Triton. gpu_sampler.py launches it.

Two kinds of arithmetic. A draw from all ids computes keys in float32 and proves the winner. Masses,
filters and log-probabilities are computed in float64 and int64 exactly as sampling/numerics.py
defines them: only `+ - * /`, conversions and integer sums, so any order of ids gives the same bits.
All kernels are launched without fused multiply-add.
"""

import triton
import triton.language as tl

from verbatim.backend.cuda.jit_numerics import gumbel64, gumbel_noise, mass_of

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # of float32; a removed id is -inf


# ---- a draw from all ids, in float32
# docs/numerics.md bounds the error of the noise; gpu_sampler.py uses the bound.


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
    raw = key.to(tl.float32)
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
        # float64 logits are subtracted before they are rounded
        key = tl.where(slack < 0.0, raw, (key - top).to(tl.float32) * scale + noise)
    else:
        key = raw
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


@triton.jit(do_not_specialize=["ROWS"])
def resolve_ties(
    x, bests, row_max, row_params, shapes, out, ROWS, VOCAB, CHUNKS,
    BLOCK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Draw from all ids in float64 for one row that select_token left undecided.

    Only chunks whose best float32 key is within the slack of the row's best can hold the winner."""
    row = tl.program_id(0)
    slack = tl.load(row_params + 4 * ROWS + row).to(tl.float32, bitcast=True)
    top = tl.load(row_max + row).to(tl.float64)
    undecided = (tl.load(out + row) < 0) & (slack > 0.0) & (slack < float("inf"))
    if undecided & (tl.abs(top) < float("inf")):
        c = tl.arange(0, BLOCK)
        peaks = tl.load(bests + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
        least = tl.max(peaks, 0) - slack
        k0 = tl.load(row_params + row).to(tl.uint32, bitcast=True)
        k1 = tl.load(row_params + ROWS + row).to(tl.uint32, bitcast=True)
        position = tl.load(row_params + 2 * ROWS + row).to(tl.uint32, bitcast=True)
        temperature = tl.load(shapes + 3 * row)
        best = tl.full((), float("-inf"), tl.float64)
        token = tl.full((), -1, tl.int32)
        for chunk in range(CHUNKS):
            if tl.load(bests + row * CHUNKS + chunk) >= least:
                id = chunk * BV + tl.arange(0, BV)
                value = tl.load(
                    x + row.to(tl.int64) * VOCAB + id, mask=id < VOCAB, other=float("-inf")
                ).to(tl.float64)
                key = (value - top) / temperature + gumbel64(id, position, k0, k1)
                peak = tl.max(key, 0)
                first = tl.min(tl.where(key == peak, id, VOCAB), 0)
                better = peak > best  # of equal keys the lower id, in an earlier chunk, stays
                best = tl.where(better, peak, best)
                token = tl.where(better, first, token)
        tl.store(out + row, token)


# ---- processors: grammar masks, bans and penalties


@triton.jit(do_not_specialize=["SLOTS"])
def process_logits(
    logits, table, penalties, masks, counts, out, VOCAB, WORDS, SLOTS, BV: tl.constexpr,
):  # fmt: skip
    """float64 logits after masks and penalties, for one chunk of one row; a removed id is -inf.

    `table` is [2, rows]: the row's mask and its slot in `counts`, -1 for none. `masks` has WORDS
    int32 words of bits per mask. `counts` [slots, VOCAB] int16 is twice the count of the id in the
    output, plus one if it is in the prompt. `penalties` is [rows, 3]: repetition, frequency,
    presence."""
    row, ROWS = tl.program_id(0), tl.num_programs(0)
    id = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = id < VOCAB
    x = tl.load(logits + row.to(tl.int64) * VOCAB + id, mask=inside, other=0.0).to(tl.float64)
    mask = tl.load(table + row)
    words = tl.load(
        masks + tl.maximum(mask, 0).to(tl.int64) * WORDS + (id >> 5),
        mask=id < tl.where(mask >= 0, VOCAB, 0),
        other=-1,
    )
    x = tl.where(((words >> (id & 31)) & 1) == 1, x, float("-inf"))
    slot = tl.load(table + ROWS + row)
    seen = tl.load(
        counts + tl.maximum(slot, 0).to(tl.int64) * VOCAB + id,
        mask=id < tl.where(slot >= 0, VOCAB, 0),
        other=0,
    ).to(tl.int32)
    repetition = tl.load(penalties + 3 * row)
    frequency, presence = tl.load(penalties + 3 * row + 1), tl.load(penalties + 3 * row + 2)
    x = tl.where(seen > 0, tl.where(x > 0.0, x / repetition, x * repetition), x)
    written = seen >> 1
    x = tl.where(written > 0, (x - frequency * written.to(tl.float64)) - presence, x)
    tl.store(out + row.to(tl.int64) * VOCAB + id, x, mask=inside)


# ---- filters: the best ids of a row as a list


@triton.jit
def group_maxima(
    x, row_max, shapes, list_k, groups, mass, VOCAB, CHUNKS,
    GROUP: tl.constexpr, BV: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """One chunk of one row: the largest logit of each GROUP ids, rounded to float32, and with MASS
    the chunk's total mass at the row's temperature. Rows with list_k 0 are skipped."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(list_k + row) > 0:
        id = chunk * BV + tl.arange(0, BV)
        value = tl.load(x + row.to(tl.int64) * VOCAB + id, mask=id < VOCAB, other=float("-inf")).to(
            tl.float64
        )
        peaks = tl.max(tl.reshape(value.to(tl.float32), (BV // GROUP, GROUP)), 1)
        at = (row * CHUNKS + chunk) * (BV // GROUP) + tl.arange(0, BV // GROUP)
        tl.store(groups + at, peaks)
        if MASS:
            d = (value - tl.load(row_max + row).to(tl.float64)) / tl.load(shapes + 3 * row)
            tl.store(mass + row * CHUNKS + chunk, tl.sum(mass_of(d), 0))


@triton.jit
def list_threshold(groups, list_k, tau, COUNT, BLOCK: tl.constexpr):
    """The list_k-th largest group maximum of a row: at least that many ids reach it. -inf, a
    removed id, never does."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    k = tl.load(list_k + row)
    if k > 0:
        value = tl.load(groups + row * COUNT + i, mask=i < COUNT, other=float("-inf"))
        bits = value.to(tl.int32, bitcast=True)
        key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # ordered like the floats
        low = tl.full((), -2147483648, tl.int64)
        high = tl.full((), 2147483648, tl.int64)
        for _ in range(32):  # low: at least k groups reach it; high: fewer do
            middle = (low + high) >> 1
            enough = tl.sum((key >= middle).to(tl.int32), 0) >= k
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        bits = low.to(tl.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        tl.store(tau + row, tl.maximum(bits.to(tl.float32, bitcast=True), LOWEST))


@triton.jit
def collect_list(x, list_k, tau, used, ids, values, VOCAB, BV: tl.constexpr, LIST: tl.constexpr):
    """Append the ids of one chunk that reach the threshold to the row's list, in any order. `used`
    counts them, also those that do not fit."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(list_k + row) > 0:
        id = chunk * BV + tl.arange(0, BV)
        value = tl.load(x + row.to(tl.int64) * VOCAB + id, mask=id < VOCAB, other=float("-inf")).to(
            tl.float64
        )
        chosen = (value.to(tl.float32) >= tl.load(tau + row)).to(tl.int32)
        count = tl.sum(chosen, 0)
        if count > 0:
            first = tl.atomic_add(used + row, count)
            at = first + tl.cumsum(chosen, 0) - 1
            fits = (chosen == 1) & (at < LIST)
            tl.store(ids + row * LIST + at, id, mask=fits)
            tl.store(values + row * LIST + at, value, mask=fits)


@triton.jit
def rank_list(
    ids, values, row, count, top, temperature, id, d, LIST: tl.constexpr, BC: tl.constexpr
):
    """(rank, mass of the better ids) of each list entry, by d descending, then id ascending."""
    rank, better = tl.zeros((LIST,), tl.int32), tl.zeros((LIST,), tl.int64)
    for start in range(0, tl.minimum(count, LIST), BC):
        j = start + tl.arange(0, BC)
        other = tl.load(ids + row * LIST + j, mask=j < count, other=0)
        value = tl.load(values + row * LIST + j, mask=j < count, other=float("-inf"))
        e = (value - top) / temperature
        before = (e[None, :] > d[:, None]) | (
            (e[None, :] == d[:, None]) & (other[None, :] < id[:, None])
        )
        before = before & (j < count)[None, :]
        rank += tl.sum(before.to(tl.int32), 1)
        better += tl.sum(tl.where(before, mass_of(e)[None, :], 0), 1)
    return rank, better


@triton.jit
def draw_from_list(
    ids, values, used, tau, row_max, row_params, shapes, list_k, mass, out, VOCAB, CHUNKS,
    LIST: tl.constexpr, BC: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Top-k, top-p, min-p and the draw over the list of one row, exactly; -1 if the list is too
    short for the filters.

    `row_params` is that of chunk_top2; `shapes` is [rows, 3] float64: temperature, top_p and
    log(min_p), which is -inf without min_p. A row's top_k is `row_params` line 5, 0 for none."""
    row, ROWS = tl.program_id(0), tl.num_programs(0)
    if tl.load(list_k + row) > 0:
        i = tl.arange(0, LIST)
        count = tl.load(used + row)
        inside = i < count
        id = tl.load(ids + row * LIST + i, mask=inside, other=VOCAB)
        value = tl.load(values + row * LIST + i, mask=inside, other=float("-inf"))
        top = tl.load(row_max + row).to(tl.float64)
        temperature = tl.load(shapes + 3 * row)
        share, floor = tl.load(shapes + 3 * row + 1), tl.load(shapes + 3 * row + 2)
        d = (value - top) / temperature
        rank, better = rank_list(ids, values, row, count, top, temperature, id, d, LIST, BC)
        k = tl.load(row_params + 5 * ROWS + row)
        kept = inside & (rank < tl.where(k > 0, k, LIST))
        # whole: the list holds every id that the filters keep
        whole = (k > 0) | (tl.load(tau + row) <= LOWEST)
        total = tl.sum(tl.where(kept, mass_of(d), 0), 0)
        listed = total
        if MASS:
            c = tl.arange(0, BLOCK)
            everything = tl.sum(tl.load(mass + row * CHUNKS + c, mask=c < CHUNKS, other=0), 0)
            total = tl.where(k > 0, total, everything)
        if share < 1.0:
            product = share * total.to(tl.float64)
            need = product.to(tl.int64)
            need += (product > need.to(tl.float64)).to(tl.int64)
            need = tl.maximum(tl.minimum(need, total), 1)
            whole = whole | (listed >= need)
            kept = kept & (better < need)
        whole = whole | (tl.min(tl.where(inside, d, 0.0), 0) < floor)
        kept = kept & (d >= floor)
        k0 = tl.load(row_params + row).to(tl.uint32, bitcast=True)
        k1 = tl.load(row_params + ROWS + row).to(tl.uint32, bitcast=True)
        position = tl.load(row_params + 2 * ROWS + row).to(tl.uint32, bitcast=True)
        key = tl.where(kept, d + gumbel64(id, position, k0, k1), float("-inf"))
        best = tl.max(key, 0)
        token = tl.min(tl.where(kept & (key == best), id, VOCAB), 0)
        proven = whole & (count <= LIST) & (count > 0) & (tl.abs(top) < float("inf"))
        tl.store(out + row, tl.where(proven, token, -1))


@triton.jit
def report_list(
    ids, values, used, logits, row_max, tokens, list_k, mass, top_ids, top_values, scores,
    VOCAB, CHUNKS, TOP, LIST: tl.constexpr, BC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the host needs for log-probabilities of one row: the best ids in order with their
    logits; `scores` [rows, 4] int64: total mass, size of the list, float32 bits of the drawn
    token's logit and of the largest one."""
    row = tl.program_id(0)
    if tl.load(list_k + row) > 0:
        i, c = tl.arange(0, LIST), tl.arange(0, BLOCK)
        count = tl.load(used + row)
        inside = i < count
        id = tl.load(ids + row * LIST + i, mask=inside, other=VOCAB)
        value = tl.load(values + row * LIST + i, mask=inside, other=float("-inf"))
        peak = tl.load(row_max + row)
        top, one = peak.to(tl.float64), tl.full((), 1.0, tl.float64)
        d = value - top
        rank, _ = rank_list(ids, values, row, count, top, one, id, d, LIST, BC)
        shown = inside & (rank < TOP)
        tl.store(top_ids + row * TOP + rank, id, mask=shown)
        tl.store(top_values + row * TOP + rank, value.to(tl.float32), mask=shown)
        total = tl.sum(tl.load(mass + row * CHUNKS + c, mask=c < CHUNKS, other=0), 0)
        token = tl.maximum(tl.load(tokens + row), 0)
        logit = tl.load(logits + row.to(tl.int64) * VOCAB + token)
        tl.store(scores + 4 * row, total)
        tl.store(scores + 4 * row + 1, count.to(tl.int64))
        tl.store(scores + 4 * row + 2, logit.to(tl.int32, bitcast=True).to(tl.int64))
        tl.store(scores + 4 * row + 3, peak.to(tl.int32, bitcast=True).to(tl.int64))


# ---- counts of tokens, for the penalties


@triton.jit
def add_tokens(counts, slots, tokens, VOCAB):
    """Count one more written token per row; a slot of -1 is skipped."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        at = counts + slot.to(tl.int64) * VOCAB + tl.maximum(tl.load(tokens + row), 0)
        tl.store(at, tl.load(at) + 2)
