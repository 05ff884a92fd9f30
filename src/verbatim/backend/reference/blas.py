"""Limit OpenBLAS to one thread while the reference backend computes.

The reference backend runs many small matrix-vector products. OpenBLAS would split each of them over
all cores and spin there: on a loaded machine that is ten times slower than one thread. With one
thread, a result also cannot depend on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np


@contextmanager
def one_thread() -> Iterator[None]:
    """Set OpenBLAS to one thread inside the block, and restore its thread count afterwards.

    Without OpenBLAS (a NumPy with another library) this does nothing."""
    controls = _controls()
    if controls is None:
        yield
        return
    get, set_ = controls
    before = get()
    set_(1)
    try:
        yield
    finally:
        set_(before)


@cache
def _controls() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """OpenBLAS's functions that get and set its thread count, from the library in NumPy's wheel;
    None without OpenBLAS."""
    package = Path(np.__file__).parent
    for file in [
        *(package.parent / "numpy.libs").glob("*openblas*"),
        *(package / ".dylibs").glob("*openblas*"),
    ]:
        try:
            library = ctypes.CDLL(str(file))  # already loaded: this only finds it
        except OSError:
            continue
        for name in ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}"):
            get, set_ = (
                getattr(library, name.format(f"{verb}_num_threads"), None)
                for verb in ("get", "set")
            )
            if get is not None and set_ is not None:
                get.restype, get.argtypes = ctypes.c_int, []
                set_.restype, set_.argtypes = None, [ctypes.c_int]
                return get, set_
    return None
