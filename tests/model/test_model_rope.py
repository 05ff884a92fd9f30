"""Rotary frequencies and cos/sin tables: correct, and the same bits on every machine."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verbatim.base.errors import ModelError
from verbatim.model.rope import make_rope, tables
from verbatim.model.spec import RopeSpec


def rope(scaling: dict[str, object] | None = None, **changes: object) -> RopeSpec:
    values = {
        "theta": 10000.0,
        "dim": 64,
        "context": 4096,
        "trained": 4096,
        "file": "a file",
        **changes,
    }
    return make_rope(scaling or {}, **values)  # type: ignore[arg-type]


def test_plain_frequencies_are_correctly_rounded() -> None:
    """theta = 2^16, dim = 32: every frequency is an exact power of two."""
    assert rope(theta=65536.0, dim=32).inv_freq == tuple(2.0**-j for j in range(16))


def test_the_bits_of_the_tables_do_not_change() -> None:
    """The digest was recorded once. One changed bit of one cosine fails here."""
    digest = hashlib.sha256()
    for theta, dim in ((10000.0, 64), (100000.0, 64), (500000.0, 128), (1e6, 256)):
        spec = rope(theta=theta, dim=dim)
        digest.update(np.array(spec.inv_freq).tobytes())
        for table in tables(spec, np.array([0, 1, 2, 3, 100, 8191, 131071, 1048575])):
            digest.update(table.tobytes())
    assert digest.hexdigest()[:16] == "f3f5307b11f24261"


@given(st.integers(0, (1 << 20) - 1), st.floats(1e-6, 1.0))
def test_the_tables_hold_cos_and_sin_of_the_angles(position: int, frequency: float) -> None:
    cos, sin = tables(RopeSpec(2, (frequency,)), np.array([position]))
    angle = position * frequency
    assert abs(float(cos[0, 0]) - math.cos(angle)) < 7e-8
    assert abs(float(sin[0, 0]) - math.sin(angle)) < 7e-8


def test_the_attention_factor_scales_cos_and_sin() -> None:
    plain, scaled = RopeSpec(4, (1.0, 0.1)), RopeSpec(4, (1.0, 0.1), attention_factor=1.25)
    for a, b in zip(tables(plain, np.arange(9)), tables(scaled, np.arange(9)), strict=True):
        assert np.allclose(a * 1.25, b, atol=1e-7)


def test_the_context_chooses_long_or_short_factors_of_longrope() -> None:
    scaling = {
        "rope_type": "longrope",
        "long_factor": [2.0] * 32,
        "short_factor": [1.0] * 32,
        "original_max_position_embeddings": 1024,
    }
    short, long = rope(scaling, context=1024), rope(scaling, context=1025)
    assert short.inv_freq[0] == 1.0
    assert long.inv_freq[0] == 0.5
    assert (
        short.attention_factor
        == long.attention_factor
        == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))
    )


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "magic"}, "magic"),
        ({"type": "linear"}, "factor is None"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
        ({"rope_type": "linear", "factor": True}, "factor is True"),
        ({"rope_type": "linear", "factor": "8"}, "factor is '8'"),
        (
            {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
            "short_factor must be 32",
        ),
        ({"rope_type": "longrope", "short_factor": "x" * 32}, "short_factor must be 32"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is None"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": -1.0}, "beta_fast is -1.0"),
    ],
)
def test_an_invalid_scaling_raises_an_error_that_names_the_key(
    scaling: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message.replace("[", r"\[")) as error:
        rope(scaling)
    assert error.value.file == "a file"


@pytest.mark.parametrize(
    "changes", [{"dim": 0}, {"dim": 7}, {"theta": 0.0}, {"theta": -1.0}, {"theta": math.inf}]
)
def test_invalid_dimensions_and_thetas_are_rejected(changes: dict[str, object]) -> None:
    with pytest.raises(ModelError):
        rope(**changes)


def test_a_theta_of_one_is_rejected_instead_of_dividing_by_zero() -> None:
    with pytest.raises(ModelError, match="cannot be computed"):
        rope({"rope_type": "yarn", "factor": 4.0}, theta=1.0)
