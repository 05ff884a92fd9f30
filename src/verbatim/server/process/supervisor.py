"""Supervises the engine process from the HTTP process: starts it, sends requests, watches its
heartbeat, and restarts it when it dies.

Handlers call submit(message) and get a Running request, which receives the deltas and the result
from the engine's messages. When the engine dies or stops sending heartbeats, its running requests
fail; the HTTP process stays up and answers 503 until the next engine process is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from verbatim.base.json_io import JsonObject
from verbatim.observe.merge_metrics import add_counters
from verbatim.server.problem import Problem
from verbatim.server.process import messages, wire
from verbatim.server.process.ledger import Ledger
from verbatim.server.process.message_codec import decode_from_engine
from verbatim.server.process.running import Running, Signal
from verbatim.server.settings import Settings

log = logging.getLogger("verbatim.server")
CLOSE_SECONDS = 5.0  # from the Close message until the engine process is killed
MOST_CRASHES = 3  # engine processes in a row that crash before their first step
STABLE_SECONDS = 60.0  # an engine that ran this long resets the restart back-off


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine, as /metrics shows it."""

    waiting: int  # requests open with no sequence running
    restarts: int
    up: bool


class Supervisor:
    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self.ledger = Ledger() if ledger is None else ledger
        # Set from the first Ready on, also during a restart.
        self.facts: messages.ModelFacts | None = None
        self.stats: JsonObject = {}
        self.metrics = ""  # its counters include those of earlier engine processes
        self._earlier_metrics = ""
        self.reports = 0  # heartbeats with engine metrics, over all engine processes
        self.pid: int | None = None
        self.restarts = 0
        self.ready = asyncio.Event()
        # An engine process ended, or close() was called; until the next Ready.
        self.ended = asyncio.Event()
        self.found = asyncio.Event()  # the model exists: its file is read, or a download started
        # Resolved with an error text if the first engine process cannot load the model.
        self.fatal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._running: dict[str, Running] = {}
        self._outbox: wire.Outbox | None = None
        self._closing = asyncio.Event()
        self._crashes = 0
        self._last_beat = 0.0
        self._last_progress = (0.0, -1)
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    # ----------------------------------------------------------------------------------- requests

    @property
    def open_requests(self) -> int:
        return len(self._running)

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def engines(self) -> list[tuple[dict[str, str], EngineState]]:
        """The engines behind this HTTP process and the labels of each in /metrics: one, without
        labels."""
        running = int(self.stats.get("requests_running", 0))
        waiting = max(0, self.open_requests - running)
        return [({}, EngineState(waiting, self.restarts, self.ready.is_set()))]

    def continue_counters(self, earlier: Supervisor) -> None:
        """Count on from the counters of the model's supervisor before this one."""
        self.metrics = self._earlier_metrics = earlier.metrics
        self.reports, self.restarts = earlier.reports, earlier.restarts

    def submit(self, message: messages.Work, signal: Signal | None = None) -> Running:
        if not self.ready.is_set() or self._outbox is None:
            raise Problem("unavailable", "the engine is starting; try again shortly", retry_after=2)
        frame = wire.pack(message)  # may raise, so it comes before any bookkeeping
        running = self._open(message, signal)
        self._outbox.put_frame(frame)
        return running

    def _open(self, message: messages.Work, signal: Signal | None) -> Running:
        request_id, max_bytes = message.request_id, self.settings.limits.max_stream_bytes
        running = Running(request_id, message.tenant, self.abort, max_bytes, signal or Signal())
        self._running[request_id] = running
        self.ledger.open(request_id)
        return running

    def abort(self, running: Running) -> None:
        if running.id in self._running and self._outbox is not None:
            self._outbox.put(messages.Abort(running.id))

    def fail_all(self, problem: Problem) -> None:
        """End every open request with `problem` and abort it in the engine (end of a drain)."""
        for running in list(self._running.values()):
            running.fail(problem)
            self.abort(running)

    def wake_all(self) -> None:
        """Wake every handler, so that a silent stream can send a keep-alive."""
        for running in self._running.values():
            running.wake()

    # ---------------------------------------------------------------------- start, restart, close

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise())

    async def load_error(self) -> str:
        """Wait until the model is loaded. Returns why it cannot be; empty: it is."""
        ready = asyncio.ensure_future(self.ready.wait())
        await asyncio.wait((ready, self.fatal), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return self.fatal.result() if self.fatal.done() else ""

    async def close(self) -> None:
        was_ready = self.ready.is_set()
        self._closing.set()
        self.ready.clear()
        self.ended.set()
        if was_ready and self._outbox is not None:
            self._outbox.put(messages.Close())
            await self._outbox.drain()
        elif self._process is not None:  # it would read Close only after the load
            self._kill(self._process)
        if self._task is not None:
            _, late = await asyncio.wait((self._task,), timeout=CLOSE_SECONDS)
            if late and self._process is not None:
                log.error("the engine does not end; killing it")
                self._kill(self._process)
            await self._task

    @staticmethod
    def _kill(process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _supervise(self) -> None:
        wait = self.settings.backoff_seconds
        while not self._closing.is_set():
            started = self._clock()
            try:
                await self._run_engine()
            except Exception:
                log.exception("the supervisor failed; the engine is started again")
            self._earlier_metrics = self.metrics
            self.ended.set()
            self._fail_running()
            if self._closing.is_set() or self.fatal.done():
                return
            if self._clock() - started > STABLE_SECONDS:
                wait = self.settings.backoff_seconds
            log.warning("the engine ended; starting it again in %.1f s", wait)
            self.restarts += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), wait)
            wait = min(wait * 2, self.settings.backoff_limit)

    async def _run_engine(self) -> None:
        ours, theirs = socket.socketpair()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "verbatim.server.process.engine_process"),
            *(str(theirs.fileno()), self.settings.log_format),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            # Ctrl-C signals the terminal's process group. In its own group, an engine that is still
            # importing is not interrupted; the HTTP process decides when it ends. (uvloop has no
            # process_group.)
            start_new_session=True,
        )
        theirs.close()
        self.pid, self._process = process.pid, process
        if self._closing.is_set():  # close() found no process yet
            self._kill(process)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        self._outbox = wire.Outbox(writer)
        self._outbox.put(self._start_message())
        self._last_beat, self.stats = self._clock(), {}
        watchdog = asyncio.create_task(self._watch(process))
        try:
            while (message := await wire.read(reader, decode_from_engine)) is not None:
                self._handle(message)
                # Let the handlers write before the next of many buffered messages.
                await asyncio.sleep(0)
        finally:
            watchdog.cancel()
            self.ready.clear()
            self._outbox = None
            writer.close()
            await self._reap(process)

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the process to end after its socket closed; kill it if it does not."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), 5.0 if self._closing.is_set() else 1.0)
        if process.returncode is None:
            self._kill(process)
            await process.wait()
        self.pid = self._process = None
        if not self._closing.is_set() and not self.fatal.done():
            self._count_crash(process.returncode)
        level = logging.INFO if self._closing.is_set() else logging.ERROR
        if self.fatal.done():
            level = logging.DEBUG  # serve() and the model pool report why
        log.log(level, "the engine process ended with code %s", process.returncode)

    def _count_crash(self, code: int | None) -> None:
        """Give up where the first engine process crashes while it loads the model, or several in
        a row before they compute anything: a limit on the memory kills each at the same place."""
        served = self._running or self.stats.get("steps_total")
        self._crashes = 0 if served or code == messages.NOT_LOADED else self._crashes + 1
        if self._crashes >= (1 if self.facts is None else MOST_CRASHES):
            self.fatal.set_result(
                f"the engine process ended with code {code} before its first step (see its log "
                "above); if memory is short, try a smaller --kv-memory, --context or model"
            )

    def _fail_running(self) -> None:
        """Fail every running request and close it in the ledger (the engine process ended)."""
        why = "the engine ended while this request ran; it is being restarted"
        for running in self._running.values():
            running.fail(Problem("engine_died", why, retry_after=2))
            self.ledger.close(running.id, "engine_died")
        self._running.clear()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Watchdog: kill an engine that sends no heartbeats, or has work and makes no steps.
        Loading a model has no timeout."""
        limit = self.settings.engine_silence_seconds
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            if not self.ready.is_set():
                continue
            now = self._clock()
            steps = int(self.stats.get("steps_total", 0))
            busy = bool(self.stats.get("running") or self.stats.get("waiting"))
            if steps != self._last_progress[1] or not busy:
                self._last_progress = (now, steps)
            if now - self._last_beat > limit or now - self._last_progress[0] > limit:
                log.error("the engine is silent for %.0f s; killing it", limit)
                self._kill(process)
                return

    # ----------------------------------------------------------------------------------- messages

    def _start_message(self) -> messages.Start:
        """The settings of the engine process: nothing about the network, no keys."""
        settings = self.settings
        return messages.Start(
            model=settings.model,
            revision=settings.revision,
            offline=settings.offline,
            engine=dict(settings.engine),
            test_engine=settings.test_engine,
            served_name=settings.served_name,
            cache_share=settings.limits.max_cache_share,
            prefix_key=settings.prefix_key,
            verbose=settings.verbose,
        )

    def _handle(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Deltas(items=items):
                for delta in items:
                    if (running := self._running.get(delta.request_id)) is not None:
                        running.push(delta)
            case messages.Heartbeat():
                self._last_beat = self._clock()
                self.stats = message.stats
                if message.metrics is not None:
                    self.metrics = add_counters(self._earlier_metrics, message.metrics)
                    self.reports += 1
            case messages.Accepted():
                if message.request_id in self._running:
                    running = self._running[message.request_id]
                    running.accept(message.text, message.prompt_tokens)
            case messages.Refused():
                self._refused(message)
            case messages.Ready(facts=facts):
                self.facts = facts
                self.found.set()
                self._last_progress = (self._clock(), -1)
                if not self._closing.is_set():
                    self.ended.clear()
                    self.ready.set()
                text = "ready: %s, context %d, fingerprint %s"
                log.info(text, facts.name, facts.context, facts.fingerprint)
            case messages.Failed():
                if self.facts is not None:
                    log.error("the engine could not start again: %s", message.message)
                elif not self.fatal.done():
                    self.fatal.set_result(message.message)
            case messages.Loading():
                self.found.set()
            case _:
                self._finished(message)

    def _refused(self, message: messages.Refused) -> None:
        running = self._running.pop(message.request_id)
        running.fail(message.problem())
        client_error = running.problem is not None and running.problem.status < 500
        self.ledger.close(running.id, "refused" if client_error else "error")

    def _finished(self, result: messages.Result) -> None:
        running = self._running.pop(result.request_id)
        if not isinstance(result, messages.Generated):
            self.ledger.close(running.id, "done")
        else:
            code = running.problem.code if running.problem is not None else ""
            reason = result.choices[0].finish.reason if result.choices else "cancel"
            state = code if code in ("timeout", "slow_reader") else reason
            self.ledger.close(running.id, state, result.usage)
        running.finish(result)
