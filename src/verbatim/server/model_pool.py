"""ModelPool: the models of one server, each with its own engine process, loaded when asked for.

In: the name that a request gives. Out: a ServedModel whose engine is ready. When a model does not
fit beside those that are loaded, the least recently used ones are unloaded first; pinned models and
models with open requests stay. A model's answers depend neither on its neighbours nor on how often
it was loaded: every load gives an engine with the same fingerprint.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import Future
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from verbatim.base.config import SETTINGS
from verbatim.base.errors import ModelError, ParameterError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.units import size_text
from verbatim.engine.loading.load_check import can_use_gpu, check_load
from verbatim.schedule.sizing import available_memory, memory_limit
from verbatim.server.problem import Problem
from verbatim.server.process.ledger import Ledger
from verbatim.server.process.messages import ModelFacts
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.settings import NamedModel, Settings

log = logging.getLogger("verbatim.server")
# Memory that a model needs, as a multiple of its file: the weights, a small KV cache, the process.
ROOM = 1.25


class ServedModel:
    """One model of the server. `supervisor` belongs to its latest engine process."""

    def __init__(self, named: NamedModel, settings: Settings, make: Callable[[], Supervisor]):
        self.name = named.name
        self.pinned = named.pinned
        self.settings = settings
        self.supervisor = make()
        self.facts: ModelFacts | None = None  # also known while the model is not loaded
        self.loaded = False  # its engine process is starting or running
        self.users = 0  # requests that hold the model, or wait for it
        self.last_used = 0.0
        self._make = make

    def start(self) -> None:
        if self.supervisor.fatal.done() or self.supervisor.closed:
            earlier, self.supervisor = self.supervisor, self._make()
            self.supervisor.continue_counters(earlier)
        self.loaded = True
        self.supervisor.start()

    async def stop(self) -> None:
        self.facts = self.supervisor.facts or self.facts
        await self.supervisor.close()
        self.loaded = False


class ModelPool:
    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._max_loaded = settings.max_loaded_models
        self._idle_seconds = settings.model_idle_seconds
        self.ledger = Ledger()
        self.models: dict[str, ServedModel] = {}
        for named in settings.models:
            own = replace(
                settings,
                model=named.model,
                served_names=(named.name,),
                engine={**shared_settings(named, settings.engine), **named.engine},
                models=(),
            )
            self.models[named.name] = ServedModel(named, own, partial(self._supervisor, own))
        # adapter -> its model: a request may name an adapter as its model
        self.adapters: dict[str, str] = {}
        for name, model in self.models.items():
            for adapter in model.settings.adapter_names:
                if adapter in self.models or adapter in self.adapters:
                    why = f"two models or adapters have the name {adapter!r}; choose another"
                    raise ParameterError("adapters", why)
                self.adapters[adapter] = name
        self.first = next(iter(self.models.values()))
        self._changing = asyncio.Lock()  # one model starts or stops at a time
        self._dropping: set[Future[None]] = set()

    def _supervisor(self, settings: Settings) -> Supervisor:
        return Supervisor(settings, self._clock, self.ledger)

    @property
    def loaded(self) -> list[ServedModel]:
        return [model for model in self.models.values() if model.loaded]

    def start(self) -> None:
        """Load the first model and the pinned ones."""
        for model in self.models.values():
            if model is self.first or model.pinned:
                self._start(model)

    def _start(self, model: ServedModel) -> None:
        model.last_used = self._clock()
        model.start()
        # The server ends if the first load of the first model fails.
        if model is not self.first or model.facts is not None:
            model.supervisor.fatal.add_done_callback(partial(self._failed, model, model.supervisor))

    def _failed(self, model: ServedModel, supervisor: Supervisor, why: Future[str]) -> None:
        """A model that no request waits for, such as a pinned one, is not shown as loaded."""
        if not why.cancelled():
            task = asyncio.ensure_future(self._drop(model, supervisor))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop(self, model: ServedModel, supervisor: Supervisor) -> None:
        async with self._changing:
            if model.loaded and model.supervisor is supervisor:
                log.error("the model %r was not loaded: %s", model.name, supervisor.fatal.result())
                await model.stop()

    async def close(self) -> None:
        for model in self.loaded:
            await model.stop()

    # ------------------------------------------------------------------------------------- use

    async def hold(self, name: str, seconds: float) -> ServedModel:
        """The model with this name, loaded, and not unloaded before release(name)."""
        model = self.models[name]
        model.users += 1
        try:
            async with asyncio.timeout(seconds):
                await self._ready(model)
        except BaseException as error:
            self.release(name)
            if isinstance(error, TimeoutError):
                why = f"the model {name!r} was not loaded in time"
                raise Problem("timeout", why) from None
            raise
        return model

    def release(self, name: str) -> None:
        model = self.models[name]
        model.users -= 1
        model.last_used = self._clock()

    async def _ready(self, model: ServedModel) -> None:
        """Wait until the model's engine is ready; start it if it is not loaded. Raises a Problem if
        the load fails, and while a supervisor restarts the engine."""
        if model.loaded and model.supervisor.ready.is_set():
            return
        async with self._changing:
            if not model.loaded:
                await self._make_room(model)
                log.info("loading the model %r", model.name)
                self._start(model)
        supervisor = model.supervisor
        ready = asyncio.ensure_future(supervisor.ready.wait())
        ended = asyncio.ensure_future(supervisor.ended.wait())
        try:
            waits = (ready, ended, supervisor.fatal)
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            ended.cancel()
        if supervisor.fatal.done():
            await self._drop(model, supervisor)
            raise not_loaded(model)
        if not supervisor.ready.is_set():
            why = f"the engine of the model {model.name!r} is being restarted; try again shortly"
            raise Problem("unavailable", why, retry_after=2)
        model.facts = supervisor.facts

    async def _make_room(self, model: ServedModel) -> None:
        """Unload the least recently used models until this one may be loaded. None is unloaded for
        a model that cannot be loaded."""
        need, checked = int(file_bytes(model) * ROOM), False
        while self._too_many() or need > available_memory():
            idle = [m for m in self.loaded if not m.users and not m.pinned]
            if not idle and self._too_many():
                why = (
                    f"{len(self.loaded)} models are loaded and in use, which is this server's limit"
                )
                why += " (--max-loaded-models); try again shortly"
                raise Problem("unavailable", why, retry_after=2)
            if not idle:
                why = "the model %r needs about %s, and %s are available; no model can be unloaded"
                log.warning(why, model.name, size_text(need), size_text(available_memory()))
                return
            if not checked:
                checked = True
                await self._check(model)
                continue  # models may have been released meanwhile
            victim = min(idle, key=lambda m: m.last_used)
            log.info("unloading the model %r to make room for %r", victim.name, model.name)
            await victim.stop()

    async def _check(self, model: ServedModel) -> None:
        """Raise a Problem if the load must fail, whatever is unloaded: a missing or broken file,
        or one that is larger than the memory."""
        try:
            await asyncio.to_thread(check_served, model)
        except (ModelError, ParameterError, OSError) as error:
            log.error("the model %r was not loaded: %s", model.name, error)
            raise not_loaded(model) from None

    async def unload(self, name: str) -> bool:
        """Unload the model unless a request holds it or waits for it, or it is pinned. The caller
        does not hold it."""
        model = self.models[name]
        async with self._changing:
            if model.users or model.pinned:
                return False
            if model.loaded:
                log.info("unloading the model %r on request", model.name)
                await model.stop()
        return True

    def _too_many(self) -> bool:
        return bool(self._max_loaded) and len(self.loaded) >= self._max_loaded

    async def unload_idle(self) -> None:
        """Unload models that no request has used for model_idle_seconds. Runs for ever."""
        while self._idle_seconds:
            await asyncio.sleep(min(1.0, self._idle_seconds / 4))
            limit = self._clock() - self._idle_seconds
            for model in self.loaded:
                idle = not model.users and not model.pinned and model.last_used < limit
                supervisor = model.supervisor
                if idle and (supervisor.ready.is_set() or supervisor.ended.is_set()):
                    async with self._changing:
                        if model.loaded and not model.users:
                            log.info("unloading the idle model %r", model.name)
                            await model.stop()


def not_loaded(model: ServedModel) -> Problem:
    why = f"the model {model.name!r} could not be loaded; the server's log says why"
    return Problem("unavailable", why, retry_after=30)


def check_served(model: ServedModel) -> None:
    """Raise the error that the model's load must end with, if that can be told beforehand."""
    settings = model.settings
    if settings.test_engine:
        return
    check_load(
        settings.model, settings.engine, revision=settings.revision, offline=settings.offline
    )
    size, limit = file_bytes(model), memory_limit()
    quantised = settings.engine.get("quant")  # then it needs less memory than its file
    if size > limit and not quantised and not can_use_gpu(settings.engine):
        raise ModelError(f"its file has {size_text(size)}, and the memory {size_text(limit)}")


