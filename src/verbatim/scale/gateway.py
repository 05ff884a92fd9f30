"""The gateway as a deployment of Ray Serve: our ASGI application behind Serve's HTTP proxy."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve

from verbatim.scale.cluster import Cluster
from verbatim.scale.deploy import HandleService
from verbatim.scale.ray_options import RayOptions
from verbatim.scale.ray_start import cluster_nodes, connect
from verbatim.scale.replicas import footprint_of, replicas_application
from verbatim.scale.resources import state_needs
from verbatim.server.app import make_app
from verbatim.server.http_process import send_keepalives
from verbatim.server.logs import AccessLog, set_up_logs
from verbatim.server.server_state import State
from verbatim.server.settings import Settings

log = logging.getLogger("verbatim.scale")
_app: Any = None  # the application of this process's gateway


def _build() -> object:
    """Serve calls this after the constructor."""
    return _app


@serve.ingress(_build)
class Gateway:
    async def __init__(self, settings: Settings, replicas: object) -> None:  # type: ignore[misc]
        global _app
        set_up_logs(settings)
        service = HandleService(settings, serve.get_replica_context().app_name)
        service.handle = replicas
        self._cluster = Cluster(settings, service=service)
        self._state = State(settings, self._cluster)
        self._state.access = AccessLog(settings.log_format)
        self._cluster.start()
        if why := await self._cluster.load_error():
            raise RuntimeError(why)
        self._keepalives = asyncio.create_task(send_keepalives(self._state))
        _app = make_app(self._state)


def gateway_application(settings: Settings, options: RayOptions) -> object:
    """The gateway bound to its replicas. Checks first that the cluster has room for them."""
    connect(options.address)
    needs = state_needs(footprint_of(settings), settings.engine, cluster_nodes(), options.replicas)
    log.info("each of %s replicas asks Ray for %s", options.replicas, needs)
    engines = replicas_application(settings, needs, options)
    made: Any = serve.deployment(Gateway).options(
        name="gateway",
        num_replicas=1,  # limits and stored answers are the gateway's: one counts for all
        max_ongoing_requests=settings.limits.max_connections,
        ray_actor_options={"num_cpus": 1},
        graceful_shutdown_timeout_s=max(settings.drain_seconds, 0.1),
    )
    return made.bind(settings, engines)
