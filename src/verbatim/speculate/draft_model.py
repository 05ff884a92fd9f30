"""Speculative decoding with a smaller model of the same vocabulary.

In: the tokens of sequences. Out: the draft model's continuation. The draft model draws with the
target's parameters and noise key. Gumbel noise depends on (key, position, token) alone, so where
the distributions are close the same noise picks the same token: a draft is accepted with
probability at least (1 - TV) / (1 + TV), TV being the total variation distance.

The draft model has its own backend, KV cache and context limit; beyond that limit it drafts
nothing. The KV cache is reused for the longest prefix that still matches the sequence. When it runs
out of device memory it drafts nothing any more; requests never end for lack of drafts.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from verbatim.backend.protocol import Backend
from verbatim.base.errors import DeviceMemoryError, ParameterError
from verbatim.base.records import DrawSpec, SeqResult, SeqStep, StepPlan
from verbatim.speculate.proposer import Draft, SeqView

log = logging.getLogger("verbatim.engine")

CHUNK = 512  # prompt tokens per step of the draft model
COST_WEIGHT = 0.2  # weight of the newest measurement in token_cost


@dataclass(slots=True)
class _Cached:
    """Tokens whose KV is in the draft model's cache, and their block table per cache group."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)


class DraftProposer:
    name = "draft"
    states_probs = False

    def __init__(self, backend: Backend, blocks: int) -> None:
        """`blocks`: size of the draft model's KV cache, per cache group."""
        self.token_cost = 1e-6  # seconds; replaced by measurements
        self._backend = backend
        self._context = backend.spec.context
        self._groups = len(backend.block_bytes())
        try:
            backend.allocate((blocks,) * self._groups)
        except (MemoryError, DeviceMemoryError):
            size = blocks * sum(backend.block_bytes()) / 2**20
            raise ParameterError(
                "speculate",
                f"the draft model's KV cache of {size:.0f} MiB does not fit into memory; "
                "lower kv_memory or kv_blocks",
            ) from None
        self._free = [list(range(blocks)) for _ in range(self._groups)]
        self._cached: OrderedDict[int, _Cached] = OrderedDict()  # least recently used first
        self._step = 0

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        try:
            return self._draft(views, limit)
        except DeviceMemoryError as error:
            self._context = 0  # no sequence fits
            log.warning("draft model: %s; no further drafts", error.message)
            return {}

    def _draft(self, views: Sequence[SeqView], limit: int) -> dict[int, Draft]:
        began = time.perf_counter()
        drafts: dict[int, list[int]] = {}
        live: list[SeqView] = []  # sequences that draft one more token
        for view in views:
            # + 1: the last drafted token is never computed.
            max_drafts = min(limit, view.max_drafts, self._context + 1 - len(view.tokens))
            if self._reserve(view, max_drafts, {v.seq_id for v in live}):
                live.append(view._replace(max_drafts=max_drafts))
        self._catch_up(live)
        for depth in range(limit):
            live = [view for view in live if depth < view.max_drafts]
            if not live:
                break
            drawn = list(zip(live, self._draw(live, drafts), strict=True))
            for view, token in drawn:
                if token >= 0:  # negative: bans left nothing to draw, or NaN
                    drafts.setdefault(view.seq_id, []).append(token)
            live = [view for view, token in drawn if token >= 0 and token not in view.end_ids]
        drafted = sum(map(len, drafts.values()))
        if drafted:
            spent = (time.perf_counter() - began) / drafted
            self.token_cost += (
                COST_WEIGHT * (spent - self.token_cost) if self.token_cost > 1e-6 else spent
            )
        return {seq_id: Draft(tuple(tokens), self.name, 0) for seq_id, tokens in drafts.items()}

    def _reserve(self, view: SeqView, drafts: int, in_use: set[int]) -> bool:
        """Allocate blocks for the sequence and its drafts; evicts sequences not in `in_use`, least
        recently used first. False: it does not fit."""
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
                oldest = next(
                    (i for i in self._cached if i not in in_use and i != view.seq_id), None
                )
                if oldest is None:
                    self._release(view.seq_id)
                    return False
                self._release(oldest)
            while len(state.blocks[group]) < need:
                state.blocks[group].append(free.pop())
        return True

    def _catch_up(self, views: Sequence[SeqView]) -> None:
        """Prefill all known tokens but the last, which the first draw computes."""
        for view in views:
            state = self._cached[view.seq_id]
            state.tokens = state.tokens[: _common_prefix(state.tokens, view.tokens)]
            while len(view.tokens) - 1 - len(state.tokens) > 0:
                start = len(state.tokens)
                chunk = tuple(view.tokens[start : min(start + CHUNK, len(view.tokens) - 1)])
                self._execute((self._sequence(view, chunk, start),))
                state.tokens.extend(chunk)

    def _draw(self, views: Sequence[SeqView], drafts: dict[int, list[int]]) -> list[int]:
        steps = []
        for view in views:
            so_far = drafts.get(view.seq_id, [])
            last = so_far[-1] if so_far else view.tokens[-1]
            start = len(view.tokens) - 1 + len(so_far)
            history = (*view.tokens, *so_far) if view.params.needs_history else ()
            # not with_(), which would validate every parameter again for each draft
            params = view.params.with_origins({}, {"logprobs": None, "explain": 0})
            spec = DrawSpec(params, view.key, view.prompt_len, history)
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


def _common_prefix(computed: Sequence[int], known: Sequence[int]) -> int:
    """Length of the common prefix, without the last known token: it must be computed again to
    get the logits of the next token."""
    count = min(len(computed), len(known) - 1)
    if list(computed[:count]) == list(known[:count]):
        return count
    return next(i for i in range(count) if computed[i] != known[i])
