"""RunningRequest: one request in the engine, with its sequences, its choices and its timings.

Token events come in; Deltas and finally one Completion go out. The request is done when every
choice has a Finish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from verbatim.base.defaults import GENERATE
from verbatim.base.errors import VerbatimError
from verbatim.base.params import SamplingParams
from verbatim.base.records import (
    BROKEN,
    Choice,
    Completion,
    Delta,
    Drawn,
    Finish,
    StepPlan,
    StepResult,
    Timings,
    TokenEvent,
    TokenLogprob,
    Usage,
    loop_text,
)
from verbatim.engine.canvas_request import whole_blocks
from verbatim.engine.embed_input import HiddenPool
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.request import Request
from verbatim.engine.stream import ChoiceStream, with_texts
from verbatim.explain.receipt import make_receipt
from verbatim.sampling.draw import noise_key
from verbatim.schedule.canvas import Canvas
from verbatim.schedule.no_token import not_finite
from verbatim.schedule.prefix import prefix_salt
from verbatim.schedule.scheduler import Scheduler
from verbatim.schedule.sequence import Sequence

Output = Delta | Completion


class RunningRequest:
    """One request, one sequence per choice. Beam search overrides this (engine/beam_request.py)."""

    def __init__(
        self, request: Request, loaded: LoadedModel, scheduler: Scheduler, context: int
    ) -> None:
        self.request = request
        self.scheduler = scheduler
        self.context = context
        context = whole_blocks(context, request.canvas, len(request.prompt_ids))
        self.tokenizer = loaded.tokenizer
        self._loaded = loaded
        params = request.params
        # token ids that end a sequence, and the finish detail of each
        self.stop_ids = {token: str(token) for token in params.stop_token_ids}
        if not params.ignore_eos:
            self.stop_ids |= dict.fromkeys(loaded.eos_ids, "eos")
        if params.max_tokens is None:
            self.limit, self.limit_name = context, "context"
        else:
            longest = len(request.prompt_ids) + params.max_tokens
            self.limit, self.limit_name = min(longest, context), "max_tokens"
        self.ranked = (params.best_of or params.n) != params.n  # returns the best choices only
        # With best_of > n the returned choices are known only at the end: no Deltas before that.
        self.sends_deltas = not self.ranked
        self.matchers: dict[int, Any] = {}  # by sequence id; empty without structured output
        self.scored: dict[int, TokenLogprob] = {}  # by prompt position
        self.hidden = HiddenPool(request.embedding)
        self.started_at: float | None = None  # time.perf_counter of the first step
        self.first_token_at: float | None = None
        self.error: VerbatimError | None = None
        self.sequences: list[Sequence] = []  # the first one computes the prompt
        self.ids: list[int] = []  # every sequence the request has had
        self.streams: dict[int, ChoiceStream] = {}  # by sequence id
        self.paused: set[int] = set()  # sequences that wait for their mask
        self._output_tokens = 0
        self._unfinished = 0  # choices without a finish reason
        self._cut: Finish | None = None  # set by end(): why the choices are not complete

    def open(self, new_id: Callable[[], int]) -> Sequence:
        """Create one sequence per choice; all fork from the first at the end of the prompt."""
        request, params = self.request, self.request.params
        prefix = request.prompt_ids[len(request.prompt_ids) - params.output_prefix :]
        for index in range(params.best_of or params.n):
            seq = self.sequence(new_id(), noise_key(request.seed, index))
            self.sequences.append(seq)
            self.streams[seq.id] = ChoiceStream(
                *(request.id, index, params, self.tokenizer, request.reasoning, prefix),
                request.tools,
            )
            matcher = request.matcher(self.tokenizer, self.stop_ids)
            if matcher is not None:
                self.matchers[seq.id] = matcher
        self._unfinished = len(self.sequences)
        self.sequences[0].siblings = self.sequences[1:]
        return self.sequences[0]

    def sequence(self, seq_id: int, key: int, beam: int = 0) -> Sequence:
        request, rules = self.request, self.request.canvas
        self.ids.append(seq_id)
        canvas = None
        salt = prefix_salt(request.tenant, request.params.cache_salt, request.adapter_digest)
        if rules is not None:
            canvas = Canvas(rules, len(request.prompt_ids), self.limit, key)
            if not rules.causal:  # keys and values depend on the block
                salt = f"block {rules.length}\0{salt}"
        return Sequence(
            seq_id,
            request.prompt_ids,
            request.params,
            limit=self.limit,
            limit_name=self.limit_name,
            key=key,
            stop_ids=self.stop_ids,
            salt=salt,
            tenant=request.tenant,
            adapter=request.adapter,
            hidden=request.hidden,
            breakers=request.breakers,
            beam=beam,
            canvas=canvas,
        )

    # -------------------------------------------------------------------------- token events

    def push(self, event: TokenEvent) -> bool:
        """Process one event of one of its sequences. True: the sequence ends with this token."""
        stream = self.streams[event.seq_id]
        if event.drawn is None:
            assert event.finish is not None
            stream.end(event.finish)
        else:
            self._output_tokens += 1
            finish = self._advance_matcher(event, event.drawn) if self.matchers else event.finish
            stream.push(event.drawn, finish)
            if self.matchers and stream.finish is None:
                self._prepare_mask(event.seq_id)
        self._unfinished -= stream.finish is not None
        return stream.finish is not None

    def _advance_matcher(self, event: TokenEvent, drawn: Drawn) -> Finish | None:
        """Advance the matcher by the drawn token; end the sequence where only an end may follow.

        At a length limit it tells a complete structure from one that was cut off. A sequence that
        has ended otherwise does not consult its matcher."""
        if event.finish is not None and event.finish.reason != "length":
            return event.finish
        matcher = self.matchers[event.seq_id]
        try:
            matcher.advance(drawn.token)
        except VerbatimError as error:
            if event.finish is not None:
                return event.finish
            self.error = error
            return Finish("error", error.message)
        # Without a structure (a thinking budget alone) a matcher is never finished.
        return Finish("stop", self.request.structure.field) if matcher.finished else event.finish

    def _prepare_mask(self, seq_id: int) -> None:
        """Compute the next mask now, also between accepted drafts: a grammar that cannot continue
        then ends the sequence at the same token with and without drafts. The sequence pauses while
        the mask needs a compile or a check in another thread."""
        matcher = self.matchers[seq_id]
        try:
            if not matcher.poll_mask():
                self.paused.add(seq_id)
                self.scheduler.hold(seq_id)
            elif matcher.finished:  # unknown while poll_mask() is False
                self.streams[seq_id].end(Finish("stop", self.request.structure.field))
        except VerbatimError as error:
            self.error = error
            self.streams[seq_id].end(Finish("error", error.message))

    def resume(self) -> bool:
        """Resume or end the paused sequences whose matchers are ready. False: there are none."""
        ready = [seq_id for seq_id in self.paused if self.matchers[seq_id].pending.done()]
        for seq_id in sorted(ready):
            self.paused.discard(seq_id)
            self.scheduler.release(seq_id)
            self._prepare_mask(seq_id)
            if self.streams[seq_id].finish is not None:
                self.scheduler.abort(seq_id)
                self._unfinished -= 1
        return bool(ready)

    def end(self, finish: Finish, *, publish: bool = True) -> None:
        """End every unfinished choice: an abort or an error. `publish`: False withdraws their
        blocks from the prefix cache."""
        self._cut = finish
        for seq in self.sequences:
            self.scheduler.abort(seq.id, publish=publish)
            self.streams[seq.id].end(finish)
        self._unfinished = 0
        self.paused.clear()

    @property
    def done(self) -> bool:
        return self._unfinished == 0

    # ------------------------------------------------------------------------------- outputs

    def deltas(self) -> list[Delta]:
        if not self.sends_deltas:
            return []
        return [delta for stream in self.streams.values() if (delta := stream.take()) is not None]

    def choices(self) -> list[Choice]:
        streams = list(self.streams.values())
        if self.ranked:
            for stream in streams:
                stream.score = stream.mean_logprob
            # a candidate that ended with an error ranks behind all complete ones
            streams.sort(key=lambda s: (s.failed, -s.mean_logprob, s.index))
            streams = streams[: self.request.params.n]
            for stream in streams:  # a candidate that was cut might have been the best
                stream.finish = self._cut or stream.finish
        return [stream.choice(i) for i, stream in enumerate(streams)]

    @property
    def output_tokens(self) -> int:
        return self._output_tokens

    @property
    def reasoning_tokens(self) -> int:
        return sum(stream.reasoning_tokens for stream in self.streams.values())

    @property
    def preemptions(self) -> int:
        return sum(seq.preemptions for seq in self.sequences)

    def completion(self, fingerprint: str, saved: float = 0.0) -> Completion:
        """`saved`: seconds that drafts saved."""
        request, now = self.request, time.perf_counter()
        prompt: tuple[TokenLogprob | None, ...] = ()
        if request.params.prompt_logprobs is not None:
            rows = {at: with_texts(row, self.tokenizer) for at, row in self.scored.items()}
            prompt = tuple(rows.get(position) for position in range(len(request.prompt_ids)))
        choices = tuple(self.choices())
        completion = Completion(
            request.id,
            request.prompt_ids,
            choices,
            Usage(
                len(request.prompt_ids),
                self.output_tokens,
                self.sequences[0].cached_tokens,
                sum(s.drafted for s in self.sequences),
                sum(s.accepted for s in self.sequences),
                self.reasoning_tokens,
            ),
            Timings(
                (self.started_at or now) - request.arrival,
                (self.first_token_at or now) - request.arrival,
                now - request.arrival,
                self.preemptions,
                saved,
            ),
            request.seed,
            fingerprint,
            (*request.warnings, *_warnings(choices, request.params)),
            prompt,
            params=request.params,
        )
        if not request.params.receipt:
            return completion
        return replace(completion, receipt=self._receipt(completion))

    def _receipt(self, completion: Completion) -> dict[str, object]:
        """Everything that `verbatim replay` needs to compute the completion again."""
        loaded, request = self._loaded, self.request
        info = loaded.backend.info
        return make_receipt(
            model=loaded.name,
            digest=loaded.digest,
            backend=info.name,
            detail=info.detail,
            numerics=info.numerics,
            fingerprint=completion.fingerprint,
            adapter=request.adapter_digest,
            context=self.context,
            prompt_ids=request.prompt_ids,
            params=request.params,
            seed=request.seed,
            choices=completion.choices,
            reasoning=request.reasoning is not None,
        )


def store_results(
    plan: StepPlan, result: StepResult, requests: Mapping[int, RunningRequest], started: float
) -> list[RunningRequest]:
    """Hand the start time, prompt log-probabilities and hidden states of a step to its requests,
    before the scheduler commits its tokens. A request with a value that is not finite ends here, so
    nothing of it is committed or published; a drawn token that is not finite ends its sequence in
    commit(), which knows the drafts that were accepted before it.

    `requests`: by sequence id. `started`: time of the step. Returns the requests that ended."""
    failed = []
    for step, done in zip(plan.sequences, result.sequences, strict=True):
        running = requests[step.seq_id]
        if running.started_at is None:
            running.started_at = started
        broken: int | None = None
        for position, scored in enumerate(done.scored, step.start + 1):
            if scored.token == BROKEN:
                broken = position
                break
            running.scored[position] = scored
        if step.hidden and done.hidden is not None:
            states = np.asarray(done.hidden)
            rows = np.isfinite(states).all(1)
            if rows.all():
                running.hidden.add(step.start, states)
            else:
                broken = step.start + int(rows.argmin())
        if broken is not None and running not in failed:
            running.end(not_finite(broken, running.request.params.adapter), publish=False)
            failed.append(running)
    return failed


def _warnings(choices: tuple[Choice, ...], params: SamplingParams) -> list[str]:
    """What a reader of the answers should know: ends in a loop, and the length of generate()."""
    out = []
    for choice in choices:
        run = loop_text(choice.loop)
        if choice.finish.reason == "loop":
            out.append(f"stopped, because the end repeats {run}; on_loop report lets it continue")
        elif choice.loop:
            out.append(f"the output repeated {run}; on_loop stop ends such an answer")
    cut = any(choice.finish.reason == "length" for choice in choices)
    if cut and dict(params.origins).get("max_tokens") == GENERATE:
        limit = f"{params.max_tokens} tokens, the limit of generate() without max_tokens"
        out.append(f"ended after {limit}; set max_tokens for another length")
    return list(dict.fromkeys(out))
