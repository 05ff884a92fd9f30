"""Write a model to a file for model_main.cpp.

The file holds the calls that ops.record makes to the native engine, so that C++ can run the model
without Python.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from verbatim.backend.cpu.ops import record
from verbatim.model.loading.load import Model

# in the order of OpType in engine.h
OPS = ("embed", "positions", "qkv", "attend", "linear", "gateup", "norm", "normadd", "moe", "head")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
NUMBERS = ("src", "dst", "norm", "norm_bias", "layer", "rope", "qnorm", "knorm")
LISTS = ("mat", "bias")


class Writer:
    """Records the calls to a native engine, and returns the numbers that it would return."""

    def __init__(self, to: BinaryIO, model: Model, fine: bool) -> None:
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
        self.line(*shape, int(spec.norm == "layer"), float(spec.norm_eps), int(fine))

    def line(self, *fields: object) -> None:
        texts = (f.hex() if isinstance(f, float) else str(f) for f in fields)
        self.to.write((" ".join(texts) + "\n").encode())

    def _next(self, kind: str) -> int:
        self.counts[kind] = self.counts.get(kind, -1) + 1
        return self.counts[kind]

    def _array(self, values: np.ndarray, *fields: object) -> int:
        self.line(*fields, values.size)
        self.to.write(np.ascontiguousarray(values).tobytes())
        return self._next(str(fields[0]))

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

    def group(
        self, window: int, layers: list[int], kind: int, floats: int, kv_heads: int, head_dim: int
    ) -> None:
        assert (kind, floats) == (0, 0), "models with recurrent layers are not written"
        self.line("group", window, kv_heads, head_dim, len(layers), *layers)

    def op(self, name: str, **fields: Any) -> None:
        values: list[object] = [OPS.index(name), *(fields.pop(n, -1) for n in NUMBERS)]
        for n in LISTS:
            values += [*fields.pop(n, []), -1, -1, -1][:3]
        values += [int(fields.pop("add", False)), int(fields.pop("outputs", False))]
        values += [float(fields.pop("scale", 1.0)), float(fields.pop("softcap", 0.0))]
        assert set(fields.pop("lora", [])) <= {-1}, "adapters are not written"
        assert not fields.pop("offset", 0), "parts of a matrix are not written"
        assert not fields, f"model_main.cpp does not support {sorted(fields)}"
        self.line("op", *values)

    def finish(self) -> None:
        self.line("finish")


def write_model(
    model: Model, prompt: tuple[int, ...], count: int, path: Path, fine: bool = False
) -> None:
    """Write the model, the prompt, and the number of greedy tokens to generate. `fine`: with int12
    activations, else int8."""
    with path.open("wb") as to:
        writer = Writer(to, model, fine)
        record(model, writer)
        writer.line("generate", count, len(prompt), *prompt)
