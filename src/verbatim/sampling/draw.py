"""The draw: d and noise per id in, the id with the greatest d + noise out. Stateless, so the rest
of the batch cannot change it.

Gumbel noise turns sampling into an argmax: with g_i = -log(-log u_i) for independent uniform u_i,
the argmax of d_i + g_i is i with probability e^{d_i} / sum e^{d_j} (Gumbel 1954; Maddison, Tarlow,
Minka 2014). The uniforms come from Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random
numbers: as easy as 1, 2, 3", 2011), a keyed permutation of a counter that needs only 32-bit
multiplications.

    counter = (id >> 1, position, denoising step, domain)
    key     = (key mod 2^32, key >> 32)
    bits    = word 0 | word 1 << 32 for even ids, word 2 | word 3 << 32 for odd ones
    u       = ((bits >> 12) + 0.5) * 2^-52        52 random bits, never 0, never 1
    g       = -log(-log(u))                       from -3.61 to 36.74

Positions are below 2^32, and the functions take position + 2^32 · step as one number. The step is
0 in autoregressive decoding.

>>> f"{noise_key(seed=7, choice=0):016x}"
'c949274536500fee'
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from verbatim.sampling.numerics import F64, I64, log

U64 = NDArray[np.uint64]

DOMAIN_TOKEN = 0  # noise of a token at a position
DOMAIN_XTC = 1  # whether XTC acts at a position
DOMAIN_KEY = 2  # the key of a choice, from the seed
DOMAIN_REMASK = 3  # order of remasking=random

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_32 = np.uint64(32)

Word = TypeVar("Word", int, U64)


def philox(c0: Word, c1: Word, c2: Word, c3: Word, key: int) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10. Words are 32-bit values: ints, or uint64 arrays, which broadcast."""
    k0, k1 = key & _LOW, key >> 32 & _LOW
    p0: Any  # numpy's types do not say that uint64 >> int and uint64 & int are uint64
    p1: Any
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c2 = (p1 >> 32) ^ c1 ^ k0, (p0 >> 32) ^ c3 ^ k1
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def noise_key(seed: int, choice: int = 0) -> int:
    """The 64-bit noise key of one choice of a request. Choices of one seed are independent."""
    a, b, _, _ = philox(choice & _LOW, choice >> 32, 0, DOMAIN_KEY, seed)
    return a | b << 32


def uniform(key: int, position: I64 | int, ids: I64, domain: int = DOMAIN_TOKEN) -> F64:
    """u in (0, 1) per (position, id); the two broadcast, so one call can serve many positions."""
    at: Any = np.asarray(position, np.int64).astype(np.uint64)
    which, last = ids.astype(np.uint64), np.asarray(domain, np.uint64)
    a, b, c, d = philox(which >> np.uint64(1), at & _LOW, at >> _32, last, key)
    bits = np.where((which & np.uint64(1)) == np.uint64(0), a | b << _32, c | d << _32)
    out: F64 = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return out


def gumbel(key: int, position: I64 | int, ids: I64) -> F64:
    """The noise per id and position; the two broadcast."""
    return -log(-log(uniform(key, position, ids)))


def chance(key: int, position: int) -> float:
    """One uniform number for XTC, independent of the tokens' noise."""
    return float(uniform(key, position, np.zeros(1, np.int64), DOMAIN_XTC)[0])


def draw(ids: I64, d: F64, key: int, position: int) -> tuple[int, F64, F64]:
    """(index of the winner in `ids`, noise, scores d + noise). `ids` ascend; a tie goes to the
    lower id."""
    noise = gumbel(key, position, ids)
    scores = d + noise
    return int(np.argmax(scores)), noise, scores
