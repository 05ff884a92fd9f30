"""Run pytest in several processes that share one GPU: `make test-gpu` needs no plugin for it.

    python tests/gpu_run.py [pytest's arguments]

Compiling the kernels takes most of the time, on one core per process. Each process runs the tests
whose number is its own modulo the number of processes; tests of one checkpoint stay together,
because building it takes longer than comparing it. Prints the output of a process that fails, then
which tests did not run, and the totals of all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import zlib
from collections import Counter
from typing import Any

PROCESSES = min(14, os.cpu_count() or 1)
SHARD = "VERBATIM_TEST_SHARD"  # "3/14": the tests of process 3 of 14


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """As a plugin: keep the tests of this process."""
    own, count = map(int, os.environ[SHARD].split("/"))

    def is_own(item: Any) -> bool:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        return zlib.crc32(getattr(case, "name", item.nodeid).encode()) % count == own

    kept = [item for item in items if is_own(item)]
    config.hook.pytest_deselected(items=[item for item in items if not is_own(item)])
    items[:] = kept


def main() -> int:
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-p", "gpu_run", *sys.argv[1:]]
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            command,
            env={**common, SHARD: f"{i}/{PROCESSES}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(PROCESSES)
    ]
    totals: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    failed = False
    for process in started:
        out = process.communicate()[0]
        if process.returncode not in (0, 5):  # 5: no test is its own
            failed = True
            print(out, flush=True)
        for count, word in re.findall(r"(\d+) (passed|failed|errors?)\b", out.splitlines()[-1]):
            totals[word.rstrip("s")] += int(count)
        for count, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+: (.*)", out, re.MULTILINE):
            skipped[reason] += int(count)
    for reason, count in skipped.most_common():
        print(f"{count:6}  not run: {reason}")
    words = [f"{count} {word}" for word, count in totals.items()] or ["no result"]
    seconds = time.monotonic() - began
    print(f"{', '.join(words)}, {skipped.total()} not run, in {seconds:.0f} s")
    return int(failed or not totals["passed"])


if __name__ == "__main__":
    sys.exit(main())
