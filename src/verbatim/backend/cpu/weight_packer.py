"""Pack the weights of a model into the native engine.

In: internal weight names. Out: the engine's numbers of packed matrices, vectors and adapters. A
matrix is packed once, however many operations read it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from verbatim.backend.cpu.repack import repack
from verbatim.base.errors import ModelError
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.load import Model
from verbatim.model.spec import ModelSpec


class WeightPacker:
    """Base of ProgramRecorder: the weights by name, packed when an operation first needs them."""

    def __init__(self, model: Model, engine: Any) -> None:
        self.spec: ModelSpec = model.spec
        self.weights = model.weights
        self.engine = engine
        self._file = str(model.path)
        self._adapters = model.adapters
        self._matrices: dict[str, int] = {}

    def _matrix(self, name: str, heads: int = 0) -> int:
        """Pack this weight once. `heads`: rows per head, if each head must start a new panel."""
        if name not in self._matrices:
            t = self.weights[name]
            self._matrices[name] = self._pack(t, *repack(t), t.rows, heads)
        return self._matrices[name]

    def _pack(self, t: Tensor, kind: str, data: np.ndarray, rows: int, heads: int = 0) -> int:
        try:
            return int(self.engine.matrix(kind, data, rows, t.shape[-1], heads))
        except ValueError as error:
            raise ModelError(f"tensor {t.name}: {error}", file=self._file) from None

    def _experts(self, name: str) -> list[int]:
        t = self.weights[name]
        count, rows, _ = t.shape
        kind, data = repack(t)
        parts = data.reshape(count, -1)
        return [self._pack(t, kind, parts[e], rows) for e in range(count)]

    def _vector(self, name: str, offset: float = 0.0) -> int:
        return self._floats(name, self.weights[name].to_f32() + np.float32(offset))

    def _floats(self, name: str, values: np.ndarray) -> int:
        values = np.ascontiguousarray(values, np.float32).reshape(-1)
        if not np.isfinite(values).all():
            raise ModelError(
                f"tensor {self.weights[name].name}: it holds a value that is not a finite number; "
                "the file is damaged: get it again",
                file=self._file,
            )
        return int(self.engine.vector(values))

    def _lora(self, name: str, heads: int = 0) -> int:
        """Pack the adapters' matrices of this weight; -1: no adapter changes it. B has the panels
        of the weight (`heads`: see _matrix)."""
        parts = [adapter.parts.get(name) for adapter in self._adapters]
        if not any(parts):
            return -1
        a, b, scale = [], [], []
        for part in parts:
            a.append(-1 if part is None else self._pack(part.a, *repack(part.a), part.a.shape[0]))
            b.append(
                -1 if part is None else self._pack(part.b, *repack(part.b), part.b.shape[0], heads)
            )
            scale.append(1.0 if part is None else part.scale)
        return int(self.engine.lora(a, b, scale))

    def _bias(self, name: str, has_bias: bool) -> int:
        return self._vector(f"{name}.bias") if has_bias else -1

    def _kernel(self, prefix: str) -> dict[str, int]:
        """The kernel of a convolution as [taps, channels], and its bias."""
        taps = self.weights[f"{prefix}.kernel"].to_f32()
        fields = {"kernel": self._floats(f"{prefix}.kernel", taps.T), "taps": taps.shape[1]}
        if self.spec.conv_bias:
            fields["kernel_bias"] = self._vector(f"{prefix}.kernel.bias")
        return fields
