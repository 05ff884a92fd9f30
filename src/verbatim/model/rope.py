"""Rotary position embeddings.

In: the scaling record of a config (Hugging Face's keys). Out: a RopeSpec and its cos/sin tables.

All machines must compute the same bits, but `pow`, `log` and `cos` differ between C libraries.
So frequencies are computed in decimal arithmetic and rounded once to float64, and `tables` uses
only IEEE additions and multiplications.

The frequencies of dynamic and longrope depend on a length. transformers uses the current length of
the sequence, which changes the angles of keys that are cached already. Here the length is the
engine's context, which is fixed at load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal, localcontext

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.base.json_io import JsonMapping
from verbatim.model.spec import ModelSpec, RopeSpec

MAX_DIM = 4096  # eight times the largest head in use; bounds the time of decimal arithmetic
# A divisor of GGUF's rope_freqs this large stops a pair: it does not rotate (gemma4).
STOPPED = 1e30
_DIGITS = 40  # decimal precision; float64 needs 17
_PI = Decimal("3.14159265358979323846264338327950288419716939937510")


def plain_frequencies(theta: float, dim: int) -> list[Decimal]:
    """theta ** (-2j / dim) for j = 0 .. dim/2 - 1, to 40 digits."""
    with localcontext() as c:
        c.prec = _DIGITS
        log_theta = Decimal(theta).ln()
        return [(-log_theta * (2 * j) / dim).exp() for j in range(dim // 2)]


def make_rope(
    scaling: Mapping[str, object], *, theta: float, dim: int, context: int, trained: int, file: str
) -> RopeSpec:
    """Compute the frequencies.

    `scaling`: rope_type (or type) and that type's numbers. `trained`: max_position_embeddings."""
    kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ModelError(
            f"rope scaling {kind!r} is unknown; known: {', '.join(sorted(_KINDS))}", file=file
        )
    if dim % 2 or not 2 <= dim <= MAX_DIM:
        raise ModelError(
            f"rotary dimension {dim} must be even, from 2 to {MAX_DIM}; it is head_dim (or "
            "hidden_size / num_attention_heads) times "
            "partial_rotary_factor, in GGUF rope.dimension_count",
            file=file,
        )
    if not 0 < theta < math.inf:
        raise ModelError(
            f"rope theta (rope_theta, rope.freq_base) is {theta}, and must be positive", file=file
        )
    reader = _ScalingReader(scaling, kind, file)
    with localcontext() as c:
        c.prec = _DIGITS
        try:
            frequencies, factor = _KINDS[kind](reader, theta, dim, context, trained)
            return RopeSpec(dim, tuple(float(f) for f in frequencies), float(factor))
        except ArithmeticError as error:
            raise ModelError(
                f"rope scaling {dict(scaling)!r} cannot be computed ({error!r})", file=file
            ) from error


def length_warning(scaling: JsonMapping, *, context: int, trained: int) -> str | None:
    """Warning for load where the engine's context gives other frequencies than transformers uses
    for a short sequence."""
    kind = scaling.get("rope_type")
    original = scaling.get("original_max_position_embeddings") or trained
    if kind == "longrope" and context > original:
        return (
            f"rope_type longrope: the context is {context}, above the original length {original}, "
            "so every sequence uses long_factor; transformers uses short_factor for sequences of "
            f"up to {original} tokens (context={original} gives the same output)"
        )
    if kind == "dynamic" and context > trained:
        return (
            f"rope_type dynamic: the context is {context}, above the trained length {trained}, so "
            f"every sequence uses the frequencies of {context} tokens; transformers uses those of "
            "the sequence's own length"
        )
    return None


class _ScalingReader:
    """Typed, validated access to the numbers of a scaling record."""

    def __init__(self, values: JsonMapping, kind: str, file: str) -> None:
        self._values, self._kind, self._file = values, kind, file

    def number(self, name: str, default: float | None = None) -> Decimal:
        value = self._values.get(name)
        value = default if value is None else value
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise ModelError(
                f"rope scaling {self._kind!r}: {name} is {value!r}, a positive number is needed",
                file=self._file,
            )
        return Decimal(value)

    def optional(self, name: str) -> Decimal | None:
        return None if self._values.get(name) is None else self.number(name)

    def positive(self, name: str) -> Decimal | None:
        """As `optional`; 0 counts as absent."""
        return None if self._values.get(name) in (0, None) else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._values.get(name, default))

    def numbers(self, name: str, count: int) -> list[Decimal]:
        values = self._values.get(name)
        ok = isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count
        if not ok or not all(
            isinstance(v, (int, float)) and math.isfinite(v) and v > 0 for v in values or ()
        ):
            raise ModelError(
                f"rope scaling {self._kind!r}: {name} must be {count} positive numbers",
                file=self._file,
            )
        return [Decimal(v) for v in values or ()]


