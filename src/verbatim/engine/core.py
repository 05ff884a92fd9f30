"""EngineCore: requests come in, Deltas and Completions go out.

The main loop is step(): plan, execute, commit. Grammars, drafting, metrics and checks attach inside
_plan and _commit. A step decides no token: the scheduler plans integers, the backend computes and
draws, the scheduler commits. Where the backend can launch steps ahead, steps are overlapped.

Not thread-safe, except for request(): LLM calls the core under a lock, AsyncEngine from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from itertools import count
from typing import Any, Unpack

from verbatim.base.config import EngineConfig
from verbatim.base.errors import DeviceMemoryError, OverloadedError, ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, Finish, StepPlan, StepResult, TokenEvent
from verbatim.engine.beam_request import request_class
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.loading.engine_setup import (
    compile_ahead,
    make_scheduler,
    open_disk_cache,
    size_cache,
    with_step_tokens,
)
from verbatim.engine.request import AnyPrompt, Request, RequestOptions, make_request
from verbatim.engine.running_request import Output, RunningRequest, store_results
from verbatim.engine.step.core_metrics import CoreMetrics
from verbatim.engine.step.drafting import Drafting
from verbatim.engine.step.failed_step import PreemptOnError, log_not_finite, smaller_steps
from verbatim.engine.step.grammar_steps import GrammarSteps
from verbatim.engine.step.overlap import Overlap
from verbatim.engine.step.step_budget import StepBudget, step_limit
from verbatim.schedule.invariants import check_scheduler


class EngineCore:
    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.loaded = loaded
        self.config = config = with_step_tokens(loaded, config)
        self.backend = loaded.backend
        self.cache_plan = size_cache(loaded, config)
        self.context = self.cache_plan.context
        self.backend.allocate(self.cache_plan.blocks)
        launcher = self.backend.launcher
        self._overlap = None if launcher is None else Overlap(self.backend, launcher)
        self.disk_cache = open_disk_cache(loaded, config)
        self.scheduler = make_scheduler(loaded, config, self.cache_plan, self.disk_cache)
        self._preempt_on_error = PreemptOnError(self.scheduler)
        # by number of the adapter; -1: the base model
        self.fingerprints = {
            number: loaded.fingerprint(number) for number in range(-1, len(loaded.adapters))
        }
        self.fingerprint = self.fingerprints[-1]
        self.drafting = Drafting(loaded, config, self.scheduler)
        limit = step_limit(loaded, config)
        self._step_budget = StepBudget(limit, self.scheduler, self.drafting.cost)
        compile_ahead(loaded, config)
        self.requests: dict[str, RunningRequest] = {}  # by request id, waiting ones included
        self._by_seq: dict[int, RunningRequest] = {}
        self.metrics = CoreMetrics(self._by_seq, self.drafting)
        self.step_log = self.metrics.step_log
        self._grammars = GrammarSteps(self.requests, self._by_seq, self._flush)
        self._new_id = count().__next__
        self._ready: list[Output] = []  # outputs produced outside commit: aborts, grammar errors
        self._started = self._planned = 0.0  # times of the current step
        self._commit_seconds = 0.0  # the step before took so long
        self._closed = False

    # ------------------------------------------------------------------------------ requests

    def request(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Tokenise and validate a request. Safe to call from any thread."""
        defaults = self.config.defaults
        return make_request(self.loaded, self.context, prompt, params, defaults=defaults, **options)

    def add(self, request: Request, *, queued: bool = False, deltas: bool = True) -> None:
        """Queue a request, or raise CapacityError or OverloadedError.
        `queued`: the caller has already reserved a place in the queue.
        `deltas`: False if the caller needs only the Completion."""
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
        running.sends_deltas &= deltas
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
        kind = request_class(request.params)
        return kind(request, self.loaded, self.scheduler, self.context)

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
        try:
            if self._overlap is not None:
                return self._overlapped_step(self._overlap)
            return self._plain_step()
        except DeviceMemoryError as error:
            if not smaller_steps(self.scheduler, error):
                for request_id in list(self.requests):
                    self.abort(request_id, Finish("error", error.message))
            return self._take_ready()

    def _plain_step(self) -> list[Output]:
        plan = self._plan()
        if plan is None:
            return self._take_ready()
        with self._preempt_on_error:
            result = self.backend.execute(self.drafting.with_states(plan))
        return self._commit(plan, result)

    def _overlapped_step(self, overlap: Overlap) -> list[Output]:
        """The twin of _plain_step: the device starts step N+1 before the host reads step N."""
        plan = self._plan()
        if plan is None:
            return self._take_ready()
        with self._preempt_on_error:
            asked = self.drafting.with_states(plan)
            current = overlap.launch(asked)
            following = overlap.launch_next(asked, current)
            result = overlap.collect(asked, current, following)
        return self._commit(plan, result)

    def _plan(self) -> StepPlan | None:
        """The next plan, with drafts and grammar masks. None: there is nothing to execute."""
        self._started = time.perf_counter()
        self._grammars.resume()
        self.drafting.propose(self._by_seq)
        self._step_budget.set()
        plan = self.scheduler.plan()
        if plan is None:
            self._grammars.wait()
            return None
        with self._preempt_on_error:
            plan = self._grammars.add_masks(plan)
        self._planned = time.perf_counter()
        return plan if plan.sequences else None

    def _commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Advance the sequences by an executed plan; return the outputs of their requests."""
        executed = time.perf_counter()
        self.drafting.observe(plan, result)  # the draft head runs beside the commit
        failed = store_results(plan, result, self._by_seq, self._planned)
        events = self.scheduler.commit(plan, result, self._read)
        if self.config.check:
            self.check()
        # with the last commit, which a step on a GPU hides while it is launched ahead
        self.drafting.learn(plan, executed - self._planned + self._commit_seconds)
        self._step_budget.learn(plan, executed - self._planned)
        self.metrics.step(plan, self._started, self._planned, executed)
        self.metrics.log_step(plan, events, self._started, executed)
        for running in failed:
            self._flush(running)
        outputs = self._outputs(events)
        self._commit_seconds = time.perf_counter() - executed
        return outputs

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
        if running.sends_deltas:
            self._ready += running.deltas()
        if running.done and running.request.id in self.requests:
            self._ready.append(self._complete(running))

    def _take_ready(self) -> list[Output]:
        ready, self._ready = self._ready, []
        return ready

    def _complete(self, running: RunningRequest) -> Completion:
        request = running.request
        saved = sum(self.drafting.finish(seq, request.tenant) for seq in running.sequences)
        completion = running.completion(self.fingerprints[request.adapter], saved)
        del self.requests[request.id]
        self._grammars.remove(running)
        for seq_id in running.ids:
            del self._by_seq[seq_id]
        self.metrics.completed(completion)
        log_not_finite(self.loaded.name, completion)
        return completion

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
        running = list(self.scheduler.running)  # copied: another thread may step meanwhile
        self.metrics.sample(
            requests=len(self.requests),
            requests_running=len({id(self._by_seq.get(seq.id)) for seq in running}),
            **self.scheduler.counts(),
            **({} if self.disk_cache is None else self.disk_cache.counts()),
        )
        for rank, seconds in enumerate(self.loaded.waits()):
            name, help = "verbatim_rank_wait_seconds_total", "seconds of waiting for this rank"
            self.metrics.registry.number(name, help, rank=str(rank)).value = seconds
        return self.metrics.registry.values()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.drafting.close()
            if self.disk_cache is not None:
                self.disk_cache.flush()
            if self._overlap is not None:
                self._overlap.discard()
            self.backend.close()
