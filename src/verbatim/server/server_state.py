"""What all handlers share: settings, the supervisor, the model names, who may come in, how many are in, what is stored.

In: a request id and its tenant. Out: an admission (a context manager) or a 429 or 503, decided at once and without asking the engine.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

from verbatim.server.answer_store import Store
from verbatim.server.api.api_errors import Problem
from verbatim.server.http_metrics import Metrics
from verbatim.server.logs import AccessLog
from verbatim.server.process.messages import ModelFacts
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.settings import Settings

MAX_ROWS = 4  # requests at once whose explanations hold rows of logits: each is up to 64 rows, 17 MB where there are 49,152 ids, in three places


class State:
    def __init__(
        self,
        settings: Settings,
        supervisor: Supervisor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.supervisor = supervisor
        self.clock = clock  # seconds; every deadline of a request is read from it
        self.metrics = Metrics()
        self.store = Store(settings.store_items, settings.limits.max_store_bytes)
        self.access: AccessLog | None = None
        self.started = int(time.time())
        self.draining = False
        self.open = 0
        self._with_rows = 0
        self._per_tenant: Counter[str] = Counter()

    @property
    def facts(self) -> ModelFacts:
        """Facts about the model; they stay known while the engine restarts. Raises a 503 until the
        engine is ready for the first time."""
        if self.supervisor.facts is None:
            raise Problem(
                "unavailable", "the model is still being loaded; try again shortly", retry_after=2
            )
        return self.supervisor.facts

    @property
    def max_json_values(self) -> int:
        """The limit, and room for a prompt of token ids."""
        facts = self.supervisor.facts
        return self.limits.max_json_values + (0 if facts is None else facts.context)

    def names(self) -> tuple[str, ...]:
        return self.settings.served_names or (self.settings.model,)

    def check_model(self, name: str | None) -> str:
        """Names are keys of a start-up table, never paths or addresses. None: the first of them."""
        names = self.names()
        if name is None:
            return names[0]
        plain = name.removesuffix(":latest")  # Ollama's clients add it
        if name in names:
            return name
        if plain in names:
            return plain
        raise Problem(
            "model_not_found",
            f"model: no such model here; /v1/models lists them ({', '.join(names[:3])})",
            "model",
        )

    def no_room(self, tenant: str) -> Problem | None:
        """Why one more request of this tenant is not taken now, if so. Asked at the door, before anything of the request is looked at."""
        if self.draining:
            return Problem("unavailable", "the server is shutting down", retry_after=30)
        if self.open >= self.limits.max_queue:
            return Problem(
                "overloaded",
                f"{self.open} requests are open, which is this server's limit",
                retry_after=1,
            )
        if self.limits.max_per_key and self._per_tenant[tenant] >= self.limits.max_per_key:
            mine = self._per_tenant[tenant]
            return Problem(
                "key_overloaded",
                f"this key has {mine} requests open, which is its limit",
                retry_after=1,
            )
        return None

    @contextlib.contextmanager
    def admit_rows(self) -> Iterator[None]:
        if self._with_rows >= MAX_ROWS:
            why = f"{self._with_rows} requests with rows are open, which is this server's limit"
            raise Problem("overloaded", f"explain_rows: {why}", "explain_rows", retry_after=1)
        self._with_rows += 1
        try:
            yield
        finally:
            self._with_rows -= 1

    @contextlib.contextmanager
    def admit(self, tenant: str) -> Iterator[None]:
        """Room for one more request, for as long as it lasts."""
        problem = self.no_room(tenant)
        if problem is not None:
            raise problem
        self.open += 1
        self._per_tenant[tenant] += 1
        try:
            yield
        finally:
            self.open -= 1
            self._per_tenant[tenant] -= 1
            if not self._per_tenant[tenant]:
                del self._per_tenant[tenant]
