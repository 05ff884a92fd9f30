"""Deploys the replicas on Ray Serve, for `verbatim serve --ray` and for a user's own Serve config.

`verbatim serve --ray`: the HTTP process of `verbatim serve` is the gateway, so sockets, TLS, limits
and drains are the same; Ray Serve's own HTTP proxy is not started. `deployment(...)`: the gateway
is a deployment of its own behind Ray Serve's proxy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verbatim.base.errors import BackendError, ParameterError
from verbatim.diagnose.footprint import Footprint, read_footprint
from verbatim.scale.autoscale import policy
from verbatim.scale.options import LOCAL, RayOptions, parse_replicas, require_ray
from verbatim.scale.prompt_hashes import PromptHashes
from verbatim.scale.resources import Node, ReplicaNeeds, state_needs
from verbatim.scale.routing import REPORT_SECONDS, Route
from verbatim.server.process.engine_process import open_text
from verbatim.server.settings import Limits, Settings

log = logging.getLogger("verbatim.scale")
ENGINES = "engine"  # name of the deployment of the replicas
# Requests wait in the engines' fair queues, never in front of a replica: there a queue would be
# first-in-first-out over all tenants.
MAX_ONGOING = 1 << 16


def connect(address: str) -> bool:
    """Connect to a running cluster, or start one on loopback. True: it was started here."""
    require_ray()
    import ray

    if ray.is_initialized():
        return False
    if address != LOCAL:
        try:
            ray.init(address=address, namespace="serve", logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).strip().partition("\n")[0]
            raise BackendError(f"no Ray cluster at {address}: {first}") from None
        return False
    # Ray reports usage to its makers unless told otherwise.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        _node_ip_address="127.0.0.1",  # every port of Ray listens on loopback
        logging_level=logging.WARNING,
    )
    return True


def cluster_nodes() -> list[Node]:
    import ray

    return [
        Node(
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
            int(node["Resources"].get("memory", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def footprint_of(settings: Settings) -> Footprint | None:
    """None: a fake engine of the tests."""
    if settings.test_engine:
        return None
    from verbatim.weights.catalog import resolve

    engine = settings.engine
    return read_footprint(
        settings.model,
        quant=engine.get("quant"),
        kv_type=engine.get("kv_type", "f16"),
        resolve=lambda name: resolve(name, revision=settings.revision, offline=settings.offline),
    )


def replica_settings(settings: Settings, needs: ReplicaNeeds) -> Settings:
    """A replica knows no keys and no addresses; it queues what the gateway admits."""
    return replace(
        settings,
        engine={**settings.engine, **needs.settings},
        host="127.0.0.1",
        keys=(),
        tls_cert=None,
        tls_key=None,
        store_items=0,
    )


def replicas_application(settings: Settings, needs: ReplicaNeeds, options: RayOptions) -> Any:
    """The Serve application of the replicas alone."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from verbatim.scale.replica import Replica

    replicas = options.replicas
    scaling: dict[str, Any] = {"num_replicas": replicas.most}
    if not replicas.fixed:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=replicas.least,
                max_replicas=replicas.most,
                target_ongoing_requests=options.target_requests,
                policy=AutoscalingPolicy(policy_function=policy),
            )
        }
    made: Any = serve.deployment(Replica).options(
        name=ENGINES,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options=needs.actor_options(),
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        # From a scale-down until a stream that still runs gets an error event.
        graceful_shutdown_timeout_s=max(settings.drain_seconds, 0.1),
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=3,
        request_router_config=RequestRouterConfig(
            request_router_class="verbatim.scale.router.PrefixRouter",
            request_routing_stats_period_s=REPORT_SECONDS,
        ),
        **scaling,
    )
    return made.bind(replica_settings(settings, needs), bool(needs.gpus))


def open_hashes(settings: Settings, footprint: Footprint | None) -> PromptHashes | None:
    if not settings.engine.get("prefix_cache", True) or not settings.engine.get("use_cache", True):
        return None
    tokenizer, template = open_text(
        settings.model,
        revision=settings.revision,
        offline=settings.offline,
        test_engine=settings.test_engine,
    )
    if footprint is None:
        return PromptHashes(tokenizer, template, settings.prefix_key)
    cost = footprint.ops_token / max(footprint.prompt_ops_token, 1)
    return PromptHashes(tokenizer, template, settings.prefix_key, cost)


