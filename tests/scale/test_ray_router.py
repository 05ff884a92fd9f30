"""The router in Ray Serve's own class, without a cluster: requests that arrive together are spread
over the replicas, and every count returns to zero."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from verbatim.scale.routes.routing import Route

# Importing Ray Serve warns of its own use of Pydantic.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Deployment(NamedTuple):
    app_name: str = "verbatim"
    name: str = "engine"


def replica(name: str) -> Any:
    from ray.serve.request_router import ReplicaID

    async def queue_length(**_: Any) -> int:
        return 0

    return SimpleNamespace(
        replica_id=ReplicaID(name, Deployment()),
        replica_metadata={"fingerprint": "one"},
        routing_stats={},
        get_queue_len=queue_length,
    )


def open_router(replicas: list[Any]) -> Any:
    from verbatim.scale.routes.router import PrefixRouter

    router = PrefixRouter(
        Deployment(), SimpleNamespace(value="test"), use_replica_queue_len_cache=True
    )
    router.initialize_state()
    router.update_replicas(replicas)
    return router


def pending(number: int) -> Any:
    from ray.serve.request_router import PendingRequest

    route = Route((b"a block.", b"another."), tokens=40, output=128)
    metadata = SimpleNamespace(internal_request_id=str(number))
    return PendingRequest(args=[], kwargs={"route": route}, metadata=metadata)


async def decide(router: Any, replicas: list[Any], request: Any) -> Any:
    return (await router.choose_replicas(replicas, request))[0][0].replica_id


async def test_requests_that_arrive_together_are_spread_over_the_replicas() -> None:
    replicas = [replica(name) for name in "abcd"]
    router = open_router(replicas)
    requests = [pending(i) for i in range(64)]
    chosen = [await decide(router, replicas, request) for request in requests]  # none is sent yet
    assert Counter(one.unique_id for one in chosen) == dict.fromkeys("abcd", 16)
    for request, one in zip(requests, chosen, strict=True):
        router.on_send_request(one)
        request.future.set_result(None)
    await asyncio.sleep(0)  # the futures' callbacks run
    router.on_new_queue_len_info(chosen[0], 1)  # an answer of its first request comes late
    more = [await decide(router, replicas, pending(i)) for i in range(4)]
    assert {one.unique_id for one in more} == set("abcd")


async def test_the_count_of_a_replica_ends_with_its_calls() -> None:
    replicas = [replica("a"), replica("b")]
    router = open_router(replicas)
    cancelled, sent = pending(1), pending(2)
    assert (await decide(router, replicas, cancelled)).unique_id == "a"
    cancelled.future.cancel()
    await asyncio.sleep(0)
    assert (await decide(router, replicas, sent)).unique_id == "a"
    again = await decide(router, replicas, sent)  # its own decision counts until it is made again
    assert again.unique_id == "b"
    router.on_send_request(again)
    sent.future.set_result(None)
    await asyncio.sleep(0)
    assert router._open == {"a": 0, "b": 1}
    router.on_request_completed(again, "2")
    assert router._open == {"a": 0, "b": 0}
    assert not router._decided
