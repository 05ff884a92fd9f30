"""Codebooks of the IQ formats: the vectors of small integers that their indices select.

A codebook of 8-vectors is a subset of the 3 ** 8 vectors over three levels, one of 4-vectors a
subset of the 8 ** 4 over eight levels. The members are numbered by their value as a number in base
3 (or 8), first element least significant, and the codebook lists them in that order. So membership
says everything: codebooks.json has one bit per possible vector, compressed (zlib), in base 85.
tests/formats/test_quant.py compares every vector with the `gguf` package.
"""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from pathlib import Path

import numpy as np

# Levels of the elements of each codebook.
LEVELS: dict[str, tuple[int, ...]] = {
    "iq1_s": (-1, 0, 1),
    "iq2_xxs": (8, 25, 43),
    "iq2_xs": (8, 25, 43),
    "iq2_s": (8, 25, 43),
    "iq3_xxs": (4, 12, 20, 28, 36, 44, 52, 62),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15),
}

# All eight signs (bit set: minus) from seven bits.
EVEN_SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], dtype=np.uint8)
# Signs of 8 elements, as factors, from their bits.
_FACTORS = (1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)[:, ::-1]).astype(
    np.int8
)


@cache
def codebook(name: str) -> np.ndarray:
    """The vectors of a codebook: int8 [members, 8] with three levels, else [members, 4]."""
    levels = np.array(LEVELS[name], dtype=np.int8)
    base = len(levels)
    width = 8 if base == 3 else 4
    members = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    packed = zlib.decompress(base64.b85decode(members[name]))
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    digits = np.flatnonzero(bits)[:, None] // base ** np.arange(width) % base
    vectors: np.ndarray = levels[digits]
    vectors.setflags(write=False)
    return vectors


def signed(name: str, indices: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Codebook vectors [n, m] with the signs of 8 elements each [n, 256 / 8]."""
    n = len(indices)
    vectors: np.ndarray = codebook(name)[indices].reshape(n, -1, 8) * _FACTORS[signs]
    return vectors.reshape(n, -1)


def offset_scale(scales: np.ndarray) -> np.ndarray:
    return scales.astype(np.float32) + np.float32(0.5)
