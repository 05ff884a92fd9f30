"""The routing decision: block hashes of a prompt and the state of the replicas in, a ranking out.

A request goes to the replica that finishes it first by the cost card. In units of one
prompt token's operations, where an output token also costs the LM head (observe/roofline.py):

    cost(replica) = tokens that it must compute for this request
                  + requests that it has open * mean work of a request

Worked numbers: a prompt of 1,000 tokens of which replica A has 900 in its prefix cache, and a mean
request of 300 tokens of work. A has 2 requests open, B none: A costs 100 + 600, B costs 1,000, so A
is chosen. With 4 open requests A costs 1,300 and B is chosen: the load outweighs the prefill saved.

A replica reports the hashes of its prefix cache every REPORT_SECONDS. Until a report can contain a
prompt that was just routed, the router assumes that its blocks are there. No import of Ray here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

REPORT_SECONDS = 1.0  # interval of a replica's reports
# A prompt is in a report at the latest two intervals after its prefill; its prefill may wait.
ASSUME_SECONDS = 10 * REPORT_SECONDS
HASH_BYTES = 8  # a half of a block hash: one false hit in 2**64, which costs a prefill
MAX_HASHES = 16_384  # per replica, in a report and assumed: 262,144 tokens at blocks of 16
DECODE_TOKENS = 256  # assumed output of a request that states no max_tokens
MEAN_WEIGHT = 0.05  # newest request's weight in the mean work of a request


@dataclass(frozen=True, slots=True)
class Route:
    """What the router knows about a request. Hashes are those of the engine's prefix cache, so the
    hashes of two tenants are never equal."""

    hashes: tuple[bytes, ...] = ()  # the prompt's full blocks
    tokens: int = 0  # prompt's length; 0: unknown
    output: int = DECODE_TOKENS  # tokens that the request may generate, all choices together
    block_size: int = 16
    decode_cost: float = 1.0  # operations of an output token per operation of a prompt token

    def work(self, hit: int) -> float:
        """Tokens to compute, if `hit` blocks of the prompt are cached. The last token of a prompt
        is always computed."""
        return max(self.tokens - hit * self.block_size, 1) + self.output * self.decode_cost


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica at the time of the decision."""

    replica: str
    open: int  # requests, running and waiting
    ready: bool = True  # False: its engine is being restarted


class PrefixMap:
    """Which replica has which blocks: what it reported, and what was routed to it since."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported: dict[str, Collection[bytes]] = {}
        self._assumed: dict[str, OrderedDict[bytes, float]] = {}  # hash -> when it was routed

    def report(self, replica: str, hashes: Collection[bytes]) -> None:
        self._reported[replica] = hashes
        self._drop_old(self._assumed.get(replica))

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these."""
        for table in (self._reported, self._assumed):
            for gone in [name for name in table if name not in replicas]:
                del table[gone]

    def routed(self, replica: str, hashes: Sequence[bytes]) -> None:
        assumed = self._assumed.setdefault(replica, OrderedDict())
        now = self._clock()
        for block_hash in hashes:
            assumed[block_hash] = now
            assumed.move_to_end(block_hash)
        while len(assumed) > MAX_HASHES:
            assumed.popitem(last=False)
        self._drop_old(assumed)

    def _drop_old(self, assumed: OrderedDict[bytes, float] | None) -> None:
        oldest = self._clock() - ASSUME_SECONDS
        while assumed and next(iter(assumed.values())) < oldest:
            assumed.popitem(last=False)

    def hit(self, replica: str, hashes: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that the replica has."""
        reported = self._reported.get(replica, ())
        assumed: Mapping[bytes, float] = self._assumed.get(replica, {})
        for count, block_hash in enumerate(hashes):
            if block_hash not in reported and block_hash not in assumed:
                return count
        return len(hashes)


class Decider:
    """Ranks replicas, and counts how often the prefix was found where it could be."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.prefixes = PrefixMap(clock)
        self.mean_work = float(DECODE_TOKENS)
        self.possible = 0  # requests of which some replica had a part of the prefix
        self.found = 0  # those sent to a replica with a part of the prefix
        self.routed_total = 0

    def rank(self, route: Route, candidates: Sequence[Candidate]) -> list[str]:
        """Replicas, best first. Ties go to the longer prefix, then to the shorter queue, then to
        the lower name: the same state gives the same decision."""

        def cost(candidate: Candidate) -> tuple[bool, float, int, int, str]:
            hit = self.prefixes.hit(candidate.replica, route.hashes)
            work = candidate.open * self.mean_work + route.work(hit)
            return (not candidate.ready, work, -hit, candidate.open, candidate.replica)

        return [candidate.replica for candidate in sorted(candidates, key=cost)]

    def routed(self, route: Route, replica: str, candidates: Sequence[str]) -> None:
        """Record where a request went; `candidates` are all replicas at that time."""
        hit = self.prefixes.hit(replica, route.hashes)
        self.routed_total += 1
        self.possible += any(self.prefixes.hit(name, route.hashes[:1]) for name in candidates)
        self.found += hit > 0
        self.mean_work += MEAN_WEIGHT * (route.work(hit) - self.mean_work)
        self.prefixes.routed(replica, route.hashes)
