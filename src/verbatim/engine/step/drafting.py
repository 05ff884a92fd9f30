"""Speculative decoding in the engine: drafts for decoding sequences before each step, measured step
costs after it.

Drafts go to Scheduler.set_drafts as known but unverified tokens. They never change the output: the
target model draws its own token at every drafted position, and commit() accepts a draft only where
it equals that token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.params import SamplingParams
from verbatim.base.records import StepPlan, StepResult
from verbatim.schedule.sequence import Sequence
from verbatim.speculate.draft_model import DraftProposer
from verbatim.speculate.draft_policy import Speculator
from verbatim.speculate.forced import ForcedProposer
from verbatim.speculate.head import HeadProposer
from verbatim.speculate.ngram import NgramProposer
from verbatim.speculate.proposer import Proposer, SeqView
from verbatim.speculate.step_cost import StepCost
from verbatim.speculate.suffix import SuffixProposer

if TYPE_CHECKING:
    from verbatim.engine.loaded_model import LoadedModel
    from verbatim.engine.running_request import RunningRequest
    from verbatim.schedule.scheduler import Scheduler


def cache_share(loaded: LoadedModel) -> float:
    """The target's share of the KV-cache memory. A draft model's cache holds as many tokens."""
    if loaded.draft is None:
        return 1.0
    target, draft = sum(loaded.backend.block_bytes()), sum(loaded.draft.block_bytes())
    return target / (target + draft)


class Drafting:
    """One Speculator per mode in use; all of them share the measured step costs.

    `adaptive=False` (for tests) submits every draft in full, whether it pays or not."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, scheduler: Scheduler) -> None:
        self.default = config.speculate.partition(":")[0]
        if config.suffix_tenants and self.default not in ("suffix", "auto"):
            raise ParameterError(
                "suffix_tenants",
                f"needs speculate=suffix or auto, and speculate is {config.speculate!r}; leave it"
                " out, or set speculate",
            )
        self._use_cache = config.use_cache
        self._check_cache(self.default)
        self.adaptive = True
        self.max_drafts: int | None = None
        self.cost = StepCost()
        self._vocab = loaded.backend.spec.vocab
        self._scheduler = scheduler
        self._draft: Proposer | None = None
        if loaded.draft is not None:
            self._draft = DraftProposer(loaded.draft, self._draft_blocks(loaded, config))
        self._head: HeadProposer | None = None
        self._no_head = (  # why mode "head" is rejected
            "no draft head comes with this model; "
            "open the engine with speculate=head:FILE and the cpu backend"
        )
        draft_backend = loaded.backend.draft_backend
        if loaded.head is not None and draft_backend is not None:
            self._head = HeadProposer(draft_backend, loaded.head)
        elif loaded.head is not None:
            self._no_head = (
                f"the {loaded.backend.info.name} backend runs no draft heads; "
                "open the engine with the cpu backend"
            )
        self._remember = frozenset(config.suffix_tenants)
        self._speculators: dict[str, Speculator] = {}

    def _draft_blocks(self, loaded: LoadedModel, config: EngineConfig) -> int:
        """Blocks of the draft model's cache: as many as the target's on average over its pools, so
        that both fit the memory that cache_share() splits; at most what max_running can use."""
        draft, sizes = loaded.draft, loaded.backend.block_bytes()
        assert draft is not None
        target_blocks = sum(
            pool.total * size for pool, size in zip(self._scheduler.cache.pools, sizes, strict=True)
        ) // sum(sizes)
        usable = config.max_running * -(-draft.spec.context // draft.block_size)
        return max(1, min(target_blocks, usable))

    def check(self, params: SamplingParams) -> None:
        self._check_cache(self._mode(params))
        if self._mode(params) == "draft" and self._draft is None:
            raise UnsupportedError(
                "speculate",
                "'draft' needs an engine that was opened with a draft model "
                "(speculate=draft:MODEL)",
            )
        if self._mode(params) == "head" and self._head is None:
            raise UnsupportedError("speculate", self._no_head)

    def _check_cache(self, mode: str) -> None:
        if not self._use_cache and mode not in ("off", "auto"):
            raise UnsupportedError(
                "speculate",
                f"{mode!r} needs the KV cache, and use_cache is false: nothing could be drafted; "
                "leave out one of them",
            )

    def _mode(self, params: SamplingParams) -> str:
        return params.speculate or self.default

    def _speculator(self, mode: str) -> Speculator:
        found = self._speculators.get(mode)
        if found is None:
            found = self._speculators[mode] = Speculator(
                self._proposers(mode), adaptive=self.adaptive, vocab=self._vocab
            )
            found.cost = self.cost
            found.max_drafts = self.max_drafts or found.max_drafts
        return found

    def _proposers(self, mode: str) -> list[Proposer]:
        """Cheapest first. Tokens that a grammar forces are drafts at no cost."""
        if mode == "draft":
            assert self._draft is not None, "check() rejects such a request"
            return [ForcedProposer(), self._draft]
        if mode == "head":
            assert self._head is not None, "check() rejects such a request"
            return [ForcedProposer(), self._head]
        lookup = NgramProposer() if mode == "ngram" else SuffixProposer(remember=self._remember)
        models = (self._head, self._draft) if mode == "auto" else ()
        return [ForcedProposer(), lookup, *(m for m in models if m is not None)]

    # -------------------------------------------------------------------------------- per step

    def propose(self, requests: Mapping[int, RunningRequest]) -> None:
        """Set drafts for the decoding sequences: those with one token left to compute. The keys of
        `requests` are sequence ids."""
        decoding: dict[str, list[Sequence]] = {}
        for seq in self._scheduler.running:
            mode = seq.params.speculate or self.default
            if not (
                mode == "off"
                or seq.beam
                or seq.siblings
                or seq.held
                or len(seq.tokens) - seq.computed != 1
            ):
                decoding.setdefault(mode, []).append(seq)
        running = len(self._scheduler.running)
        for mode, seqs in decoding.items():
            speculator = self._speculator(mode)
            if not speculator.should_draft(running):
                continue
            views = [self._view(seq, requests[seq.id]) for seq in seqs]
            for seq_id, drafts in (speculator.drafts(views, running) if views else {}).items():
                matcher = requests[seq_id].matchers.get(seq_id)
                if matcher is not None:
                    drafts = matcher.allowed_drafts(drafts)
                self._scheduler.set_drafts(seq_id, drafts)

    def _view(self, seq: Sequence, request: RunningRequest) -> SeqView:
        matcher = request.matchers.get(seq.id)
        return SeqView(
            seq.id,
            seq.tokens,
            seq.prompt_len,
            seq.params,
            seq.key,
            max_drafts=seq.limit - len(seq.tokens) - 1,
            tenant=request.request.tenant,
            forced=matcher.forced() if matcher is not None else (),
            end_ids=seq.stop_ids,
            drafted=seq.drafted,
            accepted=seq.accepted,
        )

    def source(self, seq_id: int, params: SamplingParams) -> str:
        """The proposer of the drafts that the sequence's last step submitted."""
        speculator = self._speculators.get(self._mode(params))
        return speculator.source(seq_id) if speculator is not None else ""

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Called after execute and before commit: the draft head overlaps with the commit."""
        if self._head is not None:
            self._head.observe(plan, result)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Learn the cost of a step from decode-only steps: prefill rows skip the output layer, so
        they do not measure what one more draft costs."""
        rows = 0
        for step in plan.sequences:
            if step.draws != len(step.tokens):
                return
            rows += step.draws
        self.cost.learn(rows, seconds)

    def finish(self, seq: Sequence, tenant: str) -> float:
        """A sequence has ended. Returns the seconds that drafts saved it."""
        speculator = self._speculators.get(self._mode(seq.params))
        if speculator is None:
            return 0.0
        done = SeqView(seq.id, seq.tokens, seq.prompt_len, seq.params, seq.key, 0, tenant)
        return speculator.finish(done._replace(drafted=seq.drafted, accepted=seq.accepted))

    def close(self) -> None:
        for speculator in self._speculators.values():
            speculator.close()
        if self._draft is not None:
            self._draft.close()
