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
    denoising         a block of undecided tokens follows the known ones and is drawn at once; what
                      is decided from its start on is known; computed grows when the whole block is
                      computed with its final tokens (canvas.py)

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
from verbatim.schedule.canvas_steps import CanvasSteps, EventSink
from verbatim.schedule.paged_cache import Copies
from verbatim.schedule.sequence import RUNNING, Sequence
from verbatim.schedule.token_cost import TokenCost

LONE_STEPS = 10  # a prompt alone may take a step as long as this many beside other sequences


class Scheduler(CanvasSteps):
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
        # prompt tokens beside decoded ones in a step; set by engine/step/step_budget.py
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
            or seq.canvas is not None
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
        want = seq.span - seq.computed
        budget -= self._reserved - self.tenants[seq.tenant].reserved
        n = self._chunk(seq, want, budget, self.running[:at])
        while n and not self.cache.allocate(seq, n, self._copies):
            if fewer := self._fewer(seq, want, n):  # before preempting another sequence
                n = fewer
            elif not self._preempt_for(seq):
                return None
        return seq.make_step(want, n) if n else None

    def _chunk(self, seq: Sequence, want: int, budget: int, others: list[Sequence]) -> int:
        """Tokens to compute. In groups with a window the blocks that `others` may need next stay
        free: they would preempt the sequence, though it is about to release blocks of its own."""
        if seq.canvas is not None:
            return self._whole_blocks(seq, seq.canvas.least, want, budget)
        n = seq.chunk_length(want, self._max_tokens(seq, want, budget))
        if seq.unscored:
            n = min(n, self.tenants[seq.tenant].scores)
        if n > 1 and self.cache.windowed:
            n = max(1, min(n, self.cache.max_positions(seq, others)))
        return n

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
            elif seq.canvas is not None:
                self._commit_canvas(seq, seq.canvas, done.drawn, emit)
            else:
                self._commit_draws(seq, step, done.drawn, emit)
        return events

    def _commit_prefill(self, seq: Sequence, step: SeqStep, emit: EventSink) -> None:
        seq.computed = step.start + len(step.tokens)
        self.cache.publish(seq)
        if seq.siblings and seq.computed == seq.fork_at:
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
            if token in seq.stop_ids and len(tokens) > seq.min_len:
                finish = Finish("stop", seq.stop_ids[token])
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
