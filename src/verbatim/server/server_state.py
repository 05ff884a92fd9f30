"""State shared by all request handlers: settings, supervisors, model names, admission, stored
answers."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

from verbatim.hub.hub_catalog import SYNONYMS
from verbatim.server.admission import Admission
from verbatim.server.http.api_keys import ApiKeys
from verbatim.server.http_metrics import Metrics
from verbatim.server.logs import AccessLog
from verbatim.server.model_pool import ModelPool, ServedModel
from verbatim.server.problem import Problem
from verbatim.server.process.messages import ModelFacts
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.settings import Settings
from verbatim.server.storage.answer_store import Store


class State:
    def __init__(
        self,
        settings: Settings,
        supervisor: Supervisor,
        clock: Callable[[], float] = time.monotonic,
        pool: ModelPool | None = None,
    ) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.supervisor = supervisor  # for the model that a request chose, else for the first one
        self.pool = pool  # None: one model
        self._known: ModelFacts | None = None  # facts of an earlier load, in a pool
        self.clock = clock  # seconds; the time base of every request deadline
        self.metrics = Metrics()
        most = settings.limits.max_store_bytes
        self.store = Store(settings.store_items, most, settings.state_dir)
        self.access: AccessLog | None = None
        self.started = int(time.time())
        self.keys = ApiKeys(settings.keys)
        self.admission = Admission(settings.limits, self.keys, clock)

    @property
    def facts(self) -> ModelFacts:
        """Facts about the model; they stay known while the engine restarts, and after the model was
        unloaded. Raises a 503 until the engine is ready for the first time."""
        facts = self.supervisor.facts or self._known
        if facts is None:
            why = "the model is still being loaded; try again shortly"
            raise Problem("unavailable", why, retry_after=2)
        return facts

    @property
    def max_json_values(self) -> int:
        """The configured limit, plus one value per token of a prompt given as token ids. Of several
        models, the largest context counts: the body is parsed before its model is known."""
        known = (self.facts_of(name) for name in self.names())
        longest = max((facts.context for facts in known if facts is not None), default=0)
        return self.limits.max_json_values + longest

    @property
    def open(self) -> int:
        return self.admission.open

    @property
    def ready(self) -> bool:
        """The server accepts requests. Of several models, the first was loaded once; another one is
        loaded by the request that names it."""
        if self.admission.draining.is_set():
            return False
        if self.pool is not None:
            return self.pool.first.supervisor.ready.is_set() or self.pool.first.facts is not None
        return self.supervisor.ready.is_set()

    def metrics_text(self) -> str:
        bodies, refused = len(self.admission.bodies), self.admission.refused
        return self.metrics.text(self.engines(), self.open, bodies, self.loaded(), refused)

    def names(self) -> tuple[str, ...]:
        """Names that requests may use as `model`: the model's, then those of its adapters.
        Of several models, their names, then those of their adapters."""
        if self.pool is not None:
            return (*self.pool.models, *self.pool.adapters)
        return (*self.settings.base_names, *self.settings.adapter_names)

    def adapter_of(self, name: str | None) -> str:
        """The LoRA adapter that a request's `model` names; empty: the base model."""
        plain = (name or "").removesuffix(":latest")
        adapters = self.settings.adapter_names
        return name if name in adapters and name else plain if plain in adapters else ""

    def engines(self) -> dict[str, Supervisor]:
        """Supervisors by model name."""
        if self.pool is None:
            return {self.names()[0]: self.supervisor}
        return {name: model.supervisor for name, model in self.pool.models.items()}

    def supervisor_of(self, name: str) -> Supervisor:
        """The supervisor of the model with this served name, or of the adapter's model."""
        if self.pool is None:
            return self.supervisor
        return self.pool.models[self.pool.adapters.get(name, name)].supervisor

    def loaded(self) -> dict[str, bool]:
        """Of several models: whether each has an engine, ready or starting. Empty for one model."""
        return {name: model.loaded for name, model in self.pool.models.items()} if self.pool else {}

    def facts_of(self, name: str) -> ModelFacts | None:
        """Facts about the model with this served name; None until it is loaded for the first
        time."""
        if self.pool is None:
            return self.supervisor.facts
        model = self.pool.models[self.pool.adapters.get(name, name)]
        return model.supervisor.facts or model.facts

    def for_model(self, model: ServedModel) -> State:
        """This state, as seen by a request for one of several models."""
        view = copy.copy(self)
        view.supervisor, view.settings = model.supervisor, model.settings
        view._known = model.facts
        return view

    def served_case(self, name: str) -> str:
        """The served name that equals `name` but for upper and lower case, as Ollama compares
        names; without one, `name` itself."""
        names, lower = self.names(), name.lower()
        plain = SYNONYMS.get(lower, lower).removesuffix(":latest")
        same = (served for served in names if served.lower() in (lower, plain))
        return name if name in names else next(same, name)

    def check_model(self, name: str | None) -> str:
        """The served name for a request's `model`; None: the first. A name is only looked up in the
        start-up table, never used as a path or an address."""
        names = self.names()
        if name is None:
            return names[0]
        # Ollama clients append :latest; smollm2:135m is a name of the catalog for smollm2
        plain = SYNONYMS.get(name, name).removesuffix(":latest")
        if name in names:
            return name
        if plain in names:
            return plain
        why = f"no such model here; /v1/models and /api/tags list them ({', '.join(names[:3])})"
        remedy = "`verbatim serve --served-model-name NAME` adds a name"
        raise Problem("model_not_found", f"model: {why}; {remedy}", "model")
