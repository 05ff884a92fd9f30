"""Verbatim: the same tokens, always. `from verbatim import LLM, SamplingParams`.

Exports every name in the signatures of LLM, AsyncEngine and their streams. Each is imported on
first use: the command line starts without them, and parameters need no NumPy.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verbatim.base.config import EngineConfig
    from verbatim.base.errors import (
        BackendError,
        CancelledError,
        CapacityError,
        ContextError,
        DeviceMemoryError,
        ModelError,
        OverloadedError,
        ParameterError,
        RequestError,
        UnavailableError,
        UnknownParameterError,
        UnsupportedError,
        VerbatimError,
    )
    from verbatim.base.params import SamplingParams
    from verbatim.base.records import (
        Choice,
        Completion,
        Delta,
        Finish,
        FinishReason,
        Timings,
        TokenLogprob,
        ToolCall,
        Usage,
    )
    from verbatim.engine.calls.async_calls import DeltaStream
    from verbatim.engine.calls.async_engine import AsyncEngine
    from verbatim.engine.calls.async_stream import AsyncStream
    from verbatim.engine.calls.blocking_engine import Stream
    from verbatim.engine.calls.call_inputs import ProgressBar, Prompt
    from verbatim.engine.calls.embed_calls import Ranked
    from verbatim.engine.calls.engine_base import Message
    from verbatim.engine.calls.llm import LLM, Vote
    from verbatim.engine.calls.scoring import Score
    from verbatim.engine.loaded_model import Progress
    from verbatim.explain.explained import Explanation, TokenExplanation, WhatIfs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncStream",
    "BackendError",
    "CancelledError",
    "CapacityError",
    "Choice",
    "Completion",
    "ContextError",
    "Delta",
    "DeltaStream",
    "DeviceMemoryError",
    "EngineConfig",
    "Explanation",
    "Finish",
    "FinishReason",
    "Message",
    "ModelError",
    "OverloadedError",
    "ParameterError",
    "Progress",
    "ProgressBar",
    "Prompt",
    "Ranked",
    "RequestError",
    "SamplingParams",
    "Score",
    "Stream",
    "Timings",
    "TokenExplanation",
    "TokenLogprob",
    "ToolCall",
    "UnavailableError",
    "UnknownParameterError",
    "UnsupportedError",
    "Usage",
    "VerbatimError",
    "Vote",
    "WhatIfs",
    "__version__",
]

_LAZY = {
    "EngineConfig": "verbatim.base.config",
    **dict.fromkeys(
        (
            *("BackendError", "CancelledError", "CapacityError", "ContextError"),
            *("DeviceMemoryError", "ModelError", "OverloadedError", "ParameterError"),
            *("RequestError", "UnavailableError", "UnknownParameterError", "UnsupportedError"),
            "VerbatimError",
        ),
        "verbatim.base.errors",
    ),
    "SamplingParams": "verbatim.base.params",
    **dict.fromkeys(
        (
            *("Choice", "Completion", "Delta", "Finish", "FinishReason", "Timings", "TokenLogprob"),
            *("ToolCall", "Usage"),
        ),
        "verbatim.base.records",
    ),
    **dict.fromkeys(("LLM", "Vote"), "verbatim.engine.calls.llm"),
    "Stream": "verbatim.engine.calls.blocking_engine",
    **dict.fromkeys(("ProgressBar", "Prompt"), "verbatim.engine.calls.call_inputs"),
    **dict.fromkeys(("Explanation", "TokenExplanation", "WhatIfs"), "verbatim.explain.explained"),
    "AsyncEngine": "verbatim.engine.calls.async_engine",
    "DeltaStream": "verbatim.engine.calls.async_calls",
    "AsyncStream": "verbatim.engine.calls.async_stream",
    "Message": "verbatim.engine.calls.engine_base",
    "Ranked": "verbatim.engine.calls.embed_calls",
    "Progress": "verbatim.engine.loaded_model",
    "Score": "verbatim.engine.calls.scoring",
}


if not TYPE_CHECKING:  # a type checker reads the imports above and reports a misspelt name

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            from importlib import import_module

            return getattr(import_module(_LAZY[name]), name)
        if name in ("AsyncLLM", "AsyncLLMEngine"):  # vLLM's names, imported by name
            raise ImportError(f"cannot import {name!r} from 'verbatim'; use AsyncEngine")
        raise AttributeError(f"module 'verbatim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _has_namesake(folder: str) -> bool:
    """Whether a project that is known to have a module `verbatim`, too, is installed there."""
    try:
        return any(name.startswith(("verbatim-", "verbatim_llm-")) for name in os.listdir(folder))
    except OSError:  # a zip file, or a folder that does not exist
        return False


if any(_has_namesake(folder) for folder in sys.path if folder.endswith("-packages")):
    from warnings import warn

    from verbatim.observe.namesakes import conflict

    if _text := conflict():
        warn(_text, stacklevel=2)
