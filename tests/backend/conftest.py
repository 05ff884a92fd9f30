"""Fixtures that run a test on every backend; a backend that this machine cannot run is a skip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from plans import BACKENDS, BLOCKS, Open

from verbatim.backend import open_backend
from verbatim.backend.protocol import Backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError
from verbatim.model.loading.load import Model


@pytest.fixture(params=BACKENDS)
def open_tiny(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens a model on one of the backends, and allocates its KV cache."""
    opened: list[Backend] = []

    def make(model: Model, **options: object) -> Backend:
        try:
            backend = open_backend(model, EngineConfig(backend=request.param, **options))  # type: ignore[arg-type]
        except BackendError as error:
            if request.param == "cuda":  # there is a GPU, so the backend must open
                raise
            pytest.skip(str(error))
        backend.allocate((BLOCKS,) * len(model.spec.groups))
        opened.append(backend)
        return backend

    yield make
    for backend in opened:
        backend.close()


@pytest.fixture(scope="session")
def device() -> Any:
    """The device of the cuda backend's tensors: the GPU, or the CPU under Triton's interpreter."""
    from verbatim.backend.cuda.runtime.device import device

    return device()
