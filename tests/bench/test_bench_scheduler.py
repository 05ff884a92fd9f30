"""bench/scheduler.py runs and writes its chart."""

from __future__ import annotations

import importlib.util
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "scheduler.py"


def test_the_scheduler_benchmark_measures_and_plots(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("bench_scheduler", BENCH)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    points = [(n, bench.measure(n, waiting=2, context=32, steps=10)) for n in (1, 4)]
    assert all(ms > 0 for _, ms in points)
    bench.draw(bench.charts({"running": points}), str(tmp_path / "p.svg"))
    assert b"<svg" in (tmp_path / "p.svg").read_bytes()
