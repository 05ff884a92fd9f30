"""A smaller model guesses. In: the tokens of sequences. Out: what a draft model with the same vocabulary would write next.

It draws with the target's own parameters and noise key. Gumbel noise depends on (key, position, token) alone, so where the two models'
distributions are close, the same noise picks the same token: the guess comes true with probability of at least (1 - TV) / (1 + TV),
where TV is the total variation distance of the two distributions; with noise of its own it would be far less.

It has a backend and a cache of its own, and a context of its own: beyond that it makes no guesses. A sequence's tokens that still agree with what was computed here are not computed again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from verbatim.backend.protocol import Backend
from verbatim.base.errors import ParameterError
from verbatim.base.records import DrawSpec, SeqResult, SeqStep, StepPlan
from verbatim.speculate.proposer import Draft, SeqView

CHUNK = 512  # tokens of a prompt that the draft model reads in one of its steps
PATIENCE = 0.2


@dataclass(slots=True)
class _Cached:
    """Tokens whose keys and values are in the draft's cache, and the blocks that hold them (one list for every cache group)."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)


class DraftProposer:
    name = "draft"
    states_odds = False

    def __init__(self, backend: Backend, blocks: int) -> None:
        """`blocks` is the size of the draft's own cache, for each of its groups."""
        self.token_cost = 1e-6  # replaced by what is measured
        self._backend = backend
        self._context = backend.spec.context
        self._groups = len(backend.block_bytes())
        try:
            backend.allocate((blocks,) * self._groups)
        except MemoryError:
            size = blocks * sum(backend.block_bytes()) / 2**20
            raise ParameterError(
                "speculate",
                f"the draft model's cache of {size:.0f} MiB does not fit into memory; give less to kv_memory or kv_blocks",
            ) from None
        self._free = [list(range(blocks)) for _ in range(self._groups)]
        self._cached: OrderedDict[int, _Cached] = OrderedDict()  # least recently used first
        self._step = 0

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        began = time.perf_counter()
        guesses: dict[int, list[int]] = {}
        live: list[SeqView] = []  # those for whom another token is guessed
        for view in views:
            room = min(
                limit, view.room, self._context + 1 - len(view.tokens)
            )  # the last guess is never read
            if self._reserve(view, room, {v.seq_id for v in live}):
                live.append(view._replace(room=room))
        self._catch_up(live)
        for depth in range(limit):
            live = [view for view in live if depth < view.room]
            if not live:
                break
            drawn = list(zip(live, self._draw(live, guesses), strict=True))
            for view, token in drawn:
                if token >= 0:  # else bans left nothing to draw: the text ends there
                    guesses.setdefault(view.seq_id, []).append(token)
            live = [view for view, token in drawn if token >= 0 and token not in view.ends]
        drafted = sum(map(len, guesses.values()))
        if drafted:
            spent = (time.perf_counter() - began) / drafted
            self.token_cost += (
                PATIENCE * (spent - self.token_cost) if self.token_cost > 1e-6 else spent
            )
        return {seq_id: Draft(tuple(tokens), self.name, 0) for seq_id, tokens in guesses.items()}

    def _reserve(self, view: SeqView, drafts: int, busy: set[int]) -> bool:
        """Blocks for the whole sequence and its drafts; those of others that are not `busy` now are taken back, oldest first, if need be."""
        if drafts < 1:
            self._release(view.seq_id)
            return False
        need = -(-(len(view.tokens) + drafts) // self._backend.block_size)
        state = self._cached.setdefault(
            view.seq_id, _Cached(blocks=[[] for _ in range(self._groups)])
        )
        self._cached.move_to_end(view.seq_id)
        for group, free in enumerate(self._free):
            while len(free) < need - len(state.blocks[group]):
                oldest = next((i for i in self._cached if i not in busy and i != view.seq_id), None)
                if oldest is None:
                    self._release(view.seq_id)
                    return False  # no room beside the others: written without guesses
                self._release(oldest)
            while len(state.blocks[group]) < need:
                state.blocks[group].append(free.pop())
        return True

    def _catch_up(self, views: Sequence[SeqView]) -> None:
        """Compute known tokens until only the last one is left, which the first draw computes."""
        for view in views:
            state = self._cached[view.seq_id]
            state.tokens = state.tokens[: _agreeing(state.tokens, view.tokens)]
            while len(view.tokens) - 1 - len(state.tokens) > 0:
                start = len(state.tokens)
                chunk = tuple(view.tokens[start : min(start + CHUNK, len(view.tokens) - 1)])
                self._execute((self._sequence(view, chunk, start),))
                state.tokens.extend(chunk)

    def _draw(self, views: Sequence[SeqView], guesses: dict[int, list[int]]) -> list[int]:
        steps = []
        for view in views:
            so_far = guesses.get(view.seq_id, [])
            last = so_far[-1] if so_far else view.tokens[-1]
            start = len(view.tokens) - 1 + len(so_far)
            history = (*view.tokens, *so_far) if view.params.needs_history else ()
            spec = DrawSpec(
                view.params.with_(logprobs=None, explain=0), view.key, view.prompt_len, history
            )
            steps.append(self._sequence(view, (last,), start, spec))
            state = self._cached[view.seq_id]
            state.tokens = [*state.tokens[:start], last]
        return [result.drawn[0].token for result in self._execute(tuple(steps))]

    def _sequence(
        self, view: SeqView, tokens: tuple[int, ...], start: int, spec: DrawSpec | None = None
    ) -> SeqStep:
        size = self._backend.block_size
        count = -(-(start + len(tokens)) // size)
        blocks = tuple(tuple(table[:count]) for table in self._cached[view.seq_id].blocks)
        return SeqStep(view.seq_id, tokens, start, blocks, draws=1 if spec else 0, draw=spec)

    def _execute(self, steps: tuple[SeqStep, ...]) -> tuple[SeqResult, ...]:
        self._step += 1
        return self._backend.execute(StepPlan(self._step, steps)).sequences

    def _release(self, seq_id: int) -> None:
        state = self._cached.pop(seq_id, None)
        if state is not None:
            for free, table in zip(self._free, state.blocks, strict=True):
                free.extend(table)

    def finish(self, view: SeqView) -> None:
        self._release(view.seq_id)

    def close(self) -> None:
        self._cached.clear()
        self._backend.close()


def _agreeing(computed: Sequence[int], known: Sequence[int]) -> int:
    """Length of the common prefix, at most all but the last known token: that one is computed to draw from it."""
    count = min(len(computed), len(known) - 1)
    if list(computed[:count]) == list(known[:count]):
        return count
    return next(i for i in range(count) if computed[i] != known[i])
