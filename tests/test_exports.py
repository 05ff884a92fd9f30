"""The root package exports every name that a user needs to annotate code that calls it."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import dataclasses
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import verbatim
from verbatim.base import errors

# Methods between the engine and the server or the test fakes; not part of what users call.
INTERNAL = {"submit_to", "call", "from_loaded", "from_parts"}
SPECIAL = {"__init__", "__iter__", "__next__", "__aiter__", "__anext__", "__enter__", "__aenter__"}
LIBRARIES = (builtins, typing, collections.abc, types, os)


def signatures(owner: type) -> Iterator[Callable[..., Any]]:
    """Public methods and property getters of a class, inherited ones included."""
    for name, member in inspect.getmembers_static(owner):
        if name in INTERNAL or (name.startswith("_") and name not in SPECIAL):
            continue
        found = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(found):
            yield found
            yield from typing.get_overloads(found)


def names_in(annotation: str) -> set[str]:
    """Bare names of an annotation, without the libraries of attributes (np.ndarray)."""
    tree = ast.parse(annotation, mode="eval")
    modules = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found = (
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in modules
    )
    known = {name for name in found if not any(hasattr(library, name) for library in LIBRARIES)}
    return known - {"JsonObject", "JsonMapping"}  # dict[str, Any] and Mapping[str, Any]


@pytest.mark.parametrize("owner", ["LLM", "AsyncEngine", "Stream", "AsyncStream"])
def test_every_name_of_a_public_signature_is_exported(owner: str) -> None:
    for function in signatures(getattr(verbatim, owner)):
        if function.__qualname__ in ("Stream.__init__", "AsyncStream.__init__"):
            continue  # the engine makes streams
        for annotation in function.__annotations__.values():
            missing = names_in(annotation) - set(verbatim.__all__)
            assert not missing, f"{function.__qualname__} names {missing}"


@pytest.mark.parametrize("owner", ["LLM", "AsyncEngine", "Stream", "AsyncStream"])
def test_help_shows_types_and_not_any(owner: str) -> None:
    """help() and editors show the implementation of an overloaded method."""
    for function in signatures(getattr(verbatim, owner)):
        named = inspect.signature(function)
        if len(named.parameters) == 1:  # a property, such as the model's own tokenizer
            continue
        kinds = {p.name: p.annotation for p in named.parameters.values() if p.kind != p.VAR_KEYWORD}
        kinds["return"] = named.return_annotation
        assert "Any" not in kinds.values(), f"{function.__qualname__}: {kinds}"


def test_every_field_of_an_exported_record_is_exported() -> None:
    records = [
        value
        for name in verbatim.__all__
        if dataclasses.is_dataclass(value := getattr(verbatim, name))
    ]
    assert {"Completion", "SamplingParams", "Score", "Vote"} <= {
        r.__name__ for r in records if isinstance(r, type)
    }
    for record in records:
        for field in dataclasses.fields(record):
            assert names_in(str(field.type)) <= set(verbatim.__all__), (record, field.name)


def test_every_error_is_exported() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert tree <= set(verbatim.__all__)


def test_every_export_exists_and_is_listed() -> None:
    assert set(verbatim.__all__) <= set(dir(verbatim))
    for name in verbatim.__all__:
        assert getattr(verbatim, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = verbatim.Nothing  # type: ignore[attr-defined]


def test_names_of_vllm_get_a_hint() -> None:
    for name in ("AsyncLLM", "AsyncLLMEngine"):
        with pytest.raises(ImportError, match="use AsyncEngine"):
            getattr(verbatim, name)
