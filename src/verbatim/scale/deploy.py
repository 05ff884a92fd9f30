"""Deploys the replicas on Ray Serve.

`verbatim serve --ray`: the HTTP process of `verbatim serve` is the gateway, so sockets, TLS, limits
and drains are the same; Ray Serve's own HTTP proxy is not started. In a user's own Serve config the
gateway is a deployment too, behind Serve's proxy (application.py).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from dataclasses import replace
from typing import Any

from verbatim.base.errors import ModelError, ParameterError
from verbatim.base.json_io import JsonObject
from verbatim.diagnose.footprint import Footprint
from verbatim.scale.ray_options import RayOptions, require_ray
from verbatim.scale.ray_start import UNPROTECTED, cluster_nodes, connect
from verbatim.scale.replicas import ENGINES, check_files, footprint_of, replicas_application
from verbatim.scale.resources import state_needs
from verbatim.scale.routes.prompt_hashes import PromptHashes
from verbatim.scale.routes.routing import Route
from verbatim.scale.routes.snapshots import snapshot
from verbatim.scale.start_error import last_line, reason_in
from verbatim.server.logs import set_up_logs
from verbatim.server.process.engine_process import open_text
from verbatim.server.settings import Settings

log = logging.getLogger("verbatim.scale")
STATUS_SECONDS = 0.2  # interval at which the state of a deployment is read
DELETE_SECONDS = 10.0  # for the deletion of replicas, after their drain


def open_hashes(settings: Settings, footprint: Footprint | None) -> PromptHashes | None:
    if not settings.engine.get("prefix_cache", True) or not settings.engine.get("use_cache", True):
        return None
    model, revision, offline = settings.model, settings.revision, settings.offline
    text = open_text(model, revision=revision, offline=offline, test_engine=settings.test_engine)
    if footprint is None:
        return PromptHashes(*text, settings.prefix_key)
    cost = footprint.ops_token / max(footprint.prompt_ops_token, 1)
    return PromptHashes(*text, settings.prefix_key, cost)


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

    def run(self, frame: bytes, gateway: str, route: Route) -> object:
        return self.handle.options(stream=True).run.remote(frame, gateway, route=route)

    def listen(self, gateway: str, channel: str, replica: str) -> object:
        return self.handle.options(stream=True).listen.remote(gateway, channel, replica=replica)

    def progress(self) -> str:
        return ""

    def reports(self) -> dict[str, JsonObject]:
        return snapshot(self.application).reports

    def routing(self) -> dict[str, int]:
        now = snapshot(self.application)
        return {"requests": now.routed, "prefix_possible": now.possible, "prefix_found": now.found}

    def stop(self) -> None:
        pass


class OwnService(HandleService):
    """The replicas of `verbatim serve --ray`: deployed at the start and deleted at the end."""

    def __init__(self, settings: Settings, options: RayOptions) -> None:
        super().__init__(settings, f"verbatim-{settings.port or secrets.token_hex(4)}")
        self._options = options
        self._footprint = check_files(settings, options)
        self._started_ray = connect(options.address)
        nodes = cluster_nodes()
        self._needs = state_needs(self._footprint, settings.engine, nodes, options.replicas)
        self._deploying = threading.Lock()  # held while start() runs
        self._stopping = threading.Event()
        self._running = False
        log.info("each of %s replicas asks Ray for %s", options.replicas, self._needs)

    def start(self) -> PromptHashes | None:
        with self._deploying:
            self._deploy()
        return open_hashes(self.settings, self._footprint) if self._running else None

    def _deploy(self) -> None:
        """Returns when the replicas run, or after stop(). serve.run() would do neither: it does not
        end before the model is loaded, and its error does not contain the engine's."""
        from ray import serve

        serve.start(proxy_location="Disabled", logging_config=quiet_serve())
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        made = replicas_application(self.settings, self._needs, self._options)
        how = {"route_prefix": None, "logging_config": quiet_serve()}
        target = serve.RunTarget(made, name=self.application, **how)
        [self.handle] = serve.run_many([target], wait_for_applications_running=False)
        while not self._is_running():
            if self._stopping.wait(STATUS_SECONDS):
                return
        self._running = True
        # A replica's environment is that of its node; ours says only what this process sends.
        if not self.handle.has_token_authentication.remote().result():
            log.warning(UNPROTECTED)

    def _is_running(self) -> bool:
        """False: the replicas are still being started. Raises if one could not start."""
        app = self._status()
        report = "\n".join(d.message for d in app.deployments.values()) if app else ""
        if reason := reason_in(report):
            raise ModelError(reason)
        if app and app.status == "DEPLOY_FAILED":
            raise ModelError(f"the replicas did not start: {app.message} {last_line(report)}")
        return bool(app) and app.status == "RUNNING"

    def _status(self) -> Any:
        from ray import serve

        return serve.status().applications.get(self.application)

    def progress(self) -> str:
        """The states of the replicas, such as `1 running, 2 starting`."""
        app = self._status()
        states = app.deployments[ENGINES].replica_states if app and app.deployments else {}
        return ", ".join(f"{count} {state.lower()}" for state, count in states.items() if count)

    def stop(self) -> None:
        import ray
        from ray import serve

        log.info("deleting the replicas")
        self._stopping.set()
        with self._deploying:  # start() has left Ray
            if self._running or not self._started_ray:
                deleting = threading.Thread(target=self._delete, daemon=True)
                deleting.start()
                # The cluster goes on alone if a replica loads its model until later. A cluster that
                # is gone does not answer at all.
                drain = self.settings.drain_seconds if self._running else 0.0
                deleting.join(drain + DELETE_SECONDS)
        if self._started_ray:
            if self._running:
                with contextlib.suppress(Exception):
                    serve.shutdown()
            ray.shutdown()

    def _delete(self) -> None:
        from ray import serve

        with contextlib.suppress(Exception):  # a cluster that is gone has no replicas
            serve.delete(self.application)


def quiet_serve() -> object:
    """Ray Serve's own log: failures only. The gateway logs requests and replicas."""
    from ray.serve.schema import LoggingConfig

    return LoggingConfig(log_level="WARNING", enable_access_log=False)


def serve_on_ray(settings: Settings, options: RayOptions) -> int:
    """`verbatim serve --ray`: runs until SIGTERM or Ctrl-C; returns the exit code."""
    from verbatim.scale.cluster import Cluster
    from verbatim.server.http_process import bind, check_certificate, run

    if settings.models:
        raise ParameterError(
            "ray",
            "replicas run one model: --model NAME=MODEL, --pin and --model-setting are for a "
            "server without --ray; start one server with --ray per model, with "
            "--served-model-name NAME",
        )
    require_ray()
    set_up_logs(settings)
    check_certificate(settings)
    for sock in bind(settings):
        sock.close()  # a port in use fails before Ray starts
    settings = replace(settings, prefix_key=secrets.token_bytes(32))
    service = OwnService(settings, options)
    return run(settings, lambda s, clock: Cluster(s, clock, service=service))
