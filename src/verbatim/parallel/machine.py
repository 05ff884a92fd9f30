"""The ranks of one machine in a group whose rank 0 may be on another: `verbatim rank`.

In: the model's path here, the address of rank 0, a number of ranks. Each rank is a process, started
again whenever its group ends, so that rank 0 may restart. Runs until it is stopped, or until rank 0
refuses a rank. Invariant: no rank outlives this process, whose end closes its standard input.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from verbatim.base.errors import BackendError
from verbatim.parallel.rendezvous import REFUSED, shared_secret

POLL_SECONDS = 0.2
ENDS_SECONDS = 5.0


def run_ranks(path: Path, address: str, ranks: int, threads: int | None) -> None:
    from verbatim.backend.cpu.backend import physical_cores

    shared_secret()  # its error comes before a process is started
    threads = threads or max(1, physical_cores() // ranks)
    command = [sys.executable, "-m", "verbatim.parallel.rank_process", "join", address, str(path)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        while True:
            codes = [process.poll() for process in processes]
            if REFUSED in codes:
                raise BackendError("a rank was refused, for the reason above")
            processes = [p for p, code in zip(processes, codes, strict=True) if code is None]
            while len(processes) < ranks:
                stdin = subprocess.PIPE
                processes.append(subprocess.Popen([*command, str(threads)], stdin=stdin))
            time.sleep(POLL_SECONDS)
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            try:
                process.wait(ENDS_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
