"""The scheduler. plan(): sequences to a StepPlan; commit(): a StepResult to tokens. Integers only.

The law
-------
A sequence has two counters. *known* is its number of tokens, prompt and output; *computed* is how
many of these, from the first on, have keys and values in the KV cache. A step increases computed.
When computed equals known, the sampler draws the next token, and known grows by one.

There is no prefill mode and no decode mode. Every move changes these two counters:

    prefill chunk     computed += n, no draw
    decode            computed += 1, one draw
    prefix hit        computed = n at no cost: another sequence has computed these blocks
    preemption        computed = 0, blocks released; known stays and is computed again later
    drafts            k draft tokens follow the known ones in one step; the accepted ones stay:
                      known += 1 … 1 + k
    fork              a second sequence with the same known, computed and (shared) blocks

A draw depends only on the sequence's own tokens and its own noise (promise 1), so none of these
moves can change the output.

Order
-----
The scheduler serves the sequences of a tenant by rank = arrival + PRIORITY_PLACES * priority: first
come, first served, and one step of priority is worth that many places in the queue. Tenants (API
keys) share each step equally: its prompt tokens, the running places and the blocks. What one does
not need goes to the others, so a tenant alone has all of it.

 1. Running sequences first, by rank. Each may use the step's token budget except one token per
    running sequence behind it, so every decoding sequence gets a token in every step. What decoding
    leaves is divided among the tenants with prompts to prefill or drafts to verify. A long prompt
    takes the share of its tenant, chunk by chunk; half of it while the tenant has another prompt.
    Beside other sequences its tokens are charged by depth (schedule/token_cost.py), so that the
    latency of a step does not grow with the prompt; the engine also limits them by measured time
    (prompt_tokens). Alone it takes whole chunks, of LONE_STEPS times that limit.
 2. When blocks run out, the tenant that holds most of them gives up its last running sequence in
    rank, which is preempted.
 3. Then waiting sequences start while budget is left and their known tokens fit: the next one of
    the tenant with the fewest places, among equals of the one whose last start is the longest ago.
    Where no place or too few blocks are free, other tenants give up sequences as in 2, but only
    while they keep at least as many places, or blocks, as the starting tenant then has. So equal
    shares are reached once and kept: no preemption can be answered by another.

The first in rank of all is never preempted for another one and always fits the cache alone (see
check_capacity): it always advances, so there is no livelock. A sequence that does not fit is passed
by those of other tenants only until it is the first in rank. A rank never changes, the arrivals
count up and starts take turns, so no sequence starves.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

from verbatim.base.records import (
    CacheGroup,
    Drawn,
    Finish,
    SeqStep,
    StepPlan,
    StepResult,
    TokenEvent,
)
from verbatim.schedule.block_store import BlockStore
from verbatim.schedule.blocks import ensure
from verbatim.schedule.paged_cache import Copies
from verbatim.schedule.queues import SequenceQueues, Tenant
from verbatim.schedule.sequence import RUNNING, Sequence
from verbatim.schedule.token_cost import MAX_SCORES, TokenCost

LONE_STEPS = (
    10  # steps beside others that a step of one prompt alone may take, where they have a limit
)

EventSink = Callable[[TokenEvent], bool]  # True: the sequence ends with this event


class Scheduler(SequenceQueues):
    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        blocks: tuple[int, ...],
        *,
        block_size: int = 16,
        step_tokens: int = 512,
        max_running: int = 256,
        prefix_cache: bool = True,
        use_cache: bool = True,
        prefix_key: bytes | None = None,
        store: BlockStore | None = None,
        cost: TokenCost | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__(
            groups,
            blocks,
            block_size=block_size,
            max_running=min(max_running, step_tokens),  # every running sequence fits every step
            prefix_cache=prefix_cache,
            use_cache=use_cache,
            prefix_key=prefix_key,
            store=store,
        )
        self.step_tokens = step_tokens
        # prompt tokens beside decoded ones in a step; set by the engine (engine/step_budget.py)
        self.prompt_tokens: int | None = None
        self.cost = cost or TokenCost()
        self.overlap = overlap and use_cache  # the backend launches the next step early
        self._full_attention_only = len(groups) == 1 and groups[0].window is None
        self._step = 0
        self._steps: dict[int, SeqStep] = {}  # the plan so far, by sequence id
        self._copies: Copies = []
        self._reserved = 0  # tokens of the step, the sum over the tenants

    # ----------------------------------------------------------------------------------- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when no sequence can advance."""
        self._steps = steps = {}
        self._copies = copies = list[tuple[int, int, int]]()
        budget, behind = self.step_tokens, len(self.running)
        if self.prompt_tokens is not None and behind + len(self.waiting) > 1:
            budget = min(budget, behind + self.prompt_tokens)
        self._reserve(budget - behind)
        for at, seq in enumerate(self.running[:]):
            behind -= 1
            if seq.held or seq.state != RUNNING:  # preempted for a sequence before it
                continue
            step = self._plan_decode(seq) or self._plan_running(seq, budget - behind, at)
            if step is not None:
                steps[seq.id] = step
                one = len(step.tokens) == 1  # the common case spares a call per sequence
                budget -= 1 if one else self._charge(seq, step, free=1)
        while budget > 0 and self.waiting:
            started = self._admit(budget)
            if started is None:
                break
            budget -= self._charge(started, steps[started.id])
        if not steps:
            return None
        planned = list(steps.values())
        if self.overlap:
            self._allocate_next_blocks(planned)
        self._step += 1
        return StepPlan(self._step, tuple(planned), tuple(copies))

    def _reserve(self, budget: int) -> None:
        """Divide the tokens that decoding leaves, and MAX_SCORES, equally among the tenants that
        have a use for them. Tokens that a tenant does not need go to the others."""
        tenants = self.tenants.values()
        asked = [(self._extra(t, budget), t) for t in tenants] if len(tenants) > 1 else []
        asked = sorted([pair for pair in asked if pair[0]], key=itemgetter(0))
        for tenant in tenants:
            tenant.reserved, tenant.scores = 0, max(1, MAX_SCORES // max(1, len(asked)))
        self._reserved = 0
        for i, (extra, tenant) in enumerate(asked):
            tenant.reserved = min(extra, (budget - self._reserved) // (len(asked) - i))
            self._reserved += tenant.reserved

    def _extra(self, tenant: Tenant, most: int) -> int:
        """Tokens, up to `most`, that a tenant can use in a step beyond one per running sequence."""
        extra, groups = 0, self.cache.groups
        for seq in tenant.running:
            n = len(seq.tokens) - seq.computed - 1
            if n and not seq.held:
                extra += self.cost.of_chunk(n, seq.computed, groups)
            extra += len(seq.drafts)
        for seq in tenant.waiting if self._could_admit(tenant) else ():
            if extra >= most:
                break
            extra += len(seq.tokens)
        return min(extra, most)

    def _charge(self, seq: Sequence, step: SeqStep, free: int = 0) -> int:
        """Cost of a planned step. What exceeds `free` uses up the reserve of its tenant."""
        tenant, cost = self.tenants[seq.tenant], self.cost.of_step(step, self.cache.groups)
        used = min(tenant.reserved, cost - free)
        tenant.reserved -= used
        self._reserved -= used
        tenant.scores -= len(step.targets)
        return cost

    def _preempt(self, seq: Sequence) -> None:
        """Preempt a sequence, and drop its part of the plan in progress."""
        if self._steps.pop(seq.id, None) is not None:
            own = {(g, block) for g, table in enumerate(seq.blocks) for block in table}
            self._copies[:] = [c for c in self._copies if (c[0], c[2]) not in own]
        super()._preempt(seq)

    def _plan_decode(self, seq: Sequence) -> SeqStep | None:
        """Fast path: decode one token into the last block if it has room and is not shared."""
        start, blocks = seq.computed, seq.frozen_blocks
        if (
            blocks is None
            or start < seq.prompt_len
            or start + 1 != len(seq.tokens)
            or seq.drafts
            or not self._full_attention_only
        ):
            return None
        at, table = start // self.block_size, blocks[0]
        if at >= len(table) or self.cache.pools[0].refs[table[at]] != 1:
            return None
        token = (seq.tokens[-1],)
        return SeqStep(seq.id, token, start, blocks, 1, seq.draw_spec(), adapter=seq.adapter)

    def _plan_running(self, seq: Sequence, budget: int, at: int) -> SeqStep | None:
        """The next chunk of running[at]. None: the sequence itself was preempted, or the step has
        no positions left to score."""
        want = len(seq.tokens) - seq.computed
        budget -= self._reserved - self.tenants[seq.tenant].reserved
        n = self._chunk(seq, want, budget, self.running[:at])
        while n and not self.cache.allocate(seq, n, self._copies):
            if n > 1:  # shorten the chunk before preempting another sequence
                n = max(1, min(n - 1, self.cache.max_positions(seq)))
            elif not self._preempt_for(seq):
                return None
        return seq.make_step(want, n) if n else None

    def _chunk(self, seq: Sequence, want: int, budget: int, others: list[Sequence]) -> int:
        """Tokens to compute. In groups with a window the blocks that `others` may need next stay
        free: they would preempt the sequence, though it is about to release blocks of its own."""
        n = seq.chunk_length(want, self._max_tokens(seq, want, budget))
        if seq.unscored:
            n = min(n, self.tenants[seq.tenant].scores)
        if n > 1 and self.cache.windowed:
            n = max(1, min(n, self.cache.max_positions(seq, others)))
        return n

    def _admit(self, budget: int) -> Sequence | None:
        """Start one waiting sequence: the next one of the tenant with the fewest places, and among
        equals of the one whose last start is the longest ago. One that does not fit is passed by
        those of other tenants, unless it is the first in rank of all."""
        queues = (self.running, self.waiting)
        ranks = [s.rank for s in (next((s for s in q if not s.held), None) for q in queues) if s]
        for tenant in sorted(self.tenants.values(), key=lambda t: (len(t.running), t.turn)):
            seq = tenant.next
            if seq is not None:
                if self._try_start(seq, tenant, budget):
                    return seq
                if seq.rank == min(ranks):
                    break
        return None

    def _try_start(self, seq: Sequence, tenant: Tenant, budget: int) -> bool:
        """Start a waiting sequence if its known tokens fit beside the running ones, of which those
        in _victims_for() are preempted."""
        alone = not self._steps  # no other sequence advances in this step
        if not alone:
            budget -= self._reserved - tenant.reserved
            if budget <= 0 or tenant.refused == self._admission_state(seq):
                return False
        if seq.unscored and not tenant.scores:
            return False
        self.cache.reuse_prefix(seq)
        while (victims := self._victims_for(seq)) is None:
            # If every running sequence is a held beam that waits for this one, preempt the beams.
            if not (alone and self._preempt_held()):
                ensure(bool(self.running), f"sequence {seq.id} does not fit an empty cache")
                self.cache.release_all(seq)
                tenant.refused = self._admission_state(seq)
                self._reserved -= tenant.reserved  # the tokens go to the tenants behind it
                tenant.reserved = 0
                return False
        for victim in victims:
            self._preempt(victim)
        others = self.running[:]
        self._start(seq)
        want = len(seq.tokens) - seq.computed
        n = min(self._chunk(seq, want, budget, others), self.cache.max_positions(seq))
        ensure(self.cache.allocate(seq, n, []), f"sequence {seq.id} was admitted and does not fit")
        self._steps[seq.id] = seq.make_step(want, n)
        return True

    def _admission_state(self, seq: Sequence) -> tuple[int, ...]:
        """While this does not change, a refused sequence still does not fit: no retry per step."""
        own = self.tenants[seq.tenant].running
        return seq.id, self.cache.available, len(self.running), len(own)

    def _could_admit(self, tenant: Tenant) -> bool:
        first = tenant.next
        if first is None or tenant.refused == self._admission_state(first):
            return False
        if len(self.running) < self.max_running:
            return True
        return max(len(t.running) for t in self.tenants.values()) >= len(tenant.running) + 2

    def _max_tokens(self, seq: Sequence, want: int, budget: int) -> int:
        """Most tokens of this sequence in the step: what `budget` pays for at their depth, and half
        of it while the tenant has another prompt to prefill. Alone, a long step delays no
        sequence."""
        if want == 1:
            return budget
        tenant = self.tenants[seq.tenant]
        others = any(s is not seq and not s.held for s in self.running)
        if not others and not any(map(self._could_admit, self.tenants.values())):
            if self.prompt_tokens is None:
                return budget
            most, groups = LONE_STEPS * self.prompt_tokens, self.cache.groups
            return min(budget, self.cost.affordable(most, seq.computed, groups))
        paid = self.cost.affordable(budget, seq.computed, self.cache.groups)
        half = (paid + 1) // 2
        if want <= half:
            return paid
        prefilling = any(
            len(s.tokens) - s.computed > 1 and s.rank > seq.rank and not s.held
            for s in tenant.running
        )
        return half if prefilling or self._could_admit(tenant) else paid

    # --------------------------------------------------------------------------------- commit

    def commit(
        self, plan: StepPlan, result: StepResult, sink: EventSink | None = None
    ) -> list[TokenEvent]:
        """Advance the counters by an executed plan; return one event per new token, in order.
        `sink` sees each event at once and says whether the sequence ends there (a stop string);
        drafts accepted behind the end are dropped."""
        if plan.step != result.step or len(plan.sequences) != len(result.sequences):
            ensure(False, "the result does not belong to this plan")
        events: list[TokenEvent] = []

        def emit(event: TokenEvent) -> bool:
            events.append(event)
            ends = sink is not None and sink(event)
            return ends or event.finish is not None

        for step, done in zip(plan.sequences, result.sequences, strict=True):
            if step.seq_id != done.seq_id or len(done.drawn) != step.draws:
                ensure(False, f"sequence {step.seq_id}: the result does not belong to this plan")
            seq = self.sequences.get(step.seq_id)
            if seq is None:  # aborted while the backend was computing
                continue
            if step.targets:
                seq.scored = max(seq.scored, step.start + len(step.targets))
            if step.draws == 0:
                self._commit_prefill(seq, step, emit)
            elif seq.beam:
                self._commit_beam(seq, step)
                emit(TokenEvent(seq.id, done.drawn[0]))
            else:
                self._commit_draws(seq, step, done.drawn, emit)
        return events

    def _commit_prefill(self, seq: Sequence, step: SeqStep, emit: EventSink) -> None:
        seq.computed = step.start + len(step.tokens)
        self.cache.publish(seq)
        if seq.siblings and seq.computed == seq.prompt_len - 1:
            self._fork_siblings(seq)
        if seq.computed == len(seq.tokens) == seq.limit:  # max_tokens is 0
            self._end(seq)
            emit(TokenEvent(seq.id, None, Finish("length", seq.limit_name)))

    def _commit_beam(self, seq: Sequence, step: SeqStep) -> None:
        """A beam has its candidates and is held until extend() appends one."""
        seq.computed, seq.held = step.start + len(step.tokens), True
        self.cache.publish(seq)
        if not self.use_cache:
            self.cache.release_all(seq)

    def _commit_draws(
        self, seq: Sequence, step: SeqStep, drawn: tuple[Drawn, ...], emit: EventSink
    ) -> None:
        """Append the drawn tokens. Draw i is valid only if the i drafts before it equal the tokens
        drawn there, so the first mismatch drops the rest of the step."""
        tokens, last = seq.tokens, step.draws - 1
        drafts = step.tokens[-last:] if last else ()
        finish, ended = None, False
        for i, draw in enumerate(drawn):
            token = draw.token
            if token < 0:
                seq.drafted, seq.accepted = seq.drafted + last, seq.accepted + i
                emit(TokenEvent(seq.id, None, self._end_without_token(seq, token)))
                return
            tokens.append(token)
            if token in seq.ends and len(tokens) > seq.min_len:
                finish = Finish("stop", seq.ends[token])
            elif len(tokens) >= seq.limit:
                finish = Finish("length", seq.limit_name)
            ended = emit(TokenEvent(seq.id, draw, finish))
            if ended or seq.held or i == last or drafts[i] != token:
                break
        seq.computed = computed = len(tokens) - 1
        if last:
            seq.drafted += last
            seq.accepted += i
            self.cache.trim(seq)
        if computed // self.block_size > seq.published:
            self.cache.publish(seq)
        if ended:
            self._end(seq)
        elif not self.use_cache:
            self.cache.release_all(seq)
