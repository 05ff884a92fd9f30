"""The sampler's arithmetic: accurate, and fixed to the bit. Every backend must reproduce the
constants here."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from verbatim.model import rope
from verbatim.sampling import draw, numerics


def test_exp_is_accurate_to_about_one_ulp() -> None:
    rng = np.random.default_rng(0)
    x = -np.concatenate(
        [rng.uniform(0, 1, 5000), rng.uniform(0, 40, 5000), rng.uniform(0, 708, 5000)]
    )
    true = np.array([math.exp(v) for v in x])
    assert np.max(np.abs(numerics.exp(x) - true) / true) < 5e-16
    assert numerics.exp(np.array([0.0, -708.5, -np.inf])).tolist() == [1.0, 0.0, 0.0]


def test_log_is_accurate_also_near_one() -> None:
    rng = np.random.default_rng(1)
    near = 1.0 - np.arange(1, 2000) * 2.0**-53
    x = np.concatenate(
        [
            rng.uniform(0, 1, 5000),
            near,
            rng.uniform(1, 1e6, 5000),
            2.0 ** -rng.uniform(0, 1000, 5000),
        ]
    )
    true = np.array([math.log(v) for v in x])
    assert np.max(np.abs(numerics.log(x) - true) / np.abs(true)) < 1e-15
    assert numerics.log(np.array([1.0])).tolist() == [0.0]


def test_the_bits_of_exp_and_log_are_fixed() -> None:
    """A compiler that fuses a multiply and an add, or reorders a polynomial, changes these."""
    x = np.array([-0.1, -1.0, -2.718281828459045, -17.25, -29.9, -300.0])
    assert [v.hex() for v in numerics.exp(x).tolist()] == EXP_BITS
    y = np.array(
        [0.1, 0.7071067811865475, 0.7071067811865476, 0.9999999999999999, 3.0, 1e-300, 2.0**62]
    )
    assert [v.hex() for v in numerics.log(y).tolist()] == LOG_BITS


EXP_BITS = [
    *("0x1.cf46d99d52b3ap-1", "0x1.78b56362cef38p-2", "0x1.0e49787e20548p-4"),
    *("0x1.14f49dbc5078cp-25", "0x1.d1c085ae7ed32p-44", "0x1.245639c3a49f7p-433"),
]
LOG_BITS = [
    *("-0x1.26bb1bbb55515p+1", "-0x1.62e42fefa39f1p-2", "-0x1.62e42fefa39eep-2"),
    *("-0x1.0000000000000p-53", "0x1.193ea7aad030bp+0", "-0x1.5963447f87fb5p+9"),
    "0x1.57cd0e7026820p+5",
]


def test_masses_and_mass_needed_are_exact_integers() -> None:
    d = np.array([0.0, -1.0, -29.0, -30.0, -np.inf])
    assert numerics.masses(d).tolist() == [1 << 42, 1617950892750, 1, 0, 0]
    assert numerics.mass_needed(0.5, 10) == 5
    assert numerics.mass_needed(0.51, 10) == 6
    assert numerics.mass_needed(1e-300, 10) == 1
    # rounding never exceeds the total
    assert numerics.mass_needed(1 - 2**-53, (1 << 62) - 1) < 1 << 62
    exact = [math.floor(Fraction(math.exp(v)) * 2**42) if v > -700 else 0 for v in d]
    assert all(abs(a - b) <= 1 for a, b in zip(numerics.masses(d).tolist(), exact, strict=True))


def test_spreads_give_the_entropy() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=500) * 3
    d = x - x.max()
    p = np.exp(d) / np.exp(d).sum()
    total = int(numerics.masses(d).sum())
    entropy = numerics.log_mass(total) + float(int(numerics.spreads(d).sum())) / float(total)
    assert entropy == pytest.approx(float(-(p * np.log(p)).sum()), abs=1e-9)


def test_lane_sum_adds_in_one_fixed_order() -> None:
    rng = np.random.default_rng(3)
    for size in (0, 1, 7, 8, 9, 1000):
        values = rng.normal(size=size) * 10.0 ** rng.integers(-8, 8, size)
        lanes = [0.0] * 8
        for i, v in enumerate(values.tolist()):
            lanes[i % 8] += v
        a = lanes
        assert numerics.lane_sum(values) == ((a[0] + a[4]) + (a[2] + a[6])) + (
            (a[1] + a[5]) + (a[3] + a[7])
        )


def test_power_is_accurate() -> None:
    for base, exponent in (
        (7.0, 0.6),
        (3.0, -1.5),
        (100.0, 2.0),
        (5.0, 0.0),
        (5.0, 1.0),
        (1.0, 9.0),
    ):
        assert numerics.power(base, exponent) == pytest.approx(base**exponent, rel=1e-14)


def test_best_breaks_ties_by_the_lower_index() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        values = rng.integers(0, 6, 30).astype(np.float64)
        count = int(rng.integers(1, 35))
        want = sorted(range(30), key=lambda i: (-values[i], i))[:count]
        assert numerics.best(values, count).tolist() == want


def test_philox_gives_the_published_vectors() -> None:
    """The vectors published with Random123 (kat_vectors, philox 4x32, 10 rounds)."""

    def words(counter: tuple[int, ...], key: int) -> list[str]:
        c = [np.array([w], np.uint64) for w in counter]
        return [f"{int(w[0]):08x}" for w in draw.philox(c[0], c[1], c[2], c[3], key)]

    ones = 0xFFFFFFFF
    assert words((0, 0, 0, 0), 0) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert words((ones,) * 4, 2**64 - 1) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert words(pi, 0x299F31D0A4093822) == ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"]


def test_the_noise_is_fixed_to_the_bit() -> None:
    assert f"{draw.noise_key(7, 0):016x}" == "c949274536500fee"
    assert f"{draw.noise_key(2**63 - 1, 3):016x}" == KEY_BITS
    noise = draw.gumbel(draw.noise_key(7, 0), 2**33 + 5, np.array([0, 1, 2, 49151, 2**20 - 1]))
    assert [v.hex() for v in noise.tolist()] == NOISE_BITS


KEY_BITS = "b4e3ea69bb3ae9b4"
NOISE_BITS = [
    "-0x1.a6dbd6a1594e2p-1",
    "0x1.e56864edb1c17p+0",
    "-0x1.84875ef3431c2p-1",
    "0x1.000956add7934p-2",
    "0x1.7fc878ed548dfp+1",
]


def test_noise_depends_on_each_of_its_four_inputs() -> None:
    ids = np.arange(64)
    base = draw.uniform(1, 10, ids)
    others = [
        draw.uniform(2, 10, ids),
        draw.uniform(1 << 32 | 1, 10, ids),
        draw.uniform(1, 11, ids),
        draw.uniform(1, 10 + 2**32, ids),
    ]
    others += [draw.uniform(1, 10, ids + 64), draw.uniform(1, 10, ids, draw.DOMAIN_XTC)]
    for other in others:
        assert not np.isin(other, base).any()
    assert len(set(base.tolist())) == 64
    assert (
        len(
            {draw.noise_key(5, c) for c in range(1000)}
            | {draw.noise_key(s, 0) for s in range(1000)}
        )
        == 1999
    )


def test_noise_is_finite_at_the_smallest_and_largest_uniform() -> None:
    u = np.array([0.5 * 2.0**-52, 1 - 2.0**-53])
    ends = -numerics.log(-numerics.log(u))
    assert ends[0] == pytest.approx(-3.6038, abs=1e-3)
    assert ends[1] == pytest.approx(36.7368, abs=1e-3)


def test_the_document_states_the_constants_one_per_line() -> None:
    text = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text("utf-8")
    stated = dict(
        re.findall(r"^    (\w+) += (0x1\.[0-9a-f]+p[+-]\d+)(?:  .*)?$", text, re.MULTILINE)
    )
    values = {name: getattr(numerics, name) for name in ("LOG2E", "LN2_HI", "LN2_LO")}
    values |= zip(("P1", "P2", "P3"), rope._HALF_PI, strict=True)
    assert {name: float.fromhex(value) for name, value in stated.items()} == values
