"""The command line: words in, an exit code out. One file a command, imported when that command is called.

Exit codes: 0 done; 1 something of ours failed; 2 a wrong word, flag or value; 3 the model could not be found or read;
130 interrupted (Ctrl-C); 141 the reader of our output went away. An error is one line on stderr, `verbatim: what; why; remedy`;
the traceback comes with --debug.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from verbatim import __version__
from verbatim.base.errors import ModelError, RequestError, VerbatimError

OK, FAILED, USAGE, MODEL, INTERRUPTED, READER_GONE = 0, 1, 2, 3, 130, 141

# heading -> name -> one line; the table keeps `verbatim --help` from importing every command
GROUPS = {
    "Ask a model": {
        "run": "Answer one prompt, streamed.",
        "chat": "Talk with a model, turn by turn.",
        "batch": "Answer a file of requests.",
        "serve": "Serve OpenAI's API over HTTP.",
    },
    "Look inside": {
        "explain": "Show why each token was chosen.",
        "score": "Log-probability of every token of a text, and its perplexity.",
        "replay": "Repeat an answer from its receipt and compare.",
    },
    "Models": {
        "models": "List the models at hand.",
        "pull": "Fetch a model into the cache.",
        "convert": "Write a model as a (quantised) GGUF file.",
    },
    "This machine": {
        "bench": "Measure this machine's limits and how near the engine comes.",
        "doctor": "Check the installation, the kernels and the cache.",
        "version": "Print versions, backends and the instruction set.",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
EXAMPLES = """\
verbatim run "Why is the sky blue?"
git log -5 | verbatim run --system "Sum up in one sentence." -
verbatim explain --brief --temperature 0.8 --seed 4 "Name the capital of France."
"""


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"verbatim.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click itself would end with code 1
            return READER_GONE

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        indent = max(len(name) for name in COMMANDS)
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{indent}}", line) for name, line in group.items()])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What one came for first: the commands, then how they are called, then the few options."""
        self.format_commands(ctx, formatter)
        with formatter.section("Examples"):
            for line in EXAMPLES.splitlines():
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        click.Command.format_options(self, ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import shlex
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else "verbatim --help lists the commands"
            if " " in args[0]:  # a question, most likely
                hint = "to ask it: verbatim run " + (
                    shlex.quote(args[0]) if len(args[0]) <= 100 else "'…'"
                )
            raise click.UsageError(f"no command {args[0]!r:.100}; {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.command(
    cls=LazyGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND ...",
    options_metavar="",
    epilog="verbatim COMMAND --help lists a command's options.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(
    __version__, "-V", "--version", prog_name="verbatim", message="%(prog)s %(version)s"
)
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Verbatim runs language models on this machine: the same request, the same tokens, always."""
    if ctx.invoked_subcommand is None:  # the word alone: no mistake, somebody looks around
        click.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of the `verbatim` command. Always ends in SystemExit."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in flags or os.environ.get("VERBATIM_DEBUG", "") not in ("", "0")
    if (
        "--debug" in flags
    ):  # welcome anywhere, so that it can be added to the end of a line that just failed
        words.remove("--debug")
    if words[:1] == ["help"]:  # `verbatim help run`, as elsewhere
        words = [*words[1:2], "--help"]
    _have_streams()
    _speak_any_language()
    try:
        code = _call(words)
    except BaseException as error:
        if debug and not isinstance(error, (SystemExit, KeyboardInterrupt, click.exceptions.Exit)):
            import traceback

            traceback.print_exc()
        code = _report(error)
    sys.exit(_flush() or code)


def _have_streams() -> None:
    """A shell's `>&-` or `2>&-` leaves no stream at all; what nobody wants to read goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  it stays open


def _speak_any_language() -> None:
    """A terminal that cannot show a character gets a question mark; it must not cost the answer."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "")
    if not encoding.startswith("utf") and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _call(words: list[str]) -> int:
    result: Any = cli.main(args=words, prog_name="verbatim", standalone_mode=False)
    return result if isinstance(result, int) else OK


def _report(error: BaseException) -> int:
    """Says in one line what went wrong, and gives the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        complain("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return READER_GONE
    if isinstance(error, click.ClickException):
        complain(_usage_line(error))
        return error.exit_code if error.exit_code != 1 else USAGE
    if isinstance(error, VerbatimError):
        complain(error.message)
        return code_of(error)
    if isinstance(error, MemoryError):
        complain(
            "out of memory; the model and its cache do not fit; try a smaller --context, --kv-memory or model"
        )
        return FAILED
    if isinstance(error, OSError) and error.errno in SYSTEM:
        complain(_system_line(error))
        return FAILED
    complain(f"{type(error).__name__}: {error}; this is a fault of Verbatim; --debug shows where")
    return FAILED


# what the operating system refuses, whatever the program does -> the remedy
SYSTEM = {
    errno.ENOSPC: "free some space, or send it elsewhere",
    errno.EDQUOT: "free some space, or send it elsewhere",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or send it elsewhere",
    errno.EIO: "check the device behind it",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "check its permissions, or choose another place",
    errno.EPERM: "check its permissions, or choose another place",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close some programs: the system has no more files to open",
}
NO_ROOM = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
)  # of writing a model: nothing is wrong with the model


def _system_line(error: OSError) -> str:
    """An error without a file name comes from a stream that was open already: our output."""
    what = "write the output" if error.filename is None else f"use {os.fspath(error.filename)!r}"
    reason = (error.strerror or "failed").lower()
    return f"cannot {what}: {reason}; {SYSTEM[error.errno or 0]}"


def code_of(error: VerbatimError) -> int:
    if isinstance(error, RequestError):
        return USAGE
    if isinstance(error, ModelError) and getattr(error.__cause__, "errno", None) not in NO_ROOM:
        return MODEL
    return FAILED


def _usage_line(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    text = re.sub(
        r"[.;]? \(?[Dd]id you mean (?:one of: )?(.*?)\??\)?$", r"; did you mean \1?", text
    )
    ctx = getattr(error, "ctx", None)
    if ctx is not None and "; " not in text:
        text += f"; see {ctx.command_path} --help"
    return text[0].lower() + text[1:] if text[:2].istitle() else text


def complain(message: str) -> None:
    """One line, whatever the message holds: a file name may contain a newline, an error of a library several."""
    line = " ".join(str(message).split())
    try:
        sys.stderr.write(f"verbatim: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody can be told
        pass


def _flush() -> int:
    """Flush now, while we can still say it our way: at interpreter exit a lost output would print a traceback of its own."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _report(error)
    except ValueError:
        pass
    return OK


if __name__ == "__main__":
    main()
