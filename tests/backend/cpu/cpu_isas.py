"""The instruction sets of the CPU kernels as test parameters.

A set that this CPU lacks is a skip with a reason.
"""

from __future__ import annotations

from typing import Any

import pytest

native = pytest.importorskip("verbatim.backend.cpu._native")

HAVE: list[str] = native.isas()  # from scalar to the widest
KNOWN = {
    "scalar": "any CPU",
    "avx2": "an x86 CPU with AVX2, FMA and F16C",
    "avx512": "an x86 CPU with AVX-512 (F, BW, VL, DQ, VNNI)",
    "amx": "an x86 CPU with AMX (tile, int8)",
    "neon": "an ARM CPU with dot products",
    "i8mm": "an ARM CPU with i8mm",
}
assert set(HAVE) <= set(KNOWN), "add the new instruction set to KNOWN"


def every_isa(*, without: tuple[str, ...] = ()) -> list[Any]:
    """pytest parameters for every instruction set of the kernels."""
    return [
        pytest.param(
            isa,
            marks=()
            if isa in HAVE
            else pytest.mark.skip(f"{isa} needs {needs}; this one has {', '.join(HAVE)}"),
        )
        for isa, needs in KNOWN.items()
        if isa not in without
    ]
