"""The tests of this folder run on every backend that this build has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from plans import BLOCKS, Open

from verbatim.backend import gpu, open_backend
from verbatim.backend.protocol import Backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError
from verbatim.model.load import Model


@pytest.fixture(params=["reference", "cpu", *(["cuda"] if gpu.present() else [])])
def open_tiny(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Open a model on one of the backends, with memory for its cache."""
    opened: list[Backend] = []

    def make(model: Model, **options: object) -> Backend:
        try:
            backend = open_backend(model, EngineConfig(backend=request.param, **options))  # type: ignore[arg-type]
        except BackendError as error:
            if request.param == "cuda":  # there is a GPU: it must run
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
    """Where the cuda backend's tensors are: the GPU, or the CPU under Triton's interpreter."""
    from verbatim.backend.cuda.device import device

    return device()
