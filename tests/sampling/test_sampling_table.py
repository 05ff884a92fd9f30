"""Every parameter in every mode is honoured with the same result, or refused with an error that
names it (parameter_modes.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from parameter_modes import DIFFUSION_VALUES, VALUES

from verbatim.base.params import BEAM_REFUSES, DIFFUSION, FIELDS

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_site"))

import tables


def test_every_parameter_has_a_row() -> None:
    """In the table of docs/sampling.md, which names a parameter that a mode ignores."""
    rows = [[cell.strip() for cell in line.split("|")] for line in tables.modes().splitlines()]
    table = [[row[1].strip("`"), *row[2:-1]] for row in rows[1:]]  # without the line below the head
    # thinking_budget needs a chat with a reasoning model (tests/engine/test_engine_reasoning.py),
    # adapter a loaded adapter (tests/lora)
    assert set(VALUES) == set(FIELDS) - {"thinking_budget", "adapter", *DIFFUSION}
    assert {row[0] for row in table[1:]} == set(VALUES)
    refused = {row[0] for row in table[1:] if row[5] == "refused"}
    assert refused <= {*BEAM_REFUSES, "xtc_threshold"}  # xtc_threshold needs xtc_probability


def test_every_parameter_has_a_row_for_diffusion_models() -> None:
    rows = [[cell.strip() for cell in line.split("|")] for line in
            tables.diffusion_modes().splitlines()]  # fmt: skip
    cells = {row[1].strip("`"): row[2:-1] for row in rows[2:]}
    assert set(cells) == set(DIFFUSION_VALUES)
    assert all("honoured" in cells[name] for name in DIFFUSION)
    assert cells["regex"] == ["refused", "honoured", "refused"]
