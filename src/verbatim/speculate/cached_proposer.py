"""Base of proposers that run a network with a KV cache of its own: a draft model, a draft layer.

In: the tokens of sequences. Out: chains of draws, with the target's parameters and noise key.
Gumbel noise depends on (key, position, token) alone, so where the distributions are close the same
noise picks the same token: a draft is accepted with probability at least (1 - TV) / (1 + TV), TV
being the total variation distance. Without device memory it drafts nothing any more.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from verbatim.backend.protocol import Backend
from verbatim.base.errors import DeviceMemoryError, ParameterError
from verbatim.base.records import Drawn, DrawSpec, SeqResult, SeqStep, StepPlan
from verbatim.speculate.proposer import Draft, SeqView

log = logging.getLogger("verbatim.engine")

COST_WEIGHT = 0.2  # weight of the newest measurement in token_cost
TYPICAL_PROB = 0.6  # probability of a draft, given the ones before it


class CachedProposer:
    name = ""
    what = ""  # for messages: "draft model"
    states_probs = False

    def __init__(self, backend: Backend, blocks: int) -> None:
        """`blocks`: size of the network's KV cache, per cache group."""
        self.token_cost = 1e-6  # seconds; replaced by measurements
        self._backend = backend
        self._groups = len(backend.block_bytes())
        try:
            backend.allocate((blocks,) * self._groups)
        except (MemoryError, DeviceMemoryError):
            size = blocks * sum(backend.block_bytes()) / 2**20
            raise ParameterError(
                "speculate",
                f"the {self.what}'s KV cache of {size:.0f} MiB does not fit into memory; "
                "lower kv_memory or kv_blocks",
            ) from None
        self._free = [list(range(blocks)) for _ in range(self._groups)]
        # seq_id -> block table per cache group; least recently used first
        self._tables: OrderedDict[int, list[list[int]]] = OrderedDict()
        self._step = 0
        self._failed = False

    def _reserve_for(self, view: SeqView, limit: int, in_use: set[int]) -> int:
        """Allocate blocks for up to `limit` drafts. Returns how many; 0: none."""
        raise NotImplementedError

    def _catch_up(self, views: Sequence[SeqView]) -> None:
        """Compute what the first draw of the sequences needs, and does not compute itself."""

    def _draw(self, views: Sequence[SeqView], drafts: dict[int, list[int]]) -> list[Drawn]:
        """The token after those in `drafts` of each sequence; negative: there is none."""
        raise NotImplementedError

    def _evicted(self, seq_id: int) -> None:
        """The sequence's cached positions are lost."""

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        drafts: dict[int, Draft] = {}
        with self._until_memory_fails():
            live = [] if self._failed else self._ready(views, limit)
            began = time.perf_counter()  # what a sequence computes once is no cost of each token
            drafts = self._chains(live, limit, floor)
        drafted = sum(len(draft.tokens) for draft in drafts.values())
        if drafted:
            spent = (time.perf_counter() - began) / drafted
            self.token_cost += (
                COST_WEIGHT * (spent - self.token_cost) if self.token_cost > 1e-6 else spent
            )
        return drafts

    @contextlib.contextmanager
    def _until_memory_fails(self) -> Iterator[None]:
        try:
            yield
        except DeviceMemoryError as error:
            self._failed = True
            log.warning("%s: %s; no further drafts", self.what, error.message)

    def _ready(self, views: Sequence[SeqView], limit: int) -> list[SeqView]:
        """The sequences that can be drafted for, with the number of drafts that fit."""
        live: list[SeqView] = []
        for view in views:
            count = self._reserve_for(view, min(limit, view.max_drafts), {v.seq_id for v in live})
            if count > 0:
                live.append(view._replace(max_drafts=count))
        self._catch_up(live)
        return live

    def _chains(self, live: list[SeqView], limit: int, floor: float) -> dict[int, Draft]:
        drafts: dict[int, list[int]] = {}
        probs: dict[int, list[float]] = {}
        for depth in range(limit):
            live = [view for view in live if depth < view.max_drafts]
            if not live:
                break
            drawn = list(zip(live, self._draw(live, drafts), strict=True))
            live = []
            for view, (token, logprob, *_) in drawn:
                if token < 0:  # bans left nothing to draw, or NaN
                    continue
                drafts.setdefault(view.seq_id, []).append(token)
                before = probs.setdefault(view.seq_id, [1.0])
                before.append(before[-1] * math.exp(logprob))
                if token not in view.end_ids and before[-1] * self._next_prob >= floor:
                    live.append(view)
        stated = {seq_id: tuple(p[1:]) if self.states_probs else () for seq_id, p in probs.items()}
        return {
            seq_id: Draft(tuple(tokens), self.name, 0, stated[seq_id])
            for seq_id, tokens in drafts.items()
        }

    @property
    def _next_prob(self) -> float:
        """What a further draft multiplies the stated probability by, typically."""
        return TYPICAL_PROB if self.states_probs else math.inf

    def _reserve(self, seq_id: int, positions: int, in_use: set[int]) -> bool:
        """Allocate blocks for the positions; evicts sequences not in `in_use`. False: it does not
        fit."""
        need = -(-positions // self._backend.block_size)
        tables = self._tables.setdefault(seq_id, [[] for _ in range(self._groups)])
        self._tables.move_to_end(seq_id)
        for table, free in zip(tables, self._free, strict=True):
            while len(free) < need - len(table):
                oldest = next((i for i in self._tables if i not in in_use and i != seq_id), None)
                if oldest is None:
                    self._release(seq_id)
                    return False
                self._release(oldest)
            while len(table) < need:
                table.append(free.pop())
        return True

    def _sequence(
        self,
        view: SeqView,
        tokens: tuple[int, ...],
        start: int,
        spec: DrawSpec | None = None,
        ahead: int = 0,
    ) -> SeqStep:
        """`ahead`: positions after the tokens that need blocks, too."""
        count = -(-(start + len(tokens) + ahead) // self._backend.block_size)
        blocks = tuple(tuple(table[:count]) for table in self._tables[view.seq_id])
        return SeqStep(view.seq_id, tokens, start, blocks, draws=1 if spec else 0, draw=spec)

    def _spec(self, view: SeqView, so_far: Sequence[int]) -> DrawSpec:
        history = (*view.tokens, *so_far) if view.params.needs_history else ()
        # not with_(), which would validate every parameter again for each draft
        wanted = {"logprobs": 0 if self.states_probs else None, "explain": 0}
        params = view.params.with_origins({}, {**wanted, "logprobs_mode": "raw"})
        return DrawSpec(params, view.key, view.prompt_len, history)

    def _execute(self, steps: Sequence[SeqStep]) -> tuple[SeqResult, ...]:
        if not steps:
            return ()
        self._step += 1
        return self._backend.execute(StepPlan(self._step, tuple(steps))).sequences

    def _release(self, seq_id: int) -> None:
        for free, table in zip(self._free, self._tables.pop(seq_id, ()), strict=False):
            free.extend(table)
        self._evicted(seq_id)

    def finish(self, view: SeqView) -> None:
        self._release(view.seq_id)

    def close(self) -> None:
        self._tables.clear()
        self._backend.close()
