"""Prometheus metrics of the HTTP process. /metrics appends the engine's text from its last
heartbeat.

Histograms have fixed bounds and nothing is stored per request, so memory does not grow with
traffic.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Mapping

import verbatim
from verbatim.base.records import Usage
from verbatim.observe.engine_metrics import Registry
from verbatim.observe.merge_metrics import add_counters, merge
from verbatim.server.process.supervisor import Supervisor

METRICS_TYPE = "text/plain; version=0.0.4"  # media type of Prometheus text


class Metrics:
    def __init__(self) -> None:
        r = self._registry = Registry()
        version, python = verbatim.__version__, platform.python_version()
        name, help = "verbatim_build_info", "1; versions as labels"
        r.number(name, help, version=version, python=python).value = 1
        name, help = "first_token_seconds", "arrival to first token, at the HTTP side"
        self.first_token = r.histogram(f"verbatim_http_{name}", help)
        name, help = "between_tokens_seconds", "time between pieces of a stream, at the HTTP side"
        self.between_tokens = r.histogram(f"verbatim_http_{name}", help)
        self.duration = r.histogram("verbatim_http_request_seconds", "arrival to last byte")

    def answered(self, route: str, status: int, tenant: str = "") -> None:
        name, help = "verbatim_http_answers_total", "HTTP answers by route and status"
        self._registry.number(name, help, route=route, status=str(status)).add()
        if tenant:
            name, help = "verbatim_key_answers_total", "HTTP answers by API key and status"
            self._registry.number(name, help, key=tenant, status=str(status)).add()

    def used(self, tenant: str, usage: Usage) -> None:
        name, help = "verbatim_key_tokens_total", "tokens of prompts and outputs by API key"
        for kind, count in ("prompt", usage.prompt_tokens), ("output", usage.output_tokens):
            self._registry.number(name, help, key=tenant, kind=kind).add(count)

    def text(
        self,
        engines: Mapping[str, Supervisor],
        open_requests: int,
        unfinished: int,
        loaded: Mapping[str, bool] | None = None,
        refused: int = 0,
    ) -> str:
        """Prometheus text. `open_requests`: requests admitted and not yet answered; `unfinished`:
        requests whose body is still arriving; `refused`: those that got a 429 in this process. Of
        several models, what an engine counts has a label `model`, and `loaded` says which have an
        engine: a model that is not loaded has no `verbatim_engine_up`, because it is not a fault.
        """
        ledger = next(iter(engines.values())).ledger  # one for all models

        def put(name: str, help: str, value: float, **labels: str) -> None:
            self._registry.number(f"verbatim_{name}", help, **labels).value = value

        put("http_open_requests", "requests admitted and not yet answered", open_requests)
        put("http_unfinished_bodies", "requests whose body is still arriving", unfinished)
        put("http_tasks", "asyncio tasks of the HTTP process", len(asyncio.all_tasks()))
        put("requests_opened_total", "requests sent to the engine", ledger.opened)
        put("requests_open", "requests in the engine process", ledger.running)
        for state, count in sorted(ledger.states.items()):
            put("requests_ended_total", "requests by how they ended", count, state=state)
        for kind, count in sorted(ledger.usage.items()):
            put("usage_tokens_total", "tokens reported to clients", count, kind=kind)
        for name, supervisor in engines.items():
            help, model = "heartbeats that brought the engine's metrics", model_label(engines, name)
            put("engine_reports_total", help, supervisor.reports, **model)
        for name, is_loaded in (loaded or {}).items():
            put("model_loaded", "1 for a model that is loaded", int(is_loaded), model=name)
        texts = {name: supervisor.metrics for name, supervisor in engines.items()}
        merged = merge("model", texts) if len(texts) > 1 else "".join(texts.values())
        here = Registry()  # the engine counts those that its own queue refused
        name, help = "verbatim_requests_refused_total", "requests refused because a queue was full"
        here.number(name, help).value = refused
        merged = add_counters(here.render(), merged)
        return self._registry.render() + engines_text(engines, loaded or {}) + merged


def model_label(engines: Mapping[str, Supervisor], name: str) -> dict[str, str]:
    return {"model": name} if len(engines) > 1 else {}


def engines_text(engines: Mapping[str, Supervisor], loaded: Mapping[str, bool]) -> str:
    """What the HTTP process knows about each engine. The labels name a replica or a model, if there
    are several; a registry of its own, because replicas come and go."""
    registry = Registry()
    states = [
        ({**labels, **model_label(engines, name)}, state)
        for name, supervisor in engines.items()
        if loaded.get(name, True)
        for labels, state in supervisor.engines()
    ]
    for labels, engine in states:
        waiting = "requests open with no sequence running (vllm:num_requests_waiting)"
        for name, help, value in (
            ("requests_waiting", waiting, engine.waiting),
            ("engine_restarts_total", "times the engine was started again", engine.restarts),
            ("engine_up", "1 when the engine is ready", int(engine.up)),
        ):
            registry.number(f"verbatim_{name}", help, **labels).value = value
    return registry.render() if states else ""
