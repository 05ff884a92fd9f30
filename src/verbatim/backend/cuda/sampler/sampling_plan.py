"""RowPlan: how the device samples the rows of a request, or that the host must sample them.

In: SamplingParams. Out: a RowPlan, or None. Also the bit masks of allowed ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import triton

from verbatim.backend.cuda.runtime.device_step import aligned
from verbatim.base.params import FIELDS, FILTERS, SamplingParams
from verbatim.base.records import DrawSpec
from verbatim.sampling.filters import log_of_share

SLACK = 2.0**-12  # six times the bound of the float32 error (docs/numerics.md, "The cuda backend")
MIN_TEMPERATURE = 2.0**-100  # below it the scale 1 / temperature could leave float32's range
MAX_TOP_K = 512
MAX_LOGPROBS = 32  # alternatives that the device reports
COLUMNS = 7  # int32 values per row, see jit_sampling.chunk_top2 and jit_list.draw_from_list
POSITIONS = 2  # the column of the rows' positions
NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, frequency, presence
# Filters without a kernel, with the default that leaves them off: the host samples rows with one.
DEVICE_FILTERS = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma")
HOST_FILTERS = tuple((name, FIELDS[name].default) for name in FILTERS if name not in DEVICE_FILTERS)


class RowShape(NamedTuple):
    """The temperature and the filters of a row, which kernels read by place: one line of `shapes`
    [rows, SHAPES] float64. The defaults are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    log_min_p: float = -np.inf
    typical_p: float = 1.0
    top_n_sigma: float = 0.0


SHAPES = len(RowShape._fields)


class RowPlan(NamedTuple):
    """How the device samples the rows of one request."""

    scale: float = 0.0  # 1 / temperature, and the slack of a draw from all ids (-1: argmax)
    slack: float = -1.0
    list_k: int = 0  # ids to collect in a list; 0: draw from all ids
    open: bool = False  # a filter without top-k; device_filters.py removes ids first
    top_k: int = 0  # top-k of a draw from the list
    shape: RowShape = RowShape()
    biased: bool = False  # logit_bias
    penalties: tuple[float, float, float] | None = None  # repetition, frequency, presence
    bans: bool = False  # allowed_token_ids or banned_token_ids
    logprobs: int = -1  # alternatives to report; -1: no log-probability
    # A denoising step: report the confidence, in the distribution that is drawn from.
    certain: bool = False


HOST = RowPlan(slack=np.inf)  # an infinite slack: the device never decides


def row_plan(p: SamplingParams) -> RowPlan | None:
    """How the device samples with these parameters; None: the host samples."""
    plan = _row_plan(p)
    if p.remasking is None or plan is None:
        return plan
    # The report has the confidence of what is drawn from logits and bans alone.
    if (
        plan.open
        or plan.top_k > 1
        or plan.biased
        or plan.penalties
        or plan.logprobs >= 0
        or p.remasking == "entropy_bounded"
    ):
        return None
    return plan._replace(certain=True, logprobs=0)


def _row_plan(p: SamplingParams) -> RowPlan | None:
    if (
        p.explain
        or p.dry_multiplier
        or p.no_repeat_ngram
        or p.penalty_range
        or (p.wants_logprob and p.logprobs_mode != "raw")
        or (p.logprobs or 0) > MAX_LOGPROBS
    ):
        return None
    penalties = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
    plan = RowPlan(
        penalties=penalties if penalties != NO_PENALTIES else None,
        biased=bool(p.logit_bias),
        bans=bool(p.banned_token_ids) or p.allowed_token_ids is not None,
        logprobs=(p.logprobs or 0) if p.wants_logprob else -1,
    )
    if p.greedy:  # no filter runs at temperature 0
        edited = plan.penalties or plan.bans or plan.biased
        return exact_argmax(plan) if edited else plan
    if (
        any(getattr(p, name) != default for name, default in HOST_FILTERS)
        or p.temperature < MIN_TEMPERATURE
        or p.top_k > MAX_TOP_K
    ):
        return None
    log_min_p = log_of_share(p.min_p) if p.min_p else -np.inf
    shape = RowShape(p.temperature, p.top_p, log_min_p, p.typical_p, p.top_n_sigma)
    plan = plan._replace(shape=shape)
    if p.top_k:
        return plan._replace(slack=np.inf, list_k=p.top_k, top_k=p.top_k)
    filtered = shape[1:] != RowShape()[1:]
    return plan._replace(scale=1.0 / p.temperature, slack=SLACK, open=filtered)


class Bias(NamedTuple):
    """logit_bias of all rows: one entry per row and id."""

    rows: np.ndarray  # int64
    ids: np.ndarray  # int64
    values: np.ndarray  # float64


class FilterRows(NamedTuple):
    """Which rows take part in which step, int32 values; a row with top-k takes part in none."""

    flags: np.ndarray  # [4, rows padded to 16 bytes]: any filter; sums of all ids; top-p; typical-p
    top_p: bool  # a row has it
    typical: bool
    sigma: bool


