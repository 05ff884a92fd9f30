"""Runs a command under CPU contention: `python tests/slow_machine.py COMMAND...`
(`make test-slow-machine`).

Two busy loops per core of this process run beside the command, and the command runs at nice 3, half
the weight of a busy loop. It gets a fifth of each core, so a test that depends on the clock fails.
The loops end with this process, even if it is killed: each reads a pipe that the kernel then
closes. Needs no root.
"""

from __future__ import annotations

import os
import subprocess
import sys

LOOPS = 2  # busy loops per core
NICE = 3  # weight 526 against 1024 of a busy loop

BUSY = """
import os, select, sys
while not select.select([sys.stdin], [], [], 0)[0]:  # end of file: the parent has ended
    for _ in range(1_000_000):
        pass
"""


def main(command: list[str]) -> int:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    print(
        f"slow machine: {LOOPS * cores} busy loops on {cores} cores, "
        f"and nice {NICE} for: {' '.join(command)}",
        flush=True,
    )
    # All loops read one pipe. This process has its only write end; Popen passes it to no child.
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
