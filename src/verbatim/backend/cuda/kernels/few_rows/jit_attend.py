"""Device code of attention for a step of one row, in Triton. kernels.attend_one launches it.

Invariant: the bits of jit.qkv_rope_cache and jit.attend, which it runs as one kernel: the program
of a span and a KV head computes the head's queries itself, and the program of the last span its key
and value. Those of earlier positions are on the way before the projections are written.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from verbatim.backend.cuda.kernels.jit import (
    finish_span,
    load_blocks,
    load_span,
    reduce_span,
    rotated_heads,
)
from verbatim.backend.cuda.kernels.jit_kv import finite_half, store_heads

GROUP: tl.constexpr = tl.constexpr(4)  # heads rotated at once, one per warp as in qkv_rope_cache


@triton.jit
def insert_line(cached, own, x, which):
    """Keys or values of a span [SPAN, BLOCK] with those of the `own` position: a line of x."""
    line = tl.sum(tl.where(which, finite_half(x).to(tl.float32), 0.0), 0)
    return tl.where(own[:, None], line.to(tl.float16)[None, :], cached)


@triton.jit(do_not_specialize=["SPLIT"])
def attend_one(
    splits, bias, q_norm, k_norm, positions, cos, sin, slots, keys, values, table,
    sums, peaks, masses, done, sinks, out, SPLIT, HEADS, DIM, HALF, eps, offset,
    scale, cap, factor, window,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    SHARED: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One KV head and one span of positions per program."""
    if EARLY:
        gdc_launch_dependents()
    head, span = tl.program_id(0), tl.program_id(1)
    position, start = tl.load(positions), span * SPAN
    begin = tl.maximum(position - window + 1, 0) // SPAN if WINDOW else 0
    block = load_blocks(table, start, position, SIZE, SPAN, WIDE)
    k, v, vector = load_span(keys, values, block, start, head, HEADS, DIM, SIZE, SPAN, BLOCK, True)
    if EARLY:
        gdc_wait()
    if (start <= position) & (span >= begin):
        line, lines, zero = tl.arange(0, GROUP)[:, None], tl.arange(0, LINES), tl.program_id(2)
        d = tl.arange(0, BLOCK)[None, :] + tl.zeros((GROUP, 1), tl.int32)
        query = rotated_heads(
            splits, bias, q_norm, k_norm, position, cos, sin, zero, head * SHARED + line % SHARED,
            d, SPLIT, HEADS, SHARED, DIM, HALF, eps, offset, SPLITS, BIAS, NORM, ROPE,
        ).to(tl.float16)  # fmt: skip
        if span == position // SPAN:
            x = rotated_heads(
                splits, bias, q_norm, k_norm, position, cos, sin, zero,
                HEADS * (SHARED + line % 2) + head, d, SPLIT, HEADS, SHARED, DIM, HALF, eps, offset,
                SPLITS, BIAS, NORM, ROPE,
            )  # fmt: skip
            slot = tl.load(slots).to(tl.int64)
            at = (slot // SIZE * HEADS + head) * SIZE + slot % SIZE + line * 0
            store_heads(x, keys, keys, at, d, DIM, d < DIM, line == 0, "f16")
            store_heads(x, values, values, at, d, DIM, d < DIM, line == 1, "f16")
            own = start + tl.arange(0, SPAN) == position
            k, v = insert_line(k, own, x, line == 0), insert_line(v, own, x, line == 1)
        query = tl.broadcast_to(query[None, :, :], (LINES // GROUP, GROUP, BLOCK))
        peak, mass, total = reduce_span(
            tl.reshape(query, (LINES, BLOCK)), k, v, keys, values, vector, block, start,
            position + lines * 0, scale, cap, factor, window, SPAN, CAP, WINDOW, "f16", True,
        )  # fmt: skip
        finish_span(
            peak, mass, total, sums, peaks, masses, done + head, sinks, out, span, begin,
            position // SPAN, lines.to(tl.int64) * 0, 1, HEADS * SHARED,
            head * SHARED + lines % SHARED, tl.arange(0, BLOCK), DIM, factor, lines < SHARED,
            LINES, BLOCK, SINKS,
        )  # fmt: skip
