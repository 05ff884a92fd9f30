"""Every parameter in every mode is honoured with the same result, or refused with an error that
names it (parameter_modes.py)."""

from __future__ import annotations

import pytest
from parameter_modes import VALUES, mode_table

from verbatim.base.params import BEAM_REFUSES, FIELDS


@pytest.fixture(scope="module")
def table() -> list[list[str]]:
    return mode_table()


def test_every_parameter_has_a_row(table: list[list[str]]) -> None:
    # thinking_budget needs a chat with a reasoning model (tests/engine/test_engine_reasoning.py),
    # adapter a loaded adapter (tests/lora)
    assert set(VALUES) == set(FIELDS) - {"thinking_budget", "adapter"}
    assert {row[0] for row in table[1:]} == set(VALUES)
    refused = {row[0] for row in table[1:] if row[5] == "refused"}
    assert refused <= {*BEAM_REFUSES, "xtc_threshold"}  # xtc_threshold needs xtc_probability