_Scaled = tuple[list[Decimal], Decimal]
_ONE = Decimal(1)


def _default(r: _ScalingReader, theta: float, dim: int, context: int, trained: int) -> _Scaled:
    return plain_frequencies(theta, dim), _ONE


def _proportional(r: _ScalingReader, theta: float, dim: int, context: int, trained: int) -> _Scaled:
    """The first pairs of whole heads rotate, and the others do not (gemma4)."""
    factor = r.optional("factor") or _ONE
    pairs = int(float(r.number("partial_rotary_factor", 1.0)) * dim // 2)
    frequencies = [f / factor for f in plain_frequencies(theta, dim)]
    return frequencies[:pairs] + [Decimal(0)] * (dim // 2 - pairs), _ONE


def _linear(r: _ScalingReader, theta: float, dim: int, context: int, trained: int) -> _Scaled:
    factor = r.number("factor")
    return [f / factor for f in plain_frequencies(theta, dim)], _ONE


def _dynamic(r: _ScalingReader, theta: float, dim: int, context: int, trained: int) -> _Scaled:
    """NTK scaling: raise theta so that the slowest pair rotates as far over `context` as it did
    over the trained length."""
    factor, length = r.number("factor"), max(context, trained)
    if dim == 2:
        return plain_frequencies(theta, dim), _ONE  # the only pair has frequency 1 for any theta
    growth = factor * length / trained - (factor - 1)
    log_theta = Decimal(theta).ln() + growth.ln() * dim / (dim - 2)
    return [(-log_theta * (2 * j) / dim).exp() for j in range(dim // 2)], _ONE


def _ntk_alpha(r: _ScalingReader, theta: float, dim: int, context: int, trained: int) -> _Scaled:
    """Theta times alpha ** (dim / (dim - 2)), whatever the length (hunyuan)."""
    if dim == 2:
        return plain_frequencies(theta, dim), _ONE
    log_theta = Decimal(theta).ln() + r.number("alpha").ln() * dim / (dim - 2)
    return [(-log_theta * (2 * j) / dim).exp() for j in range(dim // 2)], _ONE


def _llama3(r: _ScalingReader, theta: float, dim: int, context: int, trained: int) -> _Scaled:
    """Keep fast pairs, divide slow pairs by `factor`, and interpolate the band between them by
    wavelength."""
    factor, low, high = (
        r.number("factor"),
        r.number("low_freq_factor"),
        r.number("high_freq_factor"),
    )
    original = r.number("original_max_position_embeddings", trained)
    result = []
    for f in plain_frequencies(theta, dim):
        rotations = original * f / (2 * _PI)  # full rotations over the original context
        if rotations < low:
            f = f / factor
        elif rotations <= high and high != low:
            smooth = (rotations - low) / (high - low)
            f = (1 - smooth) * f / factor + smooth * f
        result.append(f)
    return result, _ONE


def _yarn(r: _ScalingReader, theta: float, dim: int, context: int, trained: int) -> _Scaled:
    original = r.number("original_max_position_embeddings", trained)
    factor = r.optional("factor") or Decimal(trained) / original
    fast, slow = r.number("beta_fast", 32.0), r.number("beta_slow", 1.0)

    def pair_that_rotates(times: Decimal) -> Decimal:
        return dim * (original / (times * 2 * _PI)).ln() / (2 * Decimal(theta).ln())

    low, high = pair_that_rotates(fast), pair_that_rotates(slow)
    if r.flag("truncate", True):
        low, high = Decimal(math.floor(low)), Decimal(math.ceil(high))
    low, high = max(low, Decimal(0)), min(high, Decimal(dim - 1))
    if low == high:
        high += Decimal("0.001")
    result = []
    for j, f in enumerate(plain_frequencies(theta, dim)):
        # 0: keep the frequency; 1: divide it by factor.
        ramp = min(max((j - low) / (high - low), Decimal(0)), _ONE)
        result.append(f / factor * ramp + f * (1 - ramp))
    return result, r.optional("attention_factor") or _yarn_magnitude(r, factor)


def _yarn_magnitude(r: _ScalingReader, factor: Decimal) -> Decimal:
    def magnitude(m: Decimal) -> Decimal:
        return _ONE if factor <= 1 else Decimal("0.1") * m * factor.ln() + 1

    one, all_dims = r.positive("mscale"), r.positive("mscale_all_dim")
    return magnitude(one) / magnitude(all_dims) if one and all_dims else magnitude(_ONE)


def _longrope(r: _ScalingReader, theta: float, dim: int, context: int, trained: int) -> _Scaled:
    original = r.number("original_max_position_embeddings", trained)
    factor = r.optional("factor") or Decimal(trained) / original
    divisors = r.numbers("long_factor" if context > original else "short_factor", dim // 2)
    attention = r.optional("attention_factor")
    if attention is None:
        attention = _ONE if factor <= 1 else (1 + factor.ln() / original.ln()).sqrt()
    return [f / d for f, d in zip(plain_frequencies(theta, dim), divisors, strict=True)], attention


def _divided(r: _ScalingReader, theta: float, dim: int, context: int, trained: int) -> _Scaled:
    """GGUF's rope_freqs tensor: one precomputed divisor per frequency."""
    divisors = r.numbers("divisors", dim // 2)
    pairs = zip(plain_frequencies(theta, dim), divisors, strict=True)
    return [f / d if d < STOPPED / 2 else Decimal(0) for f, d in pairs], _ONE


_KINDS = {
    "default": _default,
    "none": _default,
    "proportional": _proportional,
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk_alpha": _ntk_alpha,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "divided": _divided,
}


# ------------------------------------------------------------------------------- cos and sin tables

# pi/2 as a sum of three floats. The first two have 33 bits: k * piece is exact for |k| < 2**20.
_HALF_PI = (
    float.fromhex("0x1.921fb544p+0"),
    float.fromhex("0x1.0b4611a6p-34"),
    float.fromhex("0x1.3198a2e037073p-69"),
)
# Taylor coefficients for |x| <= pi/4; the truncation error is below 2**-60.
_SIN = [(-1.0) ** n / math.factorial(2 * n + 1) for n in range(1, 9)]
_COS = [(-1.0) ** n / math.factorial(2 * n) for n in range(1, 10)]


def tables(rope: RopeSpec, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """attention_factor times cos and sin of position * inv_freq: float32 [positions, dim / 2].

    Each float64 addition, multiplication and rounding is one NumPy call, so nothing can be fused
    and the bits are the same on all machines. About one value in a million differs from the
    correctly rounded float32."""
    angle = positions.astype(np.float64)[:, None] * np.asarray(rope.inv_freq, np.float64)[None, :]
    rotations = np.rint(angle * (2.0 / math.pi))
    x = ((angle - rotations * _HALF_PI[0]) - rotations * _HALF_PI[1]) - rotations * _HALF_PI[2]
    square = x * x
    sine, cosine = np.full_like(x, _SIN[-1]), np.full_like(x, _COS[-1])
    for s in reversed(_SIN[:-1]):
        sine = sine * square + s
    for c in reversed(_COS[:-1]):
        cosine = cosine * square + c
    sine = x + x * (square * sine)
    cosine = 1.0 + square * cosine
    quarter = rotations.astype(np.int64) & 3
    swap = (quarter & 1).astype(bool)
    cos = np.where(swap, sine, cosine) * np.where((quarter == 1) | (quarter == 2), -1.0, 1.0)
    sin = np.where(swap, cosine, sine) * np.where(quarter >= 2, -1.0, 1.0)
    factor = rope.attention_factor
    return (cos * factor).astype(np.float32), (sin * factor).astype(np.float32)


def query_scales(spec: ModelSpec, positions: np.ndarray) -> np.ndarray:
    """1 + beta * ln(1 + floor(position / length)), float32 [positions] (ModelSpec's query_scale).

    The logarithm of a whole number is computed in decimal arithmetic and rounded once."""
    steps, inverse = np.unique(positions // spec.query_scale_length, return_inverse=True)
    with localcontext() as c:
        c.prec = _DIGITS
        beta = Decimal(spec.query_scale_beta)
        values = [float(1 + beta * Decimal(1 + int(n)).ln()) for n in steps]
    return np.array(values, np.float64).astype(np.float32)[inverse]
