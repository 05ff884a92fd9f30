"""Runs a command under CPU contention: `python tests/slow_machine.py COMMAND...`
(`make test-slow-machine`).

One busy loop per core runs beside the command, which leaves it half of each core, and the command
runs at nice 5, a third of a busy loop's weight, which halves that share. With a quarter of each
core, a test that depends on the clock fails.
The loops end with this process, even if it is killed: each reads a pipe that the kernel then
closes. Needs no root.
"""

from __future__ import annotations

import os
import subprocess
import sys

NICE = 5  # weight 335 against 1024 of a busy loop: a quarter of a core

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
        f"slow machine: {cores} busy loops on {cores} cores, "
        f"and nice {NICE} for: {' '.join(command)}",
        flush=True,
    )
    # All loops read one pipe. This process has its only write end; Popen passes it to no child.
    reading, writing = os.pipe()
    loops = [subprocess.Popen([sys.executable, "-c", BUSY], stdin=reading) for _ in range(cores)]
    try:
        return subprocess.run(["nice", "-n", str(NICE), *command]).returncode
    finally:
        os.close(writing)
        for loop in loops:
            loop.wait()
        print(f"slow machine: the {len(loops)} busy loops have ended", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
