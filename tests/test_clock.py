"""No test reads the clock, sleeps or waits for a short time, except where ALLOWED says why: a
result that depends on the clock depends on the load of the machine.

A wait has a deadline that only a hang reaches (eventually.py, HANG_SECONDS), or none but that of
pytest-timeout, which every test has. httpx has a timeout of 5 s where a call names none.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
HANG = 240.0  # seconds: no wait of a working program on a loaded machine takes as long
# Calls whose last positional argument is a time limit, if it is a number.
WAITS = {"wait", "join", "acquire", "result", "settimeout", "drain", "fail_after", "move_on_after"}
WAITS |= {"asyncio.wait_for", "asyncio.timeout", "select.select", "communicate"}
WAITS |= {"set_default_timeout", "pytest.mark.timeout"}
HTTPX = {"get", "post", "put", "patch", "delete", "head", "request", "stream"}
HTTPX = {f"httpx.{name}" for name in (*HTTPX, "Client", "AsyncClient")}
INTERESTING = {*CLOCKS, "sleep", "now", "utcnow", "today", "times", "timeit", "wait_for_timeout"}
MODULES = {"time", "timeit", "asyncio", "anyio", "trio"}  # their clocks are called by these names
LAST_NAMES = {name.rsplit(".", 1)[-1] for name in (*WAITS, *HTTPX)}

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
    ("cli/test_cli_chat.py", "select.select"): "between two polls of the terminal",
    ("engine/test_engine_async.py", "closing.join"): "a wrong close returns meanwhile; the "
    "assertions hold for every moment",
    ("engine/test_engine_async.py", "wait"): "passes on the engine's own argument",
    ("engine/test_engine_async.py", "e.drain"): "the timeout must expire: the step ends only after "
    "the drain has cancelled it",
    ("grammar/test_compile_pool.py", "make_pool"): "a fake worker compares numbers, not clocks",
    ("grammar/test_compile_pool.py", "processes"): "the timeout must expire: the compile takes "
    "longer on every machine",
    ("grammar/test_compile_pool.py", "victim.wait"): "a kill at a random moment; the assertions "
    "hold for every moment",
    ("gpu_run.py", "time.monotonic"): "not a test: `make test-gpu` prints its duration",
    ("mutants.py", "subprocess.run"): "not a test: `make mutants` counts a hang as found",
    ("server/test_server_robust.py", "self._over.wait"): "between two polls of the server",
    ("server/test_server_schema.py", "subprocess.run"): "the callers pass 600 s",
    ("hub/test_catalog.py", "hub.model_info"): "a fake hub ignores it",
    ("files/fuzz_worker.py", "time.process_time"): "CPU time, not wall-clock time, against a "
    "limit that only an endless loop reaches",
}


def clock_calls(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    """(call, line) of every call that reads a clock or sleeps. sleep(0) only yields."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = [alias.name for alias in node.names if alias.name in INTERESTING]
            if names:
                yield f"from {node.module} import {', '.join(names)}", node.lineno
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in MODULES and alias.asname:
                    yield f"import {alias.name} as {alias.asname}", node.lineno
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = node.func.attr
        if name not in INTERESTING:  # before ast.unparse, which takes most of the time
            continue
        module = ast.unparse(node.func.value)
        zero = [ast.unparse(argument) for argument in node.args] == ["0"]
        sleeps = name == "sleep" and not zero
        if (
            sleeps
            or (module == "time" and name in CLOCKS)
            or ("loop" in module and name == "time")
            or (module, name) in (("os", "times"), ("timeit", "timeit"))
            or (module.endswith(("datetime", "date")) and name in ("now", "utcnow", "today"))
            or name == "wait_for_timeout"
        ):
            yield f"{module}.{name}", node.lineno


def short_waits(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    """(call, line) of every call with a time limit that a loaded machine could reach."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        named = {"timeout", "seconds"}.intersection(k.arg for k in node.keywords if k.arg)
        last = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if not named and last not in LAST_NAMES:  # before ast.unparse, as above
            continue
        call = ast.unparse(node.func)
        limits = [k.value for k in node.keywords if k.arg in ("timeout", "seconds")]
        text = call.startswith(("'", '"'))  # str.join
        if not text and not WAITS.isdisjoint((call, call.rsplit(".", 1)[-1])):
            limits += [a for a in node.args[-1:] if is_number(a)]
        keywords = {k.arg for k in node.keywords}
        default = call in HTTPX and keywords.isdisjoint(("timeout", "transport", None))
        if call == "pytest.mark.timeout":  # 0: none
            limits = [limit for limit in limits if ast.unparse(limit) != "0"]
        if default or not all(is_generous(limit) for limit in limits):
            yield call, node.lineno


def parse(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def is_number(node: ast.expr) -> bool:
    """Whether an argument may be a number of seconds: a list of strings and a task are none."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float))
    arithmetic = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Sub, ast.Div))
    return arithmetic or (isinstance(node, ast.Name) and "timeout" in node.id)


def is_generous(limit: ast.expr) -> bool:
    if isinstance(limit, ast.Constant):
        return limit.value is None or float(limit.value) >= HANG
    return ast.unparse(limit) in ("HANG_SECONDS", "1000 * HANG_SECONDS")  # of a browser: ms


def test_no_test_depends_on_the_clock() -> None:
    used, wrong = set(), []
    for file in sorted(HERE.rglob("*.py")):
        name = file.relative_to(HERE).as_posix()
        nodes = parse(file.read_text("utf-8"))
        for call, line in (*clock_calls(nodes), *short_waits(nodes)):
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
    source += "import time as t\nfrom asyncio import sleep\nanyio.sleep(1)\nloop.time()\n"
    source += "os.times()\ntimeit.timeit(f)\ndatetime.date.today()\n"
    assert [line for _, line in sorted(clock_calls(parse(source)), key=lambda call: call[1])] == [
        *range(2, 15)
    ]


def test_short_waits_are_found() -> None:
    wrong = ["e.wait(60)", "t.join(0.5)", "httpx.get(url)", "httpx.Client()", "p.run(timeout=60)"]
    wrong += ["select.select([a], [], [], 0.05)", "asyncio.wait_for(task, 5)", "v.wait(r() * 0.5)"]
    wrong += ["s.settimeout(5.0)", "eventually(done, seconds=5)", "e.wait(timeout)"]
    wrong += ["pytest.mark.timeout(5)", "p.set_default_timeout(200)"]
    fine = ["e.wait()", "e.wait(HANG_SECONDS)", "', '.join(names)", "httpx.get(url, timeout=300)"]
    fine += ["pytest.mark.timeout(0)", "p.set_default_timeout(1000 * HANG_SECONDS)"]
    fine += ["httpx.AsyncClient(transport=app)", "run(timeout=None)", "os.path.join(a, 'b')"]
    assert [line for _, line in short_waits(parse("\n".join([*wrong, *fine])))] == [
        *range(1, len(wrong) + 1)
    ]
