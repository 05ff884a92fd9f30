"""The cuda backend on every machine: cuda_kernels.py in a process in which Triton interprets its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT = 3600  # seconds, which only a hang reaches: the tests take about 80 seconds of one core


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_the_kernels_interpreted(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton")
    ini = ["-c", str(request.config.inipath), "--rootdir", str(request.config.rootpath)]
    command = [sys.executable, "-m", "pytest", *ini, "-x", "-rs", str(HERE / "cuda_kernels.py")]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True, timeout=LIMIT - 60)
    if done.returncode == 5 and "the interpreter of Triton" in done.stdout:
        reason = next(line for line in done.stdout.splitlines() if "the interpreter of Triton" in line)
        pytest.skip(reason[reason.index("the interpreter of") :])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
