"""GGUF block formats whose values are a float scale times a small integer from a table or codebook.

In: a type of SCALED, blocks uint8 [n, bytes per block]. Out: `scaled_integers` gives a float32
scale per run of 16, 32 or 256 values and the integers (int8). A value is their product, and every
product is exact in float32, so the order of the multiplications in ggml's conversion is not needed
for its bits. block_formats.py multiplies; backend/cpu/repack.py keeps scale and integers.

Fields of a block in order (d is f16):

    iq4_nl   d, 16 bytes of nibbles                          d * IQ4[q]
    iq4_xs   d, 2 bytes of high scale bits, 4 of low, 128 of nibbles   d * (s - 32) * IQ4[q], 8 runs
    mxfp4    a power of two (E8M0), 16 bytes of nibbles      2 ** (e - 128) * E2M1[q], E2M1 doubled
    tq1_0    48 bytes of five ternary digits, 4 of four, d   d * (t - 1)
    tq2_0    64 bytes of 2 bits, d                           d * (t - 1)
    iq2_xxs  d, 8 times (4 index bytes; 4 times 7 sign bits, 4 scale bits)
    iq2_xs   d, 32 times (9 index bits, 7 sign bits), 8 bytes of scales, 16 runs of 16
    iq2_s    d, 32 low index bytes, 32 sign bytes, 8 of high index bits, 8 of scales, 16 runs of 16
    iq3_xxs  d, 64 index bytes, 8 times (4 times 7 sign bits, 4 scale bits)
    iq3_s    d, 64 low index bytes, 8 of high index bits, 32 sign bytes, 4 of scales
    iq1_s    d, 32 low index bytes, 8 times (4 times 3 high index bits, 3 scale bits, shift sign)
    iq1_m    32 low index bytes, 16 of (3 high index bits, shift sign), 8 of scales with d in parts

The iq2 scale is d * (s + 1/2) / 4, iq3_xxs d * (s + 1/2) / 2, iq3_s and iq1 d * (2 s + 1). Seven
sign bits stand for eight: the eighth makes the number of minus signs even. iq1 adds 1/8 or -1/8 to
each element; here the integers are multiplied by 8 and the scale is divided by 8.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verbatim.formats.codebooks import codebook

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = np.array(IQ4, dtype=np.int8)
_E2M1 = np.array(E2M1, dtype=np.int8)
# All eight signs (bit set: minus) from seven bits.
_EVEN_SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], dtype=np.uint8)
# Signs of 8 elements, as factors, from their bits.
_FACTORS = (1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)[:, ::-1]).astype(
    np.int8
)
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], dtype=np.uint8)

Scaled = tuple[np.ndarray, np.ndarray]  # scale float32 [n, runs], integers int8 [n, values]


def scaled_integers(type: str, blocks: np.ndarray) -> Scaled:
    """Scale of each run, and the integers. All runs of a type have the same length."""
    return SCALED[type](blocks)


def _field(blocks: np.ndarray, start: int, stop: int, kind: str = "u1") -> np.ndarray:
    """Bytes start..stop of each block, as `kind` [n, count]."""
    found: np.ndarray = np.ascontiguousarray(blocks[:, start:stop]).view(kind)
    return found


def _d(blocks: np.ndarray, at: int) -> np.ndarray:
    return _field(blocks, at, at + 2, "<f2").astype(np.float32)


def _split(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """[n, m] -> [n, m * count]: `count` fields of `bits` bits of each integer, lowest first."""
    shifts = np.arange(0, bits * count, bits, dtype=packed.dtype)
    mask = packed.dtype.type((1 << bits) - 1)
    fields: np.ndarray = (packed[:, :, None] >> shifts) & mask
    return fields.reshape(len(packed), -1)


def _low_high(packed: np.ndarray) -> np.ndarray:
    """[n, 16 m] -> [n, 32 m]: of each 16 bytes the low nibbles, then the high nibbles."""
    parts = packed.reshape(len(packed), -1, 1, 16)
    nibbles = (parts >> np.array([0, 4], np.uint8)[:, None]) & np.uint8(15)
    return nibbles.reshape(len(packed), -1)


def _signed(name: str, indices: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Codebook vectors [n, m] with the signs of 8 elements each [n, 256 / 8]."""
    n = len(indices)
    vectors: np.ndarray = codebook(name)[indices].reshape(n, -1, 8) * _FACTORS[signs]
    return vectors.reshape(n, -1)


def _iq4_nl(blocks: np.ndarray) -> Scaled:
    return _d(blocks, 0), _IQ4[_low_high(blocks[:, 2:])]


def _iq4_xs(blocks: np.ndarray) -> Scaled:
    high = _split(_field(blocks, 2, 4, "<u2"), 2, 8).astype(np.uint8)
    scales = (_split(blocks[:, 4:8], 4, 2) | high << np.uint8(4)).view(np.int8) - np.int8(32)
    return _d(blocks, 0) * scales, _IQ4[_low_high(blocks[:, 8:])]


