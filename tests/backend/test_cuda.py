"""The cuda backend on every machine: cuda_interpreted.py in a process in which Triton interprets its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.torch
@pytest.mark.slow
def test_the_kernels_interpreted() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-x", str(HERE / "cuda_interpreted.py")]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
