"""One thread for NumPy's linear algebra while the reference computes.

A row at a time means many small products. OpenBLAS would hand each to all cores and let them spin: on a busy machine that is ten times
slower than one thread. And a result that never met a second thread cannot depend on how many there are.
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
    """Inside, OpenBLAS uses one thread; afterwards what it used before. Where NumPy has another library, nothing is changed."""
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
    """OpenBLAS's own two functions, in the library that NumPy's wheel brings along; None where there is none."""
    package = Path(np.__file__).parent
    for file in [
        *(package.parent / "numpy.libs").glob("*openblas*"),
        *(package / ".dylibs").glob("*openblas*"),
    ]:
        try:
            library = ctypes.CDLL(str(file))  # loaded already: this only finds it
        except OSError:
            continue
        for name in ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}"):
            get, set_ = (
                getattr(library, name.format(f"{verb}_num_threads"), None)
                for verb in ("get", "set")
            )
            if get is not None and set_ is not None:
                get.restype, get.argtypes, set_.restype, set_.argtypes = (
                    ctypes.c_int,
                    [],
                    None,
                    [ctypes.c_int],
                )
                return get, set_
    return None
