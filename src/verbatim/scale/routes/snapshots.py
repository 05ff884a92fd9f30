"""What the router of this process knows, for its gateway: the replicas' reports and the counts of
the decisions. The router publishes a function that reads them; the gateway calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from verbatim.base.json_io import JsonObject


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The replicas of one application, as this process knows them."""

    reports: dict[str, JsonObject] = field(default_factory=dict)  # by replica
    routed: int = 0  # requests
    possible: int = 0  # requests with a prefix in some replica
    found: int = 0  # those sent to a replica with a part of the prefix


_sources: dict[str, Callable[[], Snapshot]] = {}  # by application


def publish(application: str, source: Callable[[], Snapshot]) -> None:
    _sources[application] = source


def snapshot(application: str) -> Snapshot:
    source = _sources.get(application)
    return Snapshot() if source is None else source()
