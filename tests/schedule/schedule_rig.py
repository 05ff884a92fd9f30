"""Test rig: a scheduler with a FakeBackend. Every step runs the invariants and the cache canary;
the rig compares every finished sequence with an oracle that uses no cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from verbatim.base.params import SamplingParams
from verbatim.base.records import StepPlan, TokenEvent
from verbatim.schedule.invariants import check_scheduler
from verbatim.schedule.scheduler import Scheduler
from verbatim.schedule.sequence import Sequence
from verbatim.schedule.token_cost import TokenCost
from verbatim.testing.fakes import FakeBackend, fake_spec, mix

EOS = 7
VOCAB = 40


class Rig:
    def __init__(
        self,
        *,
        blocks: int | tuple[int, ...] = 64,
        block_size: int = 4,
        windows: Seq[int | None] = (None,),
        step_tokens: int = 32,
        max_running: int = 16,
        prefix_cache: bool = True,
        use_cache: bool = True,
        vocab: int = VOCAB,
        cost: TokenCost | None = None,
        overlap: bool = False,
    ) -> None:
        spec = fake_spec(vocab, windows=windows)
        counts = blocks if isinstance(blocks, tuple) else (blocks,) * len(spec.groups)
        self.scheduler = Scheduler(
            spec.groups,
            counts,
            block_size=block_size,
            step_tokens=step_tokens,
            max_running=max_running,
            prefix_cache=prefix_cache,
            use_cache=use_cache,
            prefix_key=b"test",
            cost=cost,
            overlap=overlap,
        )
        self.drafts: dict[int, tuple[int, ...]] = {}
        self.backend = FakeBackend(
            spec,
            block_size=block_size,
            pipeline=False,
            canary=True,
            known=self._known,
            overlap=overlap,
        )
        self.backend.allocate(counts)
        self.all_sequences: dict[int, Sequence] = {}
        self.ended: dict[int, TokenEvent] = {}
        self.aborted: set[int] = set()
        self.steps = 0
        self.plan: StepPlan | None = None
        self._next = 0

    def _known(self, seq_id: int) -> list[int]:
        return self.scheduler.sequences[seq_id].tokens

    def sequence(
        self,
        prompt: Seq[int],
        more: int = 8,
        *,
        params: SamplingParams | None = None,
        beam: int = 0,
        salt: str = "",
        tenant: str = "",
    ) -> Sequence:
        seq = Sequence(
            self._next,
            prompt,
            params or SamplingParams(),
            limit=len(prompt) + more,
            key=self._next * 31,
            stop_ids={EOS: "eos"},
            beam=beam,
            salt=salt,
            tenant=tenant,
        )
        self._next += 1
        self.all_sequences[seq.id] = seq
        return seq

    def add(
        self,
        prompt: Seq[int],
        more: int = 8,
        *,
        n: int = 1,
        beam: int = 0,
        salt: str = "",
        tenant: str = "",
        **params: int,
    ) -> list[Sequence]:
        family = [
            self.sequence(
                prompt, more, params=SamplingParams(**params), beam=beam, salt=salt, tenant=tenant
            )
            for _ in range(n)
        ]
        family[0].siblings = family[1:]
        self.scheduler.add(family[0])
        return family

    def step(self) -> list[TokenEvent] | None:
        """plan, execute, commit, check. None: no sequence can advance."""
        self.plan = self.scheduler.plan()
        if self.plan is None:
            assert not [s for s in self.scheduler.sequences.values() if not s.held], (
                "sequences are left and none of them can advance"
            )
            return None
        assert self.plan.rows <= self.scheduler.step_tokens
        first = next((s for s in self.scheduler.running if not s.held), None)
        assert first is None or any(step.seq_id == first.id for step in self.plan.sequences), (
            "the first in rank did not advance"
        )
        events = self.scheduler.commit(self.plan, self.backend.execute(self.plan))
        check_scheduler(self.scheduler)
        self.steps += 1
        for event in events:
            if event.finish is not None:
                self.ended[event.seq_id] = event
        return events

    def run(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError(f"not finished after {max_steps} steps")

    def abort(self, seq_id: int, *, publish: bool = True) -> None:
        if self.scheduler.abort(seq_id, publish=publish):
            self.aborted.add(seq_id)
        check_scheduler(self.scheduler)

    def at_rest(self) -> None:
        """No sequence is left, no block is used, and every finished output equals the oracle's."""
        check_scheduler(self.scheduler)
        assert not self.scheduler.sequences
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        for pool in self.scheduler.cache.pools:
            assert pool.used == 0
            assert not any(pool.refs)
        for seq in self.all_sequences.values():
            if not seq.beam and seq.id in self.ended:
                assert seq.tokens == self.oracle(seq), (
                    f"sequence {seq.id} differs from its output alone"
                )

    def oracle(self, seq: Sequence) -> list[int]:
        """The tokens the sequence must have, computed without cache, blocks, batch or drafts."""
        tokens = list(seq.tokens[: seq.prompt_len])
        number = 1
        for token in tokens:
            number = mix(number, token)
        while len(tokens) < seq.limit:
            withheld = tuple(seq.stop_ids) if len(tokens) < seq.min_len else ()
            drawn = self.backend._hash_draw(number, seq.key, len(tokens), withheld, 0)
            tokens.append(drawn.token)
            number = mix(number, drawn.token)
            if drawn.token in seq.stop_ids and len(tokens) > seq.min_len:
                break
        return tokens
