"""schemathesis on our OpenAPI document, with valid and invalid data: no 5xx, and the server works
as before afterwards."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, check_ledger, report

from eventually import HANG_SECONDS

pytestmark = [pytest.mark.server, pytest.mark.slow]


STATUSES: Counter[str] = Counter()  # of every response, over all runs


def answers(live: Live) -> Counter[str]:
    """Number of HTTP responses so far, by status."""
    found: Counter[str] = Counter()
    for name, value in live.metrics().items():
        if name.startswith("verbatim_http_answers_total"):
            found[name.rsplit('"', 2)[1]] += int(value)
    return found


def fuzz(
    live: Live, python: Path, examples: int, *more: str, seed: int = 1, seconds: int = 600
) -> int:
    """Run `examples` valid and invalid cases per operation; returns how many were sent. `seconds`:
    timeout."""
    probe, before = live.complete("probe", max_tokens=16, seed=99)["choices"], answers(live)
    words = [
        "run",
        live.url + "/openapi.json",
        "-n",
        str(examples),
        "--checks",
        "not_a_server_error",
        "--mode",
        "all",
    ]
    words += [
        "--seed",
        str(seed),
        "--no-color",
        "--generation-database",
        "none",
        "--no-shrink",
        "--request-timeout",
        str(int(HANG_SECONDS)),
    ]
    schemathesis = str(python.parent / "schemathesis")
    done = subprocess.run(
        [schemathesis, *words, *more], capture_output=True, text=True, timeout=seconds
    )
    said = done.stdout + done.stderr
    sent = re.search(r"(\d+) generated", said)
    assert sent is not None, said[-3000:]
    assert "Server error" not in said, said[-6000:]
    assert live.complete("probe", max_tokens=16, seed=99)["choices"] == probe
    assert live.metrics()["verbatim_engine_restarts_total"] == 0
    made = answers(live) - before
    # the server's count, beside that of schemathesis
    assert not [status for status in made if status[0] == "5"], made
    STATUSES.update(made)
    return int(sent[1])


@pytest.mark.timeout(900)
def test_schemathesis_finds_no_server_error(fake: Any, client_python: Path) -> None:
    """Five cases for each of about 30 operations; operations without parameters have fewer."""
    assert fuzz(fake, client_python, 5, "--phases", "fuzzing") > 90


def fuzz_until(live: Live, python: Path, wanted: int) -> None:
    """Runs with 20 cases per operation, each with another seed and so other cases."""
    sent, seed = 0, 1
    while sent < wanted:
        found = fuzz(live, python, 20, "--phases", "coverage,fuzzing", seed=seed, seconds=7200)
        assert found > 300
        sent, seed = sent + found, seed + 1
    check_ledger(live.wait_at_rest())
    report(
        f"schemathesis: {sent} cases in {seed - 1} runs; answers by status: "
        f"{dict(sorted(STATUSES.items()))}"
    )


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_schemathesis_twenty_thousand_cases(fake: Any, client_python: Path) -> None:
    fuzz_until(fake, client_python, 20_000)


@pytest.mark.soak
@pytest.mark.timeout(200_000)
def test_schemathesis_a_million_cases(fake: Any, client_python: Path) -> None:
    fuzz_until(fake, client_python, 1_000_000)
