"""Every public name has a docstring, and the examples in them run.

The examples load "smollm2"; here the fake model of verbatim.testing stands for it, so they may only
show what holds for every model."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import verbatim
from verbatim.engine.calls import engine_base
from verbatim.testing.fakes import server_parts

MODULES = [
    "base.config", "base.errors", "base.migration_hints", "base.notebook", "base.params",
    "base.records", "base.schema_types", "engine.calls.async_calls", "engine.calls.async_engine",
    "engine.calls.async_stream",
    "engine.calls.blocking_engine", "engine.calls.call_inputs", "engine.calls.embed_calls",
    "engine.calls.engine_base",
    "engine.calls.llm",
    "engine.calls.scoring", "grammar.ecma_pattern", "grammar.lower", "grammar.translate",
    "explain.explained", "explain.explanation",
]  # fmt: skip
# Aliases of types, which cannot have a docstring.
ALIASES = {"FinishReason", "Message", "Progress", "Prompt", "__version__"}
# Public methods between the engine and the server.
INTERNAL = {"submit_to", "call", "from_loaded", "from_parts", "step_thread"}
# Classes whose docstring needs no example: errors say what they are, a protocol is not called.
PLAIN = {"ProgressBar", "WhatIfs"}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setattr(engine_base, "load_for_engine", lambda *_, **__: server_parts("pipeline"))
    public = {name: getattr(verbatim, name) for name in verbatim.__all__}
    with verbatim.LLM("smollm2", kv_blocks=64) as llm:
        yield {**public, "llm": llm, "asyncio": asyncio, "typing": typing}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name: str, names: dict[str, Any]) -> None:
    module = importlib.import_module(f"verbatim.{name}")
    found = doctest.DocTestFinder(exclude_empty=True).find(
        module, extraglobs={**names, **vars(module)}
    )
    runner = doctest.DocTestRunner(verbose=False)
    for test in found:
        if test.name.endswith("SeqStep"):  # shows a record, not its repr
            continue
        runner.run(test)
    assert runner.tries or name in ("engine.calls.call_inputs",), "this module has no example"
    assert not runner.failures


def owners() -> Iterator[tuple[str, Any]]:
    for name in verbatim.__all__:
        if name not in ALIASES:
            yield name, getattr(verbatim, name)


@pytest.mark.parametrize("name", [name for name, _ in owners()])
def test_every_public_name_teaches_itself(name: str) -> None:
    """A docstring for the name and its public methods; an example for classes that users make or
    get."""
    value = getattr(verbatim, name)
    assert inspect.getdoc(value), name
    if issubclass(value, Exception):
        return
    text = inspect.getdoc(value) or ""
    assert ">>>" in text or name in PLAIN, f"{name}: no example"
    for member, found in inspect.getmembers_static(value):
        if member.startswith("_") or member in INTERNAL:
            continue
        function = found.fget if isinstance(found, property) else found
        if isinstance(function, types.FunctionType) and value in (
            verbatim.LLM,
            verbatim.AsyncEngine,
        ):
            assert function.__doc__, f"{name}.{member}"


def test_dir_shows_what_users_need() -> None:
    assert dir(verbatim) == sorted(verbatim.__all__)
    assert {"LLM", "AsyncEngine", "SamplingParams", "Completion"} <= set(dir(verbatim))
