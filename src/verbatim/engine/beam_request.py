"""Beam search as a RunningRequest: each live beam of sampling/beam.py is a sequence.

Candidate lists of the live beams come in; the search picks the next beams, and a beam that is
picked twice forks its block table. Out: Deltas of the tokens that all possible results share.
"""

from __future__ import annotations

from collections.abc import Callable

from verbatim.base.params import SamplingParams
from verbatim.base.records import BROKEN, Choice, Delta, Drawn, Finish, TokenEvent
from verbatim.engine.running_request import RunningRequest
from verbatim.engine.stream import ChoiceStream
from verbatim.sampling.beam import Beam, BeamSearch
from verbatim.schedule.no_token import NOTHING_LEFT, not_finite
from verbatim.schedule.sequence import Sequence


class BeamRequest(RunningRequest):
    """`_live` holds the sequences of the live beams, in the search's order. A sequence is held once
    it has its candidates; when the last one has them, the search picks and all continue."""

    def open(self, new_id: Callable[[], int]) -> Sequence:
        request, self._new_id = self.request, new_id
        self.search = BeamSearch(
            request.params,
            end_ids=tuple(self.stop_ids),
            max_new=self.limit - len(request.prompt_ids),
            ends=self._ends,
        )
        first = self.sequence(new_id(), 0, beam=self.search.needed)
        self.sequences, self._live = [first], [first]
        self._dropped_preemptions = 0  # preemptions of beams that were dropped
        self._candidates: dict[int, Drawn] = {}
        returned = request.params.num_return_sequences or 1
        self._outs = [self._stream(i) for i in range(returned)]
        return first

    def _stream(self, index: int) -> ChoiceStream:
        request = self.request
        return ChoiceStream(
            *(request.id, index, request.params, self.tokenizer, request.reasoning),
            tools=request.tools,
        )

    def push(self, event: TokenEvent) -> bool:
        """Never True: the search decides which beams end."""
        if event.drawn is None:
            assert event.finish is not None
            self.end(event.finish)
            return False
        if event.drawn.token == BROKEN:
            position = self.scheduler.sequences[event.seq_id].known
            self.end(not_finite(position, self.request.params.adapter), publish=False)
            return False
        # A beam with nothing left to draw has no candidates: it drops out of the search.
        self._candidates[event.seq_id] = event.drawn
        if len(self._candidates) == len(self._live):
            self._advance()
        return False

    def _advance(self) -> None:
        moves = self.search.step([self._candidates[seq.id] for seq in self._live])
        self._candidates = {}
        if self.search.done:
            self._conclude()
            return
        parents = {parent for parent, _ in moves}
        for i, seq in enumerate(self._live):
            if i not in parents:
                self.scheduler.abort(seq.id)
                self._dropped_preemptions += seq.preemptions if seq is not self.sequences[0] else 0
        taken: set[int] = set()
        nexts: list[Sequence] = []
        # All forks before any extend: a fork copies the tokens its parent has now.
        for parent, _ in moves:
            nexts.append(self._fork(self._live[parent]) if parent in taken else self._live[parent])
            taken.add(parent)
        for seq, (_, token) in zip(nexts, moves, strict=True):
            self.scheduler.extend(seq.id, token)
        self._live = nexts
        self.sequences = [
            self.sequences[0],
            *(seq for seq in nexts if seq is not self.sequences[0]),
        ]
        self._stream_agreed()

    def _fork(self, parent: Sequence) -> Sequence:
        child = self.sequence(self._new_id(), 0, beam=self.search.needed)
        child.scored = child.prompt_len
        self.scheduler.fork(parent, child)
        return child

    def _stream_agreed(self) -> None:
        """Send the tokens that every possible result starts with, for the best result only: the
        search may find fewer results than num_return_sequences."""
        agreed = self.search.agreed()
        if self.search.live:
            self._feed(self._outs[0], self.search.live[0], len(agreed))

    def _feed(self, out: ChoiceStream, beam: Beam, end: int, finish: Finish | None = None) -> None:
        for i in range(len(out.token_ids), end):
            logprob, top = (
                (beam.logprobs[i].logprob, beam.logprobs[i].top) if beam.logprobs else (0.0, ())
            )
            explain = beam.explain[i] if beam.explain else None
            out.push(Drawn(beam.tokens[i], logprob, top, explain), finish if i == end - 1 else None)

    def _conclude(self) -> None:
        results = self.search.results()
        if not results:  # every beam has dropped out
            self.end(Finish("error", NOTHING_LEFT))
            return
        self._outs = self._outs[: len(results)]
        for out, beam in zip(self._outs, results, strict=True):
            self._feed(out, beam, len(beam.tokens), beam.finish)
            out.end(beam.finish or Finish("length", self.limit_name))
            out.score = beam.score
        for seq in self._live:
            self.scheduler.abort(seq.id)

    def _ends(self, tokens: tuple[int, ...]) -> Finish | None:
        """The Finish of a beam that ends with its last token: stop id, stop string or length."""
        params = self.request.params
        if tokens[-1] in self.stop_ids and len(tokens) > params.min_tokens:
            return Finish("stop", self.stop_ids[tokens[-1]])
        if params.stop:
            trial = self._stream(0)
            for token in tokens:
                finish = trial.push(Drawn(token, 0.0), None)
            if finish is not None:
                return finish
        return Finish("length", self.limit_name) if len(tokens) >= self.search.max_new else None

    # --------------------------------------------------- the rest of RunningRequest's interface

    def end(self, finish: Finish, *, publish: bool = True) -> None:
        for seq in self._live:
            self.scheduler.abort(seq.id, publish=publish)
        for out in self._outs:
            out.end(finish)

    @property
    def preemptions(self) -> int:
        return self._dropped_preemptions + sum(seq.preemptions for seq in self.sequences)

    @property
    def done(self) -> bool:
        return all(out.finish is not None for out in self._outs)

    def deltas(self) -> list[Delta]:
        return [delta for out in self._outs if (delta := out.take()) is not None]

    def choices(self) -> list[Choice]:
        return [out.choice(i) for i, out in enumerate(self._outs)]

    @property
    def output_tokens(self) -> int:
        return sum(len(out.token_ids) for out in self._outs)

    @property
    def reasoning_tokens(self) -> int:
        return sum(out.reasoning_tokens for out in self._outs)


def request_class(params: SamplingParams) -> type[RunningRequest]:
    return BeamRequest if params.num_beams > 1 else RunningRequest
