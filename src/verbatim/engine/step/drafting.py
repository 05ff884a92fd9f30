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
from verbatim.engine.step.own_proposers import open_proposers
from verbatim.schedule.sequence import Sequence
from verbatim.speculate.draft_policy import MAX_BATCH_PRICE, Speculator
from verbatim.speculate.forced import ForcedProposer
from verbatim.speculate.ngram import NgramProposer
from verbatim.speculate.proposer import Observer, Proposer, SeqView
from verbatim.speculate.step_cost import StepCost
from verbatim.speculate.suffix import SuffixProposer

if TYPE_CHECKING:
    from verbatim.engine.loaded_model import LoadedModel
    from verbatim.engine.running_request import RunningRequest
    from verbatim.schedule.scheduler import Scheduler


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
        diffusion = loaded.backend.spec.diffusion
        if diffusion and not diffusion.causal and self.default not in ("off", "auto"):
            raise ParameterError(
                "speculate",
                f"{self.default!r} drafts tokens from left to right, and this is a diffusion model;"
                " leave it out",
            )
        self.adaptive = True
        self.max_drafts: int | None = None
        self.cost = StepCost(overlaps=loaded.backend.launcher is not None)
        self._vocab = loaded.backend.spec.vocab
        self._scheduler = scheduler
        self.own, self._missing = open_proposers(loaded, config, scheduler)
        self._observers = [p for p in self.own.values() if isinstance(p, Observer)]
        # The mode that needs states of the target; empty: none does.
        self._layer = next((p.name for p in self._observers), "")
        self._window = max((p.window for p in self._observers), default=0)
        self._remember = frozenset(config.suffix_tenants)
        self._speculators: dict[str, Speculator] = {}
        self._off: set[str] = set()  # proposers that are switched off for poor drafts

    def check(self, params: SamplingParams) -> None:
        mode = self._mode(params)
        self._check_cache(mode)
        if mode in self._missing and mode not in self.own:
            raise UnsupportedError("speculate", self._missing[mode])

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
                self.proposers(mode), adaptive=self.adaptive, vocab=self._vocab
            )
            found.cost = self.cost
            found.max_drafts = self.max_drafts or found.max_drafts
            found.off = self._off
        return found

    def proposers(self, mode: str) -> list[Proposer]:
        """Cheapest first. Tokens that a grammar forces are drafts at no cost."""
        if mode in self.own:
            return [ForcedProposer(), self.own[mode]]
        lookup = NgramProposer() if mode == "ngram" else SuffixProposer(remember=self._remember)
        return [ForcedProposer(), lookup, *(self.own.values() if mode == "auto" else ())]

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
                or seq.canvas is not None
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

    def with_states(self, plan: StepPlan) -> StepPlan:
        """The plan to execute: steps of sequences that a draft layer may draft for also return the
        final states of their rows; of a prompt, those of the last positions that it reads. Where
        not even a certain draft pays, and in a batch whose drafts did not, none does."""
        running = len(self._scheduler.running)
        price = self.cost.price(running) if self.adaptive and running > 1 else 0.0
        if not self._layer or self._layer in self._off or price >= MAX_BATCH_PRICE:
            return plan
        if running > 1 and any(one.gave_up for one in self._speculators.values()):
            return plan
        steps = []
        for step in plan.sequences:
            seq = self._scheduler.sequences[step.seq_id]
            wanted = self._mode(seq.params) in ("auto", self._layer) and not seq.beam
            near = step.end > len(seq.tokens) - self._window
            steps.append(step._replace(hidden=True) if wanted and near else step)
        return plan._replace(sequences=tuple(steps))

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Called after execute and before commit."""
        for proposer in self._observers:
            proposer.observe(plan, result)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Learn the cost of a step from decode-only steps: prefill rows skip the output layer, so
        they do not measure what one more draft costs."""
        rows = 0
        for step in plan.sequences:
            if step.draws != len(step.tokens):
                return
            rows += step.draws
        drafted = rows > len(plan.sequences)
        (self.cost.drafts if drafted else self.cost).learn(rows, seconds)

    def finish(self, seq: Sequence, tenant: str) -> float:
        """A sequence has ended. Returns the seconds that drafts saved it."""
        speculator = self._speculators.get(self._mode(seq.params))
        done = SeqView(seq.id, seq.tokens, seq.prompt_len, seq.params, seq.key, 0, tenant)
        if speculator is None:  # never drafted for; its states may be kept all the same
            for proposer in self.own.values():
                proposer.finish(done)
            return 0.0
        return speculator.finish(done._replace(drafted=seq.drafted, accepted=seq.accepted))

    def close(self) -> None:
        for speculator in self._speculators.values():
            speculator.close()
        for proposer in self.own.values():
            proposer.close()
