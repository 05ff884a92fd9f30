"""Device code of the filters without top-k, in Triton. device_filters.py launches it.

The draw from all ids comes first. If the filters keep its token, it is also the best of the kept
ids, so the row is done: that needs the mass of the ids before the token in the filter's order, and
no order of the ids. For the other rows the filters remove ids, and a second draw follows.

top-p and typical-p keep the shortest prefix of an order whose mass suffices. The order is that of a
key, then of the id: -d for top-p, the distance from the entropy for typical-p. The kernels find the
last kept (key, id), the cut, in four steps: the mass per bucket of keys; the bucket in which the
mass suffices; the ids of that bucket; the last one that is kept. An id is kept if it is not after
the cut. Keys and masses have the bits of sampling/filters.py, so the kept ids are the same, however
many.

`cuts` has CUTS float64 values per row: key and id of the last kept id of top-p, then of typical-p
(inf: all ids), and 1 if the row is left to the host.
"""

import triton
import triton.language as tl

from verbatim.backend.cuda.sampler.jit_list import end_of_prefix, mass_needed, sigma_edge
from verbatim.backend.cuda.sampler.jit_numerics import mass_of, spread_of
from verbatim.backend.cuda.sampler.jit_sampling import SHAPES

CUTS: tl.constexpr = tl.constexpr(5)
BUCKETS: tl.constexpr = tl.constexpr(2048)
# Buckets per unit of the key. Keys from 24 on have no bucket: all ids there have a mass of at most
# e^-24 of the best id's, together 4e-5 of it for 2^20 ids.
PER_UNIT: tl.constexpr = tl.constexpr(2048 / 24)


@triton.jit
def load_row(x, row_max, shapes, row, chunk, VOCAB, BV: tl.constexpr):
    """(ids, logits, d) of one chunk; an id past the end has the logit -inf."""
    id = chunk * BV + tl.arange(0, BV)
    value = tl.load(x + row.to(tl.int64) * VOCAB + id, mask=id < VOCAB, other=float("-inf")).to(
        tl.float64
    )
    top = tl.load(row_max + row).to(tl.float64)
    return id, value, (value - top) / tl.load(shapes + SHAPES * row)


@triton.jit
def kept_so_far(id, value, d, cuts, shapes, row):
    """The ids after top-p and min-p."""
    key, last = tl.load(cuts + CUTS * row), tl.load(cuts + CUTS * row + 1)
    before = (-d < key) | ((-d == key) & (id.to(tl.float64) <= last))
    return (value > float("-inf")) & before & (d >= tl.load(shapes + SHAPES * row + 2))


