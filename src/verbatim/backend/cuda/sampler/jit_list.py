"""Device code of the draw from a list of the best ids, in Triton. gpu_sampler.py launches it.

In: the list that jit_sampling.collect_list made. Filters, masses, noise and log-probabilities of
the list are computed in float64 and int64 exactly as sampling/ defines them, or the row is left to
the host. All kernels are launched without fused multiply-add.
"""

import triton
import triton.language as tl

from verbatim.backend.cuda.sampler.jit_numerics import gumbel64, mass_of, spread_of
from verbatim.backend.cuda.sampler.jit_sampling import SHAPES


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
def mass_needed(share, total):
    """As sampling/numerics.py: the smallest mass that is at least `share` of `total`."""
    product = share * total.to(tl.float64)
    need = product.to(tl.int64)
    need += (product > need.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(need, total), 1)


@triton.jit
def end_of_prefix(key, id, mass, need):
    """The last (key, id) of the shortest prefix with a mass of at least `need`, by key, then id.
    All keys are >= 0.

    Found by bisection, first of the key's bits, then of the ids with that key."""
    bits = tl.abs(key).to(tl.int64, bitcast=True)  # ordered like the keys; -0.0 becomes 0.0
    low = tl.min(tl.where(mass > 0, bits, 0x7FF0000000000000), 0) - 1
    high = tl.max(tl.where(mass > 0, bits, -1), 0)
    while high - low > 1:  # the ids up to `high` have the mass, those up to `low` do not
        middle = low + ((high - low) >> 1)
        enough = tl.sum(tl.where(bits <= middle, mass, 0), 0) >= need
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    need -= tl.sum(tl.where(bits < high, mass, 0), 0)
    first = tl.full((), -1, tl.int32)
    last = tl.max(tl.where((bits == high) & (mass > 0), id, -1), 0)
    while last - first > 1:
        middle = first + ((last - first) >> 1)
        enough = tl.sum(tl.where((bits == high) & (id <= middle), mass, 0), 0) >= need
        first, last = tl.where(enough, first, middle), tl.where(enough, middle, last)
    return high.to(tl.float64, bitcast=True), last


@triton.jit
def keep_typical(kept, id, d, share):
    """The ids of `kept` that typical_p keeps."""
    mass = tl.where(kept, mass_of(d), 0)
    total, spread = tl.sum(mass, 0), tl.sum(tl.where(kept, spread_of(d), 0), 0)
    distance = tl.abs(-d - spread.to(tl.float64) / total.to(tl.float64))
    last, last_id = end_of_prefix(distance, id, mass, mass_needed(share, total))
    return kept & ((distance < last) | ((distance == last) & (id <= last_id)))


@triton.jit
def sigma_edge(n, count, sum1, sum2):
    """(-n * sigma, its largest error) from the sums of z and z^2 over `count` live ids.

    sampling/filters.py adds in one fixed order and in two passes; the two sums differ by less than
    1e-10 of the mean square for 2^20 ids. An error of 1e-9 is far above that, and an id is almost
    never that near to the edge."""
    square = sum2 / count
    mean = sum1 / count
    sigma = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
    error = tl.where(square == 0.0, 0.0, n * (1e-9 * square / tl.maximum(sigma, 1e-300)))
    return -(n * sigma), error


@triton.jit
def draw_from_list(
    ids, values, used, row_max, row_params, shapes, list_k, moments, out, VOCAB, CHUNKS,
    LIST: tl.constexpr, BC: tl.constexpr, BLOCK: tl.constexpr, SIGMA: tl.constexpr,
):  # fmt: skip
    """Top-k, the other filters and the draw over the list of one row, exactly; -1 if the list does
    not hold the best k ids.

    `row_params` is that of chunk_top2; its line 5 is the row's top_k. SIGMA: a row has top_n_sigma,
    and `moments` are those of jit_filters.chunk_sums."""
    row, ROWS = tl.program_id(0), tl.num_programs(0)
    if tl.load(list_k + row) > 0:
        i, c = tl.arange(0, LIST), tl.arange(0, BLOCK)
        count = tl.load(used + row)
        inside = i < count
        id = tl.load(ids + row * LIST + i, mask=inside, other=VOCAB)
        value = tl.load(values + row * LIST + i, mask=inside, other=float("-inf"))
        top = tl.load(row_max + row).to(tl.float64)
        at = shapes + SHAPES * row
        temperature, share = tl.load(at), tl.load(at + 1)
        typical, n = tl.load(at + 3), tl.load(at + 4)
        d = (value - top) / temperature
        rank, better = rank_list(ids, values, row, count, top, temperature, id, d, LIST, BC)
        kept = inside & (rank < tl.load(row_params + 5 * ROWS + row))
        if share < 1.0:
            kept = kept & (better < mass_needed(share, tl.sum(tl.where(kept, mass_of(d), 0), 0)))
        kept = kept & (d >= tl.load(at + 2))
        if typical < 1.0:
            kept = keep_typical(kept, id, d, typical)
        unsure = False
        if SIGMA:  # noqa: SIM102 (a constant: without it the rest is not compiled)
            if n > 0.0:
                each, size = moments + row * CHUNKS + c, ROWS * CHUNKS
                live = tl.sum(tl.load(each, mask=c < CHUNKS, other=0.0), 0)
                sum1 = tl.sum(tl.load(each + size, mask=c < CHUNKS, other=0.0), 0)
                sum2 = tl.sum(tl.load(each + 2 * size, mask=c < CHUNKS, other=0.0), 0)
                least, error = sigma_edge(n, live, sum1, sum2)
                z = tl.where(kept, value - top, float("inf"))
                unsure = tl.max((tl.abs(z - least) < error).to(tl.int32), 0) == 1
                near = kept & (z >= least)
                # typical_p may leave only ids farther away: then the best of them stays
                any_near = tl.max(near.to(tl.int32), 0) == 1
                nearest = tl.min(tl.where(kept, rank, LIST), 0)
                kept = kept & tl.where(any_near, near, rank == nearest)
        k0 = tl.load(row_params + row).to(tl.uint32, bitcast=True)
        k1 = tl.load(row_params + ROWS + row).to(tl.uint32, bitcast=True)
        position = tl.load(row_params + 2 * ROWS + row).to(tl.uint32, bitcast=True)
        step = tl.load(row_params + 6 * ROWS + row).to(tl.uint32, bitcast=True)
        key = tl.where(kept, d + gumbel64(id, position, k0, k1, step), float("-inf"))
        best = tl.max(key, 0)
        token = tl.min(tl.where(kept & (key == best), id, VOCAB), 0)
        proven = (count <= LIST) & (count > 0) & (tl.abs(top) < float("inf")) & (unsure == 0)
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
        # by the logits themselves: far below the largest one, differences from it may be equal
        zero, one = tl.full((), 0.0, tl.float64), tl.full((), 1.0, tl.float64)
        rank, _ = rank_list(ids, values, row, count, zero, one, id, value, LIST, BC)
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
