"""A model written down for model_main.cpp: what ops.record tells the native engine, as a file that C++ alone can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from verbatim.backend.cpu.ops import record
from verbatim.model.load import Model

# in the order of OpType in engine.h
OPS = ("embed", "positions", "qkv", "attend", "linear", "gateup", "norm", "normadd", "moe", "head")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
NUMBERS = ("src", "dst", "norm", "norm_bias", "layer", "rope", "qnorm", "knorm")
LISTS = ("mat", "bias")


class Writer:
    """Takes the calls that a native engine would get, and hands out the numbers that it would."""

    def __init__(self, to: BinaryIO, model: Model) -> None:
        self.to = to
        self.counts: dict[str, int] = {}
        spec = model.spec
        shape = (
            spec.vocab,
            spec.hidden,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            ACTIVATIONS.index(spec.activation),
        )
        self.line(*shape, int(spec.norm == "layer"), float(spec.norm_eps))

    def line(self, *words: object) -> None:
        spelled = (w.hex() if isinstance(w, float) else str(w) for w in words)
        self.to.write((" ".join(spelled) + "\n").encode())

    def _next(self, what: str) -> int:
        self.counts[what] = self.counts.get(what, -1) + 1
        return self.counts[what]

    def _array(self, values: np.ndarray, *words: object) -> int:
        self.line(*words, values.size)
        self.to.write(np.ascontiguousarray(values).tobytes())
        return self._next(str(words[0]))

    def buffer(self, width: int) -> int:
        self.line("buffer", width)
        return self._next("buffer")

    def matrix(self, type: str, data: np.ndarray, rows: int, k: int, group: int = 0) -> int:
        return self._array(data, "matrix", type, rows, k, group)

    def vector(self, values: np.ndarray) -> int:
        assert values.dtype == np.float32
        return self._array(values, "vector")

    def rope(self, inv_freq: np.ndarray, factor: float) -> int:
        assert inv_freq.dtype == np.float64
        return self._array(inv_freq, "rope", float(factor))

    def group(self, window: int, layers: list[int]) -> None:
        self.line("group", window, len(layers), *layers)

    def op(self, name: str, **fields: Any) -> None:
        words: list[object] = [OPS.index(name), *(fields.pop(n, -1) for n in NUMBERS)]
        for n in LISTS:
            words += [*fields.pop(n, []), -1, -1, -1][:3]
        words += [int(fields.pop("add", False)), int(fields.pop("outputs", False))]
        words += [float(fields.pop("scale", 1.0)), float(fields.pop("softcap", 0.0))]
        assert not fields, f"model_main.cpp does not know {sorted(fields)}"
        self.line("op", *words)

    def finish(self) -> None:
        self.line("finish")


def write_model(model: Model, prompt: tuple[int, ...], count: int, path: Path) -> None:
    """Everything up to `count` greedy tokens behind `prompt`."""
    with path.open("wb") as to:
        writer = Writer(to, model)
        record(model, writer)
        writer.line("generate", count, len(prompt), *prompt)
