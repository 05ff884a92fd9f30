"""Answers kept because the request said store: true. In memory, bounded in number and in bytes, the oldest leave first, each key sees its own only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Literal

from verbatim.server.api.api_errors import Problem
from verbatim.server.json_io import dumps

Kind = Literal["chat", "response"]


class Store:
    def __init__(self, capacity: int, max_bytes: int) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._bytes = 0
        self._items: OrderedDict[tuple[str, Kind, str], tuple[dict[str, Any], int]] = (
            OrderedDict()
        )  # (tenant, kind, id) -> item, size

    def check_offered(self, asked: bool) -> None:
        if asked and not self._capacity:
            raise Problem(
                "unsupported_parameter",
                "store: this server keeps no answers (--store-items 0)",
                "store",
            )

    def put(self, tenant: str, kind: Kind, name: str, item: dict[str, Any]) -> None:
        """item: the object as clients get it, and what else its routes need. Kept as long as there is room; one that is larger than all the room is not."""
        size = len(dumps(item))
        if size > self._max_bytes:
            return
        self._items[(tenant, kind, name)] = (item, size)
        self._bytes += size
        while len(self._items) > self._capacity or self._bytes > self._max_bytes:
            self._bytes -= self._items.popitem(last=False)[1][1]

    def get(self, tenant: str, kind: Kind, name: str) -> dict[str, Any]:
        found = self._items.get((tenant, kind, name))
        if found is None:
            raise Problem(
                "not_found",
                "no stored answer has this id; only those made with store: true are kept, and the oldest leave first",
            )
        return found[0]

    def pop(self, tenant: str, kind: Kind, name: str) -> dict[str, Any]:
        item = self.get(tenant, kind, name)
        self._bytes -= self._items.pop((tenant, kind, name))[1]
        return item

    def of(self, tenant: str, kind: Kind) -> list[dict[str, Any]]:
        return [
            item
            for (owner, what, _), (item, _) in self._items.items()
            if (owner, what) == (tenant, kind)
        ]
