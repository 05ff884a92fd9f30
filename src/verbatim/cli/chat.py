"""`verbatim chat`: a conversation in the terminal. Each turn sends the whole history; the prefix
cache limits the prefill to the new messages."""

from __future__ import annotations

import json
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verbatim.base.errors import RequestError, UnsupportedError
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.base.records import Completion
from verbatim.cli.options import (
    Command,
    Option,
    engine_options,
    model_options,
    parse_parameter,
    positional_model,
    sampling_of,
    sampling_options,
)
from verbatim.cli.terminal import BOLD, GREEN, RED, note, paint, warn, write

if TYPE_CHECKING:
    from verbatim.engine.llm import LLM

HELP = """\
/help                 this list
/reset                forget the conversation (the system message stays)
/system [TEXT]        set the system message and start afresh; without TEXT show it
/params [NAME=VALUE]  change a sampling parameter; without one show those in force
/explain              why each token of the last answer was chosen
/save FILE            write the conversation as JSON
/quit                 leave (also Ctrl-D)
Ctrl-C stops the answer, not the program. A line that ends in \\ continues on the next."""
COMMANDS = [line[1:].split()[0] for line in HELP.splitlines() if line.startswith("/")]


@click.command(cls=Command)
@click.argument("name", required=False, metavar="[MODEL]")
@click.option("--system", cls=Option, metavar="TEXT", help="system message")
@click.option("-q", "--quiet", cls=Option, is_flag=True, help="no closing lines, no greeting")
@model_options
@engine_options
@sampling_options
def command(name: str | None, system: str | None, quiet: bool, **flags: Any) -> int:
    """Chat with a model in the terminal. /help lists the commands inside; Ctrl-C stops an answer.

    Sampling parameters that are not given are the model's own, and the seed is 0: the same
    conversation gives the same answers. With a pipe, each line of stdin is one turn.
    """
    from verbatim.cli.open_model import check_structure, decode_argument, open_llm

    positional_model(flags, name)
    params = sampling_of(flags)
    _check_supported(params)
    check_structure(params)
    with open_llm(flags, quiet=quiet) as llm:
        if not llm.has_template:
            raise UnsupportedError(
                "model",
                f"{llm.parts.name} has no chat template; `verbatim run --raw` continues plain text",
            )
        system = system and decode_argument(system, "system")
        return Conversation(llm, params, system, quiet=quiet).loop()


def _check_supported(params: SamplingParams) -> None:
    """Reject parameters for several answers, and for reports that a chat does not show."""
    for name in (
        "n",
        "best_of",
        "num_return_sequences",
        "logprobs",
        "prompt_logprobs",
        "explain",
        "receipt",
    ):
        if getattr(params, name) != FIELDS[name].default:
            raise UnsupportedError(name, "chat does not support it; use `verbatim run`")


