"""The RequestRouter of Ray Serve over the engine's own block hashes; the decision is routing.py's.

Serve creates one router per process that calls the replicas (the gateway). The replicas' reports
(replica.record_routing_stats) arrive here through Serve's controller. Serve copies this module's
code by value, so what the gateway reads from a router is in snapshots.py.

The router counts the open calls of each replica from the moment of the decision. Serve's own count
begins when a call is sent, and a replica's older answer overwrites it: 64 requests that arrive
together would all go to one replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from verbatim.base.json_io import JsonObject
from verbatim.scale.routes.routing import HASH_BYTES, Candidate, Decider, Route
from verbatim.scale.routes.snapshots import Snapshot, publish

log = logging.getLogger("verbatim.scale")


class PrefixRouter(RequestRouter):
    def initialize_state(self, **_: Any) -> None:
        self.decider = Decider()
        self.reports: dict[str, JsonObject] = {}
        self._fingerprint = ""
        self._open: Counter[str] = Counter()  # calls per replica: sent, or decided and not yet sent
        self._decided: dict[asyncio.Future[Any], str] = {}  # calls that are not sent yet
        publish(self.app_name, self.snapshot)

    def snapshot(self) -> Snapshot:
        d = self.decider
        return Snapshot(dict(self.reports), d.routed_total, d.possible, d.found)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        usable = self._same_model(candidate_replicas)
        if pending_request is None:
            return [usable]
        pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in usable}
        if (one := pending_request.kwargs.get("replica")) in by_name:
            return [[by_name[one]]]
        route = route_of(pending_request)
        ranked = self.decider.rank(route, [self._candidate(replica) for replica in usable])
        if ranked:
            self._decide(pending_request.future, ranked[0])
        return [[by_name[name]] for name in ranked]

    def _candidate(self, replica: RunningReplica) -> Candidate:
        name = replica.replica_id.unique_id
        return Candidate(name, self._open[name], self.reports.get(name, {}).get("up", True))

    def _decide(self, future: asyncio.Future[Any], replica: str) -> None:
        """Count a decision until its call is sent or cancelled, which `future` reports."""
        if future in self._decided:  # decided again: Serve found the first choice unavailable
            self._open[self._decided[future]] -= 1
        else:
            future.add_done_callback(self._undecide)
        self._decided[future] = replica
        self._open[replica] += 1

    def _undecide(self, future: asyncio.Future[Any]) -> None:
        self._open[self._decided.pop(future)] -= 1

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._open[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._open[replica_id.unique_id] -= 1

    def _same_model(self, replicas: list[RunningReplica]) -> list[RunningReplica]:
        """Replicas with one fingerprint: others would give other tokens. A service keeps its
        fingerprint until no replica has it any more (a new model was deployed)."""
        prints = [replica.replica_metadata.get("fingerprint", "") for replica in replicas]
        if self._fingerprint not in prints and prints:
            self._fingerprint = prints[0]
        return [r for r, p in zip(replicas, prints, strict=True) if p == self._fingerprint]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        if "route" not in pending_request.kwargs:  # no request of a client
            return
        names = [replica.unique_id for replica in self.curr_replicas]
        self.decider.routed(route_of(pending_request), replica_id.unique_id, names)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = set(self.reports)
        self.reports = {r.replica_id.unique_id: r.routing_stats or {} for r in replicas}
        self.decider.prefixes.keep(self.reports)
        for name, report in self.reports.items():
            if (joined := report.get("hashes")) is not None:
                starts = range(0, len(joined), HASH_BYTES)
                self.decider.prefixes.report(name, {joined[i : i + HASH_BYTES] for i in starts})
        super().update_replicas(replicas)
        self._log_changes(before, set(self.reports))
        different = len(replicas) - len(self._same_model(replicas))
        if different:
            log.error(
                "%d replicas have another fingerprint than %s and get no requests: their tokens "
                "could differ; run one version on one kind of machine",
                different,
                self._fingerprint,
            )

    def _log_changes(self, before: set[str], now: set[str]) -> None:
        for name in sorted(now - before):
            log.info("replica %s is ready; replicas: %d", name, len(now))
        for name in sorted(before - now):
            log.warning("replica %s is gone; replicas: %d", name, len(now))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        if self.reports.pop(replica_id.unique_id, None) is not None:
            log.warning(
                "replica %s died; its running requests get an error; replicas: %d",
                replica_id.unique_id,
                len(self.reports),
            )
        self.decider.prefixes.keep(self.reports)


def route_of(pending_request: PendingRequest) -> Route:
    return pending_request.kwargs.get("route") or Route(output=0)
