"""`verbatim lens` prints its page's address and serves the page there."""

from __future__ import annotations

import re
import signal
import subprocess
from typing import Any

import httpx
import pytest

from eventually import HANG_SECONDS

pytestmark = pytest.mark.server


def test_lens_serves_the_page_at_the_address_it_prints(spawn: Any) -> None:
    process = spawn(
        *("lens", "--no-browser", "--port", "0", "--test-engine", "pipeline"),
        stderr=subprocess.PIPE,
    )
    try:
        for line in process.stderr:
            if found := re.match(rb"the Lens: (http://127\.0\.0\.1:\d+/)", line):
                break
        else:
            raise AssertionError("no address was printed")
        answer = httpx.get(found[1].decode(), timeout=HANG_SECONDS)
        assert "<title>Verbatim Lens</title>" in answer.text
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
