"""In-memory store for responses and for chat completions with `store: true`.

The store is a FIFO bounded by item count and by bytes; it evicts the oldest item first. A tenant
(API key) can read only its own items.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from verbatim.base.json_io import JsonObject, dumps
from verbatim.server.problem import Problem, unsupported

Kind = Literal["chat", "response"]


class Store:
    def __init__(self, capacity: int, max_bytes: int) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._bytes = 0
        # (tenant, kind, id) -> (item, size in bytes)
        self._items: OrderedDict[tuple[str, Kind, str], tuple[JsonObject, int]] = OrderedDict()

    @property
    def enabled(self) -> bool:
        return self._capacity > 0

    def check_enabled(self, requested: bool) -> None:
        if requested and not self.enabled:
            raise unsupported("store", "this server stores no answers (--store-items 0)")

    def put(self, tenant: str, kind: Kind, name: str, item: JsonObject) -> None:
        """Store `item`: the object that clients get, plus what its routes need. An item larger than
        the whole store is dropped."""
        size = len(dumps(item))
        if size > self._max_bytes:
            return
        self._items[(tenant, kind, name)] = (item, size)
        self._bytes += size
        while len(self._items) > self._capacity or self._bytes > self._max_bytes:
            self._bytes -= self._items.popitem(last=False)[1][1]

    def get(self, tenant: str, kind: Kind, name: str) -> JsonObject:
        found = self._items.get((tenant, kind, name))
        if found is None:
            raise Problem(
                "not_found",
                "no stored answer has this id; responses are stored unless store is false, chat"
                " completions if it is true, and the oldest answers are evicted first",
            )
        return found[0]

    def pop(self, tenant: str, kind: Kind, name: str) -> JsonObject:
        item = self.get(tenant, kind, name)
        self._bytes -= self._items.pop((tenant, kind, name))[1]
        return item

    def of(self, tenant: str, kind: Kind) -> list[JsonObject]:
        return [
            item
            for (owner, item_kind, _), (item, _) in self._items.items()
            if (owner, item_kind) == (tenant, kind)
        ]
