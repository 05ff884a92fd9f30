"""Size and shape of the code: lines per package, modules per folder, fan-out, spread of a thing.

    python tests/test_budgets.py        prints each figure beside its limit

A change that needs a higher limit says so in its description, net of what it removes.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "verbatim"

# Most lines of Python of a package; "" are the modules at the root.
LINES: dict[str, int] = {
    "": 179,
    "backend": 11910,
    "base": 2818,
    "bench": 847,
    "chat": 9,
    "cli": 7173,
    "convert": 879,
    "diagnose": 2722,
    "encoder": 891,
    "engine": 6432,
    "explain": 838,
    "files": 1426,
    "formats": 2225,
    "grammar": 3850,
    "hub": 1016,
    "lens": 10,
    "lora": 703,
    "model": 3613,
    "model/families": 4712,
    "observe": 850,
    "parallel": 765,
    "sampling": 1655,
    "scale": 2799,
    "schedule": 2341,
    "server": 12782,
    "speculate": 1486,
    "testing": 686,
    "text": 4925,
}
MODEL_FAMILIES = "model/families"  # has a limit of its own; the files list one kind of thing
# Lines of .py files, and of the .md files of docs.
TOTALS = {"src": 80542, "tests": 68109, "docs": 10684}
ANY = 699  # uses of Any in src
LONG_FUNCTIONS, MEDIAN_FUNCTION = 11, 7  # functions of src over 50 lines; lines of the median

MODULES = 15  # most modules of a folder, without __init__
KINDS = {"model/families", "formats", "cli/commands"}  # folders that list one kind of thing
FAN_OUT = 16  # most modules of this package that one module imports
# Imports of modules that exceed FAN_OUT.
WIDE: dict[str, int] = {}

# Most files that name one thing: what the next thing of its kind would touch.
SPREAD = {"glm4": 2, "q5_k": 6, "top_n_sigma": 14, "warm_up": 4}

# Pages of docs/extend -> most files that their walk names: what adding one thing touches.
WALKS = {"family": 6, "format": 3, "sampler": 14, "setting": 5, "route": 8}
FILE = re.compile(r"[\w/]+\.(?:py|cpp|h|js|html)\b")

# Folders of a package -> folders or modules of the same package that they must not import.
FORBIDDEN = {
    "server/process": ("server/api", "server/http"),
    "server/http": ("server/api", "server/process"),
    "files": ("model",),
    "formats": ("files", "model"),
    "cli/lib": ("cli/commands",),
    "model/families": ("model/loading",),
    "backend/cuda/kernels": ("backend/cuda/sampler", "backend/cuda/runtime"),
    "backend/cuda/runtime": ("backend/cuda/sampler",),
}
UPWARD: set[tuple[str, str]] = set()  # imports against FORBIDDEN that exist; must become empty


@cache
def sources() -> dict[str, ast.Module]:
    """Path below src/verbatim -> syntax tree, of every module."""
    paths = sorted(p for p in SRC.rglob("*.py") if "__pycache__" not in p.parts)
    return {p.relative_to(SRC).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in paths}


def count(paths: Iterator[Path]) -> int:
    found = (p for p in paths if "__pycache__" not in p.parts)
    return sum(len(p.read_text(encoding="utf-8").splitlines()) for p in found)


def package_of(path: str) -> str:
    if path.startswith(MODEL_FAMILIES + "/"):
        return MODEL_FAMILIES
    return path.split("/")[0] if "/" in path else ""


def package_lines() -> Counter[str]:
    lines: Counter[str] = Counter()
    for path in sources():
        lines[package_of(path)] += count(iter([SRC / path]))
    return lines


def totals() -> dict[str, int]:
    docs = [*(ROOT / "docs").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    return {
        "src": count((ROOT / "src").rglob("*.py")),
        "tests": count((ROOT / "tests").rglob("*.py")),
        "docs": count(iter(docs)),
    }


def uses_of_any() -> int:
    return sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for tree in sources().values()
        for node in ast.walk(tree)
    )


def function_lines() -> list[int]:
    """Lines of every function of src, the longest first."""
    functions = (
        node
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return sorted(((n.end_lineno or n.lineno) - n.lineno + 1 for n in functions), reverse=True)


def folder_modules() -> Counter[str]:
    modules: Counter[str] = Counter()
    for path in sources():
        folder, _, name = path.rpartition("/")
        modules[folder] += name != "__init__.py"
    return modules


@cache
def imports() -> dict[str, set[str]]:
    """Path of a module -> paths of the modules of this package that it imports."""
    names = {
        "verbatim." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in sources()
    }
    graph = {}
    for path, tree in sources().items():
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                pairs = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
                found |= {longer if longer in names else shorter for longer, shorter in pairs}
        graph[path] = {names[name] for name in found & set(names)}
    return graph


def spread(word: str) -> list[str]:
    """Files of src, tests and docs that have `word` as a word of its own, except this one."""
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    ends = (".py", ".md", ".cpp", ".h", ".inc", ".js", ".html")
    found = []
    for folder in ("src", "tests", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in ends or path == Path(__file__):
                continue
            if pattern.search(path.read_text(encoding="utf-8")):
                found.append(path.relative_to(ROOT).as_posix())
    return found


def upward() -> set[tuple[str, str]]:
    """(module, imported module) of every import that FORBIDDEN excludes."""
    return {
        (path, other)
        for folder, others in FORBIDDEN.items()
        for path, found in imports().items()
        if path.startswith(folder + "/")
        for other in found
        if other.startswith(tuple(f"{name}/" for name in others))
    }


def test_no_package_has_more_lines_than_its_budget() -> None:
    over = {p: (n, LINES.get(p, 0)) for p, n in package_lines().items() if n > LINES.get(p, 0)}
    assert not over, f"package: (lines, budget): {over}"


def test_the_totals_stay_below_their_limits() -> None:
    over = {name: (n, TOTALS[name]) for name, n in totals().items() if n > TOTALS[name]}
    assert not over, f"lines, limit: {over}"


def test_functions_are_short_and_typed() -> None:
    lines = function_lines()
    assert sum(n > 50 for n in lines) <= LONG_FUNCTIONS, lines[:40]
    assert statistics.median(lines) <= MEDIAN_FUNCTION
    assert uses_of_any() <= ANY


def test_folders_are_small() -> None:
    over = {f: n for f, n in folder_modules().items() if n > MODULES and f not in KINDS}
    assert not over


def test_no_module_imports_too_many_others() -> None:
    over = {path: len(found) for path, found in imports().items() if len(found) > FAN_OUT}
    assert all(n <= WIDE.get(path, 0) for path, n in over.items()), over


def test_lower_parts_of_a_package_do_not_import_upper_ones() -> None:
    assert upward() <= UPWARD, upward() - UPWARD


@pytest.mark.parametrize("word", SPREAD)
def test_a_thing_is_named_in_few_files(word: str) -> None:
    files = spread(word)
    assert len(files) <= SPREAD[word], "\n".join(files)


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_names_few_files(name: str) -> None:
    assert len(walk(name)) <= WALKS[name], walk(name)


def walk(name: str) -> set[str]:
    """Files that a page of docs/extend names outside its examples, without their folders."""
    text = (ROOT / "docs" / "extend" / f"{name}.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {found.rpartition("/")[2] for found in FILE.findall(text)}


def report() -> None:
    for name, lines in sorted(package_lines().items()):
        print(f"{name or '(root)':16} {lines:6} of {LINES.get(name, 0):6}")
    for name, lines in totals().items():
        print(f"{name:16} {lines:6} of {TOTALS[name]:6}")
    lengths = function_lines()
    print(f"functions > 50   {sum(n > 50 for n in lengths):6} of {LONG_FUNCTIONS:6}")
    print(f"median function  {statistics.median(lengths):6} of {MEDIAN_FUNCTION:6}")
    print(f"Any              {uses_of_any():6} of {ANY:6}")
    over = {f: n for f, n in folder_modules().items() if n > MODULES and f not in KINDS}
    print("folders", over)
    print("fan-out", {p: len(found) for p, found in imports().items() if len(found) > FAN_OUT})
    print("upward", upward())
    for name, limit in WALKS.items():
        print(f"walk {name:11} {len(walk(name)):6} of {limit:6}")
    for word, limit in SPREAD.items():
        print(f"{word:16} {len(spread(word)):6} of {limit:6}")


if __name__ == "__main__":
    report()
