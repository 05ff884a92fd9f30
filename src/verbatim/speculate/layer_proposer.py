"""Speculative decoding with a draft layer: multi-token prediction, or an EAGLE-3 head.

In: the target's states of computed positions. Out: chains of drafts. The layer reads the state of
position p with the token at p + 1, and draws the token at p + 2; its own output is the state of the
next draft (model/loading/draft_layer.py and eagle3.py).

The layer has a KV cache over the positions whose states this process has computed. It is kept
while a sequence is preempted. A gap starts it anew: after a prefix hit or a fork, the positions
before have keys and values of the target but no states. Then the layer sees less of the text; that
costs accepted drafts and changes no output. Positions of rejected drafts are overwritten.

States wait until the layer drafts for their sequence, at most WINDOW of them: of a long prompt the
layer sees the end only, and a sequence that is never drafted for costs no more than their copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verbatim.backend.protocol import DraftLayer
from verbatim.base.records import Drawn, SeqResult, SeqStep, State, StepPlan, StepResult
from verbatim.speculate.cached_proposer import CachedProposer
from verbatim.speculate.proposer import Draft, SeqView

WINDOW = 512  # positions
FEW = 16  # positions that the first draw computes, too; more are computed in a step before it
NO_LIMIT = 1 << 30
FIRST_CHAIN, MAX_CHAIN = 4, 8  # drafts that a device draws in a row: at first, and at most


@dataclass(slots=True)
class _Positions:
    """The layer's view of one sequence."""

    first: int  # position of the sequence that is position 0 of the layer's cache
    cached: int = 0  # positions in the cache, computed from the target's states
    waiting: list[State] = field(default_factory=list)  # states of the positions after them
    last: Sequence[State] = ()  # output of the latest draft: the state of the next one

    @property
    def end(self) -> int:
        return self.first + self.cached + len(self.waiting)

    def drop_from(self, position: int) -> None:
        """Forget the positions from this one on."""
        keep = max(position - self.first, 0)
        self.cached = min(self.cached, keep)
        del self.waiting[max(keep - self.cached, 0) :]

    def computed(self) -> None:
        """The waiting positions are in the cache."""
        self.cached, self.waiting = self.cached + len(self.waiting), []

    def keep_last(self, count: int) -> None:
        """Start anew with the last `count` states that wait."""
        self.waiting, end = self.waiting[-count:], self.end
        self.first, self.cached = end - len(self.waiting), 0


