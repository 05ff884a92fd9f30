"""Shares of tenants: what each leaves of a step to the others, and which sequence starts next.

In: the queues of the tenants, and the tokens that decoding leaves of a step. Out: a reserve of
tokens per tenant, sequences that start, and sequences that are preempted for them. The order, and
why no sequence starves, is at the head of scheduler.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from operator import itemgetter

from verbatim.base.records import SeqStep
from verbatim.schedule.blocks import ensure
from verbatim.schedule.queues import SequenceQueues, Tenant
from verbatim.schedule.sequence import Sequence
from verbatim.schedule.token_cost import MAX_SCORES, TokenCost


class TenantShares(SequenceQueues):
    cost: TokenCost
    _steps: dict[int, SeqStep]  # the plan so far, by sequence id
    _reserved: int  # tokens of the step, the sum over the tenants

    def _chunk(self, seq: Sequence, want: int, budget: int, others: list[Sequence]) -> int:
        raise NotImplementedError

    def _has_room(self, block: int) -> bool:
        raise NotImplementedError

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
            n = seq.span - seq.computed - 1
            if n and not seq.held:
                extra += self.cost.of_chunk(n, seq.computed, groups)
            extra += len(seq.drafts)
        for seq in tenant.waiting if self._could_admit(tenant) else ():
            if extra >= most:
                break
            extra += seq.span
        return min(extra, most)

    def _charge(self, seq: Sequence, step: SeqStep, free: int = 0) -> int:
        """Cost of a planned step. What exceeds `free` uses up the reserve of its tenant."""
        tenant, cost = self.tenants[seq.tenant], self.cost.of_step(step, self.cache.groups)
        used = min(tenant.reserved, cost - free)
        tenant.reserved -= used
        self._reserved -= used
        tenant.scores -= len(step.targets)
        return cost

    def _victims_for(self, seq: Sequence) -> list[Sequence] | None:
        """The sequences to preempt so that `seq` can start; None: it waits. Another tenant gives up
        a sequence only if it keeps as many places, or blocks, as the tenant of `seq` then has."""
        running, victims, own = self.running[:], list[Sequence](), seq.tenant
        while True:
            if len(running) >= self.max_running:
                size, need = _one_place, 1
            elif self.cache.can_admit(seq, running, victims):
                return victims
            else:
                size, need = self.cache.held, self.cache.needed(seq)
            used = _used(running, size)
            for tenant, count in used.most_common():
                last = None if tenant == own else self._last(tenant, victims)
                if last is not None and count - size(last) >= used[own] + need:
                    break
            else:
                return None
            running.remove(last)
            victims.append(last)

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
        if seq.canvas is not None and not self._has_room(seq.canvas.least):
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
        want = seq.span - seq.computed
        n = min(self._chunk(seq, want, budget, others), self.cache.max_positions(seq))
        ensure(self.cache.allocate(seq, n, []), f"sequence {seq.id} was admitted and does not fit")
        self._steps[seq.id] = seq.make_step(want, n)
        return True

    # ---------------------------------------------------------------------------------- preemption

    def _preempt_for(self, seq: Sequence) -> bool:
        """Free blocks for `seq`: preempt a sequence of the tenant that holds most of them. False:
        it was `seq` itself."""
        found = (
            self._last(tenant) for tenant, _ in _used(self.running, self.cache.held).most_common()
        )
        victim = next((last for last in found if last is not None), None)
        ensure(victim is not None, f"sequence {seq.id} does not fit an empty cache")
        assert victim is not None
        self._preempt(victim)
        return victim is not seq

    def _last(self, tenant: str, victims: Seq[Sequence] = ()) -> Sequence | None:
        """The sequence that a tenant gives up next: a held one, else its last in rank; never the
        first in rank of all."""
        first = next((s for s in self.running if not s.held), None)
        queue = self.tenants[tenant].running
        left = [s for s in queue if s is not first and s not in victims]
        return next((s for s in reversed(left) if s.held), left[-1] if left else None)


def _used(running: Iterable[Sequence], size: Callable[[Sequence], int]) -> Counter[str]:
    """What the sequences of each tenant use. A shared block counts for each of its sequences."""
    used: Counter[str] = Counter()
    for seq in running:
        used[seq.tenant] += size(seq)
    return used


def _one_place(seq: Sequence) -> int:
    return 1
