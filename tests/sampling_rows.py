"""Helpers of the sampler's tests: run one row through the stages, and a plain softmax."""

from __future__ import annotations

from typing import Any

import numpy as np

from verbatim.base.params import SamplingParams
from verbatim.base.records import Drawn, DrawSpec
from verbatim.sampling.draw import gumbel
from verbatim.sampling.logprobs import as_row
from verbatim.sampling.pipeline import Row, sample_rows, state_of
from verbatim.sampling.processors import STAGES
from verbatim.sampling.row_state import RowState


def processed(logits: np.ndarray, params: SamplingParams, **row: Any) -> RowState:
    """The row after every active stage, before the draw."""
    state = state_of(as_row(logits), make_row(params, **row))
    for stage in STAGES:
        if stage.active(state):
            stage.apply(state)
    return state


def make_row(
    params: SamplingParams,
    *,
    key: int = 7,
    position: int = 5,
    prompt_len: int = 3,
    history: tuple[int, ...] = (),
    mask: bytes | None = None,
    **spec: Any,
) -> Row:
    return Row(DrawSpec(params, key, prompt_len, **spec), position, history, mask)


def sample(logits: np.ndarray, params: SamplingParams, **row: Any) -> Drawn:
    return sample_rows(np.asarray(logits, np.float32)[None, :], [make_row(params, **row)])[0]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(np.asarray(x, np.float64) - np.max(x))
    return e / e.sum()


def bits(ids: list[int], vocab: int) -> bytes:
    """A grammar mask that allows `ids`."""
    flags = np.zeros(-(-vocab // 32) * 32, np.uint8)
    flags[ids] = 1
    return np.packbits(flags, bitorder="little").tobytes()


def draw_many(ids: np.ndarray, d: np.ndarray, key: int, positions: np.ndarray) -> np.ndarray:
    """The ids drawn at each of `positions` from one distribution."""
    out = np.empty(len(positions), np.int64)
    chunk = max(1, 32_768 // max(1, len(ids)))  # 256 KiB of float64: fits a core's cache
    for start in range(0, len(positions), chunk):
        at = positions[start : start + chunk, None]
        out[start : start + chunk] = ids[
            np.argmax(d[None, :] + gumbel(key, at, ids[None, :]), axis=1)
        ]
    return out
