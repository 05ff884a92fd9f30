"""Page 9 of the course: the roofline, what this machine allows.

Measures memory bandwidth and float32 arithmetic of one core with NumPy, and computes the arithmetic
intensity of decode and prefill for the default model.

    python examples/course/09_roofline.py [--plot roofline.svg]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is imported

import numpy as np
from course_plot import BLUE, GREEN, ORANGE, arguments, panels, save

WEIGHTS, WEIGHT_BYTES = 134.5e6, 98e6  # SmolLM2-135M as Q4_1
ROWS = (1, 4, 16, 64, 512)


def best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def main(words: list[str] | None = None) -> tuple[float, float]:
    """Bytes per second, operations per second."""
    options = arguments(__doc__, words)
    big = np.ones(32 * 2**20, np.float32)  # 128 MiB: larger than any cache
    bandwidth = big.nbytes / best_seconds(big.sum)
    matrix = np.ones((512, 512), np.float32)
    peak = 2 * 512**3 / best_seconds(lambda: matrix @ matrix)
    print(f"one core, NumPy: {bandwidth / 1e9:.1f} GB/s read, {peak / 1e9:.0f} GFLOP/s")
    ridge = peak / bandwidth
    print(f"a kernel needs {ridge:.1f} operations per byte to be limited by arithmetic")
    print("rows in a step  operations per byte")
    for rows in ROWS:
        print(f"{rows:14}  {rows * 2 * WEIGHTS / WEIGHT_BYTES:19.1f}")
    print(f"decode of one sequence: at most {bandwidth / WEIGHT_BYTES:.0f} tokens/s here")
    if options.plot:
        figure, [one] = panels(1)
        x = np.logspace(-0.5, 3.5, 200)
        one.plot(x, np.minimum(x * bandwidth, peak) / 1e9, color=BLUE)
        for rows, colour in ((1, ORANGE), (16, GREEN), (512, GREEN)):
            at = rows * 2 * WEIGHTS / WEIGHT_BYTES
            one.plot(at, min(at * bandwidth, peak) / 1e9, "o", color=colour)
            name = "decode, 1 sequence" if rows == 1 else f"{rows} rows"
            one.annotate(name, (at, min(at * bandwidth, peak) / 1e9), xytext=(5, -12),
                         textcoords="offset points")  # fmt: skip
        one.set(xscale="log", yscale="log", xlabel="operations per byte read", ylabel="GFLOP/s")
        save(figure, options.plot)
    return bandwidth, peak


if __name__ == "__main__":
    main()
