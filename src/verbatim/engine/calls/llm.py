"""LLM: the blocking API. Prompts come in, Completions go out; many prompts share the steps of one
engine.

    from verbatim import LLM, SamplingParams

    with LLM("smollm2") as llm:
        params = SamplingParams(max_tokens=8, temperature=0)
        print(llm.generate("The capital of France is", params).text)

Threads may share an LLM: their requests run in the same batch, and the threads take turns stepping.
Servers use AsyncEngine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never, overload

import numpy as np

from verbatim.base.errors import ParameterError
from verbatim.base.migration_hints import argument
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, TokenLogprob
from verbatim.engine.calls.blocking_engine import BlockingEngine, Stream
from verbatim.engine.calls.call_inputs import (
    ProgressBar,
    Prompt,
    bounded,
    each,
    is_one,
    is_one_chat,
    one,
    refuse_foreign,
    refuse_unknown,
)
from verbatim.engine.calls.chat_prompt import chat_prompt
from verbatim.engine.calls.embed_calls import EmbedCalls
from verbatim.engine.calls.engine_base import Message
from verbatim.engine.calls.scoring import Score, score_of, windows
from verbatim.engine.embed_input import EmbedInput
from verbatim.engine.read_prompt import read_prompt
from verbatim.engine.step.failed_step import raise_error
from verbatim.explain.explained import Explanation


@dataclass(frozen=True, slots=True)
class Vote:
    """Result of `LLM.vote`: the most frequent answer. Of equally frequent ones, the first.

    >>> vote = llm.vote("hi", 3, params=SamplingParams(choice=["yes", "no"], seed=1))
    >>> vote.answer == vote.counts[0][0]
    True
    """

    answer: str
    # Most frequent first, without the completions for which extract() returned None.
    counts: tuple[tuple[str, int], ...]
    completion: Completion


class LLM(EmbedCalls, BlockingEngine):
    """A loaded model: `generate`, `stream`, `chat`, `explain`, `score`, `embed`, `rerank`. Calls
    block.

    The arguments of the constructor are documented in `LLM.__init__`. Close it, or use it in a
    `with` block. Threads may share it.

    >>> with LLM("smollm2") as llm:
    ...     done = llm.generate("The capital of France is", SamplingParams(max_tokens=8, seed=1))
    >>> len(done.token_ids) <= 8
    True
    """

    @overload
    def generate(
        self,
        prompts: str | list[int] | tuple[int, ...],
        params: SamplingParams | None = None,
        *,
        progress: bool | Callable[..., ProgressBar] = False,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | Callable[..., ProgressBar] = False,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | Callable[..., ProgressBar] = False,
        **unknown: Never,
    ) -> Completion | list[Completion]:
        """Generate completions. All prompts share the steps of the engine; the answers do not
        depend on that.

        prompts: a string or a list of token ids, or a list of them
        params: one SamplingParams for all prompts, or a list with one per prompt. Without
            max_tokens an answer ends after 1,024 tokens, with a warning
        progress: True shows a bar (tqdm); or a function that makes one, called as
            progress(total=..., desc=...)
        Returns a Completion for one prompt, a list in the same order for a list of prompts. An
        invalid prompt raises before any request starts.

        >>> short = SamplingParams(max_tokens=4, seed=1)
        >>> len(llm.generate("Hello", short).token_ids) <= 4
        True
        >>> len(llm.generate(["Hello", "Goodbye"], short))
        2
        """
        refuse_unknown("generate", unknown)
        given: Any = prompts
        if is_one(given):
            return self._run([given], [bounded(one(params))], progress)[0]
        every = [bounded(p) for p in each(params, len(given))]
        return self._run(list(given), every, progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **unknown: Never
    ) -> Stream:
        """generate() for one prompt, as a stream of Deltas. The request advances while a stream is
        read; several streams may be read alternately.

        prompt: a string or a list of token ids
        params: a SamplingParams
        Returns a Stream: iterate for Deltas; afterwards `stream.completion` has the Completion.

        >>> for delta in llm.stream("Hello", SamplingParams(max_tokens=4, seed=1)):
        ...     text = delta.text
        """
        refuse_unknown("stream", unknown)
        return Stream(self, self.core.request(prompt, params))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Message | Callable[..., object]] | None = None,
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        progress: bool | Callable[..., ProgressBar] = False,
        **template: Any,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Message | Callable[..., object]] | None = None,
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        progress: bool | Callable[..., ProgressBar] = False,
        **template: Any,
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Message | Callable[..., object]] | None = None,
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        progress: bool | Callable[..., ProgressBar] = False,
        **template: Any,
    ) -> Completion | list[Completion]:
        """Generate the next message of a conversation, or of a list of conversations.

        messages: a list such as [{"role": "user", "content": "Hello"}], or a list of such lists
        params: one SamplingParams for all, or a list with one per conversation
        tools: functions that the model may call: Python functions with annotated parameters, or
            objects in OpenAI's form. Calls are in the Completion's `tool_calls`
        tool_choice: "auto", "none", "required" or the name of a function; the last two are enforced
        parallel_tool_calls: False allows one call at most
        progress: as in generate()
        template: options of the model's chat template (enable_thinking=...)
        Returns a Completion, or a list of them. A model without a template raises UnsupportedError.

        >>> ask = [{"role": "user", "content": "Name the capital of France."}]
        >>> llm.chat(ask, SamplingParams(max_tokens=4, seed=1)).finish_reason in ("stop", "length")
        True
        """
        refuse_foreign("chat", template)
        template |= {
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
        }
        given: Any = messages
        if is_one_chat(given):
            make, wanted = chat_prompt(self, given, one(params), template)
            return self._run([make()], [wanted], progress)[0]
        talks = zip(given, each(params, len(given)), strict=True)
        inputs = [chat_prompt(self, talk, wanted, template) for talk, wanted in talks]
        return self._run([make() for make, _ in inputs], [p for _, p in inputs], progress)

    def chat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Stream:
        """chat() for one conversation, as a stream of Deltas; the arguments are those of chat().

        >>> stream = llm.chat_stream([{"role": "user", "content": "Hi"}], SamplingParams(seed=1))
        >>> stream.close()
        """
        refuse_foreign("chat_stream", template)
        make, wanted = chat_prompt(self, messages, one(params), template)
        return self.stream(make(), wanted)

    def explain(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        top: int = 5,
        **template: Any,
    ) -> Explanation:
        """Generate an answer and explain each of its tokens.

        prompt: a string, a list of token ids, or a conversation as in chat()
        params: a SamplingParams; n must be 1
        top: candidates to show per token
        template: options of the chat template, for a conversation
        Returns an Explanation, which prints one line per token; explanation[i] prints the stages
        and candidates of one token, explanation.what_if(temperature=0) draws them again.

        >>> llm.explain("hi", SamplingParams(max_tokens=2, temperature=0))[1].rank
        1
        """
        refuse_foreign("explain", template)
        wanted = one(params)
        if wanted.width > 1:
            raise ParameterError(
                "n", "explain() explains one answer; leave n, best_of and beams out"
            )
        if _whole("top", top) < 1:
            raise ParameterError("top", f"{top} is below 1; give the candidates to show per token")
        wanted = wanted.with_(explain=max(top, wanted.explain), receipt=True)
        parts = prompt if isinstance(prompt, list | tuple) else ()
        chat = any(isinstance(part, Mapping) for part in parts)
        text: Any = self.encode_chat(prompt, **template) if chat else prompt  # type: ignore[arg-type]
        if template and not chat:
            raise argument("explain", next(iter(template)))
        done = self._run([text], [wanted])[0]
        assert done.params is not None, "the engine reports the parameters in force"
        return Explanation(done, done.params, self.tokenizer)

    def score(
        self,
        text: Prompt,
        *,
        top: int = 0,
        window: int | None = None,
        stride: int | None = None,
        adapter: str = "",
    ) -> Score:
        """Teacher-forced log-probability of every token, and the perplexity.

        text: a string or a list of token ids
        top: alternatives to report per token
        window: score a text of any length in windows of this many tokens
        stride: tokens between window starts (default: half a window)
        adapter: a loaded LoRA adapter; empty: the base model
        Returns a Score.

        >>> score = llm.score("The sky is blue.")
        >>> len(score.logprobs) == len(score.token_ids)
        True
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=top, adapter=adapter)
        if window is None:
            if stride is not None:
                raise ParameterError("stride", "belongs to window; set it too, or leave stride out")
            done = self._run([text], [params])[0]
            raise_error([done])
            return score_of(done.prompt_ids, done.prompt_logprobs, done.warnings)
        if _whole("window", window) > self.context:
            raise ParameterError(
                "window", f"{window} is more than the context holds ({self.context})"
            )
        if stride is not None:
            _whole("stride", stride)
        ids, warnings = read_prompt(self.loaded, text)
        spans = windows(len(ids), window, stride)
        completions = self._run([ids[w.start : w.end] for w in spans], [params] * len(spans))
        raise_error(completions)
        logprobs: list[TokenLogprob | None] = []
        for span, done in zip(spans, completions, strict=True):
            logprobs += done.prompt_logprobs[span.first - span.start :]
        return score_of(ids, logprobs, warnings)

    def vote(
        self,
        prompt: Prompt,
        n: int,
        *,
        extract: Callable[[str], str | None] = str.strip,
        params: SamplingParams | None = None,
    ) -> Vote:
        """Self-consistency: generate n completions, extract an answer from each, return the most
        frequent one.

        prompt: a string or a list of token ids
        n: completions to generate
        extract: the answer in a completion's text; None leaves the completion out
        params: a SamplingParams, whose n is replaced
        Returns a Vote.

        >>> llm.vote("2 + 2 =", 3, params=SamplingParams(regex="[0-9]", seed=1)).answer.isdigit()
        True
        """
        done = self._run([prompt], [one(params).with_(n=n)])[0]
        counts: dict[str, int] = {}
        for choice in done.choices:
            answer = extract(choice.text)
            if answer is not None:
                counts[answer] = counts.get(answer, 0) + 1
        ranked = tuple(sorted(counts.items(), key=lambda item: -item[1]))  # stable: ties in order
        return Vote(ranked[0][0] if ranked else "", ranked, done)

    def _vectors(self, inputs: Sequence[EmbedInput]) -> list[np.ndarray]:
        """The embedding (of a pair: the score) of each input, for embed() and rerank()."""
        requests = [self.core.request(given, given.params, hidden=True) for given in inputs]
        for request in requests:
            self.core.check_fits(request)
        running = []
        with self._awaited(requests):
            for request in requests:
                with self._lock:  # another thread's step must not complete it in between
                    self._add(request)
                    running.append(self.core.requests[request.id])
            raise_error(self._finish([request.id for request in requests]))
        return [request.hidden.vector() for request in running]


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ParameterError(name, f"{value!r:.40} is not a whole number")
    return int(value)