class LayerProposer(CachedProposer):
    what = "draft layer"
    states_probs = True
    window = WINDOW

    def __init__(self, name: str, backend: DraftLayer, blocks: int) -> None:
        super().__init__(backend, blocks)
        self._device = backend.chains
        self.name = name  # its mode
        self._positions: dict[int, _Positions] = {}
        # most drafts of a chain, and the chains that a device has drawn
        self._longest = NO_LIMIT if self._device is None else FIRST_CHAIN
        self._drawn: dict[int, list[Drawn]] = {}
        # sequences drafted for in this step, without their tokens; and chains that are being drawn,
        # with the number of tokens that they continue
        self._drafted: dict[int, SeqView] = {}
        self._started: dict[int, tuple[int, Callable[[], list[list[Drawn]]]]] = {}

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        for step, done in zip(plan.sequences, result.sequences, strict=True):
            if step.hidden or done.states is None:
                continue
            states = done.states[-WINDOW:]
            start = step.start + len(done.states) - len(states)
            held = self._positions.get(step.seq_id)
            if held is None or not held.first <= start <= held.end:
                held = self._positions[step.seq_id] = _Positions(start)
            held.drop_from(start)
            held.waiting.extend(states)
            if len(held.waiting) > WINDOW:
                held.keep_last(WINDOW)
        drafted, self._drafted = self._drafted, {}
        if len(plan.sequences) == 1 and plan.sequences[0].seq_id in drafted:
            self._start(drafted[plan.sequences[0].seq_id], plan.sequences[0], result.sequences[0])

    def _start(self, view: SeqView, step: SeqStep, done: SeqResult) -> None:
        """Start the next chain of a sequence beside the commit of its last one."""
        held, tokens = self._positions.get(view.seq_id), [drawn.token for drawn in done.drawn]
        if self._device is None or held is None or len(tokens) != len(step.tokens):
            return
        count = 1  # tokens that the sequence gained
        while count < len(tokens) and tokens[count - 1] == step.tokens[count]:
            count += 1
        held.drop_from(step.start + count)
        positions, last = held.cached + count + self._longest - 1, tokens[count - 1]
        if last < 0 or last in view.end_ids or len(held.waiting) != count:
            return
        if self._failed or not self._reserve(view.seq_id, positions, set()):
            return
        step = self._step_of(view._replace(tokens=tokens[:count]), [], self._longest)
        with self._until_memory_fails():
            chain = self._device.start([step], self._longest)
            self._started[view.seq_id] = step.start + held.first + 1 + count, chain
            held.computed()

    def _reserve_for(self, view: SeqView, limit: int, in_use: set[int]) -> int:
        held = self._positions.get(view.seq_id)
        if held is None:
            return 0
        held.drop_from(len(view.tokens) - 1)  # states of rejected drafts
        if self._started.get(view.seq_id, (0,))[0] == len(view.tokens):
            return min(limit, self._longest)
        if held.end != len(view.tokens) - 1 or not held.waiting:
            return 0
        limit = min(limit, self._longest)
        positions = held.cached + len(held.waiting) + limit - 1
        return limit if self._reserve(view.seq_id, positions, in_use) else 0

    def _evicted(self, seq_id: int) -> None:
        self._started.pop(seq_id, None)
        if held := self._positions.get(seq_id):
            held.keep_last(len(held.waiting))

    def _catch_up(self, views: Sequence[SeqView]) -> None:
        for view in views:
            held = self._positions[view.seq_id]
            self._shorten(view, held)
            more = len(held.waiting) - 1
            if more >= FEW:
                tokens = tuple(view.tokens[-1 - more : -1])
                step = self._sequence(view, tokens, held.cached)
                self._execute([step._replace(states=held.waiting[:more])])
                held.cached, held.waiting = held.cached + more, held.waiting[more:]

    def _shorten(self, view: SeqView, held: _Positions) -> None:
        if view.probe and len(held.waiting) > FEW:  # they are not worth one draft
            held.keep_last(FEW)

    def _chains(self, live: list[SeqView], limit: int, floor: float) -> dict[int, Draft]:
        if self._device is None or not live:
            return super()._chains(live, limit, floor)
        limit = min(limit, self._longest)
        known = {view.seq_id: len(view.tokens) for view in live}
        started = {i: c for i, (n, c) in self._started.items() if known.get(i) == n}
        self._started.clear()
        self._drawn = {seq_id: chain()[0] for seq_id, chain in started.items()}
        if rest := [view for view in live if view.seq_id not in started]:
            drawn = self._device.start([self._step_of(view, [], limit) for view in rest], limit)()
            self._drawn |= {view.seq_id: chain for view, chain in zip(rest, drawn, strict=True)}
        for view in rest:
            self._positions[view.seq_id].computed()
        self._drafted = {view.seq_id: view._replace(tokens=()) for view in live}
        found = super()._chains(live, limit, floor)
        # The device draws all of them before the host sees one: one more than was worth it.
        longest = max([len(draft.tokens) for draft in found.values()], default=0)
        self._longest = min(longest + 1, MAX_CHAIN)
        return found

    def _draw(self, views: Sequence[SeqView], drafts: dict[int, list[int]]) -> list[Drawn]:
        if self._device is not None:
            return [self._drawn[v.seq_id][len(drafts.get(v.seq_id, ()))] for v in views]
        steps = [self._step_of(view, drafts.get(view.seq_id, [])) for view in views]
        results = self._execute(steps)
        for result in results:
            held = self._positions[result.seq_id]
            assert result.states is not None, "the step asked for it"
            held.last = list(result.states)[-1:]
            held.computed()
        return [result.drawn[0] for result in results]

    def _step_of(self, view: SeqView, so_far: Sequence[int], count: int = 1) -> SeqStep:
        """The step that draws the draft after those, with blocks for `count` drafts."""
        held = self._positions[view.seq_id]
        # the last draft, or all waiting positions
        tokens = so_far[-1:] if so_far else view.tokens[-len(held.waiting) :]
        states = held.last if so_far else held.waiting
        start = held.cached + max(len(so_far) - 1, 0)
        spec = self._spec(view, so_far)
        step = self._sequence(view, tuple(tokens), start, spec, count - 1)
        return step._replace(hidden=True, states=states, shift=held.first + 1)

    def finish(self, view: SeqView) -> None:
        super().finish(view)
        self._positions.pop(view.seq_id, None)
