"""Tools of the suite itself: the table of tests that did not run, `make smoke`, the slow
machine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import MUTANTS, Mutant, source
from shell_variables import LOOPBACK, remove_user_settings

HERE = Path(__file__).parent
MAKEFILE = (HERE.parent / "Makefile").read_text()

SUITE = """
import pytest

def test_runs():
    pass

@pytest.mark.parametrize("number", range(3))
def test_needs_a_printer(number):
    pytest.skip("needs a printer")

@pytest.mark.soak
def test_heavy():
    pass

@pytest.mark.soak
@pytest.mark.qemu
def test_emulated():
    pass

@pytest.mark.qemu
@pytest.mark.soak
def test_emulated_too():
    pass

def test_nested(record_property):
    record_property("not run", "inner.py:7: needs a scanner")
"""
LIBRARY = "import pytest\npytest.importorskip('no_such_library')\ndef test_never():\n    pass\n"


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_tests_that_did_not_run_are_listed_with_and_without_workers(
    workers: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak\n qemu\n")
    (tmp_path / "test_one.py").write_text(SUITE)
    (tmp_path / "test_two.py").write_text(LIBRARY)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "not_run",
        "-p",
        "xdist",
        "-m",
        "not soak",
        *workers,
        str(tmp_path),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(HERE)
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # their imports take longer than the tests
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    table = [
        line.split(None, 1)
        for line in done.stdout.partition("tests that did not run")[2].splitlines()
    ]
    rows = {line[1].strip(): int(line[0]) for line in table if len(line) == 2 and line[0].isdigit()}
    assert {text: count for text, count in rows.items() if "could not import" not in text} == {
        "needs a printer": 3,
        "test_one.py": 3,
        "needs a scanner": 1,
        "inner.py": 1,
        "test_two.py": 1,
        "marker soak: heavy; run `make soak`": 1,
        "markers qemu and soak: need ARM emulation (g++-aarch64-linux-gnu, qemu-user-static); run "
        "`make soak`": 2,
        "in all": 8,
    }
    [missing] = [text for text in rows if "could not import" in text]
    assert "no_such_library" in missing


def test_the_suite_runs_without_the_settings_of_the_users_shell() -> None:
    shell = {
        "VERBATIM_MODEL": "mine",
        "VERBATIM_API_KEY": "secret",
        "VERBATIM_DEBUG": "1",
        "VERBATIM_CACHE": "/models",
        "VERBATIM_TEST_MODELS": "/files",
        "HTTP_PROXY": "http://proxy:3128",
        "NO_PROXY": "intranet",
        "NO_COLOR": "1",
        "COLUMNS": "40",
        "TERM": "dumb",
        "MAKEFLAGS": "B",
    }
    remove_user_settings(shell)
    assert shell == {
        "VERBATIM_CACHE": "/models",
        "VERBATIM_TEST_MODELS": "/files",
        "HTTP_PROXY": "http://proxy:3128",
        "NO_PROXY": "intranet,127.0.0.1,localhost,::1",
        "no_proxy": "intranet,127.0.0.1,localhost,::1",
        "TERM": "xterm",
    }
    assert set(LOOPBACK) <= set(os.environ["NO_PROXY"].split(",")), "conftest.py has called it"


def test_every_package_has_a_folder_of_tests() -> None:
    packages = {path.parent for path in (HERE.parent / "src" / "verbatim").glob("*/__init__.py")}
    assert len(packages) > 15
    for package in packages - {HERE.parent / "src/verbatim/testing"}:  # every test uses the fakes
        assert list((HERE / package.name).rglob("test_*.py")), f"no test in tests/{package.name}"


def test_the_tests_of_make_test_gpu_need_no_package_of_the_server() -> None:
    """An import that fails ends the whole run, and a GPU machine may have no server packages."""
    (names,) = re.findall(r"^GPU_TESTS = ((?:.*\\\n)*.*)", MAKEFILE, re.M)
    chosen = [HERE.parent / name.split("::")[0] for name in names.replace("\\\n", " ").split()]
    files = [one for path in chosen for one in ([path] if path.is_file() else path.rglob("*.py"))]
    assert HERE / "cli" / "test_cli_gpu.py" in files
    for file in files:
        assert not re.search(r"^(from|import) verbatim\.(server|scale)", file.read_text(), re.M), (
            file
        )


def test_every_test_of_make_smoke_exists() -> None:
    chosen = re.findall(r'"(tests/\S+?\.py)(?:::(\w+))?', MAKEFILE)
    assert len(chosen) == 4
    for file, name in chosen:
        text = (HERE.parent / file).read_text()
        assert f"def {name or 'test'}" in text, (
            f"make smoke names {file}::{name}, which does not exist"
        )


@pytest.mark.parametrize("code", [0, 3])
def test_the_slow_machine_returns_the_exit_code_and_ends_its_loops(code: int) -> None:
    command = [
        sys.executable,
        str(HERE / "slow_machine.py"),
        sys.executable,
        "-c",
        f"raise SystemExit({code})",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "busy loops have ended" in done.stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies_once_and_names_tests_that_exist(mutant: Mutant) -> None:
    text = source(mutant).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    files = [word for word in mutant.tests.split() if word.endswith(".py")]
    assert files
    assert all((HERE / file).is_file() for file in files)


PAGE_READS = {"inner_text", "text_content", "get_attribute", "input_value", "is_visible", "count"}
PAGE_READS |= {"is_enabled", "is_hidden", "is_checked", "all_inner_texts", "all_text_contents"}


def test_no_assertion_reads_a_page_once() -> None:
    """The page may draw its state after it was read: expect() of Playwright and becomes() wait."""
    for path in [*(HERE / "chat").glob("*.py"), *(HERE / "lens").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.walk(node.test) if isinstance(node, ast.Assert) else ()
            names = {c.func.attr for c in called if isinstance(c, ast.Call) and not c.args
                     and isinstance(c.func, ast.Attribute)}  # fmt: skip
            assert not names & PAGE_READS, f"{path.name}:{getattr(node, 'lineno', 0)}"
