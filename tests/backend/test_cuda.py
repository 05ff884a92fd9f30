"""Run the files of NESTED in a process in which Triton interprets their kernels, on any machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NESTED = ("cuda_kernels.py", "cuda_kv_types.py", "cuda_ranks.py", "../speculate/cuda_drafts.py")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(0)  # each test of the nested run has its own timeout
def test_the_kernels_pass_their_tests_under_the_interpreter(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    pytest.importorskip("triton")
    ini = ["-c", str(request.config.inipath), "--rootdir", str(request.config.rootpath)]
    files = [str(HERE / name) for name in NESTED]
    command = [sys.executable, "-m", "pytest", *ini, "-x", "-rs", *files]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True)
    if done.returncode == 5 and "the interpreter of Triton" in done.stdout:
        reason = next(
            line for line in done.stdout.splitlines() if "the interpreter of Triton" in line
        )
        pytest.skip(reason[reason.index("the interpreter of") :])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
    # "SKIPPED [1] tests/…py:12: reason": listed by not_run.py
    for line in done.stdout.splitlines():
        if skip := re.match(r"SKIPPED \[(\d+)\] (\S+?:\d+): (.*)", line):
            for number in range(int(skip[1])):
                record_property("not run", f"{skip[2]}:{number}: {skip[3]}")
