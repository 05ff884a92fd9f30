"""The steps of sequences with a canvas: how many rows each computes, and what a step decides.

In: the step in progress, and the draws of an executed one. Out: rows of whole blocks, and events of
the tokens that became known. The law is at the head of scheduler.py, the canvas in canvas.py.
"""

from __future__ import annotations

from collections.abc import Callable

from verbatim.base.errors import CapacityError
from verbatim.base.records import Drawn, Finish, TokenEvent
from verbatim.schedule.canvas import Canvas
from verbatim.schedule.sequence import Sequence
from verbatim.schedule.shares import TenantShares

EventSink = Callable[[TokenEvent], bool]  # True: the sequence ends with this event


class CanvasSteps(TenantShares):
    step_tokens: int

    def _max_tokens(self, seq: Sequence, want: int, budget: int) -> int:
        raise NotImplementedError

    def check_capacity(self, seq: Sequence) -> None:
        block = 1 if seq.canvas is None else seq.canvas.least
        if block > self.step_tokens:
            raise CapacityError(
                f"a denoising step computes {block} positions at once, and step_tokens is "
                f"{self.step_tokens}; raise it, or give a smaller max_tokens or block_length",
                param="max_tokens" if seq.canvas and seq.canvas.rules.full else "block_length",
            )
        super().check_capacity(seq)

    def _fewer(self, seq: Sequence, want: int, n: int) -> int:
        """A shorter chunk than n that fits the blocks; 0: there is none."""
        if n == 1:
            return 0
        most = min(n - 1, self.cache.max_positions(seq))
        return max(1, most) if seq.canvas is None else seq.chunk_length(want, most)

    def _whole_blocks(self, seq: Sequence, block: int, want: int, budget: int) -> int:
        """Rows of a sequence with a canvas. The block in progress and the final pass before it are
        its decode step, which needs no share of the prompts' tokens. At least one block: the first
        sequence of a step always advances."""
        left = self._left()
        paid = left if want <= 2 * block else min(left, self._max_tokens(seq, want, budget))
        n = seq.chunk_length(want, paid)
        return n or (seq.chunk_length(want, block) if self._has_room(block) else 0)

    def _left(self) -> int:
        return self.step_tokens - sum(len(step.tokens) for step in self._steps.values())

    def _has_room(self, block: int) -> bool:
        return not self._steps or block <= self._left()

    def _commit_canvas(
        self, seq: Sequence, canvas: Canvas, drawn: tuple[Drawn, ...], emit: EventSink
    ) -> None:
        """Decide positions of the block in progress, and append the tokens that are known then."""
        failed = next((draw.token for draw in drawn if draw.token < 0), 0)
        if failed:
            emit(TokenEvent(seq.id, None, self._end_without_token(seq, failed)))
            return
        seq.computed = canvas.final
        if seq.computed // self.block_size > seq.published:
            self.cache.publish(seq)
        ended, taken = False, 0
        for draw in canvas.decide(drawn):
            seq.tokens.append(draw.token)
            taken += 1
            ended = emit(TokenEvent(seq.id, draw, self._finish_of(seq, draw.token)))
            if ended or seq.held:
                break
        canvas.advance(taken)
        if ended:
            self._end(seq)
        elif not self.use_cache:
            self.cache.release_all(seq)

    def _finish_of(self, seq: Sequence, token: int) -> Finish | None:
        """The finish of a sequence whose last token is `token`."""
        known = len(seq.tokens)
        if token in seq.stop_ids and known > seq.min_len:
            return Finish("stop", seq.stop_ids[token])
        return Finish("length", seq.limit_name) if known >= seq.limit else None
