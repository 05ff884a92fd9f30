"""A running request: its sequences, its choices, its clock. Token events come in, Deltas and at last one Completion go out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from verbatim.base.errors import VerbatimError
from verbatim.base.records import (
    Choice,
    Completion,
    Delta,
    Drawn,
    Finish,
    Timings,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from verbatim.engine.loaded_model import Tokenizer
from verbatim.engine.request import Request
from verbatim.engine.stream import ChoiceStream
from verbatim.sampling.draw import noise_key
from verbatim.schedule.scheduler import Scheduler
from verbatim.schedule.sequence import Sequence

Output = Delta | Completion


class HiddenPool:
    """One vector of the prompt's hidden states: their mean, the first (cls) or the last. States are added in order of
    position, so that chunks change no bit, in the memory of one state."""

    def __init__(self, pooling: str = "mean") -> None:
        self._pooling = pooling
        self._sum: np.ndarray | None = None
        self.count = 0

    def add(self, start: int, states: np.ndarray) -> None:
        """States of positions start, start + 1, …; those seen before (it was preempted) are skipped."""
        for state in states[self.count - start :]:
            if self._sum is None or self._pooling == "last":
                self._sum = state.astype(np.float64)
            elif self._pooling == "mean":
                self._sum = self._sum + state
            self.count += 1

    def vector(self) -> np.ndarray:
        """float32 [hidden]"""
        assert self._sum is not None, "nothing was computed"
        vector: np.ndarray = (self._sum / (self.count if self._pooling == "mean" else 1)).astype(
            np.float32
        )
        return vector


class Job:
    """One request with one sequence for each choice. Beam search is another kind of job (engine/beam_request.py)."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        ends: dict[int, str],
        context: int,
    ) -> None:
        self.request = request
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.ends = ends
        params = request.params
        asked = (
            context if params.max_tokens is None else len(request.prompt_ids) + params.max_tokens
        )
        self.streams_as_it_goes = (
            params.best_of or params.n
        ) == params.n  # else only the end tells which choices are returned
        self.limit, self.limit_name = (
            min(asked, context),
            "context" if params.max_tokens is None else "max_tokens",
        )
        self.matchers: dict[int, Any] = {}  # by sequence id, where the answer has a structure
        self.scored: dict[int, TokenLogprob] = {}  # by prompt position
        self.hidden = HiddenPool(request.pooling)
        self.began: float | None = None
        self.first: float | None = None
        self.error: VerbatimError | None = None
        self.sequences: list[Sequence] = []  # the first leads: it computed the prompt
        self.ids: list[int] = []  # of every sequence it ever had
        self.streams: dict[int, ChoiceStream] = {}  # by sequence id
        self.paused: set[int] = (
            set()
        )  # sequences whose structure is being made anew beside the engine
        self._drawn = 0
        self._open = 0  # choices that are still being written

    def open(self, new_id: Callable[[], int]) -> Sequence:
        """Make the sequences; the first one leads, the others fork off it at the prompt's end."""
        params = self.request.params
        for index in range(params.best_of or params.n):
            seq = self.sequence(new_id(), noise_key(self.request.seed, index))
            self.sequences.append(seq)
            self.streams[seq.id] = ChoiceStream(self.request.id, index, params, self.tokenizer)
            if self.request.structure is not None:
                self.matchers[seq.id] = self.request.structure.start()
        self._open = len(self.sequences)
        self.sequences[0].siblings = self.sequences[1:]
        return self.sequences[0]

    def sequence(self, seq_id: int, key: int, beam: int = 0) -> Sequence:
        request = self.request
        self.ids.append(seq_id)
        return Sequence(
            seq_id,
            request.prompt_ids,
            request.params,
            limit=self.limit,
            limit_name=self.limit_name,
            key=key,
            ends=self.ends,
            salt=f"{request.tenant}\0{request.params.cache_salt}",
            hidden=request.hidden,
            breakers=request.breakers,
            beam=beam,
        )

    # ---------------------------------------------------------------------------------------------------- token by token

    def push(self, event: TokenEvent) -> bool:
        """One event of one of its sequences. True: the text ends with it."""
        stream = self.streams[event.seq_id]
        if event.drawn is None:
            assert event.finish is not None
            stream.end(event.finish)
        else:
            self._drawn += 1
            finish = self._follow(event, event.drawn) if self.matchers else event.finish
            stream.push(event.drawn, finish)
            if self.matchers and stream.finish is None:
                self._look_ahead(event.seq_id)
        self._open -= stream.finish is not None
        return stream.finish is not None

    def _follow(self, event: TokenEvent, drawn: Drawn) -> Finish | None:
        """Move the structure on; it ends the text where nothing but an end could follow. A text that has come to its end asks no structure."""
        if event.finish is not None:
            return event.finish
        matcher = self.matchers[event.seq_id]
        try:
            matcher.advance(drawn.token)
        except VerbatimError as error:
            self.error = error
            return Finish("error", error.message)
        return Finish("stop", self.request.structure.field) if matcher.finished else None

    def _look_ahead(self, seq_id: int) -> None:
        """What may come next is computed here, also where drafts that came true go on: a structure that cannot be followed any further ends the text
        at the same token with drafts and without. Where that takes a while, the sequence pauses."""
        matcher = self.matchers[seq_id]
        try:
            if not matcher.look():
                self.paused.add(seq_id)
                self.scheduler.hold(seq_id)
            elif matcher.finished:  # which was not known while it paused
                self.streams[seq_id].end(Finish("stop", self.request.structure.field))
        except VerbatimError as error:
            self.error = error
            self.streams[seq_id].end(Finish("error", error.message))

    def resume(self) -> bool:
        """Let those go on, or end, whose structure is ready. False: there are none."""
        ready = [seq_id for seq_id in self.paused if self.matchers[seq_id].renewal.done()]
        for seq_id in sorted(ready):
            self.paused.discard(seq_id)
            self.scheduler.release(seq_id)
            self._look_ahead(seq_id)
            if self.streams[seq_id].finish is not None:
                self.scheduler.abort(seq_id)
                self._open -= 1
        return bool(ready)

    def end(self, finish: Finish) -> None:
        """End what still runs: an abort, or an error."""
        for seq in self.sequences:
            self.scheduler.abort(seq.id)
            self.streams[seq.id].end(finish)
        self._open = 0
        self.paused.clear()

    @property
    def done(self) -> bool:
        return self._open == 0

    # ------------------------------------------------------------------------------------------------------- what leaves

    def deltas(self) -> list[Delta]:
        if not self.streams_as_it_goes:
            return []
        return [delta for stream in self.streams.values() if (delta := stream.take()) is not None]

    def choices(self) -> list[Choice]:
        streams = list(self.streams.values())
        if not self.streams_as_it_goes:
            for stream in streams:
                stream.score = stream.mean_logprob
            streams.sort(key=lambda s: (-s.mean_logprob, s.index))
            streams = streams[: self.request.params.n]
        return [stream.choice(i) for i, stream in enumerate(streams)]

    @property
    def output_tokens(self) -> int:
        return self._drawn

    @property
    def preemptions(self) -> int:
        return sum(seq.preemptions for seq in self.sequences)

    def completion(self, fingerprint: str, saved: float = 0.0) -> Completion:
        request, now = self.request, time.perf_counter()
        prompt: tuple[TokenLogprob | None, ...] = ()
        if request.params.prompt_logprobs is not None:
            prompt = tuple(self.scored.get(position) for position in range(len(request.prompt_ids)))
        return Completion(
            request.id,
            request.prompt_ids,
            tuple(self.choices()),
            Usage(
                len(request.prompt_ids),
                self.output_tokens,
                self.sequences[0].cached_tokens,
                sum(s.drafted for s in self.sequences),
                sum(s.accepted for s in self.sequences),
            ),
            Timings(
                (self.began or now) - request.arrival,
                (self.first or now) - request.arrival,
                now - request.arrival,
                self.preemptions,
                saved,
            ),
            request.seed,
            fingerprint,
            request.warnings,
            prompt,
        )
