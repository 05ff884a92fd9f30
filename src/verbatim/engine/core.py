"""EngineCore: requests come in, Deltas and Completions go out. The whole program is step(): plan, execute, commit.

Not for several threads at once: LLM calls it from the caller's, AsyncEngine from a thread of its own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from itertools import count
from typing import Any

from verbatim.backend.protocol import Backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import OverloadedError, ParameterError, VerbatimError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, Finish, SeqStep, StepPlan, StepResult, TokenEvent
from verbatim.engine.beam_request import kind_of
from verbatim.engine.drafting import Drafting, cache_share
from verbatim.engine.loaded_model import Parts
from verbatim.engine.request import Request, make_request
from verbatim.engine.running_request import Job, Output
from verbatim.observe.engine_metrics import EngineMetrics
from verbatim.observe.roofline import cost_card
from verbatim.schedule.invariants import check_scheduler
from verbatim.schedule.scheduler import Scheduler
from verbatim.schedule.sizing import CachePlan, plan_cache
from verbatim.schedule.token_cost import TokenCost

PAUSE = 0.05  # seconds that a step waits for structures where there is nothing else to do; a new request may come meanwhile


class EngineCore:
    def __init__(self, parts: Parts, config: EngineConfig) -> None:
        self.parts = parts
        self.config = config
        backend = self.backend = parts.backend
        self.cache_plan: CachePlan = plan_cache(
            backend.spec.groups,
            backend.block_bytes(),
            block_size=backend.block_size,
            context=_context(parts, config),
            fixed=config.context is not None,
            config=config,
            available=backend.available_memory(),
            share=cache_share(parts),
        )
        self.context = self.cache_plan.context
        backend.allocate(self.cache_plan.blocks)
        self.scheduler = Scheduler(
            backend.spec.groups,
            self.cache_plan.blocks,
            block_size=backend.block_size,
            step_tokens=config.step_tokens,
            max_running=config.max_running,
            prefix_cache=config.prefix_cache,
            use_cache=config.use_cache,
            cost=_token_cost(backend),
            ahead=backend.overlap,
        )
        info = backend.info
        made_of = "\0".join((parts.digest, info.name, info.numerics))
        self.fingerprint = f"vb-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
        self.metrics = EngineMetrics()
        self.drafting = Drafting(parts, config, self.scheduler)
        self.jobs: dict[str, Job] = {}
        self._by_seq: dict[int, Job] = {}
        self._ids = count()
        self._structured = 0  # requests whose answers have a structure
        self._ready: list[Output] = []  # made between steps, by aborts
        self._closed = False

    # ------------------------------------------------------------------------------------------------------- in and out

    def request(
        self,
        prompt: str | Seq[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
        hidden: bool = False,
        deadline: float | None = None,
    ) -> Request:
        """Check a request and make it ready to run. Safe to call from any thread. `deadline`: of its
        grammar compile, on the clock of time.monotonic."""
        named: dict[str, Any] = {"request_id": request_id, "tenant": tenant, "hidden": hidden}
        timing: dict[str, Any] = {"engine_busy": lambda: self.busy, "deadline": deadline}
        return make_request(self.parts, self.context, prompt, params, **named, **timing)

    def add(self, request: Request, *, queued: bool = False) -> None:
        """Take it into the queue, or refuse it: CapacityError, OverloadedError. `queued`: its place was promised already."""
        if request.id in self.jobs:
            raise ParameterError("request_id", f"{request.id!r} is already running")
        if self.full and not queued:
            self.metrics.refused.add()
            raise OverloadedError(
                f"{len(self.scheduler.waiting)} requests are waiting, and the queue holds {self.config.max_waiting}"
            )
        self.check_fits(request)
        job = self._job(request)
        self.scheduler.add(job.open(self._new_id))
        self.jobs[request.id] = job
        self._structured += bool(job.matchers)
        self._by_seq.update(dict.fromkeys(job.ids, job))
        self.metrics.requests.add()

    @property
    def full(self) -> bool:
        return len(self.scheduler.waiting) >= self.config.max_waiting

    def check_fits(self, request: Request) -> None:
        """Refuse what this engine could never run, before anything is begun."""
        self.drafting.check(request.params)
        self.scheduler.check_capacity(self._job(request).sequence(-1, 0))

    def _job(self, request: Request) -> Job:
        ends = {token: str(token) for token in request.params.stop_token_ids}
        if not request.params.ignore_eos:
            ends |= dict.fromkeys(self.parts.eos_ids, "eos")
        return kind_of(request.params)(
            request, self.parts.tokenizer, self.scheduler, ends, self.context
        )

    def _new_id(self) -> int:
        return next(self._ids)

    def abort(self, request_id: str, finish: Finish | None = None) -> bool:
        """End a request now. Its blocks are free at once; its Completion comes out of the next step()."""
        job = self.jobs.get(request_id)
        if job is None:
            return False
        job.end(finish or Finish("cancel"))
        self._ready += self._leave(job)
        return True

    @property
    def busy(self) -> bool:
        return bool(self.jobs or self._ready)

    # -------------------------------------------------------------------------------------------------------- the program

    def step(self) -> list[Output]:
        """One step of everything that runs. Empty and not busy: there is nothing to do."""
        began = time.perf_counter()
        paused = self._resume() if self._structured else []
        self.drafting.propose(self._by_seq)
        plan = self.scheduler.plan()
        if plan is None:
            assert paused or not self.jobs, "requests are left and none of them can advance"
            wait(paused, PAUSE, FIRST_COMPLETED)
            return self._take_ready()
        try:
            plan = self._masked(plan)
            if not plan.sequences:
                return self._take_ready()
            planned = time.perf_counter()
            result = self.backend.execute(plan)
        except (
            BaseException
        ):  # Ctrl-C too: nobody knows how far it came, so nothing of it is trusted
            self.scheduler.recompute()
            raise
        executed = time.perf_counter()
        self.drafting.observe(plan, result)
        self._collect(plan, result, planned)
        events = self.scheduler.commit(plan, result, self._read)
        touched = dict.fromkeys(self._by_seq[event.seq_id] for event in events)
        if self.config.check:
            self.check()
        self.drafting.learn(plan, executed - planned)
        self.metrics.step(plan, began, planned, executed)
        outputs = self._take_ready()
        for job in touched:
            outputs += self._leave(job)
        return outputs

    def _resume(self) -> list[Future[Any]]:
        """Go on with the sequences whose structure was made anew; what the others wait for."""
        for job in [job for job in self.jobs.values() if job.paused]:
            if job.resume():
                self._ready += self._leave(job)
        return [job.matchers[seq_id].renewal for job in self.jobs.values() for seq_id in job.paused]

    def _masked(self, plan: StepPlan) -> StepPlan:
        """Structured sequences get the masks of their draws. One whose structure fails ends; the step goes on without it."""
        if not self._structured:
            return plan
        steps: list[SeqStep] = []
        for step in plan.sequences:
            job = self._by_seq.get(step.seq_id)
            if job is None:  # another choice of its request has just failed, and all of it ended
                continue
            matcher = job.matchers.get(step.seq_id)
            if matcher is None or not step.draws or step.draw is None:
                steps.append(step)
                continue
            drafts = step.tokens[len(step.tokens) - step.draws + 1 :]
            try:
                masks = tuple(matcher.masks_along(drafts))
            except VerbatimError as error:
                job.error = error
                job.end(Finish("error", error.message))
                self._ready += self._leave(job)
                continue
            steps.append(step._replace(draw=replace(step.draw, masks=masks)))
        return plan._replace(sequences=tuple(step for step in steps if step.seq_id in self._by_seq))

    def _collect(self, plan: StepPlan, result: StepResult, planned: float) -> None:
        """What is not a token: when a request began, log-probabilities and hidden states of its prompt."""
        for step, done in zip(plan.sequences, result.sequences, strict=True):
            job = self._by_seq[step.seq_id]
            if job.began is None:
                job.began = planned
            for position, scored in enumerate(done.scored, step.start + 1):
                job.scored[position] = scored
            if done.hidden is not None:
                job.hidden.add(step.start, done.hidden)

    def _read(self, event: TokenEvent) -> bool:
        """Hand an event to its request. True: the request's text ends there."""
        job = self._by_seq[event.seq_id]
        if job.first is None and event.drawn is not None:
            job.first = time.perf_counter()
        before = len(job.ids)
        ends = job.push(event)
        if len(job.ids) > before:  # beams fork as they go
            self._by_seq.update(dict.fromkeys(job.ids[before:], job))
        return ends

    def _leave(self, job: Job) -> list[Output]:
        """What a request sends now: its Deltas, and when all is done its Completion."""
        outputs: list[Output] = [*job.deltas()]
        if job.done and job.request.id in self.jobs:
            outputs.append(self._complete(job))
        return outputs

    def _complete(self, job: Job) -> Completion:
        saved = sum(self.drafting.finish(seq, job.request.tenant) for seq in job.sequences)
        completion = job.completion(self.fingerprint, saved)
        if job.request.params.receipt:
            completion = replace(completion, receipt=self._receipt(job.request, completion))
        del self.jobs[job.request.id]
        self._structured -= bool(job.matchers)
        for seq_id in job.ids:
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
            fingerprint=self.fingerprint,
            context=self.context,
            prompt_ids=request.prompt_ids,
            params=request.params,
            seed=request.seed,
            choices=completion.choices,
        )

    def _take_ready(self) -> list[Output]:
        ready, self._ready = self._ready, []
        return ready

    # -------------------------------------------------------------------------------------------------------------- state

    def check(self) -> None:
        """Prove the accounting, and that every request the engine knows is one the scheduler knows, and the other way round."""
        check_scheduler(self.scheduler)
        known = {seq_id for seq_id, job in self._by_seq.items() if job.request.id in self.jobs}
        assert known == set(self._by_seq), "a request that is over still has sequences"
        lost = set(self.scheduler.sequences) - set(self._by_seq)
        assert not lost, f"sequences {lost} belong to no request"
        if not self.jobs:
            assert not self.scheduler.sequences, (
                "nothing runs and the scheduler still holds sequences"
            )
            assert all(pool.used == 0 for pool in self.scheduler.cache.pools), (
                "nothing runs and blocks are still used"
            )

    def stats(self) -> dict[str, Any]:
        scheduler, pools = self.scheduler, self.scheduler.cache.pools
        blocks, used = sum(p.total for p in pools), sum(p.used for p in pools)
        running = list(scheduler.running)  # another thread may step meanwhile
        self.metrics.sample(
            requests=len(self.jobs),
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
        )
        return self.metrics.registry.values()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.drafting.close()
            self.backend.close()


def _context(parts: Parts, config: EngineConfig) -> int:
    most = parts.context or parts.backend.spec.context
    if config.context is not None and config.context > most:
        raise ParameterError(
            "context",
            f"{config.context} is more than this model's {most} positions; ask for at most that",
        )
    return config.context or most


def _token_cost(backend: Backend) -> TokenCost:
    card = cost_card(backend.spec, backend.info)
    return TokenCost(card.prompt_ops_token, card.ops_position // len(backend.spec.layers))
