"""Engines for tests: the fakes, and tiny random models on every backend that is there."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from verbatim.base.config import EngineConfig
from verbatim.engine.loaded_model import LoadedModel
from verbatim.testing.fakes import ByteTokenizer, fake_parts
from verbatim.testing.tiny_models import tiny_model

BACKENDS = ["fake", "reference", "cpu"]


def cpu_available(family: str = "llama") -> bool:
    from verbatim.backend import cpu

    return (
        getattr(cpu, "unsupported", None) is not None
        and cpu.unsupported(tiny_model(family, type="q8_0")) is None
    )


@lru_cache(maxsize=32)
def _model(family: str, kind: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    return tiny_model(family, type=kind, **dict(changes))


def tiny_parts(
    name: str, config: EngineConfig, family: str = "llama", *, pipeline: bool = True, **changes: Any
) -> LoadedModel:
    """`name`: one of BACKENDS, or "overlapped": the fake one, which launches steps ahead. Models
    are small enough for thousands of steps."""
    if name in ("fake", "overlapped"):
        overlap = name == "overlapped"
        return fake_parts(canary=config.check, pipeline=pipeline, overlap=overlap)
    from verbatim.backend import open_backend

    kind = "q8_0" if name == "cpu" else "f32"
    model = _model(family, kind, tuple(sorted(changes.items())))
    backend = open_backend(
        model, EngineConfig(backend=name, threads=1, check=config.check, kv_type=config.kv_type)
    )
    return LoadedModel(
        backend,
        ByteTokenizer(),
        eos_ids=(ByteTokenizer.EOS,),
        name=f"tiny-{family}",
        digest=model.source.digest,
    )
