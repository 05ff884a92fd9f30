"""Which inputs a chat template reads. In: its source, or the messages to render. Out: the values
that it would ignore silently.

    variables   found once, in the syntax tree: does any expression read the name from outside?
    keys        found per rendering, by TrackedMessage: was this key of this message read? Templates
                read `name` in one branch (tool results) and not in another, so the tree cannot tell

A template that uses a message as a whole (`message | tojson`, a loop over its items) has read all
its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes
from jinja2.meta import TrackingCodeGenerator

from verbatim.base.json_io import JsonObject
from verbatim.text.templates.sandbox import Timed, chat_environment
from verbatim.text.templates.template_budget import Budget, use_budget


@dataclass(frozen=True, slots=True)
class TemplateReads:
    """variables  names that the template reads from its context
    keys       attribute names of any object
    texts      string constants in its expressions, without the literal template text"""

    variables: frozenset[str]
    keys: frozenset[str]
    texts: frozenset[str]

    def may_read(self, key: str) -> bool:
        """Whether it may read a key of this name, of any object."""
        return key in self.keys or key in self.texts


class _Tracker(Timed, TrackingCodeGenerator):
    """Jinja's variable analysis under the time budget: the source is untrusted."""


def find_reads(source: str) -> TemplateReads:
    """Analyse a template that sandbox.py has compiled, and so bounded, before."""
    environment = chat_environment()
    with use_budget(Budget()):
        tree = environment.parse(source)
        tracker = _Tracker(environment)
        tracker.visit(tree)
        keys = {node.attr for node in tree.find_all(nodes.Getattr)}
        texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return TemplateReads(
        frozenset(tracker.undeclared_identifiers), frozenset(keys), frozenset(texts)
    )


class TrackedMessage(JsonObject):
    """A message that records which of its keys are read. Iterating or copying it reads all."""

    __slots__ = ("_read_keys",)

    def __init__(self, message: JsonObject) -> None:
        super().__init__(message)
        self._read_keys: set[Any] = set()

    def unread_keys(self) -> list[str]:
        return [key for key in dict.keys(self) if key not in self._read_keys]

    def _mark_all_read(self) -> None:
        self._read_keys.update(dict.keys(self))

    def __getitem__(self, key: Any) -> Any:
        self._read_keys.add(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._read_keys.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._read_keys.add(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._mark_all_read()
        return super().__iter__()

    def keys(self) -> Any:
        self._mark_all_read()
        return super().keys()

    def values(self) -> Any:
        self._mark_all_read()
        return super().values()

    def items(self) -> Any:
        self._mark_all_read()
        return super().items()

    def copy(self) -> JsonObject:
        self._mark_all_read()
        return dict(super().items())

    def __repr__(self) -> str:
        self._mark_all_read()
        return super().__repr__()
