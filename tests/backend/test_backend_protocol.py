"""Every backend has every member of the Backend protocol, so the engine does not probe for them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from plans import Open

import verbatim
from verbatim.backend.protocol import Backend
from verbatim.testing.fakes import FakeBackend
from verbatim.testing.tiny_models import tiny_model

ROOT = Path(verbatim.__file__).parent
METHODS = {name for name, member in vars(Backend).items() if inspect.isfunction(member)}
MEMBERS = {
    *Backend.__annotations__,
    *(name for name in METHODS if not name.startswith("_")),
    *(name for name, member in vars(Backend).items() if isinstance(member, property)),
}


def missing(backend: Backend) -> set[str]:
    return {name for name in MEMBERS if not hasattr(backend, name)}


def test_every_backend_has_every_member(open_tiny: Open) -> None:
    backend = open_tiny(tiny_model("llama"))
    assert missing(backend) == set()
    assert (backend.launcher is None) == (backend.info.name != "cuda")
    assert (backend.available_memory() is None) == (backend.info.name != "cuda")


def test_the_fake_backend_has_every_member() -> None:
    assert missing(FakeBackend()) == set()
    assert FakeBackend().launcher is None
    assert FakeBackend(overlap=True).launcher is not None


@pytest.mark.parametrize("package", ["engine", "speculate", "schedule", "server"])
def test_no_package_probes_a_backend_for_attributes(package: str) -> None:
    """No call of getattr or hasattr on a backend."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and "backend" in ast.unparse(node.args[0])
    ]
    assert found == []
