"""The tests of this folder run on every backend; one that this machine cannot run is skipped by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from plans import BLOCKS, Open

from verbatim.backend import open_backend
from verbatim.backend.protocol import Backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError
from verbatim.model.load import Model

GPU = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")


@pytest.fixture(params=["reference", "cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])])
def open_tiny(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Open a model on one of the backends, with memory for its cache."""
    opened: list[Backend] = []

    def make(model: Model, **options: object) -> Backend:
        try:
            backend = open_backend(model, EngineConfig(backend=request.param, **options))  # type: ignore[arg-type]
        except BackendError as error:
            pytest.skip(str(error))
        backend.allocate((BLOCKS,) * len(model.spec.groups))
        opened.append(backend)
        return backend

    yield make
    for backend in opened:
        backend.close()
