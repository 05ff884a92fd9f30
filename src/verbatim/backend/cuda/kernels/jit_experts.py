"""Device code of a mixture of experts, in Triton: choose experts, sort rows by expert, add their
results. experts.py launches it.

Invariant: sums are added from left to right, so that their bits do not depend on the number of
rows.
"""

import triton
import triton.language as tl


@triton.jit
def in_best_groups(
    choice, expert, SIZE: tl.constexpr, GROUPS: tl.constexpr, USED: tl.constexpr
):  # fmt: skip
    """Whether an expert is in one of the USED groups, of SIZE adjacent experts, whose two best have
    the largest sums; ties go to the lower group."""
    group, lowest = expert, float("-inf")
    sums = tl.zeros_like(choice) + lowest
    for g in tl.static_range(GROUPS):
        own = tl.where(expert // SIZE == g, choice, lowest)
        top = tl.max(own, 1)
        first = tl.min(tl.where(own == top[:, None], expert, GROUPS * SIZE), 1)
        second = tl.max(tl.where(expert == first[:, None], lowest, own), 1)
        sums = tl.where(group == g, (top + second)[:, None], sums)
    kept, left = tl.zeros_like(choice) > 0.0, group < GROUPS
    for _ in tl.static_range(USED):
        top = tl.max(tl.where(left, sums, lowest), 1)
        # without a number that equals it (NaN), the first group that is left
        best = tl.min(tl.where(left & (sums == top[:, None]), group, GROUPS), 1)
        best = tl.where(best < GROUPS, best, tl.min(tl.where(left, group, GROUPS), 1))
        left = left & (group != best[:, None])
        kept = kept | (expert // SIZE == best[:, None])
    return kept


@triton.jit(do_not_specialize=["ROWS"])
def choose_experts(
    scores, choice_bias, scales, chosen, shares, ROWS, FACTOR,
    EXPERTS: tl.constexpr, USED: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    LINES: tl.constexpr, SOFTMAX: tl.constexpr, BIAS: tl.constexpr, RENORMALISED: tl.constexpr,
    SCALES: tl.constexpr, GROUPS: tl.constexpr, GROUPS_USED: tl.constexpr,
):  # fmt: skip
    """The USED best experts of each row, best first (ties go to the lower index), and their shares.

    scores are positive and, with SOFTMAX, not yet divided by their sum. WIDTH and SLOTS are powers
    of two that hold EXPERTS and USED."""
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = row < ROWS
    expert, slot = tl.arange(0, WIDTH)[None, :], tl.arange(0, SLOTS)[None, :]
    held = inside[:, None] & (expert < EXPERTS)
    at = row.to(tl.int64) * EXPERTS
    score = tl.load(scores + at[:, None] + expert, mask=held, other=0.0)
    if SOFTMAX:
        total = tl.load(scores + at, mask=inside, other=1.0)
        for i in range(1, EXPERTS):
            total += tl.load(scores + at + i, mask=inside, other=0.0)
        score = tl.div_rn(score, total[:, None] + tl.zeros_like(score))
    choice = score
    if BIAS:
        choice += tl.load(choice_bias + expert, mask=expert < EXPERTS, other=0.0)
    choice = tl.where(held, choice, float("-inf"))
    best = tl.zeros((LINES, SLOTS), tl.float32)
    picks, total = tl.zeros((LINES, SLOTS), tl.int32), tl.zeros((LINES,), tl.float32)
    left = expert < EXPERTS
    if GROUPS > 1:
        left = left & in_best_groups(choice, expert, EXPERTS // GROUPS, GROUPS, GROUPS_USED)
    for rank in tl.static_range(USED):
        top = tl.max(tl.where(left, choice, float("-inf")), 1)
        # without a number that equals it (NaN), the first expert that is left
        equal = left & (choice == top[:, None])
        first = tl.min(tl.where(equal, expert, WIDTH), 1)
        first = tl.where(first < WIDTH, first, tl.min(tl.where(left, expert, WIDTH), 1))
        mine = tl.sum(tl.where(expert == first[:, None], score, 0.0), 1)
        left = left & (expert != first[:, None])
        picks = tl.where(slot == rank, first[:, None], picks)
        best = tl.where(slot == rank, mine[:, None], best)
        total = mine if rank == 0 else total + mine
    if RENORMALISED:
        best = tl.div_rn(best, total[:, None] + tl.zeros_like(best))
    best = best * FACTOR
    given = inside[:, None] & (slot < USED)
    if SCALES:
        best = best * tl.load(scales + picks, mask=given, other=0.0)
    place = row.to(tl.int64)[:, None] * USED + slot
    tl.store(chosen + place, picks, mask=given)
    tl.store(shares + place, best, mask=given)


@triton.jit(do_not_specialize=["PICKS", "TILES"])
def sort_by_expert(
    chosen, rows, lines, experts, place, PICKS, TILES,
    EXPERTS: tl.constexpr, USED: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sort the picks (row, rank) by expert into tiles of HEIGHT lines; a program does so for one
    expert. WIDTH is a power of two above EXPERTS.

    rows, lines: the source row and the number of each line, -1 for padding; experts: the expert of
    each tile, -1 for those behind the last; place: the line of each pick."""
    expert = tl.program_id(0)
    index, number = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    counts = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, PICKS, BLOCK):
        pick = tl.load(chosen + start + index, mask=start + index < PICKS, other=EXPERTS)
        counts += tl.histogram(pick, WIDTH)
    tiles = tl.where(number < EXPERTS, (counts + HEIGHT - 1) // HEIGHT, 0)
    first = tl.sum(tl.where(number < expert, tiles, 0))
    mine = tl.sum(tl.where(number == expert, tiles, 0))
    line = first * HEIGHT
    for start in range(0, PICKS, BLOCK):
        at = start + index
        equal = (tl.load(chosen + at, mask=at < PICKS, other=EXPERTS) == expert).to(tl.int32)
        target = line + tl.cumsum(equal, 0) - 1
        tl.store(rows + target, at // USED, mask=equal > 0)
        tl.store(lines + target, target, mask=equal > 0)
        tl.store(place + at, target, mask=equal > 0)
        line += tl.sum(equal)
    rest = line + tl.arange(0, HEIGHT)
    padding = rest < (first + mine) * HEIGHT
    tl.store(rows + rest, -1, mask=padding)
    tl.store(lines + rest, -1, mask=padding)
    for tile in range(first, first + mine):
        tl.store(experts + tile, expert)
    if expert == 0:
        for start in range(tl.sum(tiles), TILES, BLOCK):
            tl.store(experts + start + index, -1, mask=start + index < TILES)


@triton.jit
def add_experts(
    results, place, shares, out, WIDTH,
    USED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = the results of the row's experts times their shares, added in order of rank."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(USED):
        line = tl.load(place + row * USED + rank).to(tl.int64)
        share = tl.load(shares + row * USED + rank)
        total += share * tl.load(results + line * WIDTH + column, mask=held, other=0.0)
    tl.store(out + row * WIDTH + column, total, mask=held)
