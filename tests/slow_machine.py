"""Runs a command on a machine made slow: `python tests/slow_machine.py COMMAND...`, as `make test-slow-machine` does.

Two busy loops for each core that this process may use run beside the command, and the command runs at a lower
priority (nice 3: half the weight of a busy loop). A core that the command shares with its two loops gives it a fifth of its
time, so a test that depends on the clock fails here. The loops end with this process, also when it is interrupted or
killed: each reads a pipe that the kernel then closes. Needs no root.
"""

from __future__ import annotations

import os
import subprocess
import sys

LOOPS = 2  # for each core
NICE = 3  # weight 526 against 1024 of a busy loop

BUSY = """
import os, select, sys
while not select.select([sys.stdin], [], [], 0)[0]:  # readable at its end: the parent is gone
    for _ in range(1_000_000):
        pass
"""


def main(command: list[str]) -> int:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    print(
        f"slow machine: {LOOPS * cores} busy loops on {cores} cores, and nice {NICE} for: {' '.join(command)}",
        flush=True,
    )
    # All loops read the one pipe. This process holds its only writing end, and Popen passes it to no child.
    reading, writing = os.pipe()
    loops = [
        subprocess.Popen([sys.executable, "-c", BUSY], stdin=reading) for _ in range(LOOPS * cores)
    ]
    try:
        return subprocess.run(["nice", "-n", str(NICE), *command]).returncode
    finally:
        os.close(writing)
        for loop in loops:
            loop.wait()
        print(f"slow machine: the {len(loops)} busy loops have ended", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
