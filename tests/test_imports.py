"""Import rules of the design: packages import downward only, no cycles, and `import verbatim` is
light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import verbatim

ROOT = Path(verbatim.__file__).parent

# package -> packages it may import, besides itself; docs/one-token.md draws the main path
MODELS = {"base", "formats", "files", "sampling", "model"}
BELOW_ENGINE = MODELS | {
    *("hub", "text", "grammar", "schedule", "speculate", "backend", "encoder", "lora"),
    *("observe", "explain", "parallel"),
}
MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "formats": {"base"},
    "files": {"base", "formats"},
    "hub": {"base", "formats", "files"},
    "text": {"base"},
    "grammar": {"base"},
    "schedule": {"base"},
    "sampling": {"base"},
    "model": {"base", "formats", "files"},
    "lora": {"base", "formats", "files", "model"},
    "backend": MODELS,
    "encoder": {"base", "formats", "files", "model", "backend"},
    "speculate": {"backend"} | MODELS,
    "parallel": {"backend", "lora", "schedule"} | MODELS,
    "observe": {"base"},
    "explain": {"base", "sampling"},
    "engine": BELOW_ENGINE,
    "testing": {"engine"} | BELOW_ENGINE,
    "lens": {"base"},
    "chat": {"base"},
    "server": {"engine", "lens", "chat"} | BELOW_ENGINE,
    "convert": {"hub", "text", "lora"} | MODELS,
    "bench": {"engine"} | BELOW_ENGINE,
    "diagnose": {"engine"} | BELOW_ENGINE,
    "scale": {"server", "engine", "diagnose"} | BELOW_ENGINE,
    "cli": {"scale", "server", "engine", "lens", "convert", "bench", "diagnose"} | BELOW_ENGINE,
}
# Top-level modules without a rule: entry points.
FREE = {"__main__", "__init__"}
# The engine process, which a test can start with a fake engine.
USES_FAKES = {"server/process/engine_process.py"}

# Heavy library -> packages or files that may import it, inside a function or in a module that is
# loaded on demand.
HEAVY: dict[str, tuple[str, ...]] = {
    "fastapi": ("server",),
    "starlette": ("server",),
    "ray": ("scale",),
    "pyarrow": ("scale",),
    "uvicorn": ("server", "cli"),
    "uvloop": ("server",),
    "httptools": ("server",),
    "pydantic": ("server",),
    "msgpack": ("server", "backend"),
    "jsonschema": ("grammar/document_check.py",),
    "llguidance": ("grammar/llguidance_tokenizer.py", "grammar/translate.py"),
    "huggingface_hub": ("hub/hub.py",),
    "tokenizers": ("text",),
    "jinja2": ("text",),
    "click": ("cli",),
    "rich": ("cli",),
    "matplotlib": ("cli", "observe"),
    "torch": ("backend/cuda",),
    "triton": ("backend/cuda",),
}
# Never imported: test oracles, and libraries that execute code from files.
NEVER = {
    *("transformers", "gguf", "safetensors", "pickle", "_pickle", "dill", "cloudpickle", "marshal"),
    "shelve",
}
# Scripts that run a rival in its own interpreter; they import nothing from verbatim.
EXEMPT = "bench/rivals/worker_"


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The imports and calls of a file. Several tests need them, and a walk of all files is slow."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom | ast.Call))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import in the file, also in functions and TYPE_CHECKING."""
    package = path.relative_to(ROOT.parent).with_suffix("").parts[:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from verbatim import text` imports a package
            yield from (
                ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
                if module == "verbatim"
                else [(node.lineno, module)]
            )


def sources() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if "__pycache__" not in p.parts)


def package_of(path: Path) -> str:
    loaded = path.relative_to(ROOT).parts
    return loaded[0] if len(loaded) > 1 else path.stem


def test_every_package_has_an_import_rule() -> None:
    assert {package_of(path) for path in sources()} <= set(MAY_IMPORT) | FREE


def test_imports_run_downward_only() -> None:
    wrong = []
    for path in sources():
        package = package_of(path)
        if package in FREE:
            continue
        for line, module in imports(path):
            parts = module.split(".")
            if parts[0] != "verbatim" or len(parts) < 2 or parts[1] == package:
                continue
            if (
                parts[1] in MAY_IMPORT
                and parts[1] not in MAY_IMPORT[package]
                and parts[1] != "testing"
            ):
                wrong.append(
                    f"{path.relative_to(ROOT)}:{line} imports {module}; "
                    f"{package} may import {sorted(MAY_IMPORT[package])}"
                )
            if parts[1] == "testing" and path.relative_to(ROOT).as_posix() not in USES_FAKES:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports the fakes")
    assert not wrong, "\n".join(wrong)


def test_what_commands_share_imports_no_command() -> None:
    above = ("verbatim.cli.commands", "verbatim.cli.main")
    for path in (ROOT / "cli" / "lib").rglob("*.py"):
        found = [module for _, module in imports(path) if module.startswith(above)]
        assert not found, f"{path.name} imports {found}"


def test_the_import_rules_have_no_cycle() -> None:
    """No two packages may import each other."""
    for package, below in MAY_IMPORT.items():
        for other in below:
            assert package not in MAY_IMPORT[other], f"{package} and {other}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def module_graph(paths: list[Path]) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, lazily and under TYPE_CHECKING too."""
    names = {module_name(path): path for path in paths}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found: set[str] = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: imports here are absolute"
                # `from package import module` or `from module import name`
                both = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
                found |= {longer if longer in names else str(module) for longer, module in both}
        graph[name] = found & set(names)
    return graph


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of the import graph, and modules that import themselves."""

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


# Import cycles that exist. Must stay empty.
KNOWN_CYCLES: list[list[str]] = []


def test_no_import_cycle_inside_a_package() -> None:
    assert import_cycles(module_graph(sources())) == KNOWN_CYCLES


def test_import_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}, "f": {"a", "e"}}
    assert import_cycles(graph) == [["b", "c"], ["e"]]
    graph = module_graph(sources())
    assert "verbatim.schedule.scheduler" in graph["verbatim.schedule.invariants"]
    assert "verbatim.server.api.native.info" in graph["verbatim.server.api.native.protocol"], (
        "from package import module"
    )


# A name that several modules or classes have: parallel implementations of one interface.
PARALLEL_MODULES = {"__init__", "backend", "ops", "protocol"}
# Worker: the process of each rival. Generate: `verbatim.scale.Generate` is the public name of a
# Ray Data stage, and the message to the engine process is one of a family of verbs.
PARALLEL_CLASSES = {"Worker", "Generate"}


def repeated(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    where: dict[str, list[str]] = {}
    for name, path in names:
        where.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    return {name: paths for name, paths in where.items() if len(paths) > 1}


def test_a_module_name_occurs_once_in_the_package() -> None:
    modules = repeated((path.stem, path) for path in sources())
    assert set(modules) == PARALLEL_MODULES, modules


def test_a_class_name_occurs_once_in_the_package() -> None:
    classes = repeated(
        (node.name, path)
        for path in sources()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert set(classes) == PARALLEL_CLASSES, classes


def test_heavy_libraries_are_imported_only_by_their_packages() -> None:
    wrong = []
    for path in sources():
        where = path.relative_to(ROOT).as_posix()
        if where.startswith(EXEMPT):
            continue
        for line, module in imports(path):
            top = module.split(".")[0]
            if top in NEVER:
                wrong.append(f"{where}:{line} imports {module}, which no module may")
            if top in HEAVY and not any(
                where == package or where.startswith(package + "/") for package in HEAVY[top]
            ):
                wrong.append(
                    f"{where}:{line} imports {module}, which belongs to {', '.join(HEAVY[top])}"
                )
    assert not wrong, "\n".join(wrong)


def test_no_module_calls_eval_exec_or_import() -> None:
    """eval, exec and __import__ would evade the tests above."""
    wrong = []
    for path in sources():
        for node in nodes(path):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("eval", "exec", "__import__")
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {node.func.id}")
    assert not wrong, "\n".join(wrong)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in sys.modules of a fresh interpreter after `statement`."""
    code = (
        f"{statement}\nimport sys, json\n"
        "print(json.dumps(sorted(m if m.startswith('verbatim') else m.partition('.')[0] "
        "for m in sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_verbatim_is_light() -> None:
    loaded = loaded_by("import verbatim")
    assert not loaded & (set(HEAVY) | {"numpy", "transformers", "gguf"})
    packages = {m.split(".")[1] for m in loaded if m.startswith("verbatim.")}
    assert not packages, "names are imported on first use"


@pytest.mark.parametrize(
    "statement",
    [
        "from verbatim import SamplingParams, VerbatimError; SamplingParams(temperature=0.5)",
        "import verbatim.hub.catalog, verbatim.files.gguf; "
        "import verbatim.files.safetensors, verbatim.files.gguf_write",
        "import verbatim.model.loading.load, verbatim.backend, verbatim.backend.reference",
        "import verbatim.cli.main, verbatim.cli.commands.serve, verbatim.cli.commands.batch",
        "import verbatim.scale, verbatim.scale.ray_options, verbatim.scale.routes.routing",
        "from verbatim import LLM, AsyncEngine",
    ],
)
def test_unused_optional_libraries_are_not_loaded(statement: str) -> None:
    optional = {
        *("torch", "ray", "pyarrow", "fastapi", "starlette", "uvicorn", "llguidance"),
        *("huggingface_hub", "transformers", "gguf"),
    }
    assert not loaded_by(statement) & optional