class Conversation:
    """History, parameters and input loop of one chat. An input line is a /command or a turn."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, *, quiet: bool
    ) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.turns: list[dict[str, str]] = []
        # Messages, parameters and completion of the last turn.
        self.last: tuple[list[dict[str, str]], SamplingParams, Completion] | None = None
        self.quiet = quiet
        self.interactive = sys.stdin.isatty()

    @property
    def messages(self) -> list[dict[str, str]]:
        return (
            [] if self.system is None else [{"role": "system", "content": self.system}]
        ) + self.turns

    def loop(self) -> int:
        if self.interactive:
            _enable_line_editing()
            if not self.quiet:
                note(
                    f"{self.llm.parts.name}, context {self.llm.context} tokens. "
                    "/help for commands, Ctrl-D to leave."
                )
        while True:
            line = self._read()
            if line is None:
                return 0
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    if self._command(line):
                        return 0
                else:
                    self._turn(line)
            except RequestError as error:  # this turn fails; the conversation continues
                note(f"verbatim: {error.message}", RED)

    def _read(self) -> str | None:
        """The next line, with its continuation lines; None at the end of input. Ctrl-C at the
        prompt only clears the line."""
        parts: list[str] = []
        while True:
            try:
                line = input(self._prompt(bool(parts))) if self.interactive else _next_line()
            except EOFError:
                if self.interactive:
                    write("\n")
                return "\n".join(parts) if parts else None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                parts.clear()
                note("\n(Ctrl-D or /quit to leave)")
                continue
            if line.endswith("\\"):
                parts.append(line[:-1])
                continue
            return "\n".join([*parts, line])

    def _prompt(self, continued: bool) -> str:
        mark = paint("... " if continued else ">>> ", BOLD, sys.stdout)
        # readline must not count the colour codes as columns
        return mark.replace("\x1b[1m", "\x01\x1b[1m\x02").replace("\x1b[0m", "\x01\x1b[0m\x02")

    def _turn(self, text: str) -> None:
        from verbatim.cli.open_model import speed_limit
        from verbatim.cli.report import (
            broken_structure,
            closing_line,
            is_sampled,
            length_line,
            loop_line,
        )
        from verbatim.cli.run import collect

        messages = [*self.messages, {"role": "user", "content": text}]
        code, completion = collect(self.llm.chat_stream(messages, self.params), show=True)
        write("\n")
        # A cancelled answer stays in the history up to where the user saw it.
        self.turns += [messages[-1], {"role": "assistant", "content": completion.text}]
        self.last = messages, self.params, completion
        loop = loop_line(completion, "/params on_loop=report", "/params on_loop=stop")
        cut = broken_structure(completion) or loop or length_line(completion)
        for line in (*completion.warnings, *([cut] if cut else [])):
            warn(line)
        if code and self.quiet:
            note("(stopped)")
        if not self.quiet:
            limit = speed_limit(self.llm, len(completion.prompt_ids))
            sampled = is_sampled(completion)
            note(closing_line(self.llm, completion, sampled=sampled, limit=limit))

    # ----------------------------------------------------------------------------------- commands

    def _command(self, line: str) -> bool:
        """Run a /command. Returns True to leave the chat."""
        name, _, rest = line[1:].strip().partition(" ")
        rest = rest.strip()
        match name:
            case "quit" | "exit" | "bye":
                return True
            case "help" | "?":
                note(HELP)
            case "reset":
                self.turns.clear()
                self.last = None
                note("the conversation is cleared")
            case "system":
                self._set_system(rest)
            case "params":
                self._set_params(rest)
            case "explain":
                self._explain()
            case "save":
                self._save(rest)
            case _:
                matches = get_close_matches(name, COMMANDS, 1)
                hint = f"did you mean /{matches[0]}?" if matches else "/help lists them"
                note(
                    f"verbatim: no command /{name}; {hint} "
                    "(put a space first to send a line that starts with /)",
                    RED,
                )
        return False

    def _explain(self) -> None:
        """Run the last turn again with explanations. The same request gives the same tokens, so no
        explanation needs to be recorded in advance."""
        from verbatim.cli.run import collect
        from verbatim.observe.explanation import headline

        if self.last is None:
            note("there is no answer yet")
            return
        messages, params, before = self.last
        again = params.with_(explain=1, seed=None if params.num_beams > 1 else before.seed)
        if before.finish_reason == "cancel" and before.token_ids:
            again = again.with_(max_tokens=len(before.token_ids))  # the tokens before Ctrl-C
        code, completion = collect(self.llm.chat_stream(messages, again), show=False)
        assert code or completion.token_ids == before.token_ids, (
            "the same request gave other tokens"
        )
        for record in completion.choices[0].explain:
            write(headline(record, self.llm.tokenizer.token_bytes) + "\n")

    def _set_system(self, text: str) -> None:
        if not text:
            note(
                f"system message: {self.system}"
                if self.system is not None
                else "no system message is set; the chat template may add its own"
            )
            return
        self.system = text
        self.turns.clear()
        note("system message set; the conversation is cleared")

    def _set_params(self, text: str) -> None:
        changes: dict[str, Any] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if not equals:
                note(f"verbatim: {word!r} is not NAME=VALUE, such as temperature=0.7", RED)
                return
            changes[name.replace("-", "_")] = parse_parameter(name, value)
        if changes.get("num_beams", 1) > 1:  # a beam search cannot stop on a loop
            changes.setdefault("on_loop", "report")
        changed = self.params.with_(**changes)
        _check_supported(changed)
        self.params = changed
        shown = self.params.to_mapping() or {"temperature": self.params.temperature}
        note(
            " ".join(f"{name}={value}" for name, value in shown.items()), GREEN if changes else "2"
        )

    def _save(self, name: str) -> None:
        if not name:
            note("verbatim: /save needs a file name", RED)
            return
        record = {
            "model": self.llm.parts.name,
            "fingerprint": self.llm.fingerprint,
            "params": self.params.to_mapping(),
            "messages": self.messages,
        }
        try:
            Path(name).expanduser().write_text(
                json.dumps(record, ensure_ascii=False, indent=1) + "\n", "utf-8"
            )
            note(f"saved {len(self.turns) // 2} turns to {name}")
        # RuntimeError: ~ of an unknown user; ValueError: a name that no file can have.
        except (OSError, RuntimeError, ValueError) as error:
            note(
                f"verbatim: cannot write {name!r}: {getattr(error, 'strerror', None) or error}", RED
            )


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _enable_line_editing() -> None:
    """Enable arrow keys and history if the platform has readline."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)