def shared_settings(named: NamedModel, engine: JsonMapping) -> JsonObject:
    """The settings for all models, without those that have no effect on this one, an encoder."""
    path = Path(named.model).expanduser()
    if not (engine and path.exists()):
        return dict(engine)
    from verbatim.encoder.encoder_load import check_encoder, encoder_type

    unused: list[str] = []
    try:
        if encoder_type(path) is not None:
            unused = [name for name in engine if not SETTINGS[name].encoders]
            spec = check_encoder(path)
            unused += ["pooling"] if spec.scores and "pooling" in engine else []
            unused += ["context"] if (engine.get("context") or 0) > spec.context else []
    except ModelError:  # loading it says why
        pass
    if unused:
        log.info("no effect on the encoder %r: %s", named.name, ", ".join(unused))
    return {name: value for name, value in engine.items() if name not in unused}


def file_bytes(model: ServedModel) -> int:
    """Size of the model's weight files; 0 where it is not known before the first load."""
    if model.facts is not None and model.facts.file.get("bytes"):
        return int(model.facts.file["bytes"])
    from verbatim.engine.loading.model_info import weight_files
    from verbatim.hub.model_list import find_record

    path = Path(model.settings.model).expanduser()
    if path.exists():
        try:
            return sum(file.stat().st_size for file in weight_files(path))
        except (ModelError, OSError):  # loading it says why
            return 0
    record = find_record(model.settings.model)
    return 0 if record is None else record.bytes
