"""Time of drawing a token from a vocabulary of 150,000 with the native sampler: one row, and 64
rows of mixed settings.

python bench/sampler.py          the last line is JSON
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from verbatim.backend.cpu import _native as native
from verbatim.backend.cpu.backend import physical_cores
from verbatim.backend.cpu.sampler import NativeSampler
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec
from verbatim.sampling.pipeline import Row

VOCAB = 150_000
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-k, top-p, min-p, penalties": {
        "top_k": 50, "top_p": 0.95, "min_p": 0.02,
        "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1,
    },
    "top-p": {"top_p": 0.9},
    "plain temperature": {"temperature": 0.8},
    "min-p": {"min_p": 0.05},
    "typical": {"typical_p": 0.9},
}  # fmt: skip


def row(settings: dict[str, Any], key: int) -> Row:
    params = SamplingParams(**settings)
    history = tuple(np.random.default_rng(key).integers(0, VOCAB, 1000).tolist())
    return Row(DrawSpec(params, key, 500, history), 1000, history if params.needs_history else ())


def milliseconds(logits: np.ndarray, rows: list[Row], threads: int) -> float:
    """From Row records to drawn tokens, as in a step of the engine. The thread pool exists
    already."""
    sampler = NativeSampler(native, None)
    drawer = native.RowSampler("", threads)
    best = 1e9
    for _ in range(15):
        began = time.perf_counter()
        drawer.draw(logits, [sampler.native_row(r) for r in rows])
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def main() -> None:
    random = np.random.default_rng(0)
    logits = (random.standard_normal((64, VOCAB)) * 3).astype(np.float32)
    result = {name: milliseconds(logits[:1], [row(s, 1)], 1) for name, s in SETTINGS.items()}
    mixed = [row(list(SETTINGS.values())[i % len(SETTINGS)], i) for i in range(64)]
    result["64 mixed rows"] = milliseconds(logits, mixed, physical_cores())
    for name, value in result.items():
        print(f"{name:32s} {value:8.3f} ms")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