def _mxfp4(blocks: np.ndarray) -> Scaled:
    e = blocks[:, :1].astype(np.uint32)
    # The two smallest scales are subnormal.
    bits = np.where(e < 2, np.uint32(0x00200000) << (e & 1), (e - 1) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32), _E2M1[_low_high(blocks[:, 1:])]


def _tq1_0(blocks: np.ndarray) -> Scaled:
    # A byte b holds digits as a fraction of 256: the digit is the integer part of 3 * b / 256, the
    # following ones are in 3 * b modulo 256.
    parts = [
        (blocks[:, None, start:stop] * _POWERS_OF_3[:digits, None]).reshape(len(blocks), -1)
        for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    digits = (np.concatenate(parts, axis=1).astype(np.uint16) * 3) >> 8
    return _d(blocks, 52), digits.astype(np.int8) - np.int8(1)


def _tq2_0(blocks: np.ndarray) -> Scaled:
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    q = (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)
    return _d(blocks, 64), q.reshape(-1, 256).view(np.int8) - np.int8(1)


def _iq2_xxs(blocks: np.ndarray) -> Scaled:
    words = _field(blocks, 2, 66, "<u4").reshape(len(blocks), 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    signs = _EVEN_SIGNS[_split(words[:, :, 1], 7, 4)]
    scale = _d(blocks, 0) * _offset_scale(words[:, :, 1] >> 28) * np.float32(0.25)
    return scale, _signed("iq2_xxs", indices, signs)


def _offset_scale(scales: np.ndarray) -> np.ndarray:
    return scales.astype(np.float32) + np.float32(0.5)


def _iq2_xs(blocks: np.ndarray) -> Scaled:
    words = _field(blocks, 2, 66, "<u2")
    scales = _split(blocks[:, 66:], 4, 2)
    scale = _d(blocks, 0) * _offset_scale(scales) * np.float32(0.25)
    return scale, _signed("iq2_xs", words & np.uint16(511), _EVEN_SIGNS[words >> 9])


def _iq2_s(blocks: np.ndarray) -> Scaled:
    high = _split(blocks[:, 66:74], 2, 4).astype(np.uint16)
    scale = _d(blocks, 0) * _offset_scale(_split(blocks[:, 74:], 4, 2)) * np.float32(0.25)
    return scale, _signed("iq2_s", blocks[:, 2:34] | high << 8, blocks[:, 34:66])


def _iq3_xxs(blocks: np.ndarray) -> Scaled:
    words = _field(blocks, 66, 98, "<u4")
    scale = _d(blocks, 0) * _offset_scale(words >> 28) * np.float32(0.5)
    return scale, _signed("iq3_xxs", blocks[:, 2:66], _EVEN_SIGNS[_split(words, 7, 4)])


def _iq3_s(blocks: np.ndarray) -> Scaled:
    high = _split(blocks[:, 66:74], 1, 8).astype(np.uint16)
    scale = _d(blocks, 0) * (2 * _split(blocks[:, 106:], 4, 2) + 1)
    return scale, _signed("iq3_s", blocks[:, 2:66] | high << 8, blocks[:, 74:106])


def _shifted(indices: np.ndarray, minus: np.ndarray) -> np.ndarray:
    """8 times the vectors of iq1, plus or minus 1; indices and minus [n, 32]."""
    shift = (1 - 2 * minus.astype(np.int8))[:, :, None]
    vectors: np.ndarray = 8 * codebook("iq1_s")[indices] + shift
    return vectors.reshape(len(indices), -1)


def _iq1_s(blocks: np.ndarray) -> Scaled:
    words = _field(blocks, 34, 50, "<u2")
    indices = blocks[:, 2:34] | _split(words, 3, 4) << 8
    scale = _d(blocks, 0) * (2 * (words >> 12 & 7) + 1) * np.float32(0.125)
    return scale, _shifted(indices, np.repeat(words >> 15, 4, axis=1))


def iq1_m_d(blocks: np.ndarray) -> np.ndarray:
    """d [n, 1]: its nibbles are the high ones of the four 16-bit words of scales."""
    words = _field(blocks, 48, 56, "<u2") >> 12
    bits = words[:, 0] | words[:, 1] << 4 | words[:, 2] << 8 | words[:, 3] << 12
    return bits.astype("<u2").view("<f2").astype(np.float32)[:, None]


def _iq1_m(blocks: np.ndarray) -> Scaled:
    high = _split(blocks[:, 32:48], 4, 2)
    indices = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    scales = _split(_field(blocks, 48, 56, "<u2"), 3, 4)
    scale = iq1_m_d(blocks) * (2 * scales + 1) * np.float32(0.125)
    return scale, _shifted(indices, high >> 3)


SCALED: dict[str, Callable[[np.ndarray], Scaled]] = {
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
    "tq1_0": _tq1_0,
    "tq2_0": _tq2_0,
    "iq2_xxs": _iq2_xxs,
    "iq2_xs": _iq2_xs,
    "iq2_s": _iq2_s,
    "iq3_xxs": _iq3_xxs,
    "iq3_s": _iq3_s,
    "iq1_s": _iq1_s,
    "iq1_m": _iq1_m,
}
