"""Environment variables of Verbatim: an unknown name is a warning that names it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import verbatim
from eventually import HANG_SECONDS
from verbatim.cli.environment import VARIABLES, unknown_variables


def test_an_unknown_variable_is_named_with_its_nearest() -> None:
    found = unknown_variables({"VERBATIM_CACHE": "/x", "VERBATIM_MODELS": "m", "PATH": "/bin"})
    [line] = found
    assert line.startswith("VERBATIM_MODELS is no variable of Verbatim and has no effect; ")
    assert "did you mean VERBATIM_MODEL?" in line
    [line] = unknown_variables({"VERBATIM_XYZXYZXYZ": "1"})
    assert all(name in line for name in VARIABLES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VERBATIM_SERVICE_HOST", "10.0.0.1"),
        ("VERBATIM_SERVICE_PORT", "8000"),
        ("VERBATIM_SERVICE_PORT_HTTP", "8000"),
        ("VERBATIM_PORT", "tcp://10.0.0.1:8000"),
        ("VERBATIM_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("VERBATIM_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("VERBATIM_TEST_MODELS", "/models"),
    ],
)
def test_variables_of_kubernetes_and_of_the_tests_cause_no_warning(name: str, value: str) -> None:
    """Kubernetes gives every pod the address of a Service named verbatim in such variables."""
    assert unknown_variables({name: value}) == []


def test_the_command_prints_the_warning_and_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verbatim", "models"],
        env={**os.environ, "VERBATIM_MODLE": "x"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0
    assert done.stderr.startswith("verbatim: warning: VERBATIM_MODLE is no variable of Verbatim")


def test_a_setting_of_the_server_causes_a_warning_elsewhere() -> None:
    [line] = unknown_variables({"VERBATIM_PORT": "8000"})
    assert line == "VERBATIM_PORT is a setting of `verbatim serve` and has no effect here"
    assert unknown_variables({"VERBATIM_PORT": "8000", "VERBATIM_CONFIG": "f"}, True) == []
    [line] = unknown_variables({"VERBATIM_MAX_QUEU": "8000"}, True)
    assert "did you mean VERBATIM_MAX_QUEUE?" in line


def test_the_table_has_every_variable_that_the_code_reads() -> None:
    src = Path(verbatim.__file__).parent
    text = "".join(
        path.read_text("utf-8") for path in src.rglob("*.py") if path.name != "environment.py"
    )
    read = set(re.findall(r"""environ[^"']{0,20}["'](VERBATIM_\w+)""", text))
    assert read == set(VARIABLES)
    install = (src.parents[1] / "docs/install.md").read_text("utf-8")
    assert [name for name in VARIABLES if f"`{name}`" not in install] == []
