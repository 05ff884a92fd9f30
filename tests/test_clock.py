"""No test reads the clock or sleeps, except where ALLOWED says why: a result that depends on the
clock depends on the load of the machine.

A wait has its own deadline (eventually.py, HANG_SECONDS) or that of pytest-timeout, which every
test has.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}

# (file, call): why. None of them decides whether a working program passes.
ALLOWED = {
    ("eventually.py", "time.monotonic"): "the deadline that only a hang reaches",
    ("eventually.py", "time.sleep"): "between two polls of an event",
    ("eventually.py", "asyncio.sleep"): "between two polls of an event",
    ("server/clocked_server.py", "time.monotonic"): "the clock runs again for the shutdown",
    ("server/test_server_robust.py", "asyncio.sleep"): "clients leave at random moments, or read "
    "slowly; the assertions hold for every moment and every pace",
    ("grammar/test_compile_pool.py", "time.clock_gettime"): "CPU time of a worker, to know that "
    "its compiles together exceeded the limit of one",
    ("grammar/test_compile_pool.py", "time.monotonic"): "a deadline that only a hang reaches",
    ("grammar/test_compile_pool.py", "time.sleep"): "between two polls of the process list",
    ("speculate/test_head.py", "time.sleep"): "the draft is fetched at different moments; its "
    "value is the same at every moment",
    ("weights/fuzz_worker.py", "time.process_time"): "CPU time, not wall-clock time, against a "
    "limit that only an endless loop reaches",
}


def clock_calls(source: str) -> Iterator[tuple[str, int]]:
    """(call, line) of every call that reads a clock or sleeps. sleep(0) only yields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield f"from time import {', '.join(alias.name for alias in node.names)}", node.lineno
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        module, name = ast.unparse(node.func.value), node.func.attr
        zero = [ast.unparse(argument) for argument in node.args] == ["0"]
        sleeps = name == "sleep" and module in ("time", "asyncio") and not zero
        if (
            sleeps
            or (module == "time" and name in CLOCKS)
            or (module.endswith("datetime") and name in ("now", "utcnow"))
            or name == "wait_for_timeout"
        ):
            yield f"{module}.{name}", node.lineno


def test_no_test_depends_on_the_clock() -> None:
    used, wrong = set(), []
    for file in sorted(HERE.rglob("*.py")):
        name = file.relative_to(HERE).as_posix()
        for call, line in clock_calls(file.read_text("utf-8")):
            used.add((name, call))
            if (name, call) not in ALLOWED:
                wrong.append(f"tests/{name}:{line}: {call}")
    assert not wrong, "wait for an event instead (eventually.py)\n" + "\n".join(wrong)
    assert used == set(ALLOWED), "an entry of ALLOWED is no longer needed"


def test_every_test_has_a_deadline() -> None:
    settings = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))
    assert settings["tool"]["pytest"]["ini_options"]["timeout"] >= 600


def test_clock_calls_are_found() -> None:
    source = (
        "time.sleep(0)\ntime.sleep(0.1)\nawait asyncio.sleep(x)\nassert time.perf_counter() < 1\n"
    )
    source += "from time import monotonic\ndatetime.datetime.now()\npage.wait_for_timeout(5)\n"
    assert [line for _, line in sorted(clock_calls(source), key=lambda call: call[1])] == [
        *range(2, 8)
    ]