@triton.jit
def row_sum(values, row, CHUNKS, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    return tl.sum(tl.load(values + row * CHUNKS + c, mask=c < CHUNKS, other=0), 0)


@triton.jit
def mean_key(mass, spread, row, CHUNKS, BLOCK: tl.constexpr):
    """The mean of -d: the entropy less the log of the total mass."""
    total, sum = row_sum(mass, row, CHUNKS, BLOCK), row_sum(spread, row, CHUNKS, BLOCK)
    return sum.to(tl.float64) / total.to(tl.float64)


@triton.jit
def key_of(d, mass, spread, row, CHUNKS, BLOCK: tl.constexpr, TYPICAL: tl.constexpr):
    if TYPICAL:
        key = tl.abs(-d - mean_key(mass, spread, row, CHUNKS, BLOCK))
    else:
        key = -d
    return key


@triton.jit
def bucket_of(key):
    return tl.minimum(key * PER_UNIT, 1.0 * BUCKETS).to(tl.int32)


@triton.jit
def add_to_buckets(buckets, row, key, mass):
    bucket = bucket_of(key)
    mass = tl.where(bucket < BUCKETS, mass, 0)
    tl.atomic_add(buckets + row.to(tl.int64) * BUCKETS + bucket, mass, mask=mass > 0)


@triton.jit
def chunk_sums(
    x, row_max, shapes, wanted, cuts, mass, spread, moments, buckets, VOCAB, CHUNKS,
    BV: tl.constexpr, CUT: tl.constexpr, SPREAD: tl.constexpr, MOMENTS: tl.constexpr,
    BUCKET: tl.constexpr,
):  # fmt: skip
    """Sums of one chunk of one row over its live ids; with CUT over the ids after top-p and min-p.
    Masses, with SPREAD also spreads (sampling/numerics.py). MOMENTS: `moments` [3, rows, chunks],
    how many ids there are, the sum of z = logit - best logit, and of z^2. BUCKET: also add the
    masses to the buckets of -d."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(wanted + row) > 0:
        id, value, d = load_row(x, row_max, shapes, row, chunk, VOCAB, BV)
        at = row * CHUNKS + chunk
        live = value > float("-inf")
        if CUT:
            live = kept_so_far(id, value, d, cuts, shapes, row)
        if MOMENTS:
            z = tl.where(live, value - tl.load(row_max + row).to(tl.float64), 0.0)
            size = tl.num_programs(0) * CHUNKS
            tl.store(moments + at, tl.sum(live.to(tl.float64), 0))
            tl.store(moments + size + at, tl.sum(z, 0))
            tl.store(moments + 2 * size + at, tl.sum(z * z, 0))
        each = tl.where(live, mass_of(d), 0)
        tl.store(mass + at, tl.sum(each, 0))
        if SPREAD:
            tl.store(spread + at, tl.sum(tl.where(live, spread_of(d), 0), 0))
        if BUCKET:
            add_to_buckets(buckets, row, -d, each)


@triton.jit
def mass_before(
    x, row_max, shapes, wanted, tokens, mass, spread, before, VOCAB, CHUNKS,
    BV: tl.constexpr, BLOCK: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """The mass of the ids of one chunk that precede the row's token in the order of typical-p, or
    of top-p. TYPICAL: a row may have typical-p."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = tl.load(tokens + row)
    if (tl.load(wanted + row) > 0) & (token >= 0):
        id, value, d = load_row(x, row_max, shapes, row, chunk, VOCAB, BV)
        drawn = distance(x, row_max, shapes, row, token, VOCAB)
        key, own = -d, -drawn
        if TYPICAL:  # noqa: SIM102 (a constant: without it the rest is not compiled)
            if tl.load(shapes + SHAPES * row + 3) < 1.0:
                mean = mean_key(mass, spread, row, CHUNKS, BLOCK)
                key, own = tl.abs(-d - mean), tl.abs(-drawn - mean)
        less = (key < own) | ((key == own) & (id < token))
        each = tl.where((value > float("-inf")) & less, mass_of(d), 0)
        tl.store(before + row * CHUNKS + chunk, tl.sum(each, 0))


@triton.jit
def distance(x, row_max, shapes, row, token, VOCAB):
    """The d of one id."""
    value = tl.load(x + row.to(tl.int64) * VOCAB + token).to(tl.float64)
    return (value - tl.load(row_max + row).to(tl.float64)) / tl.load(shapes + SHAPES * row)


@triton.jit
def drop_kept(
    x, row_max, shapes, flags, tokens, mass, before, out, VOCAB, CHUNKS, STRIDE,
    BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Copy a row's four flags, or clear them if the filters keep its token. A row whose typical-p
    follows another filter, or that has top-n-sigma, always keeps its flags."""
    row = tl.program_id(0)
    token, at = tl.load(tokens + row), shapes + SHAPES * row
    top_p, log_min_p = tl.load(at + 1), tl.load(at + 2)
    typical, sigma = tl.load(at + 3), tl.load(at + 4)
    share = tl.minimum(top_p, typical)
    known = (sigma == 0.0) & ((typical >= 1.0) | ((top_p >= 1.0) & (log_min_p == float("-inf"))))
    keeps = known & (token >= 0)
    if keeps:
        keeps = distance(x, row_max, shapes, row, token, VOCAB) >= log_min_p
        if SUMS:  # noqa: SIM102 (a constant: without it the rest is not compiled)
            if share < 1.0:
                need = mass_needed(share, row_sum(mass, row, CHUNKS, BLOCK))
                keeps = keeps & (row_sum(before, row, CHUNKS, BLOCK) < need)
    for i in tl.static_range(4):
        flag = tl.load(flags + i * STRIDE + row)
        tl.store(out + i * STRIDE + row, tl.where(keeps, 0, flag))


@triton.jit
def typical_histogram(
    x, row_max, shapes, wanted, cuts, mass, spread, buckets, VOCAB, CHUNKS,
    BV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the masses of one chunk of one row to the buckets of their distances."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(wanted + row) > 0:
        id, value, d = load_row(x, row_max, shapes, row, chunk, VOCAB, BV)
        live = kept_so_far(id, value, d, cuts, shapes, row)
        key = key_of(d, mass, spread, row, CHUNKS, BLOCK, True)
        add_to_buckets(buckets, row, key, tl.where(live, mass_of(d), 0))


@triton.jit
def find_bucket(
    shapes, wanted, mass, buckets, bucket, missing, CHUNKS, BLOCK: tl.constexpr,
    TYPICAL: tl.constexpr,
):  # fmt: skip
    """The bucket in which the mass of the prefix suffices (BUCKETS: in none), and the mass that the
    ids of this bucket must add."""
    row = tl.program_id(0)
    if tl.load(wanted + row) > 0:
        share = tl.load(shapes + SHAPES * row + 1 + 2 * TYPICAL)
        need = mass_needed(share, row_sum(mass, row, CHUNKS, BLOCK))
        i = tl.arange(0, BUCKETS)
        each = tl.load(buckets + row.to(tl.int64) * BUCKETS + i)
        first = tl.min(tl.where(tl.cumsum(each, 0) >= need, i, BUCKETS), 0)
        tl.store(bucket + row, first)
        tl.store(missing + row, need - tl.sum(tl.where(i < first, each, 0), 0))


@triton.jit
def collect_bucket(
    x, row_max, shapes, wanted, cuts, mass, spread, bucket, used, ids, values, VOCAB, CHUNKS,
    BV: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """Append the ids of one chunk that are in the row's bucket to its list, with their d, in any
    order. `used` counts them, also those that do not fit."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(wanted + row) > 0:
        id, value, d = load_row(x, row_max, shapes, row, chunk, VOCAB, BV)
        live = value > float("-inf")
        if TYPICAL:
            live = kept_so_far(id, value, d, cuts, shapes, row)
        key = key_of(d, mass, spread, row, CHUNKS, BLOCK, TYPICAL)
        chosen = (live & (bucket_of(key) == tl.load(bucket + row))).to(tl.int32)
        count = tl.sum(chosen, 0)
        if count > 0:
            at = tl.atomic_add(used + row, count) + tl.cumsum(chosen, 0) - 1
            fits = (chosen == 1) & (at < LIST)
            tl.store(ids + row * LIST + at, id, mask=fits)
            tl.store(values + row * LIST + at, d, mask=fits)


@triton.jit
def find_cut(
    wanted, mass, spread, bucket, missing, used, ids, values, cuts, CHUNKS,
    BLOCK: tl.constexpr, LIST: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """The last id of the prefix, among the ids of its bucket. A bucket with more ids than the list
    holds leaves the row to the host."""
    row = tl.program_id(0)
    if tl.load(wanted + row) > 0:
        i, count = tl.arange(0, LIST), tl.load(used + row)
        at = cuts + CUTS * row
        if (tl.load(bucket + row) >= BUCKETS) | (count > LIST):
            tl.store(at + 4, 1.0)
        else:
            inside = i < count
            id = tl.load(ids + row * LIST + i, mask=inside, other=0)
            d = tl.load(values + row * LIST + i, mask=inside, other=0.0)
            key = key_of(d, mass, spread, row, CHUNKS, BLOCK, TYPICAL)
            each = tl.where(inside, mass_of(d), 0)
            last, last_id = end_of_prefix(key, id, each, tl.load(missing + row))
            tl.store(at + 2 * TYPICAL, last)
            tl.store(at + 1 + 2 * TYPICAL, last_id.to(tl.float64))


@triton.jit
def remove_filtered(
    x, row_max, shapes, wanted, cuts, mass, spread, moments, out, out_max, VOCAB, CHUNKS,
    BV: tl.constexpr, BLOCK: tl.constexpr, TYPICAL: tl.constexpr, SIGMA: tl.constexpr,
):  # fmt: skip
    """The logits with -inf for each id that a filter removes, for one chunk of one wanted row. A
    row that is left to the host, and one that is not wanted, gets the maximum NaN."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(wanted + row) == 0:
        tl.store(out_max + row, float("nan"))
    else:
        id, value, d = load_row(x, row_max, shapes, row, chunk, VOCAB, BV)
        at = cuts + CUTS * row
        kept = kept_so_far(id, value, d, cuts, shapes, row)
        if TYPICAL:  # noqa: SIM102 (a constant: without it the rest is not compiled)
            if tl.load(shapes + SHAPES * row + 3) < 1.0:
                key = key_of(d, mass, spread, row, CHUNKS, BLOCK, True)
                last = tl.load(at + 2)
                kept = kept & (
                    (key < last) | ((key == last) & (id.to(tl.float64) <= tl.load(at + 3)))
                )
        unsure = tl.load(at + 4) > 0.0
        if SIGMA:
            n = tl.load(shapes + SHAPES * row + 4)
            if n > 0.0:
                size = tl.num_programs(0) * CHUNKS
                least, error = sigma_edge(
                    n,
                    row_sum(moments, row, CHUNKS, BLOCK),
                    row_sum(moments + size, row, CHUNKS, BLOCK),
                    row_sum(moments + 2 * size, row, CHUNKS, BLOCK),
                )
                z = value - tl.load(row_max + row).to(tl.float64)
                near = kept & (tl.abs(z - least) < error)
                unsure = unsure | (tl.max(near.to(tl.int32), 0) == 1)
                kept = kept & (z >= least)
        if unsure:
            tl.store(out_max + row, float("nan"))
        tl.store(
            out + row.to(tl.int64) * VOCAB + id,
            tl.where(kept, value, float("-inf")).to(out.dtype.element_ty),
            mask=id < VOCAB,
        )
