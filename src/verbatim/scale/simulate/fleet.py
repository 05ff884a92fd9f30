"""The event loop of a simulation. In: Arrivals and the ReplicaCosts. Out: one Served per request.

Every replica has a real Scheduler with the engine's limits, and requests go where the real Decider
of the gateway sends them; only the seconds of a step and the drawn tokens are made up. Time is
virtual. Invariant: events are handled in order of time, ties in the order of replicas, so the same
arguments give the same numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from verbatim.base.errors import CapacityError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Drawn, SeqResult, StepPlan, StepResult, TokenEvent
from verbatim.engine.step.step_budget import StepBudget
from verbatim.scale.routes.routing import Candidate, Decider, Route
from verbatim.scale.simulate.costs import ReplicaCosts
from verbatim.scale.simulate.traffic import Arrival
from verbatim.schedule.prefix import PrefixChain, prefix_salt
from verbatim.schedule.scheduler import Scheduler
from verbatim.schedule.sequence import Sequence
from verbatim.speculate.step_cost import StepCost

KEY = bytes(32)  # all simulated replicas hash prefixes alike, as those of one service do
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Served:
    """One request of the simulation. Times are seconds since the start."""

    arrival: Arrival
    replica: int
    first: float = 0.0  # first token
    last: float = 0.0  # last token
    refused: bool = False  # larger than the whole KV cache

    @property
    def wait(self) -> float:
        """Time to first token."""
        return self.first - self.arrival.at

    @property
    def between(self) -> float | None:
        """Mean seconds between two tokens; None: the output has one."""
        more = self.arrival.output - 1
        return (self.last - self.first) / more if more else None


class SimulatedReplica:
    """A scheduler and the step that it is executing."""

    def __init__(self, costs: ReplicaCosts, prefix_cache: bool) -> None:
        self.costs = costs
        self.scheduler = Scheduler(
            costs.groups,
            (costs.blocks,),
            block_size=costs.block_size,
            step_tokens=costs.step_tokens,
            max_running=costs.max_running,
            prefix_cache=prefix_cache,
            prefix_key=KEY,
            cost=costs.token_cost,
            overlap=costs.step_ms is None,
        )
        self._step_cost = StepCost()
        self._budget = StepBudget(costs.step_ms, self.scheduler, self._step_cost)
        self.plan: StepPlan | None = None  # the step in execution
        self.open: dict[int, Served] = {}
        self.busy = 0.0  # seconds of all steps
        self.steps = 0

    def add(self, number: int, served: Served, tokens: list[int]) -> None:
        arrival = served.arrival
        seq = Sequence(
            number, tokens, PARAMS, limit=len(tokens) + arrival.output, tenant=arrival.tenant
        )
        seq.salt = prefix_salt(arrival.tenant, "")
        try:
            self.scheduler.add(seq)
        except CapacityError:
            served.refused = True
            return
        self.open[number] = served

    def start(self) -> float | None:
        """Plan the next step; its seconds, or None if there is nothing to compute."""
        self._budget.set()
        self.plan = plan = self.scheduler.plan()
        if plan is None:
            return None
        seconds = self.costs.seconds(plan)
        self._learn(plan, seconds)
        self.busy += seconds
        self.steps += 1
        return seconds

    def _learn(self, plan: StepPlan, seconds: float) -> None:
        """What the engine measures of its own steps, which limits the next prefill chunks."""
        if all(step.draws == len(step.tokens) for step in plan.sequences):
            self._step_cost.learn(len(plan.sequences), seconds)
        self._budget.learn(plan, seconds)

    def finish(self, now: float) -> None:
        """Commit the step that ends now."""
        plan, self.plan = self.plan, None
        assert plan is not None, "only a planned step ends"
        results = [
            SeqResult(step.seq_id, (Drawn(step.seq_id, 0.0),) * step.draws)
            for step in plan.sequences
        ]

        def read(event: TokenEvent) -> bool:
            served = self.open[event.seq_id]
            served.first = served.first or now
            if event.finish is not None:
                served.last = now
                del self.open[event.seq_id]
            return False

        self.scheduler.commit(plan, StepResult(plan.step, tuple(results)), read)


class Fleet:
    """Replicas behind one router."""

    def __init__(self, costs: ReplicaCosts, replicas: int, *, prefix_cache: bool = True) -> None:
        self.now = 0.0
        self.replicas = [SimulatedReplica(costs, prefix_cache) for _ in range(replicas)]
        self.decider = Decider(lambda: self.now)
        self._chain = PrefixChain(costs.block_size, KEY) if prefix_cache else None
        self._steps: list[tuple[float, int]] = []  # heap: end of a step, index of its replica
        for i, replica in enumerate(self.replicas):
            self.decider.prefixes.report(_name(i), replica.scheduler.cache.pools[0].by_hash)

    def run(self, arrivals: Iterable[Arrival]) -> list[Served]:
        """Serve all requests to their end."""
        out = []
        for number, arrival in enumerate(arrivals):
            self._advance(arrival.at)
            out.append(self._send(number, arrival))
        self._advance(float("inf"))
        return out

    def _advance(self, until: float) -> None:
        """Handle all step ends before `until`."""
        while self._steps and self._steps[0][0] <= until:
            self.now, i = heapq.heappop(self._steps)
            self.replicas[i].finish(self.now)
            self._start(i)
        if self.now < until != float("inf"):
            self.now = until

    def _start(self, i: int) -> None:
        seconds = self.replicas[i].start()
        if seconds is not None:
            heapq.heappush(self._steps, (self.now + seconds, i))

    def _send(self, number: int, arrival: Arrival) -> Served:
        tokens = arrival.tokens(number)
        route = Route(self._hashes(arrival, tokens), arrival.prompt, arrival.output)
        candidates = self._candidates(route)
        chosen = self.decider.rank(route, candidates)[0]
        self.decider.routed(route, chosen, [c.replica for c in candidates])
        i = int(chosen)
        served = Served(arrival, i)
        self.replicas[i].add(number, served, tokens)
        if self.replicas[i].plan is None:
            self._start(i)
        return served

    def _candidates(self, route: Route) -> list[Candidate]:
        """The replicas that can be ranked first, as among all of them: those with the prompt's
        first block, and the one with the fewest open requests. The cost of the others rises with
        their open requests alone."""
        every = range(len(self.replicas))
        first, prefixes = route.hashes[:1], self.decider.prefixes
        held = {i for i in every if prefixes.hit(_name(i), first)} if first else set()
        held.add(min(every, key=lambda i: len(self.replicas[i].open)))
        return [Candidate(_name(i), len(self.replicas[i].open)) for i in sorted(held)]

    def _hashes(self, arrival: Arrival, tokens: list[int]) -> tuple[bytes, ...]:
        if self._chain is None or not arrival.segments:
            return ()
        hashes: list[bytes] = []
        root = self._chain.root(prefix_salt(arrival.tenant, ""))
        self._chain.extend(hashes, root, tokens, (len(tokens) - 1) // self._chain.block_size)
        return tuple(hashes)


def _name(i: int) -> str:
    """Names sort like the indices."""
    return f"{i:06}"