class HandleService:
    """The replicas behind a DeploymentHandle of Ray Serve."""

    def __init__(self, settings: Settings, application: str) -> None:
        self.settings = settings
        self.application = application
        self.handle: Any = None

    def start(self) -> PromptHashes | None:
        return open_hashes(self.settings, footprint_of(self.settings))

    async def facts(self) -> bytes:
        frame: bytes = await self.handle.facts.remote()
        return frame

    def run(self, frame: bytes, route: Route) -> Any:
        return self.handle.options(stream=True).run.remote(frame, route=route)

    def reports(self) -> dict[str, dict[str, Any]]:
        from verbatim.scale.router import snapshot

        return snapshot(self.application).reports

    def routing(self) -> dict[str, int]:
        from verbatim.scale.router import snapshot

        now = snapshot(self.application)
        return {"routed": now.routed, "possible": now.possible, "found": now.found}

    def stop(self) -> None:
        pass


class OwnService(HandleService):
    """The replicas of `verbatim serve --ray`: deployed at the start and deleted at the end."""

    def __init__(self, settings: Settings, options: RayOptions) -> None:
        super().__init__(settings, f"verbatim-{settings.port or secrets.token_hex(4)}")
        self._options = options
        self._started_ray = False
        self._deployed = False

    def start(self) -> PromptHashes | None:
        from ray import serve

        self._started_ray = connect(self._options.address)
        quiet_ray()
        footprint = footprint_of(self.settings)
        needs = state_needs(
            footprint, self.settings.engine, cluster_nodes(), self._options.replicas
        )
        log.info("each of %s replicas asks Ray for %s", self._options.replicas, needs)
        serve.start(proxy_location="Disabled")
        self._deployed = True
        self.handle = serve.run(
            replicas_application(self.settings, needs, self._options),
            name=self.application,
            route_prefix=None,
        )
        return open_hashes(self.settings, footprint)

    def stop(self) -> None:
        import ray
        from ray import serve

        if self._deployed:
            log.info("deleting the replicas")
            with contextlib.suppress(Exception):  # a cluster that is gone has no replicas
                serve.delete(self.application)
        if self._started_ray:
            with contextlib.suppress(Exception):
                serve.shutdown()
            ray.shutdown()


def quiet_ray() -> None:
    """Ray Serve logs each deployment step to the terminal; this process says it in one line."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def serve_on_ray(settings: Settings, options: RayOptions) -> int:
    """`verbatim serve --ray`: runs until SIGTERM or Ctrl-C; returns the exit code."""
    from verbatim.scale.cluster import Cluster
    from verbatim.server.http_process import run

    require_ray()
    settings = replace(settings, prefix_key=secrets.token_bytes(32))
    service = OwnService(settings, options)
    return run(settings, lambda s, clock: Cluster(s, clock, service=service))


def deployment(
    model: str = "smollm2",
    *,
    replicas: str | int = 1,
    keys: Sequence[str] | None = None,
    served_names: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    target_requests: int = 16,
    limits: Limits | None = None,
    drain_seconds: float = 30.0,
    test_engine: str = "",
    **engine: Any,
) -> Any:
    """An application for Ray Serve: a gateway with every route of `verbatim serve`, and replicas.

        app = verbatim.scale.deployment("smollm2", replicas="2-8", context=4096)
        serve.run(app)

    replicas: a number, or MIN-MAX for autoscaling
    keys: API keys of clients. None: those of VERBATIM_API_KEY, which must then exist. Pass () only
        if Serve's proxy listens on loopback.
    target_requests: open requests per replica that autoscaling aims at
    engine: the settings of LLM (context, threads, kv_memory, ...)
    """
    require_ray()
    if keys is None:
        keys = os.environ.get("VERBATIM_API_KEY", "").split()
        if not keys:
            raise ParameterError(
                "keys",
                "Ray Serve may listen beyond this machine: set VERBATIM_API_KEY or pass keys; pass "
                "keys=() if its proxy listens on loopback only",
            )
    settings = Settings(
        model=model,
        served_names=tuple(served_names),
        engine=engine,
        keys=tuple(keys),
        allowed_hosts=tuple(allowed_hosts),
        limits=limits or Limits(),
        drain_seconds=drain_seconds,
        test_engine=test_engine,
        prefix_key=secrets.token_bytes(32),
    )
    from verbatim.scale.gateway import gateway_application

    return gateway_application(
        settings, RayOptions("auto", parse_replicas(replicas), target_requests)
    )
