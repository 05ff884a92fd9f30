"""Makes Triton's interpreter faster: it patches triton.language once per function, not per call.

The interpreter replaces some hundred attributes of triton.language before every kernel launch and
before every call of a device function, tl.sum and tl.max included. That is most of its time with
small tensors. The attributes are the same every time, so this keeps them for the whole process.
Import this before a kernel runs, and only in a process that interprets.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def patch_once() -> None:
    """A Triton without these internals keeps its own way, which is slower and equal."""
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None:
        return

    @functools.cache
    def patched(fn: Any) -> SimpleNamespace:
        patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patched
