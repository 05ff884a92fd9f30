"""Answers kept because the request said store: true. In memory, bounded in number, the oldest leave first, each key sees its own only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from verbatim.server.problems import Problem


class Store:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()  # (tenant, id) -> {object, messages, ...}

    def check_offered(self, asked: bool) -> None:
        if asked and not self._capacity:
            raise Problem("unsupported_parameter", "store: this server keeps no answers (--store-items 0)", "store")

    def put(self, tenant: str, name: str, item: dict[str, Any]) -> None:
        self._items[(tenant, name)] = item
        while len(self._items) > self._capacity:
            self._items.popitem(last=False)

    def get(self, tenant: str, name: str) -> dict[str, Any]:
        item = self._items.get((tenant, name))
        if item is None:
            raise Problem(
                "not_found",
                "no stored answer has this id; only those made with store: true are kept, and the oldest leave first",
            )
        return item

    def pop(self, tenant: str, name: str) -> dict[str, Any]:
        item = self.get(tenant, name)
        del self._items[(tenant, name)]
        return item

    def of(self, tenant: str, kind: str) -> list[dict[str, Any]]:
        return [item for (owner, _), item in self._items.items() if owner == tenant and item["kind"] == kind]