class RowTable(NamedTuple):
    """All that a launch needs to know about its rows, except their positions and grammar masks. In
    steady decode it is the same in every step."""

    specs: Sequence[DrawSpec]
    plans: Sequence[RowPlan | None]  # None: the host samples the row
    columns: np.ndarray  # [COLUMNS, rows] int32; POSITIONS are left empty
    shapes: np.ndarray  # [rows, SHAPES] float64: each row's RowShape
    bias: Bias | None
    filtered: FilterRows | None
    masked: bool  # bans or min_tokens may exclude ids
    penalised: bool
    strengths: np.ndarray  # [rows, 3] float64: repetition, frequency, presence penalty
    from_all: bool  # a row draws from all ids
    noise: bool  # such a row is not an argmax
    list_k: Sequence[int]
    sigma: bool  # a row with a list filters by sigma
    logprobs: Sequence[int]  # alternatives to report per row; -1: none
    certain: bool  # all rows are of denoising steps


def row_table(specs: Sequence[DrawSpec], plans: Sequence[RowPlan | None]) -> RowTable:
    some = [plan or HOST for plan in plans]
    columns = np.zeros((COLUMNS, len(specs)), np.int32)
    columns[:2] = np.array([spec.key for spec in specs], "<u8").view(np.int32).reshape(-1, 2).T
    columns[3:5] = (
        np.array([(plan.scale, plan.slack) for plan in some], np.float32).view(np.int32).T
    )
    columns[5] = [plan.top_k for plan in some]
    columns[6] = [max(spec.step, 0) for spec in specs]
    return RowTable(
        specs,
        plans,
        columns,
        np.array([plan.shape for plan in some]),
        bias_of(specs, some),
        filter_rows(some),
        masked=any(plan.bans for plan in some) or any(spec.withheld for spec in specs),
        penalised=any(plan.penalties for plan in some),
        strengths=np.array([plan.penalties or NO_PENALTIES for plan in some]),
        from_all=any(not plan.list_k for plan in some),
        noise=any(plan.scale for plan in some),
        list_k=[plan.list_k for plan in some],
        sigma=any(plan.list_k and plan.shape.top_n_sigma for plan in some),
        logprobs=[plan.logprobs for plan in some],
        certain=any(plan.certain for plan in some),
    )


def filter_rows(plans: Sequence[RowPlan]) -> FilterRows | None:
    """None: no row has a filter without top-k."""
    flags = np.zeros((4, aligned(len(plans))), np.int32)
    sigma = False
    for row, plan in enumerate(plans):
        if plan.open:
            top_p, typical = plan.shape.top_p < 1.0, plan.shape.typical_p < 1.0
            by_sigma = plan.shape.top_n_sigma > 0.0
            flags[:, row] = 1, top_p or typical or by_sigma, top_p, typical
            sigma = sigma or by_sigma
    if not flags[0].any():
        return None
    return FilterRows(flags, bool(flags[2].any()), bool(flags[3].any()), sigma)


def bias_of(specs: Sequence[DrawSpec], plans: Sequence[RowPlan]) -> Bias | None:
    found = [
        (row, id, value)
        for row, (spec, plan) in enumerate(zip(specs, plans, strict=True))
        if plan.biased
        for id, value in dict(spec.params.logit_bias).items()
    ]
    if not found:
        return None
    rows, ids, values = zip(*found, strict=True)
    return Bias(np.array(rows, np.int64), np.array(ids, np.int64), np.array(values, np.float64))


def same_rows(specs: Sequence[DrawSpec], table: RowTable, max_history: int) -> bool:
    """Whether row_table() of these specs would be the same, except for the histories: a sequence
    with penalties has another DrawSpec in every step. A history above the limit changes a plan."""
    return len(specs) == len(table.specs) and all(
        spec is last
        or (
            spec.params is last.params
            and spec.key == last.key
            and spec.withheld == last.withheld
            and len(spec.history) <= max_history
        )
        for spec, last in zip(specs, table.specs, strict=True)
    )


def exact_argmax(plan: RowPlan) -> RowPlan:
    """An argmax over float64 logits: the list of one id."""
    return plan._replace(slack=np.inf, list_k=1, top_k=1)


def list_size(list_k: int) -> int:
    """Capacity of a row's candidate list for its best list_k ids. The device keeps every id above a
    threshold: two or three times list_k of a real vocabulary, where likely ids are neighbours."""
    return min(1024, max(64, 1 << (4 * list_k + 31).bit_length()))


def mask_words(mask: np.ndarray, vocab: int) -> np.ndarray:
    """A mask of bytes as int32 words for `vocab` ids; ids past its end are not allowed."""
    out = np.zeros(triton.cdiv(vocab, 32) * 4, np.uint8)
    size = min(len(mask), len(out))
    out[:size] = mask[:size]
    return out.view(np.int32)


def ban_words(p: SamplingParams, withheld: tuple[int, ...], vocab: int) -> np.ndarray:
    allowed = np.zeros(triton.cdiv(vocab, 32) * 32, bool)
    allowed[slice(None) if p.allowed_token_ids is None else list(p.allowed_token_ids)] = True
    allowed[[*p.banned_token_ids, *withheld]] = False
    return np.packbits(allowed, bitorder="little").view(np.int32)
