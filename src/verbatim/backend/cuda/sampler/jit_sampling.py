"""Device code of the GPU sampler, in Triton. gpu_sampler.py launches it.

Two kinds of arithmetic. A draw from all ids computes keys in float32 and proves the winner. Masses,
filters and log-probabilities are computed in float64 and int64 exactly as sampling/numerics.py
defines them: only `+ - * /`, conversions and integer sums, so any order of ids gives the same bits.
All kernels are launched without fused multiply-add.
"""

import triton
import triton.language as tl

from verbatim.backend.cuda.sampler.jit_numerics import gumbel64, gumbel_noise, mass_of

# `shapes` has SHAPES float64 values per row: sampling_plan.RowShape
SHAPES: tl.constexpr = tl.constexpr(5)
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # float32's; a removed id is -inf


# ---- a draw from all ids, in float32
# docs/numerics.md bounds the error of the noise; gpu_sampler.py uses the bound.


@triton.jit
def row_word(row_params, line: tl.constexpr, row, used, ROWS):
    """One line of `row_params`, [rows, 1] int32."""
    return tl.load(row_params + line * ROWS + row, mask=used, other=0)[:, None]


@triton.jit(do_not_specialize=["ROWS"])
def chunk_top2(
    logits, row_max, row_params, bests, seconds, ids, ROWS, VOCAB, CHUNKS,
    NOISE: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One chunk of BV ids of BR rows: the best key, the lowest id with that key, and the best key
    of all other ids. A row whose maximum is NaN is not drawn.

    A key is the logit, or (logit - row_max) * scale + noise if the row has a temperature.
    `row_params` is [7, rows] int32: the two halves of the noise key, the position, scale and slack
    (float32 bits; a slack below 0 means argmax), top_k, and the denoising step of a diffusion
    block. Triton's launcher owns the name `params`."""
    row, chunk = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1)
    used = row < ROWS
    top = tl.load(row_max + row, mask=used, other=float("nan"))
    if tl.max((top == top).to(tl.int32), 0) == 1:
        id = (chunk * BV + tl.arange(0, BV))[None, :]
        key = tl.load(
            logits + row.to(tl.int64)[:, None] * VOCAB + id,
            mask=used[:, None] & (id < VOCAB),
            other=float("-inf"),
        )
        raw = key.to(tl.float32)
        if NOISE:
            k0 = row_word(row_params, 0, row, used, ROWS).to(tl.uint32, bitcast=True)
            k1 = row_word(row_params, 1, row, used, ROWS).to(tl.uint32, bitcast=True)
            position = row_word(row_params, 2, row, used, ROWS).to(tl.uint32, bitcast=True)
            step = row_word(row_params, 6, row, used, ROWS).to(tl.uint32, bitcast=True)
            scale = row_word(row_params, 3, row, used, ROWS).to(tl.float32, bitcast=True)
            slack = row_word(row_params, 4, row, used, ROWS).to(tl.float32, bitcast=True)
            noise = gumbel_noise(chunk * (BV // 2), position, k0, k1, BV, step)
            # float64 logits are subtracted before they are rounded
            key = tl.where(slack < 0.0, raw, (key - top[:, None]).to(tl.float32) * scale + noise)
        else:
            key = raw
        best = tl.max(key, 1)
        first = tl.min(tl.where(key == best[:, None], id, VOCAB), 1)
        at = row * CHUNKS + chunk
        tl.store(bests + at, best, mask=used)
        tl.store(ids + at, first, mask=used)
        tl.store(
            seconds + at, tl.max(tl.where(id == first[:, None], float("-inf"), key), 1), mask=used
        )


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
        step = tl.load(row_params + 6 * ROWS + row).to(tl.uint32, bitcast=True)
        temperature = tl.load(shapes + SHAPES * row)
        best = tl.full((), float("-inf"), tl.float64)
        token = tl.full((), -1, tl.int32)
        for chunk in range(CHUNKS):
            if tl.load(bests + row * CHUNKS + chunk) >= least:
                id = chunk * BV + tl.arange(0, BV)
                value = tl.load(
                    x + row.to(tl.int64) * VOCAB + id, mask=id < VOCAB, other=float("-inf")
                ).to(tl.float64)
                key = (value - top) / temperature + gumbel64(id, position, k0, k1, step)
                peak = tl.max(key, 0)
                first = tl.min(tl.where(key == peak, id, VOCAB), 0)
                better = peak > best  # equal keys: the lower id, in an earlier chunk, stays
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


# ---- filters: the best ids of a row as a list, see jit_list.py


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
            d = (value - tl.load(row_max + row).to(tl.float64)) / tl.load(shapes + SHAPES * row)
            tl.store(mass + row * CHUNKS + chunk, tl.sum(mass_of(d), 0))


@triton.jit
def list_threshold(groups, list_k, tau, COUNT, BLOCK: tl.constexpr, LOWER: tl.constexpr):
    """The list_k-th largest group maximum of a row: at least that many ids reach it. -inf, a
    removed id, never does. LOWER: a little lower, so that the list has all ids whose distance from
    the largest logit rounds to that of the list_k-th; of these, top-k keeps the lowest ids."""
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
        least = bits.to(tl.float32, bitcast=True)
        if LOWER:
            least -= (tl.abs(tl.max(value, 0)) + tl.abs(least)) * 2.0**-22
        tl.store(tau + row, tl.maximum(least, LOWEST))


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


# ---- counts of tokens, for the penalties


@triton.jit
def add_tokens(counts, slots, tokens, VOCAB):
    """Count one more written token per row; a slot of -1 is skipped."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        at = counts + slot.to(tl.int64) * VOCAB + tl.maximum(tl.load(tokens + row), 0)
        tl.store(at, tl.load(at) + 2)
