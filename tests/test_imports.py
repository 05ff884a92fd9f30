"""Imports run downward only, and `import verbatim` is light. Both are rules of the design; this is where they are kept."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import verbatim

ROOT = Path(verbatim.__file__).parent

# room -> rooms it may import, besides itself
LOWEST = {"base"}
NUMBERS = {"sampling", "model", "weights"} | LOWEST
BELOW_ENGINE = {"speculate", "schedule", "text", "grammar", "observe", "backend"} | NUMBERS
MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "schedule": LOWEST,
    "text": LOWEST,
    "weights": LOWEST,
    "sampling": LOWEST,
    "grammar": LOWEST,
    "model": {"weights"} | LOWEST,
    "observe": NUMBERS,
    "backend": NUMBERS,
    "speculate": {"backend"} | NUMBERS,
    "engine": BELOW_ENGINE,
    "server": {"engine", "lens"} | BELOW_ENGINE,
    "lens": LOWEST,
    "convert": {"text"} | NUMBERS,
    "bench": {"engine"} | BELOW_ENGINE,
    "cli": {"server", "engine", "lens", "convert", "bench"} | BELOW_ENGINE,
}
FREE = {
    "testing",
    "testing_models",
    "__main__",
    "__init__",
}  # single files: public fakes and the doors
USES_FAKES = {
    "server/process/engine_process.py"
}  # the engine's own process, which a test can start with a fake engine

# big libraries -> the rooms that may import them, and only inside a function or in a module loaded for that purpose
HEAVY: dict[str, tuple[str, ...]] = {
    "fastapi": ("server",),
    "starlette": ("server",),
    "uvicorn": ("server", "cli"),
    "uvloop": ("server",),
    "httptools": ("server",),
    "pydantic": ("server",),
    "msgpack": ("server", "backend"),
    "llguidance": ("grammar/matcher.py", "grammar/translate.py"),
    "huggingface_hub": ("weights/hub.py",),
    "tokenizers": ("text",),
    "jinja2": ("text",),
    "click": ("cli",),
    "rich": ("cli",),
    "matplotlib": ("cli", "observe"),
    "torch": ("backend/cuda",),
    "triton": ("backend/cuda",),
}
NEVER = {
    "transformers",
    "gguf",
    "safetensors",
    "pickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
}  # oracles; things that run a file's code
EXEMPT = "bench/rivals/worker_"  # scripts that run a rival in the rival's own interpreter; they import nothing of ours


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import anywhere in the file, also inside functions and under TYPE_CHECKING."""
    package = path.relative_to(ROOT.parent).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from verbatim import text` imports a room too
            yield from (
                ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
                if module == "verbatim"
                else [(node.lineno, module)]
            )


def sources() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if "__pycache__" not in p.parts)


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


def test_every_room_is_known() -> None:
    assert {room_of(path) for path in sources()} <= set(MAY_IMPORT) | FREE


def test_imports_run_downward_only() -> None:
    wrong = []
    for path in sources():
        room = room_of(path)
        if room in FREE:
            continue
        for line, module in imports(path):
            parts = module.split(".")
            if parts[0] != "verbatim" or len(parts) < 2 or parts[1] == room:
                continue
            if parts[1] in MAY_IMPORT and parts[1] not in MAY_IMPORT[room]:
                wrong.append(
                    f"{path.relative_to(ROOT)}:{line} imports {module}; {room} may import {sorted(MAY_IMPORT[room])}"
                )
            if (
                parts[1].startswith("testing")
                and path.relative_to(ROOT).as_posix() not in USES_FAKES
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports the fakes")
    assert not wrong, "\n".join(wrong)


def test_the_rooms_have_no_cycle() -> None:
    """The table itself: whoever may import a room may not be imported by it."""
    for room, below in MAY_IMPORT.items():
        for other in below:
            assert room not in MAY_IMPORT[other], f"{room} and {other}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def module_graph(paths: list[Path]) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, lazily and under TYPE_CHECKING too."""
    names = {module_name(path): path for path in paths}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: imports here are absolute"
                # `from package import module` means the module, `from module import name` the module before the name
                both = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
                found |= {longer if longer in names else str(module) for longer, module in both}
        graph[name] = found & set(names)
    return graph


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (strongly connected components), and modules that import themselves."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [*graph[start]]
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += graph[module]
        return seen

    reached = {module: reach(module) for module in graph}
    groups = {
        tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]
    }
    return sorted(map(list, groups))


# Import cycles that still exist. Empty, and to stay so.
KNOWN_CYCLES: list[list[str]] = []


def test_no_import_cycle_inside_a_package() -> None:
    assert import_cycles(module_graph(sources())) == KNOWN_CYCLES


def test_import_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}, "f": {"a", "e"}}
    assert import_cycles(graph) == [["b", "c"], ["e"]]
    assert "verbatim.schedule.scheduler" in module_graph(sources())["verbatim.schedule.invariants"]
    assert "verbatim.server.api.info" in module_graph(sources())["verbatim.server.app"], (
        "from package import module"
    )


def test_heavy_libraries_stay_in_their_rooms() -> None:
    wrong = []
    for path in sources():
        where = path.relative_to(ROOT).as_posix()
        if where.startswith(EXEMPT):
            continue
        for line, module in imports(path):
            top = module.split(".")[0]
            if top in NEVER:
                wrong.append(f"{where}:{line} imports {module}, which nothing here may")
            if top in HEAVY and not any(
                where == room or where.startswith(room + "/") for room in HEAVY[top]
            ):
                wrong.append(
                    f"{where}:{line} imports {module}, which belongs to {', '.join(HEAVY[top])}"
                )
    assert not wrong, "\n".join(wrong)


def test_no_import_hides_a_dynamic_one() -> None:
    """eval, exec and __import__ would pass by the tests above (and by readers)."""
    wrong = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("eval", "exec", "__import__")
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {node.func.id}")
    assert not wrong, "\n".join(wrong)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in sys.modules of a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(m.partition('.')[0] if not m.startswith('verbatim') else m for m in sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_verbatim_is_light() -> None:
    loaded = loaded_by("import verbatim")
    assert not loaded & (set(HEAVY) | {"numpy", "transformers", "gguf"})
    rooms = {m.split(".")[1] for m in loaded if m.startswith("verbatim.")}
    assert rooms == {"base"}


@pytest.mark.parametrize(
    "statement",
    [
        "from verbatim import SamplingParams, VerbatimError; SamplingParams(temperature=0.5)",
        "import verbatim.weights.catalog, verbatim.weights.gguf, verbatim.weights.safetensors, verbatim.weights.gguf_write",
        "import verbatim.model.load, verbatim.backend, verbatim.backend.reference",
        "import verbatim.cli.main",
        "from verbatim import LLM, AsyncEngine",
    ],
)
def test_what_is_not_used_is_not_loaded(statement: str) -> None:
    optional = {
        "torch",
        "fastapi",
        "starlette",
        "uvicorn",
        "llguidance",
        "huggingface_hub",
        "transformers",
        "gguf",
    }
    assert not loaded_by(statement) & optional
