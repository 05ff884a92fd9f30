"""Records that pass between packages: frozen plain data, so that a step can be logged, replayed,
sent to another process and tested without a model.

    Scheduler.plan() -> StepPlan -> Backend.execute() -> StepResult -> Scheduler.commit()
    -> TokenEvent

schedule/scheduler.py states the scheduling law: *known* and *computed* tokens. Records made in
every step are named tuples, which cost a third of a frozen dataclass to construct.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, overload

from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.migration_hints import attribute
from verbatim.base.notebook import box, token_span
from verbatim.base.parsed import parse_answer

if TYPE_CHECKING:
    import numpy as np

    from verbatim.base.params import SamplingParams

FinishReason = Literal["stop", "length", "loop", "cancel", "error"]
STALE_LOOP = 256  # Choice.loop of an output whose last 256 tokens repeat earlier parts of it


def loop_text(loop: int) -> str:
    """What an output with this Choice.loop repeats.

    >>> loop_text(1), loop_text(STALE_LOOP)
    ('a run of 1 token', 'earlier parts of the answer for 256 tokens')
    """
    if loop == STALE_LOOP:
        return f"earlier parts of the answer for {loop} tokens"
    return f"a run of {loop} token{'s' if loop > 1 else ''}"


# --------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table. Layers with a sliding window form their own group, so that
    blocks outside the window can be released while full-attention layers keep theirs.

    Recurrent layers are windowed, too (docs/adr/0023). "conv": a block holds the inputs of a causal
    convolution, and the window is its kernel. "state": a block holds the state before its first
    position and the updates of its positions, and the window is 2: the first position of a block
    reads the block before it."""

    window: int | None  # None: full attention; w: position p reads the blocks of p-w+1 .. p
    layers: tuple[int, ...]
    kind: Literal["attention", "conv", "state"] = "attention"


