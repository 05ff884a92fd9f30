"""One answer, for the commands that print it: a request is started, its stream is read to the end.

Ctrl-C cancels the request, not the process, so that the partial answer is shown."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from verbatim.base.errors import ParameterError
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.base.records import Completion
from verbatim.cli.lib.command_class import option, switch
from verbatim.cli.lib.options import RAW, Values, all_of
from verbatim.cli.lib.reasoning_options import ReasoningLevel, reasoning_level, reasoning_options
from verbatim.cli.lib.terminal import ReasoningView
from verbatim.cli.lib.texts import decode_argument, read_prompt, split_model

if TYPE_CHECKING:
    from verbatim.engine.calls.blocking_engine import Stream
    from verbatim.engine.calls.llm import LLM


def check_shown(params: SamplingParams, reports: Sequence[str]) -> None:
    """Reject reports that would be computed but that plain text output does not show."""
    remedies = {
        "explain": "; or use `verbatim explain`",
        "receipt": "; or --save-receipt FILE with `verbatim run`",
    }
    for name in reports:
        if getattr(params, name) != FIELDS[name].default:
            why = f"plain text does not show its report; add --json{remedies.get(name, '')}"
            raise ParameterError(name, why)


_SPECIAL = "with --raw: the text of a control token (<|im_start|>) becomes that token"
# PROMPT and the flags that say how it is sent; PromptFlags reads them.
prompt_options = all_of(
    click.argument("prompt", nargs=-1, metavar="[PROMPT]"),
    switch("--raw", help=RAW),
    switch("--parse-special", common=False, help=_SPECIAL),
    option("--file", metavar="FILE", help="read the prompt from FILE"),
    option("--system", metavar="TEXT", help="system message of the chat turn"),
    reasoning_options,
)


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """What prompt_options() parsed: the prompt, and how it is sent."""

    text: str
    raw: bool
    system: str | None
    parse_special: bool
    level: ReasoningLevel | None

    @classmethod
    def of(cls, flags: Values) -> PromptFlags:
        """Read the flags, and the prompt where it comes from a file or stdin."""
        raw, system = flags["raw"], flags["system"]
        if raw and system is not None:
            why = "cannot be used with a raw continuation; leave out --raw or --system"
            raise ParameterError("system", why)
        level = reasoning_level(flags)
        text = read_prompt(split_model(flags["prompt"], flags), file=flags["file"])
        return cls(text, raw, system, flags["parse_special"], level)

    def is_turn(self, llm: LLM) -> bool:
        """Whether the prompt is a chat turn; else the text is continued."""
        return llm.has_template and not self.raw

    def start(self, llm: LLM, params: SamplingParams) -> Stream:
        """Start a chat turn if the model has a chat template, a continuation otherwise. A flag that
        does not fit the chosen kind raises."""
        if not self.is_turn(llm):
            self._check_continuation()
            return llm.stream(llm.encode(self.text, parse_special=self.parse_special), params)
        if self.parse_special:
            why = "belongs to --raw: in a chat turn the template writes the control tokens"
            raise ParameterError("parse_special", why)
        messages = [{"role": "user", "content": self.text}]
        if self.system is not None:
            system = decode_argument(self.system, "system")
            messages.insert(0, {"role": "system", "content": system})
        variables = {} if self.level is None else self.level.variables(llm)
        return llm.chat_stream(messages, params, **variables)

    def _check_continuation(self) -> None:
        if self.system is not None:
            why = "this model has no chat template, so it takes no system message"
            remedy = "leave out --system, or write its text into the prompt"
            raise ParameterError("system", f"{why}; {remedy}")
        if self.level is not None:
            why = "only a chat turn with a chat template has reasoning; leave it out"
            raise ParameterError(self.level.field, why)


def collect(
    stream: Stream, *, show: Callable[[str], None] | None, reasoning: ReasoningView | None = None
) -> tuple[int, Completion]:
    """Read a stream to its end, passing the text of the first answer to `show` and its reasoning to
    `reasoning`. Returns the exit code and the completion.

    The first Ctrl-C cancels the request after the running step, and the partial completion is
    returned with code 130. A second Ctrl-C raises at once."""
    code = 0

    def stop(signum: int, frame: object) -> None:
        nonlocal code
        if code:
            raise KeyboardInterrupt
        code = 130
        stream.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        with stream:
            for delta in stream:
                if delta.index != 0:
                    continue
                if reasoning is not None and delta.reasoning:
                    reasoning.push(delta.reasoning)
                if delta.text:
                    if reasoning is not None:
                        reasoning.close()
                    if show is not None:
                        show(delta.text)
    finally:
        if reasoning is not None:
            reasoning.close()
        signal.signal(signal.SIGINT, before)
    assert stream.completion is not None, "a stream ends with its completion"
    return code, stream.completion
