"""Beam search as a job: the lines of sampling/beam.py are sequences, and choosing among them is forking block tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verbatim.base.records import Choice, Delta, Drawn, Finish, TokenEvent
from verbatim.engine.running_request import Job
from verbatim.engine.stream import ChoiceStream
from verbatim.sampling.beam import Beam, BeamSearch
from verbatim.schedule.scheduler import NOTHING_LEFT
from verbatim.schedule.sequence import Sequence


class BeamJob(Job):
    """`live` are the sequences of the live lines, in the search's order. Each holds when it has its candidates; when the
    last one has, the search decides and they go on."""

    def open(self, new_id: Callable[[], int]) -> Sequence:
        request, self._new_id = self.request, new_id
        self.search = BeamSearch(
            request.params,
            end_ids=tuple(self.ends),
            max_new=self.limit - len(request.prompt_ids),
            ends=self._ends,
        )
        first = self.sequence(new_id(), 0, beam=self.search.needed)
        self.sequences, self._live = [first], [first]
        self._preemptions = 0  # of lines that were dropped
        self._candidates: dict[int, Drawn] = {}
        returned = request.params.num_return_sequences or 1
        self._outs = [self._stream(i) for i in range(returned)]
        self._agreed = 0
        return first

    def _stream(self, index: int) -> ChoiceStream:
        return ChoiceStream(self.request.id, index, self.request.params, self.tokenizer)

    def push(self, event: TokenEvent) -> bool:
        """Never True: which lines end is the search's to say."""
        if event.drawn is None or event.drawn.token < 0:
            self.end(event.finish or Finish("error", NOTHING_LEFT))
            return False
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
                self._preemptions += seq.preemptions if seq is not self.sequences[0] else 0
        taken: set[int] = set()
        nexts: list[Sequence] = []
        for (
            parent,
            _,
        ) in moves:  # all forks before any token: a fork copies what its parent knows now
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
        """Send the tokens that every possible answer begins with."""
        agreed = self.search.agreed()
        if len(agreed) > self._agreed and self.search.live:
            line = self.search.live[0]
            for out in self._outs:
                self._feed(out, line, self._agreed, len(agreed))
            self._agreed = len(agreed)

    def _feed(
        self, out: ChoiceStream, line: Beam, start: int, end: int, finish: Finish | None = None
    ) -> None:
        for i in range(start, end):
            logprob, top = (
                (line.logprobs[i].logprob, line.logprobs[i].top) if line.logprobs else (0.0, ())
            )
            explain = line.explain[i] if line.explain else None
            out.push(Drawn(line.tokens[i], logprob, top, explain), finish if i == end - 1 else None)

    def _conclude(self) -> None:
        results = self.search.results()
        self._outs = self._outs[: len(results)]
        for out, line in zip(self._outs, results, strict=True):
            self._feed(out, line, self._agreed, len(line.tokens), line.finish)
            out.end(line.finish or Finish("length", self.limit_name))
            out.score = line.score
        for seq in self._live:
            self.scheduler.abort(seq.id)

    def _ends(self, tokens: tuple[int, ...]) -> Finish | None:
        """Whether a line ends with its last token: by id, by a stop string, by length."""
        params = self.request.params
        if tokens[-1] in self.ends and len(tokens) > params.min_tokens:
            return Finish("stop", self.ends[tokens[-1]])
        if params.stop:
            trial = self._stream(0)
            for token in tokens:
                finish = trial.push(Drawn(token, 0.0), None)
            if finish is not None:
                return finish
        return Finish("length", self.limit_name) if len(tokens) >= self.search.max_new else None

    # ---------------------------------------------------------------------------------------- the rest of a job's duties

    def end(self, finish: Finish) -> None:
        for seq in self._live:
            self.scheduler.abort(seq.id)
        for out in self._outs:
            out.end(finish)

    @property
    def preemptions(self) -> int:
        return self._preemptions + sum(seq.preemptions for seq in self.sequences)

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


def kind_of(params: Any) -> type[Job]:
    return BeamJob if params.num_beams > 1 else Job
