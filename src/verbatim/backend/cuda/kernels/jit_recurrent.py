"""Device code of recurrent layers, in Triton. recurrent.py launches it and documents its tensors.

Invariant: as in jit.py. A program computes one value head of one sequence, position by position, so
its bits do not depend on the other rows or on the cut of the sequence into steps.
"""

import triton
import triton.language as tl


@triton.jit
def advance(state, k, v, decay, beta):
    """The state [key_dim, value_dim] after one position."""
    state = state * decay
    error = (v - tl.sum(state * k[:, None], 0)) * beta
    return state + k[:, None] * error[None, :]


@triton.jit(do_not_specialize=["WIDTH"])
def delta_net(
    mixed, z, b, a, decay, dt, norm, states, updates, table, first, starts, out, WIDTH, eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SIZE: tl.constexpr, TILED: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The outputs of one value head at the rows of one sequence. See Ops.delta_net; the state is
    that before the first row's block, advanced by the stored updates."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    key_head = head * KEY_HEADS // VALUE_HEADS
    if TILED:
        key_head = head % KEY_HEADS
    i, j = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = i < DK, j < DV
    cell, inside = i[:, None] * DV + j[None, :], in_k[:, None] & in_v[None, :]
    row0, end = tl.load(first + sequence), tl.load(first + sequence + 1)
    start = tl.load(starts + sequence)
    table += sequence * WIDTH
    before = tl.maximum(start - 1, 0) // SIZE  # the block of the position before the first row
    place = tl.load(table + before).to(tl.int64) * VALUE_HEADS + head
    state = tl.load(
        states + place * DK * DV + cell, mask=inside & (cell * 0 + start > 0), other=0.0
    )
    rate, shift = tl.load(decay + head), tl.load(dt + head)
    weight = tl.load(norm + j, mask=in_v, other=0.0)
    # One loop advances the state over stored and new positions: in two loops, the compiler may sum
    # in two orders. At a stored position the first row is read and ignored.
    both = tl.arange(0, 2)
    for p in range(tl.where(start > 0, before * SIZE, 0), start + end - row0):
        position = start * 0 + p  # a tensor, also under the interpreter
        new, new_k = cell * 0 + position >= start, i * 0 + position >= start
        new_v = j * 0 + position >= start
        wide = (row0 + tl.maximum(position - start, 0)).to(tl.int64)
        place = tl.load(table + position // SIZE).to(tl.int64) * VALUE_HEADS + head
        slot = position % SIZE
        first_slot = cell * 0 + slot == 0
        tl.store(states + place * DK * DV + cell, state, mask=inside & first_slot & new)
        x = mixed + wide * (2 * KEY_HEADS * DK + VALUE_HEADS * DV)
        q = tl.load(x + key_head * DK + i, mask=in_k, other=0.0)
        k = tl.load(x + (KEY_HEADS + key_head) * DK + i, mask=in_k, other=0.0)
        v = tl.load(x + 2 * KEY_HEADS * DK + head * DV + j, mask=in_v, other=0.0)
        q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6) * scale
        k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
        at = wide * VALUE_HEADS + head
        drive = tl.load(a + at) + shift
        softplus = tl.maximum(drive, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(drive)))
        keep, beta = tl.exp(rate * softplus), 1.0 / (1.0 + tl.exp(-tl.load(b + at)))
        stored = updates + (place * SIZE + slot) * (DK + DV + 2)
        k = tl.where(new_k, k, tl.load(stored + i, mask=in_k, other=0.0))
        v = tl.where(new_v, v, tl.load(stored + DK + j, mask=in_v, other=0.0))
        keep = tl.where(position >= start, keep, tl.load(stored + DK + DV))
        beta = tl.where(position >= start, beta, tl.load(stored + DK + DV + 1))
        tl.store(stored + i, k, mask=in_k & new_k)
        tl.store(stored + DK + j, v, mask=in_v & new_v)
        tl.store(
            stored + DK + DV + both,
            tl.where(both == 0, keep, beta),
            mask=both * 0 + position >= start,
        )
        state = advance(state, k, v, keep, beta)
        y = tl.sum(state * q[:, None], 0)
        y = y / tl.sqrt(tl.sum(y * y, 0) / DV + eps) * weight
        gate = tl.load(z + at * DV + j, mask=in_v, other=0.0)
        tl.store(out + at * DV + j, y * (gate / (1.0 + tl.exp(-gate))), mask=in_v & new_v)
