"""The records that pass between rooms: frozen plain data, so that a step can be logged, replayed, sent to another
process and tested without a model.

    Scheduler.plan() -> StepPlan -> Backend.execute() -> StepResult -> Scheduler.commit() -> TokenEvent

The one law: a sequence is a list of *known* tokens, of which the first *computed* have their keys and values in the cache.
A step computes some more of them; when computed reaches known, the last logits draw the next token.

The records that are made in every step are named tuples, which cost a third of a frozen dataclass to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from verbatim.base.params import SamplingParams

FinishReason = Literal["stop", "length", "loop", "cancel", "error"]


# ---------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table. Layers with a sliding window form a group of their own, so that
    blocks behind the window can be released while the full-attention layers keep theirs."""

    window: (
        int | None
    )  # None: every earlier position is visible; w: positions p-w+1 .. p are visible at p
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawSpec:
    """All that the sampler may know about one sequence. Everything here is a function of the request and its own
    tokens, never of the batch: that is half of promise 1."""

    params: SamplingParams
    key: int  # 64-bit noise key, made from (seed, choice index) by sampling.draw.noise_key
    prompt_len: int  # tokens before this position belong to the prompt
    history: tuple[
        int, ...
    ] = ()  # all known tokens except drafts; empty unless params.needs_history
    withheld: tuple[
        int, ...
    ] = ()  # ids that may not be drawn while fewer than min_tokens are out (EOS, stop ids)
    masks: tuple[
        bytes | None, ...
    ] = ()  # grammar: for each draw, a bitmask over ids (bit i of byte i//8, LSB first)
    beam: int = (
        0  # > 0: return this many best (id, log-probability) of the processed row instead of a draw
    )
    breakers: tuple[
        tuple[int, ...], ...
    ] = ()  # DRY: params.dry_breakers as ids or runs of ids (sampling.breakers)


class SeqStep(NamedTuple):
    """What one sequence does in one step: compute `tokens` at positions start, start+1, …

    The logits of the last `draws` tokens are drawn from. draws is 0 inside a prompt, 1 at its end and while writing,
    and 1 + k when the last k tokens are drafts: drawing i then sees tokens[: len(tokens) - draws + i + 1].

    >>> SeqStep(7, (11, 12, 13), 5, ((0, 4),), draws=1)   # positions 5, 6, 7; the token for position 8 is drawn
    """

    seq_id: int
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[
        tuple[int, ...], ...
    ]  # per CacheGroup: block id of each run of block_size positions; -1: released
    draws: int = 0
    draw: DrawSpec | None = None
    targets: tuple[
        int, ...
    ] = ()  # score targets[i] with the logits of tokens[i] (prompt log-probabilities)
    target_top: int = 0  # how many best alternatives to report for each scored target
    hidden: bool = False  # also return the final hidden state (after the last norm) of every token of this step

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class StepPlan(NamedTuple):
    step: int
    sequences: tuple[SeqStep, ...]
    copies: tuple[
        tuple[int, int, int], ...
    ] = ()  # (group, from block, to block), done before anything is computed

    @property
    def rows(self) -> int:
        return sum([len(s.tokens) for s in self.sequences])


# -------------------------------------------------------------------------------------------------------------- result


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # best first; ties to the lower id


class Drawn(NamedTuple):
    """One draw. `logprob` follows params.logprobs_mode: the model's own distribution, or the processed one; 0.0 unless params.wants_logprob."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    explain: dict[str, Any] | None = None  # observe/explanation.py documents the keys; plain data
    candidates: tuple[tuple[int, float], ...] = ()  # beam: the best ids with their log-probability
    reported: tuple[
        float, ...
    ] = ()  # beam, where logprobs are asked for: of each candidate, by logprobs_mode


class SeqResult(NamedTuple):
    seq_id: int
    drawn: tuple[Drawn, ...] = ()  # one for each draw of the plan, in order
    scored: tuple[TokenLogprob, ...] = ()  # one for each target
    hidden: np.ndarray | None = None  # [tokens of this step, hidden size] float32


class StepResult(NamedTuple):
    step: int
    sequences: tuple[SeqResult, ...]


# --------------------------------------------------------------------------------------------------- out of the engine


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended. `detail` says which: the stop string or token id, the limit ("max_tokens", "context")."""

    reason: FinishReason
    detail: str = ""


class TokenEvent(NamedTuple):
    """What commit() reports: sequence `seq_id` gained one token and may have ended with it. With max_tokens = 0 it ends without one."""

    seq_id: int
    drawn: Drawn | None
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one choice of one request, as a stream sends it: text that can no longer change."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    explain: tuple[dict[str, Any], ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose keys and values came out of the prefix cache
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a step of a sequence gave on average: its own and the drafts that came true. 1 without speculation, 0 where nothing was written."""
        return self.output_tokens / max(self.output_tokens - self.accepted_tokens, 1)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. first_token counts from arrival, so it contains the queue."""

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    preemptions: int = 0
    saved: float = 0.0  # by drafts, estimated from the measured costs of steps; below zero: lost; 0 while costs are unknown

    def decode_rate(self, output_tokens: int) -> float:
        """Tokens a second after the first one."""
        span = self.total - self.first_token
        return (output_tokens - 1) / span if output_tokens > 1 and span > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()
    explain: tuple[dict[str, Any], ...] = ()
    score: float | None = None  # beam score, or mean log-probability where best_of ranked it
    loop: int = 0  # length of the n-gram that filled the last tokens, 0 if none (see engine/loop_detector.py)

    @property
    def finish_reason(self) -> FinishReason:
        return self.finish.reason


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to one prompt. With n = 1 the properties below are all that one needs."""

    request_id: str
    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    seed: int
    fingerprint: str
    warnings: tuple[str, ...] = ()
    prompt_logprobs: tuple[
        TokenLogprob | None, ...
    ] = ()  # one for each prompt token; the first is None
    receipt: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish(self) -> Finish:
        return self.choices[0].finish

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish.reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs
