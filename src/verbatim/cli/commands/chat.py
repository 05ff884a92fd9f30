"""`verbatim chat`: a conversation in the terminal. Each turn sends the whole history; the prefix
cache limits the prefill to the new messages.

An input line is a /command or a turn. In: lines of a terminal or a pipe. Out: answers, as rendered
Markdown on a terminal and as plain text elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import ContextError, ParameterError, RequestError, UnsupportedError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.cli.lib.chat.chat_commands import COMMANDS, run_command
from verbatim.cli.lib.chat.chat_input import enable_line_editing, model_names
from verbatim.cli.lib.chat.chat_session import Conversation, check_supported
from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import (
    ONE_ANSWER,
    Values,
    engine_options,
    model_options,
    positional_model,
)
from verbatim.cli.lib.reasoning_options import reasoning_level, reasoning_options
from verbatim.cli.lib.report import (
    broken_structure,
    closing_line,
    error_text,
    length_line,
    short_line,
)
from verbatim.cli.lib.sampling_options import sampling_of, sampling_options
from verbatim.cli.lib.terminal import BOLD, RED, ReasoningView, note, paint, use_colour, warn, write
from verbatim.cli.lib.texts import check_structure, decode_argument

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM


QUOTES = '"""'  # opens and closes a message of several lines, as in Ollama


@as_command(reasoning_options, model_options, engine_options(unused=ONE_ANSWER), sampling_options)
def command(
    name: str | None = argument("[MODEL]"),
    system: str | None = flag("system message", metavar="TEXT"),
    quiet: bool = flag("no closing lines, no greeting", "-q", "--quiet"),
    verbose: bool = flag(
        "closing lines with counts, seed and backend, as /stats shows them", "-v", "--verbose"
    ),
    plain: bool = flag("answers as they are, without rendered Markdown"),
    **flags: Any,
) -> int:
    """Chat with a model in the terminal. /help lists the commands inside; Ctrl-C stops an answer.

    Sampling parameters that are not given are the model's own, and each turn has a random seed
    unless --seed is given (/stats shows it). With a pipe, each line of stdin is one turn. Typed
    lines are kept for the next chat (VERBATIM_HISTORY names the file; off: none). A model's
    reasoning is shown dimmed on a terminal, never in a pipe, and is not part of the conversation.
    --no-think switches it off, /think and /nothink during the chat.
    """
    positional_model(flags, name)
    level = reasoning_level(flags)
    params = sampling_of(flags)
    check_supported(params)
    check_structure(params)
    system = system and decode_argument(system, "system")
    chat = ChatLoop(
        Conversation(_open(flags, quiet), params, system),
        lambda model: _open({**flags, "model": model}, quiet, interruptible=True),
        quiet=quiet,
        verbose=verbose,
        plain=plain,
    )
    try:
        chat.talk.set_reasoning(level)
        return chat.run()
    finally:
        chat.talk.llm.close()


def _open(flags: Values, quiet: bool, *, interruptible: bool = False) -> LLM:
    """`interruptible`: a chat is running, whose history is written when the process exits."""
    llm = open_llm(flags, quiet=quiet, interruptible=interruptible)
    if llm.has_template:
        return llm
    llm.close()
    remedy = "`verbatim run --raw` continues plain text"
    raise UnsupportedError("model", f"{llm.loaded.name} has no chat template; {remedy}")


