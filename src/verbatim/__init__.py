"""Verbatim: the same tokens, always. `from verbatim import LLM, SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verbatim.base.errors import VerbatimError
from verbatim.base.params import SamplingParams

if TYPE_CHECKING:
    from verbatim.engine.aio import AsyncEngine
    from verbatim.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "SamplingParams", "VerbatimError", "__version__"]

_LAZY = {"LLM": "verbatim.engine.llm", "AsyncEngine": "verbatim.engine.aio"}


def __getattr__(name: str) -> Any:
    """LLM and AsyncEngine load NumPy and the backends; they are imported when first named, so that errors and parameters stay cheap."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'verbatim' has no attribute {name!r}")