class TokenPrefix(Sequence[int]):
    """The tokens that a list has now, without a copy. The list may only grow.

    >>> tokens = [5, 6]
    >>> prefix = TokenPrefix(tokens)
    >>> tokens.append(7)
    >>> len(prefix), prefix[-1], tuple(prefix)
    (2, 6, (5, 6))
    """

    __slots__ = ("_count", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self._count = tokens, len(tokens)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        place = index + self._count if index < 0 else index
        if not 0 <= place < self._count:
            raise IndexError(index)
        return self._tokens[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens[: self._count])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class DrawSpec:
    """All that the sampler knows about one sequence. It is a function of the request and its own
    tokens, never of the batch: half of promise 1."""

    params: SamplingParams
    key: int  # 64-bit noise key, made from (seed, choice index) by sampling.draw.noise_key
    prompt_len: int  # output starts here: the length of the prompt less its output_prefix
    # all known tokens except drafts; empty unless params.needs_history
    history: Sequence[int] = ()
    # ids excluded from the draw before min_tokens (end of sequence, stop ids)
    withheld: tuple[int, ...] = ()
    # grammar: per draw, a bitmask over ids (bit i of byte i//8, lowest first)
    masks: tuple[bytes | None, ...] = ()
    beam: int = 0  # > 0: return this many best (id, log-probability) instead of a draw
    # DRY: params.dry_breakers as ids or runs of ids (sampling/dry_breakers.py)
    breakers: tuple[tuple[int, ...], ...] = ()
    step: int = -1  # denoising step of the block in progress, from 0 on; -1: autoregressive


State: TypeAlias = Any  # one token's: an array, or a row on a device


class StateRows(Protocol):
    """States of some tokens: an array, or rows on a device, which numpy.asarray copies to the host
    and a draft layer on the same device reads where they are."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[State]: ...
    def __getitem__(self, rows: slice, /) -> StateRows: ...
    def __array__(self) -> np.ndarray: ...


class SeqStep(NamedTuple):
    """One sequence in one step: compute `tokens` at positions start, start+1, …

    The last `draws` tokens' logits are drawn from. draws is 0 inside a prompt, 1 at its end and in
    decode, and 1 + k when the last k tokens are drafts: draw i then sees
    tokens[: len(tokens) - draws + i + 1].

    >>> SeqStep(7, (11, 12, 13), 5, ((0, 4),), draws=1)  # positions 5 to 7; draws position 8
    """

    seq_id: int
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[tuple[int, ...], ...]  # block table per CacheGroup; -1: released
    draws: int = 0
    draw: DrawSpec | None = None
    # prompt log-probabilities: score targets[i] with the logits of tokens[i]
    targets: tuple[int, ...] = ()
    target_top: int = 0  # best alternatives to report per target
    hidden: bool = False  # also return the final hidden state (after the last norm) per token
    adapter: int = -1  # number of the LoRA adapter in Model.adapters; -1: the base model
    # Of a draft layer: the target's state (or the layer's own) that comes with each token, a row
    # each, and what the sampler adds to positions, because the layer's cache may begin later.
    states: Sequence[State] = ()
    shift: int = 0
    # Row p sees the keys before (p // block + 1) * block, at most those of the step's end: 1 is
    # causal attention, and a block of the whole length full attention (docs/adr/0034). 0: a row
    # writes no key, and sees those before p.
    block: int = 1
    causal: int = 0  # rows before this position see no later one, whatever the block
    # Rows of `tokens` whose logits are drawn from, where they are not the last `draws` ones.
    picks: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class StepPlan(NamedTuple):
    step: int
    sequences: tuple[SeqStep, ...]
    # (group, from block, to block), executed before the forward pass
    copies: tuple[tuple[int, int, int], ...] = ()

    @property
    def rows(self) -> int:
        return sum([len(s.tokens) for s in self.sequences])


# ------------------------------------------------------------------------------------------- result


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token, in nats, and the best alternatives. The texts are those of
    the tokens in a result of the engine: U+FFFD where a token ends inside a character.

    >>> TokenLogprob(7, -0.25, ((7, -0.25), (3, -2.0))).top[0]
    (7, -0.25)
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # best first; a tie goes to the lower id
    text: str = ""
    top_texts: tuple[str, ...] = ()


# Drawn.token without a token: bans exclude every id; the logits are not finite. The request ends.
NOTHING, BROKEN = -1, -2


class Drawn(NamedTuple):
    """One draw. `logprob` follows params.logprobs_mode: the model's own distribution or the
    processed one; 0.0 unless params.wants_logprob."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    explain: JsonObject | None = None  # explain/explanation.py documents the keys; plain data
    candidates: tuple[tuple[int, float], ...] = ()  # beam: best ids, log-probabilities
    # beam with logprobs: log-probability of each candidate, by logprobs_mode
    reported: tuple[float, ...] = ()
    # Of a denoising step: log-probability of the token in the distribution that is sampled, and
    # that distribution's entropy (only for remasking=entropy_bounded), in nats.
    confidence: float = 0.0
    entropy: float = 0.0


class SeqResult(NamedTuple):
    seq_id: int
    drawn: tuple[Drawn, ...] = ()  # one per draw of the plan, in order
    scored: tuple[TokenLogprob, ...] = ()  # one per target; token BROKEN: no finite logits
    hidden: StateRows | None = None  # [tokens of this step, hidden size] float32
    # with it, states of the layers that a draft head reads (Model.captured), side by side
    captured: StateRows | None = None

    @property
    def states(self) -> StateRows | None:
        """What a draft layer reads of this step."""
        return self.hidden if self.captured is None else self.captured


class StepResult(NamedTuple):
    step: int
    sequences: tuple[SeqResult, ...]


# -------------------------------------------------------------------------------- out of the engine


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended. `detail`: the stop string or token id, or the limit ("max_tokens",
    "context").

    >>> Finish("length", "max_tokens").reason
    'length'
    """

    reason: FinishReason
    detail: str = ""


class TokenEvent(NamedTuple):
    """One new token of a sequence, from commit(); `finish` is set if it ends there. With
    max_tokens = 0 the sequence ends without a token."""

    seq_id: int
    drawn: Drawn | None
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model calls, with its arguments. A call whose arguments were cut or are
    no JSON object stays text.

    >>> call = ToolCall("weather", {"city": "Paris"}, "call_1")
    >>> call.result({"celsius": 21})["content"]
    '{"celsius": 21}'
    """

    name: str
    arguments: JsonMapping
    id: str

    def result(self, value: object) -> JsonObject:
        """The message that gives the function's result to the model: text, or JSON of a value."""
        try:
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ParameterError("value", f"is neither text nor JSON: {error}") from None
        return {"role": "tool", "tool_call_id": self.id, "content": text}

    def as_message_part(self) -> JsonObject:
        """The call as OpenAI's messages have it."""
        arguments = json.dumps(dict(self.arguments), ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Delta:
    """A streamed piece of one choice: text that can no longer change.

    `finish` is set in the last Delta of the choice. `logprobs` and `explain` are filled if the
    request asked for them.

    >>> Delta("req-1", 0, " Paris", (3681,)).text
    ' Paris'
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    explain: tuple[JsonObject, ...] = ()
    finish: Finish | None = None
    reasoning: str = ""  # a piece of the reasoning of a reasoning model; `text` is the answer
    reasoning_tokens: int = 0  # share of token_ids
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, over all choices.

    >>> Usage(prompt_tokens=5, output_tokens=8).total_tokens
    13
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from prefix hits
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0  # output tokens of reasoning, markers included

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per step of a sequence: the drawn one plus accepted drafts. 1 without speculative
        decoding, 0 without output."""
        return self.output_tokens / max(self.output_tokens - self.accepted_tokens, 1)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. first_token counts from arrival, so it includes the time in the queue.

    >>> Timings(first_token=0.5, total=1.5).decode_rate(11)
    10.0
    """

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    preemptions: int = 0
    # saved by accepted drafts, estimated from measured step costs; negative: lost; 0: unknown
    saved: float = 0.0

    def decode_rate(self, output_tokens: int) -> float:
        """Tokens per second after the first one."""
        span = self.total - self.first_token
        return (output_tokens - 1) / span if output_tokens > 1 and span > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt; n > 1 gives several.

    >>> Choice(0, " Paris", (3681,), Finish("length", "max_tokens")).finish_reason
    'length'
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()
    explain: tuple[JsonObject, ...] = ()
    score: float | None = None  # beam score, or mean log-probability with best_of
    # length of the n-gram that repeats at the end (engine/loop_detector.py); STALE_LOOP: no n-gram,
    # but so many tokens at the end repeat earlier parts of the output; or 0
    loop: int = 0
    reasoning: str = ""  # the reasoning of a reasoning model; `text` is the answer without it
    json_schema: str | None = field(default=None, repr=False)  # request's schema
    tool_calls: tuple[ToolCall, ...] = ()  # of a chat() with tools; `text` is without them

    @property
    def finish_reason(self) -> FinishReason:
        return self.finish.reason

    @property
    def pieces(self) -> tuple[str, ...]:
        """The text of each token, if log-probabilities were asked for."""
        return tuple(row.text for row in self.logprobs)

    @property
    def parsed(self) -> Any:
        """The answer as an object of the type that the request gave as json_schema (a pydantic
        model, a TypedDict, a dataclass), or as plain data for a schema in JSON; None without one,
        and for calls of tools. An answer that was cut is a RequestError.
        """
        if self.tool_calls:
            return None
        return parse_answer(self.json_schema, self.text, self.finish.reason)


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """The result for one prompt. The properties (`text`, `token_ids`, `finish_reason`, `logprobs`)
    read its first choice; `choices` has all.

    In a notebook it is shown with its tokens coloured by probability, if the request asked for
    them: SamplingParams(logprobs=0).

    >>> answer = Choice(0, " Paris", (3681,), Finish("length", "max_tokens"))
    >>> Completion("req-1", (1, 2), (answer,), Usage(2, 1), Timings(total=0.25), 7, "vb-0")
    Completion(' Paris', finish='length (max_tokens)', tokens='2 + 1', seconds=0.25, seed=7)
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    seed: int
    fingerprint: str
    warnings: tuple[str, ...] = ()
    # one per prompt token; the first is None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    receipt: JsonObject | None = field(default=None, repr=False)
    # the parameters in force; base.defaults.report() lists them with their origins
    params: SamplingParams | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._shown())
        return f"Completion({self.text!r}, {shown})"

    def __rich_repr__(self) -> Iterator[object]:
        yield self.text
        yield from self._shown()

    def _shown(self) -> Iterator[tuple[str, object]]:
        finish, usage = self.finish, self.usage
        yield "finish", finish.reason + (f" ({finish.detail})" if finish.detail else "")
        yield "tokens", f"{usage.prompt_tokens} + {usage.output_tokens}"
        yield "seconds", round(self.timings.total, 3)
        yield "seed", self.seed
        if len(self.choices) > 1:
            yield "choices", len(self.choices)
        if self.warnings:
            yield "warnings", self.warnings

    def _repr_html_(self) -> str:
        """For notebooks: the answers, each token coloured by its probability."""
        note = ", ".join(f"{name} {value}" for name, value in self._shown())
        spans: list[str] = []
        for choice in self.choices:
            spans += [f"[{choice.index}] "] if len(self.choices) > 1 else []
            if choice.logprobs:
                spans += [token_span(row.text, row.logprob) for row in choice.logprobs]
            else:
                spans.append(html.escape(choice.text))
            spans += ["\n"] if len(self.choices) > 1 else []
        if not self.choices[0].logprobs:
            note += "; SamplingParams(logprobs=0) colours the tokens by probability"
        return box(spans, note)

    if not TYPE_CHECKING:  # a type checker reports unknown names itself

        def __getattr__(self, name: str) -> object:
            raise attribute(self, name, "completion")

        def __getitem__(self, _: object) -> object:
            raise TypeError(
                "a Completion is one answer and has no parts; generate() returns a list only for "
                "a list of prompts. Use .text, or .choices for several answers"
            )

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def parsed(self) -> Any:
        """Choice.parsed of the first choice."""
        return self.choices[0].parsed

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def message(self) -> JsonObject:
        """The answer as the next message of its conversation: text, reasoning and calls.

        >>> answer = Choice(0, "Paris.", (3681,), Finish("stop", "eos"))
        >>> Completion("r", (1,), (answer,), Usage(1, 1), Timings(), 7, "vb-0").message
        {'role': 'assistant', 'content': 'Paris.'}
        """
        made: JsonObject = {"role": "assistant", "content": self.text}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.tool_calls:
            made["tool_calls"] = [call.as_message_part() for call in self.tool_calls]
        return made

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