class ChatLoop:
    """Reads lines, runs turns and /commands, and shows answers."""

    def __init__(
        self,
        talk: Conversation,
        reopen: Callable[[str], LLM],
        *,
        quiet: bool,
        verbose: bool = False,
        plain: bool = False,
    ) -> None:
        self.talk = talk
        self.reopen = reopen  # opens another model with the flags of the command line
        self.quiet = quiet
        self.verbose = verbose
        self.interactive = sys.stdin.isatty()
        self._rendered = not plain and self.interactive and use_colour(sys.stdout)

    def run(self) -> int:
        if self.interactive:
            enable_line_editing(list(COMMANDS), model_names)
            if not self.quiet:
                note(
                    f"{self.talk.llm.loaded.name}, context {self.talk.llm.context} tokens. "
                    "/help for commands, Ctrl-D to leave."
                )
        while True:
            try:
                line = self._read()
                if line is None:
                    return 0
                if not line.strip():
                    continue
                if line.startswith("/"):
                    if run_command(self, line):
                        return 0
                else:
                    self.turn(line)
            except RequestError as error:  # this turn fails; the conversation continues
                note(f"verbatim: {error.message}", RED)

    def _read(self) -> str | None:
        """The next message: one line, lines joined by a backslash at their end, or (typed) a block
        between triple quotes. None at the end of input. Ctrl-C at the prompt clears the message."""
        parts: list[str] = []
        quoted = False
        while True:
            try:
                line = input(_prompt(bool(parts))) if self.interactive else _next_line()
            except EOFError:
                if self.interactive:
                    write("\n")
                return "\n".join(parts) if parts else None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                parts.clear()
                quoted = False
                note("\n(Ctrl-D or /quit to leave)")
                continue
            if self.interactive and not parts and line.startswith(QUOTES):
                quoted, line = True, line[len(QUOTES) :]
            if quoted:
                done = line.endswith(QUOTES)
                parts.append(line.removesuffix(QUOTES))
                if done:
                    return "\n".join(parts).strip("\n")
                continue
            if line.endswith("\\"):
                parts.append(line[:-1])
                continue
            return "\n".join([*parts, line])

    def turn(self, text: str, params: SamplingParams | None = None) -> None:
        """Send a message and show the answer. If the context is full, offer to drop turns."""
        try:
            code, completion = self._ask(text, params)
        except ContextError as error:
            if not self.talk.turns:
                raise
            if not self._offer_to_drop(error, text):
                return
            code, completion = self._ask(text, params)
        self._close(code, completion)

    def _ask(self, text: str, params: SamplingParams | None) -> tuple[int, Completion]:
        reasoning = ReasoningView(quiet=self.quiet)
        if not self._rendered:
            done = self.talk.ask(text, write, params, reasoning)
            write("\n")
            return done
        from rich.console import Console

        from verbatim.cli.lib.chat.markdown_stream import MarkdownStream

        stream = MarkdownStream(Console(highlight=False))
        try:
            return self.talk.ask(text, stream.push, params, reasoning)
        finally:
            stream.close()

    def _offer_to_drop(self, error: ContextError, text: str) -> bool:
        """The conversation no longer fits. True: the user agreed, and the oldest turns are gone."""
        note(f"verbatim: the context is full: {error.message}", RED)
        remedy = "/drop forgets the oldest turn, /clear all of them, /save FILE keeps a copy"
        if not self.interactive:
            note(remedy)
            return False
        try:
            answer = input("forget as many of the oldest turns as needed, and send it? [y/N] ")
        except (EOFError, KeyboardInterrupt):
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            note(f"not sent; {remedy}")
            return False
        dropped = self.talk.drop_oldest(text)
        note(f"forgot the oldest {dropped} turn{'s' if dropped != 1 else ''}")
        return True

    def _close(self, code: int, completion: Completion) -> None:
        """Print warnings and one line of counts after an answer; /stats prints the rest."""
        full = length_line(completion) if completion.finish.detail == "context" else None
        room = "/drop makes room" if len(self.talk.turns) > 2 else "a larger --context makes room"
        broken = broken_structure(completion) or error_text(completion)
        cut = broken or (f"{full}; {room}" if full else "")
        for line in (*completion.warnings, *([cut] if cut else [])):
            warn(line)
        if code and self.quiet:
            note("(stopped)")
        if not self.quiet:
            note(
                closing_line(self.talk.llm, completion) if self.verbose else short_line(completion)
            )


def _prompt(continued: bool) -> str:
    mark = paint("... " if continued else ">>> ", BOLD, sys.stdout)
    # readline must not count the colour codes as columns
    return mark.replace("\x1b[1m", "\x01\x1b[1m\x02").replace("\x1b[0m", "\x01\x1b[0m\x02")


def _next_line() -> str:
    """The next line of a pipe: UTF-8 in every locale, as in `verbatim run`."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        why = f"a line is not UTF-8 text (byte {error.start}); convert it first"
        raise ParameterError("stdin", why) from None
