"""Sequence queues: which sequences wait, run or have ended, and the moves between these states.

In: requests to add, abort, fork, extend, hold or preempt a sequence. Out: the two queues `running`
and `waiting`, sorted by rank, and the block tables in `cache`. The scheduler plans over them.
Invariant: every sequence in `sequences` is in exactly one queue, except siblings before their fork;
a waiting sequence holds no blocks. The queues of each tenant are parts of these two.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

from verbatim.base.errors import CapacityError
from verbatim.base.records import BROKEN, CacheGroup, Finish, SeqStep
from verbatim.schedule.block_store import BlockStore
from verbatim.schedule.blocks import ensure
from verbatim.schedule.no_token import finish_without_token
from verbatim.schedule.paged_cache import PagedCache
from verbatim.schedule.prefix import PrefixChain
from verbatim.schedule.sequence import ENDED, RUNNING, WAITING, Sequence

PRIORITY_PLACES = 64  # places in the queue that one priority level is worth; docs/adr/0013
_rank = attrgetter("rank")


class Tenant:
    """The queues of one tenant, and its share of the step that is being planned."""

    __slots__ = ("refused", "reserved", "running", "scores", "turn", "waiting")

    def __init__(self, turn: int) -> None:
        self.running: list[Sequence] = []  # sorted by rank
        self.waiting: list[Sequence] = []  # sorted by rank
        self.turn = turn  # number of its last start; among equals, the smallest starts next
        self.reserved = 0  # tokens of the step that other tenants leave to it
        self.scores = 0  # prompt positions that it may still score in the step
        self.refused: tuple[int, ...] = ()  # _admission_state() of its last refusal

    @property
    def next(self) -> Sequence | None:
        return next((seq for seq in self.waiting if not seq.held), None)


class SequenceQueues:
    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        blocks: tuple[int, ...],
        *,
        block_size: int,
        max_running: int,
        prefix_cache: bool,
        use_cache: bool,
        prefix_key: bytes | None,
        store: BlockStore | None,
    ) -> None:
        prefix = PrefixChain(block_size, prefix_key) if prefix_cache and use_cache else None
        self.cache = PagedCache(groups, blocks, block_size, prefix, store)
        self.block_size = block_size
        self.max_running = max_running
        self.use_cache = use_cache
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []  # sorted by rank
        self.waiting: list[Sequence] = []  # sorted by rank
        self.tenants: dict[str, Tenant] = {}  # those with a sequence in a queue
        self._arrivals = self._turns = 0
        self.preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache
        self.prefix_hits = 0  # tokens found in the prefix cache

    # ------------------------------------------------------------------------ used by the engine

    def add(self, seq: Sequence) -> None:
        """Queue a sequence and its siblings. CapacityError if it cannot fit even an empty cache."""
        self.check_capacity(seq)
        self._arrivals += 1
        for member in (seq, *seq.siblings):
            member.rank = (self._arrivals + PRIORITY_PLACES * seq.params.priority, member.id)
            ensure(member.id not in self.sequences, f"sequence {member.id} was added twice")
            self.sequences[member.id] = member
        self._move(seq, WAITING)
        if not self.use_cache:  # no blocks to share: every choice computes its own prompt
            for sibling in seq.siblings:
                self._move(sibling, WAITING)
            seq.siblings = []

    def check_capacity(self, seq: Sequence) -> None:
        for group, pool in zip(self.cache.groups, self.cache.pools, strict=True):
            need = self.cache.blocks_needed(group, seq.capacity)
            if need > pool.total:
                window = f" (sliding window {group.window})" if group.window else ""
                raise CapacityError(
                    f"{seq.prompt_len} prompt tokens and up to {seq.limit - seq.prompt_len} more "
                    f"need {need} cache blocks of {self.block_size} tokens{window}, and the whole "
                    f"cache has {pool.total}; shorten the prompt, lower max_tokens, or give the "
                    "engine more kv_memory",
                    param="max_tokens",
                )

    def abort(self, seq_id: int, *, publish: bool = True) -> bool:
        """End a sequence in any state and release its blocks. False: it has ended already.
        `publish` as in _end()."""
        seq = self.sequences.get(seq_id)
        if seq is None:
            return False
        if seq.siblings:  # the siblings still need the prompt: the first one computes it
            heir = seq.siblings.pop(0)
            heir.siblings, seq.siblings = seq.siblings, []
            self._move(heir, WAITING)
        for elder in self.sequences.values() if seq.pending else ():
            elder.siblings = [s for s in elder.siblings if s is not seq]
        self._end(seq, publish=publish)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` (new, without tokens) gets the tokens and shares the blocks of `parent`; a shared
        block is copied on write."""
        if child.id not in self.sequences:
            child.rank = (parent.rank[0], child.id)
            self.sequences[child.id] = child
        child.tokens, child.held = parent.tokens[:], parent.held
        if parent.state != RUNNING or len(self.running) >= self.max_running or not self.use_cache:
            self._move(child, WAITING)
            return
        self.cache.fork(parent, child)
        self._move(child, RUNNING)

    def extend(self, seq_id: int, token: int) -> None:
        """Append the next token of a held beam and schedule it again."""
        seq = self.sequences[seq_id]
        ensure(seq.held, f"sequence {seq_id} is not held")
        seq.tokens.append(token)
        seq.held = False

    def hold(self, seq_id: int) -> None:
        """Keep the sequence out of every step until release(), for example while its grammar
        compiles. Drafts accepted behind its last token are drawn again afterwards."""
        self.sequences[seq_id].held = True

    def release(self, seq_id: int) -> None:
        self.sequences[seq_id].held = False

    def set_drafts(self, seq_id: int, tokens: Iterable[int]) -> None:
        """Draft tokens behind the known ones. The next plan uses as many as the step budget, the
        blocks and the limits allow, and drops the rest."""
        self.sequences[seq_id].drafts = tuple(tokens)

    def preempt_all(self) -> None:
        """After a step that failed or was carried out in part: every running sequence recomputes
        its known tokens."""
        for seq in self.running[:]:
            self._preempt(seq)

    def counts(self) -> dict[str, float]:
        """Gauges and counters by metric name. Safe to call while another thread steps."""
        pools = self.cache.pools
        blocks, used = sum(p.total for p in pools), sum(p.used for p in pools)
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "blocks": blocks,
            "blocks_used": used,
            "blocks_cached": sum(len(p.cached) for p in pools),
            "kv_cache_usage_ratio": used / max(blocks, 1),
            "preemptions_total": self.preemptions,
            "evictions_total": sum(p.evictions for p in pools),
            "prefix_queries_total": self.prefix_queries,
            "prefix_hits_total": self.prefix_hits,
        }

    def clear_prefix_cache(self) -> int:
        """Evict every cached prefix block that no sequence uses. Returns the blocks freed."""
        return sum(pool.evict_cached() for pool in self.cache.pools)

    # ----------------------------------------------------------------------------- state changes

    def _move(self, seq: Sequence, state: int) -> None:
        """Move a sequence from the queues of its state to those of another; ENDED: to none."""
        tenant = self.tenants.get(seq.tenant)
        if tenant is None:
            tenant = self.tenants[seq.tenant] = Tenant(self._next_turn())
        for queues in (self, tenant):
            if not seq.pending:
                queue = queues.running if seq.state == RUNNING else queues.waiting
                i = bisect_left(queue, seq.rank, key=_rank)
                ensure(i < len(queue) and queue[i] is seq, f"sequence {seq.id} is in another queue")
                del queue[i]
            if state != ENDED:
                insort(queues.running if state == RUNNING else queues.waiting, seq, key=_rank)
        seq.state, seq.pending = state, state == ENDED
        if not (tenant.running or tenant.waiting):
            del self.tenants[seq.tenant]

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns

    def _start(self, seq: Sequence) -> None:
        """Move a waiting sequence, after its prefix lookup, to `running`."""
        self._move(seq, RUNNING)
        self.tenants[seq.tenant].turn = self._next_turn()
        if seq.preemptions == 0:
            seq.cached_tokens = min(seq.computed, seq.prompt_len)
            if self.cache.prefix is not None:
                self.prefix_queries += seq.prompt_len
                self.prefix_hits += seq.cached_tokens
        if seq.siblings and seq.computed >= seq.fork_at:
            self._fork_siblings(seq)

    def _fork_siblings(self, seq: Sequence) -> None:
        siblings, seq.siblings = seq.siblings, []
        for child in siblings:
            child.scored = seq.prompt_len  # `seq` reports the prompt's log-probabilities
            self.fork(seq, child)

    def _preempt(self, seq: Sequence) -> None:
        self._move(seq, WAITING)
        self.cache.release_all(seq)
        seq.drafts = ()
        seq.preemptions += 1
        self.preemptions += 1

    def _preempt_held(self) -> bool:
        held = next((s for s in reversed(self.running) if s.held), None)
        if held is not None:
            self._preempt(held)
        return held is not None

    def _end(self, seq: Sequence, *, publish: bool = True) -> None:
        """`publish`: False withdraws the sequence's blocks from the prefix cache."""
        if not publish:
            self.cache.unpublish(seq)
        self._move(seq, ENDED)
        self.cache.release_all(seq)
        del self.sequences[seq.id]

    def _end_without_token(self, seq: Sequence, token: int) -> Finish:
        self._end(seq, publish=token != BROKEN)
        return finish_without_token(token, len(seq.tokens), seq.params.adapter)

    def _allocate_next_blocks(self, steps: list[SeqStep]) -> None:
        """Allocate the next KV block one step early for decoding sequences, so that the GPU can
        launch the following step without a new plan. Skipped when free blocks are scarce; never
        preempts."""
        for i, step in enumerate(steps):
            if step.draws != 1 or step.end < len(step.blocks[0]) * self.block_size:
                continue
            seq = self.sequences[step.seq_id]
            scarce = self.cache.low_on_blocks(len(self.running))
            if seq.beam or seq.canvas or step.end + 1 >= seq.limit or scarce:
                continue
            if self.cache.allocate(seq, len(step.tokens) + 1, []):
                steps[i] = step._replace(blocks=seq.freeze_blocks())
