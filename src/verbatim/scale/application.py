"""deployment(): replicas and their gateway as an application for a user's own Ray Serve config."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

from verbatim.base.config import served
from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonMapping
from verbatim.scale.ray_options import RayOptions, parse_replicas, require_ray
from verbatim.server.settings import Limits, Settings


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
) -> object:
    """An application for Ray Serve: a gateway with every route of `verbatim serve`, and replicas.

        app = verbatim.scale.deployment("smollm2", replicas="2-8", context=4096)
        serve.run(app)

    replicas: a number, or MIN-MAX for autoscaling
    keys: API keys of clients. None: those of VERBATIM_API_KEY, which must then exist. Pass () only
        if Serve's proxy listens on loopback.
    target_requests: open requests per replica that autoscaling aims at
    engine: the settings of LLM (context, threads, kv_memory, ...); the defaults are those of
        `verbatim serve`
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
        engine=served(engine),
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


def build(args: JsonMapping) -> object:
    """The application builder for a Serve config file; `args` are those of deployment().

    import_path: verbatim.scale.application:build
    args: {model: smollm2, replicas: 2-8, threads: 4}
    """
    return deployment(**args)
