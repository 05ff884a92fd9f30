"""Preflight of `make test-gpu`: exits with one line if no GPU runs a kernel or pytest is missing.

Run with src on PYTHONPATH, before anything is built.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec


def refusal() -> str | None:
    """Why the GPU tests cannot run with this interpreter, and the remedy; None if they can."""
    if find_spec("numpy") is None:
        return "NumPy is not installed; say which interpreter has it with PYTHON=..."
    from verbatim.backend import gpu
    from verbatim.base.errors import BackendError

    if not gpu.present():
        return (
            f"{gpu.hidden_or_absent()}; run it where there is one "
            "(`make test` runs the kernels interpreted)"
        )
    reason = gpu.missing()
    if reason is None and find_spec("pytest") is None:
        reason = "pytest is not installed; install it"
    if reason is not None:
        return f"{reason}, or say which interpreter has it with PYTHON=..."
    try:
        print(f"test-gpu: {import_module('verbatim.backend.cuda').kernel_ran()}", flush=True)
    except BackendError as error:
        return f"{error}; `verbatim doctor` says more"
    return None


if __name__ == "__main__":
    why = refusal()
    sys.exit(f"test-gpu: {why}" if why else 0)
