"""Device code of chains of drafts, in Triton. backend/cuda/chains.py launches it.

`fields` is int32 [fields, stride]: a column per sequence, whose lines chains.ChainField names. The
draws are those of the sampler without filters, up to rounding: a draft may be any token.
"""

import triton
import triton.language as tl

from verbatim.backend.cuda.sampler.jit_numerics import gumbel64

MOST: tl.constexpr = tl.constexpr(8)  # drafts of a chain


@triton.jit
def draw_chunks(
    logits, ids, fields, parts, tokens, VOCAB, CHUNKS, STRIDE,
    NAMED: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One chunk of BV logits of one sequence: the token with the best key, and in `parts` [rows,
    CHUNKS, 4] its key and logit, the largest logit, and the sum of exp(logit - largest). `ids`:
    the token of each logit, if NAMED."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    i = chunk * BV + tl.arange(0, BV)
    inside = i < VOCAB
    x = tl.load(logits + row.to(tl.int64) * VOCAB + i, mask=inside, other=float("-inf"))
    id = i
    if NAMED:
        id = tl.load(ids + i, mask=inside, other=0)
    scale = tl.load(fields + 3 * STRIDE + row).to(tl.float32, bitcast=True).to(tl.float64)
    key = x.to(tl.float64)
    if scale > 0.0:
        k0 = tl.load(fields + row).to(tl.uint32, bitcast=True)
        k1 = tl.load(fields + STRIDE + row).to(tl.uint32, bitcast=True)
        position = tl.load(fields + 2 * STRIDE + row).to(tl.uint32, bitcast=True)
        key = key * scale + gumbel64(id, position, k0, k1)
    best = tl.max(key, 0)
    first = tl.min(tl.where(key == best, i, VOCAB), 0)
    peak = tl.max(x, 0)
    at = parts + (row * CHUNKS + chunk) * 4
    tl.store(at, best.to(tl.float32))
    tl.store(at + 1, tl.max(tl.where(i == first, x, float("-inf")), 0))
    tl.store(at + 2, peak)
    tl.store(at + 3, tl.sum(tl.where(inside, tl.exp(x - peak), 0.0), 0))
    tl.store(tokens + row * CHUNKS + chunk, tl.max(tl.where(i == first, id, 0), 0))


@triton.jit
def advance(
    parts, tokens, fields, table, drawn, ROWS, CHUNKS, STRIDE, WIDTH, CONTEXT,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce the chunks of one sequence: append the token and its log-probability to `drawn` [MOST,
    2, ROWS], and make it the row that is computed next. `table` is [ROWS, WIDTH]."""
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    inside = c < CHUNKS
    at = parts + (row * CHUNKS + c) * 4
    key = tl.load(at, mask=inside, other=float("-inf"))
    first = tl.min(tl.where(key == tl.max(key, 0), c, CHUNKS), 0)
    chosen = c == first  # no chunk, if a logit is NaN: then the token is 0
    token = tl.max(tl.where(chosen, tl.load(tokens + row * CHUNKS + c, mask=inside, other=0), 0), 0)
    logit = tl.load(at + 1, mask=inside, other=float("-inf"))
    peaks = tl.load(at + 2, mask=inside, other=float("-inf"))
    peak = tl.max(peaks, 0)
    sums = tl.load(at + 3, mask=inside, other=0.0)
    total = tl.sum(tl.where(inside, sums * tl.exp(peaks - peak), 0.0), 0)
    logprob = tl.max(tl.where(chosen, logit, float("-inf")), 0) - peak - tl.log(total)
    field = fields + row
    count = tl.load(field + 4 * STRIDE)
    out = drawn + tl.minimum(count, MOST - 1) * 2 * ROWS + row
    tl.store(out, token)
    tl.store(out + ROWS, logprob.to(tl.int32, bitcast=True))
    position = tl.minimum(tl.load(field + 6 * STRIDE) + 1, CONTEXT - 1)
    block = tl.load(table + row * WIDTH + tl.minimum(position // BLOCK_SIZE, WIDTH - 1))
    tl.store(field + 2 * STRIDE, tl.load(field + 2 * STRIDE) + 1)
    tl.store(field + 4 * STRIDE, count + 1)
    tl.store(field + 6 * STRIDE, position)
    tl.store(field + 7 * STRIDE, token)
    tl.store(field + 8 * STRIDE, block * BLOCK_SIZE + position % BLOCK_SIZE)
