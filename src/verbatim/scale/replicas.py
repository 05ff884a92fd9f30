"""The replicas as a Serve application, and what is read of their model before Ray starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verbatim.base.config import split_adapter
from verbatim.diagnose.footprint import Footprint, read_footprint
from verbatim.scale.autoscale import policy
from verbatim.scale.ray_options import LOCAL, RayOptions
from verbatim.scale.resources import ReplicaNeeds
from verbatim.scale.routes.routing import REPORT_SECONDS
from verbatim.server.settings import Settings

ENGINES = "engine"  # name of the deployment of the replicas
# Requests wait in the engines' fair queues, never in front of a replica: there a queue would be
# first-in-first-out over all tenants.
MAX_ONGOING = 1 << 16


def footprint_of(settings: Settings) -> Footprint | None:
    """None: a fake engine of the tests."""
    if settings.test_engine:
        return None
    from verbatim.hub.catalog import resolve

    engine = settings.engine
    return read_footprint(
        settings.model,
        quant=engine.get("quant"),
        kv_type=engine.get("kv_type", "f16"),
        resolve=lambda name: resolve(name, revision=settings.revision, offline=settings.offline),
    )


def check_files(settings: Settings, options: RayOptions) -> Footprint | None:
    """Read the header of the model, and of the adapters if the replicas run on this machine: a
    missing or broken file is an error before Ray starts."""
    footprint = footprint_of(settings)
    if footprint is not None and options.address == LOCAL:
        from verbatim.lora.adapter_file import read_adapter

        for entry in settings.engine.get("adapters", ()):
            read_adapter(split_adapter(entry)[1])
    return footprint


def replica_settings(settings: Settings, needs: ReplicaNeeds) -> Settings:
    """A replica knows no keys and no addresses; it queues what the gateway admits."""
    own = replace(settings, engine={**settings.engine, **needs.settings}, host="127.0.0.1", keys=())
    return replace(own, tls_cert=None, tls_key=None, store_items=0, state_dir=None)


def replicas_application(settings: Settings, needs: ReplicaNeeds, options: RayOptions) -> object:
    """The Serve application of the replicas alone."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from verbatim.scale.replica import Replica

    replicas = options.replicas
    scaling: dict[str, object] = {"num_replicas": replicas.most}
    if not replicas.fixed:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=replicas.least,
                max_replicas=replicas.most,
                target_ongoing_requests=options.target_requests,
                upscale_delay_s=options.upscale_seconds,
                downscale_delay_s=options.downscale_seconds,
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
            request_router_class="verbatim.scale.routes.router.PrefixRouter",
            request_routing_stats_period_s=REPORT_SECONDS,
        ),
        **scaling,
    )
    return made.bind(replica_settings(settings, needs), bool(needs.gpus))
