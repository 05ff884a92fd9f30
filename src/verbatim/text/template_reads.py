"""What a chat template looks at. In: its source, or the messages that it is about to render. Out: which of the values given to it it would drop.

A template drops what it does not know without a word. Two questions find that out, because a variable and a key of a message differ:

    variables   whether any place of the template takes the name from outside: asked of its syntax tree, once
    keys        whether the key of this very message was looked at while the conversation was rendered: asked of the message itself, since templates
                look at `name` in one branch (the results of tools) and not in another, and read the `name` of a function in all of them

A template that hands a message on as a whole (`message | tojson`, a loop over its items) has looked at all its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes
from jinja2.meta import TrackingCodeGenerator

from verbatim.text.sandbox import chat_environment
from verbatim.text.template_budget import Budget, current, spending


@dataclass(frozen=True, slots=True)
class Reads:
    """variables: taken from outside. keys: attributes of anything. texts: strings in its expressions; what stands between those is not among them."""

    variables: frozenset[str]
    keys: frozenset[str]
    texts: frozenset[str]

    def asks_for(self, key: str) -> bool:
        """Whether it may look at a key of this name, of whatever it may be."""
        return key in self.keys or key in self.texts


class _Tracker(TrackingCodeGenerator):
    """Jinja's own answer, on the clock: the source is a stranger's."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        current().tick()
        return super().visit(node, *args, **kwargs)


def reads_of(source: str) -> Reads:
    """Of a template that compiles (sandbox.py has bounded it by then)."""
    environment = chat_environment()
    with spending(Budget()):
        tree = environment.parse(source)
        tracker = _Tracker(environment)
        tracker.visit(tree)
        keys = {node.attr for node in tree.find_all(nodes.Getattr)}
        texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return Reads(frozenset(tracker.undeclared_identifiers), frozenset(keys), frozenset(texts))


class Watched(dict[str, Any]):
    """A message that notes which of its keys were looked at. Whatever goes over it as a whole has looked at all of them."""

    __slots__ = ("_seen",)

    def __init__(self, message: dict[str, Any]) -> None:
        super().__init__(message)
        self._seen: set[Any] = set()

    def unseen(self) -> list[str]:
        return [key for key in dict.keys(self) if key not in self._seen]

    def _all(self) -> None:
        self._seen.update(dict.keys(self))

    def __getitem__(self, key: Any) -> Any:
        self._seen.add(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: Any) -> bool:
        self._seen.add(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._all()
        return super().__iter__()

    def keys(self) -> Any:
        self._all()
        return super().keys()

    def values(self) -> Any:
        self._all()
        return super().values()

    def items(self) -> Any:
        self._all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        self._all()
        return dict(super().items())

    def __repr__(self) -> str:
        self._all()
        return super().__repr__()
