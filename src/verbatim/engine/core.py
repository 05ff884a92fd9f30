"""EngineCore: requests come in, Deltas and Completions go out.

The main loop is step(): plan, execute, commit. Grammars, drafting, metrics and checks attach before
and after those three calls. A step decides no token by itself: the scheduler plans integers, the
backend computes and draws, the scheduler commits.

Not thread-safe, except for request(): LLM calls the core under a lock, AsyncEngine from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from typing import Any

from verbatim.base.config import EngineConfig
from verbatim.base.errors import OverloadedError, ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, Finish, StepPlan, StepResult, TokenEvent
from verbatim.engine.beam_request import request_class
from verbatim.engine.drafting import Drafting
from verbatim.engine.embed_input import EmbedInput
from verbatim.engine.engine_setup import (
    fingerprint_of,
    make_scheduler,
    open_disk_cache,
    size_cache,
)
from verbatim.engine.grammar_steps import GrammarSteps
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.request import Request, make_request
from verbatim.engine.running_request import Output, RunningRequest
from verbatim.observe.engine_metrics import EngineMetrics
from verbatim.observe.step_log import StepLog, StepPart
from verbatim.schedule.invariants import check_scheduler


class EngineCore:
    def __init__(self, parts: LoadedModel, config: EngineConfig) -> None:
        self.parts = parts
        self.config = config
        self.backend = parts.backend
        self.cache_plan = size_cache(parts, config)
        self.context = self.cache_plan.context
        self.backend.allocate(self.cache_plan.blocks)
        self.disk_cache = open_disk_cache(parts, config)
        self.scheduler = make_scheduler(parts, config, self.cache_plan, self.disk_cache)
        self.fingerprint = fingerprint_of(parts)
        # by number of the adapter; -1: the base model
        self.fingerprints = {
            number: fingerprint_of(parts, number) for number in range(-1, len(parts.adapters))
        }
        self.metrics = EngineMetrics()
        self.step_log = StepLog()
        self.drafting = Drafting(parts, config, self.scheduler)
        self.requests: dict[str, RunningRequest] = {}  # by request id, waiting ones included
        self._by_seq: dict[int, RunningRequest] = {}
        self._grammars = GrammarSteps(self.requests, self._by_seq, self._flush)
        self._ids = count()
        self._ready: list[Output] = []  # outputs produced outside commit: aborts, grammar errors
        self._closed = False

    # ------------------------------------------------------------------------------ requests

    def request(
        self,
        prompt: str | Seq[int] | EmbedInput,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
        hidden: bool = False,
        deadline: float | None = None,
    ) -> Request:
        """Tokenise and validate a request. Safe to call from any thread.

        `deadline` bounds the grammar compile, on the clock of time.monotonic."""
        named: dict[str, Any] = {"request_id": request_id, "tenant": tenant, "hidden": hidden}
        named["defaults"] = self.config.defaults
        timing: dict[str, Any] = {"engine_busy": lambda: self.busy, "deadline": deadline}
        return make_request(self.parts, self.context, prompt, params, **named, **timing)

    def add(self, request: Request, *, queued: bool = False) -> None:
        """Queue a request, or raise CapacityError or OverloadedError.

        `queued`: the caller has already reserved a place in the queue."""
        if request.id in self.requests:
            raise ParameterError("request_id", f"{request.id!r} is already running")
        if self.full and not queued:
            self.metrics.refused.add()
            waiting = len(self.scheduler.waiting)
            raise OverloadedError(
                f"{waiting} requests are waiting, and the queue holds {self.config.max_waiting}"
                "; send it again later, or raise max_waiting"
            )
        self.check_fits(request)
        running = self._running(request)
        self.scheduler.add(running.open(self._new_id))
        self.requests[request.id] = running
        self._grammars.add(running)
        self._by_seq.update(dict.fromkeys(running.ids, running))
        self.metrics.requests.add()

    @property
    def full(self) -> bool:
        return len(self.scheduler.waiting) >= self.config.max_waiting

    def check_fits(self, request: Request) -> None:
        """Reject a request that this engine can never run, before any of it starts."""
        self.drafting.check(request.params)
        self.scheduler.check_capacity(self._running(request).sequence(-1, 0))

    def _running(self, request: Request) -> RunningRequest:
        ends = {token: str(token) for token in request.params.stop_token_ids}
        if not request.params.ignore_eos:
            ends |= dict.fromkeys(self.parts.eos_ids, "eos")
        kind = request_class(request.params)
        return kind(request, self.parts.tokenizer, self.scheduler, ends, self.context)

    def _new_id(self) -> int:
        return next(self._ids)

    def abort(self, request_id: str, finish: Finish | None = None) -> bool:
        """End a request. Frees its blocks now; the next step() returns its Completion."""
        running = self.requests.get(request_id)
        if running is None:
            return False
        running.end(finish or Finish("cancel"))
        self._flush(running)
        return True

    @property
    def busy(self) -> bool:
        return bool(self.requests or self._ready)

    # ---------------------------------------------------------------------------------- step

    def step(self) -> list[Output]:
        """Run one step of all scheduled sequences. Returns [] and stays not busy when idle."""
        started = time.perf_counter()
        self._before_plan()
        plan = self._runnable(self.scheduler.plan())
        if plan is None:
            return self._take_ready()
        planned = time.perf_counter()
        result = self._execute(plan)
        executed = time.perf_counter()
        self._before_commit(plan, result, planned)
        events = self.scheduler.commit(plan, result, self._read)
        self._after_commit(plan, started, planned, executed)
        if self.step_log.watched:
            self._log_step(plan, events, started, executed)
        return self._outputs(events)

    def _before_plan(self) -> None:
        self._grammars.resume()
        self.drafting.propose(self._by_seq)

    def _runnable(self, plan: StepPlan | None) -> StepPlan | None:
        """Add grammar masks to the plan. None: there is nothing to execute."""
        if plan is None:
            self._grammars.wait()
            return None
        try:
            plan = self._grammars.add_masks(plan)
        except BaseException:
            self.scheduler.preempt_all()
            raise
        return plan if plan.sequences else None

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            return self.backend.execute(plan)
        except BaseException:  # Ctrl-C too: the KV cache may be partly written, so discard it
            self.scheduler.preempt_all()
            raise

    def _before_commit(self, plan: StepPlan, result: StepResult, planned: float) -> None:
        """Start the draft head on the new states; store start times, scores, hidden states."""
        self.drafting.observe(plan, result)
        for step, done in zip(plan.sequences, result.sequences, strict=True):
            running = self._by_seq[step.seq_id]
            if running.started_at is None:
                running.started_at = planned
            for position, scored in enumerate(done.scored, step.start + 1):
                running.scored[position] = scored
            if done.hidden is not None:
                running.hidden.add(step.start, done.hidden)

    def _after_commit(
        self, plan: StepPlan, started: float, planned: float, executed: float
    ) -> None:
        if self.config.check:
            self.check()
        self.drafting.learn(plan, executed - planned)
        self.metrics.step(plan, started, planned, executed)

    def _log_step(
        self, plan: StepPlan, events: Seq[TokenEvent], started: float, executed: float
    ) -> None:
        """Record the step for the Lens. Only while a page watches: a record of 256 sequences takes
        about 0.1 ms."""
        drawn: dict[int, int] = {}
        for event in events:
            drawn[event.seq_id] = drawn.get(event.seq_id, 0) + (event.drawn is not None)
        parts = []
        for step in plan.sequences:
            running = self._by_seq[step.seq_id]
            request = running.request
            source = self.drafting.source(step.seq_id, request.params) if step.draws > 1 else ""
            parts.append(
                StepPart(
                    request.id,
                    request.tenant,
                    step.start,
                    len(step.tokens),
                    step.draws,
                    drawn.get(step.seq_id, 0),
                    source,
                    request.arrival,
                    running.preemptions,
                )
            )
        self.step_log.add(started, executed, tuple(parts))

    def _read(self, event: TokenEvent) -> bool:
        """Pass a token event to its request. True: the sequence ends with this token."""
        running = self._by_seq[event.seq_id]
        if running.first_token_at is None and event.drawn is not None:
            running.first_token_at = time.perf_counter()
        before = len(running.ids)
        ends = running.push(event)
        if len(running.ids) > before:  # beam search forks sequences inside push()
            self._by_seq.update(dict.fromkeys(running.ids[before:], running))
        return ends

    # ------------------------------------------------------------------------------- outputs

    def _outputs(self, events: Seq[TokenEvent]) -> list[Output]:
        """Outputs of the requests that the step advanced, one Delta per choice at most."""
        advanced = dict.fromkeys(self._by_seq[event.seq_id] for event in events)
        for running in advanced:
            self._flush(running)
        return self._take_ready()

    def _flush(self, running: RunningRequest) -> None:
        """Queue a request's new Deltas, and its Completion once all choices are finished."""
        self._ready += running.deltas()
        if running.done and running.request.id in self.requests:
            self._ready.append(self._complete(running))

    def _take_ready(self) -> list[Output]:
        ready, self._ready = self._ready, []
        return ready

    def _complete(self, running: RunningRequest) -> Completion:
        request = running.request
        saved = sum(self.drafting.finish(seq, request.tenant) for seq in running.sequences)
        fingerprint = self.fingerprints[request.adapter]
        completion = running.completion(fingerprint, saved)
        if request.params.receipt:
            completion = replace(completion, receipt=self._receipt(request, completion))
        del self.requests[request.id]
        self._grammars.remove(running)
        for seq_id in running.ids:
            del self._by_seq[seq_id]
        self.metrics.completed(completion)
        return completion

    def _receipt(self, request: Request, completion: Completion) -> dict[str, Any]:
        from verbatim.observe.receipt import make_receipt

        return make_receipt(
            model=self.parts.name,
            digest=self.parts.digest,
            backend=self.backend.info.name,
            detail=self.backend.info.detail,
            numerics=self.backend.info.numerics,
            fingerprint=completion.fingerprint,
            adapter=self.parts.adapters[request.adapter].digest if request.adapter >= 0 else "",
            context=self.context,
            prompt_ids=request.prompt_ids,
            params=request.params,
            seed=request.seed,
            choices=completion.choices,
        )

    # --------------------------------------------------------------------------------- state

    def check(self) -> None:
        """Assert the block accounting, and that engine and scheduler hold the same sequences."""
        check_scheduler(self.scheduler)
        known = {seq_id for seq_id, r in self._by_seq.items() if r.request.id in self.requests}
        assert known == set(self._by_seq), "a finished request still has sequences"
        lost = set(self.scheduler.sequences) - set(self._by_seq)
        assert not lost, f"sequences {lost} belong to no request"
        if not self.requests:
            assert not self.scheduler.sequences, "idle, but the scheduler still holds sequences"
            used = [pool.used for pool in self.scheduler.cache.pools]
            assert not any(used), f"idle, but KV blocks are still in use: {used} per pool"

    def stats(self) -> dict[str, Any]:
        """Counters and gauges by name. Safe to call while another thread steps."""
        scheduler, pools = self.scheduler, self.scheduler.cache.pools
        blocks, used = sum(p.total for p in pools), sum(p.used for p in pools)
        running = list(scheduler.running)  # copied: another thread may step meanwhile
        self.metrics.sample(
            requests=len(self.requests),
            requests_running=len({id(self._by_seq.get(seq.id)) for seq in running}),
            running=len(running),
            waiting=len(scheduler.waiting),
            blocks=blocks,
            blocks_used=used,
            blocks_cached=sum(len(p.cached) for p in pools),
            kv_cache_usage_ratio=used / max(blocks, 1),
            preemptions_total=scheduler.preemptions,
            evictions_total=sum(p.evictions for p in pools),
            prefix_queries_total=scheduler.prefix_queries,
            prefix_hits_total=scheduler.prefix_hits,
            **({} if self.disk_cache is None else self.disk_cache.counts()),
        )
        return self.metrics.registry.values()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.drafting.close()
            if self.disk_cache is not None:
                self.disk_cache.flush()
            self.backend.close()
