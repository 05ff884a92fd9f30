"""The command line: words in, an exit code out. One file a command, imported when that command is called.

Exit codes: 0 done; 1 something of ours failed; 2 a wrong word, flag or value; 3 the model could not be found or read;
130 interrupted (Ctrl-C); 141 the reader of our output went away. An error is one line on stderr, `verbatim: what; why; remedy`;
the traceback comes with --debug.
"""

from __future__ import annotations

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

# name -> one line; the table keeps `verbatim --help` from importing every command
COMMANDS = {
    "run": "Answer one prompt, streamed.",
    "chat": "Talk with a model, turn by turn.",
    "score": "Log-probability of every token of a text, and its perplexity.",
    "explain": "Show why each token was chosen.",
    "models": "List the models at hand.",
    "pull": "Fetch a model into the cache.",
    "convert": "Write a model as a (quantised) GGUF file.",
    "bench": "Measure this machine's limits and how near the engine comes.",
    "serve": "Serve OpenAI's API over HTTP.",
    "batch": "Answer a file of requests.",
    "replay": "Repeat an answer from its receipt and compare.",
    "doctor": "Check the installation, the kernels and the cache.",
    "version": "Print versions, backends and the instruction set.",
}


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
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else "verbatim --help lists the commands"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(__version__, "-V", "--version", prog_name="verbatim", message="%(prog)s %(version)s")
def cli(debug: bool) -> None:
    """Verbatim: the same tokens, always. `verbatim run "Why is the sky blue?"` is a good start."""


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of the `verbatim` command. Always ends in SystemExit."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in flags or os.environ.get("VERBATIM_DEBUG", "") not in ("", "0")
    if "--debug" in flags:  # welcome anywhere, so that it can be added to the end of a line that just failed
        words.remove("--debug")
    _speak_any_language()
    try:
        code = _call(words)
    except BaseException as error:
        if debug and not isinstance(error, (SystemExit, KeyboardInterrupt, click.exceptions.Exit)):
            import traceback

            traceback.print_exc()
        code = _report(error)
    _flush()
    sys.exit(code)


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
        complain("out of memory; the model and its cache do not fit; try a smaller --context, --kv-memory or model")
        return FAILED
    complain(f"{type(error).__name__}: {error}; this is a fault of Verbatim; --debug shows where")
    return FAILED


def code_of(error: VerbatimError) -> int:
    if isinstance(error, RequestError):
        return USAGE
    if isinstance(error, ModelError):
        return MODEL
    return FAILED


def _usage_line(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    text = re.sub(r"\.? \(?[Dd]id you mean (?:one of: )?(.*?)\??\)?$", r"; did you mean \1?", text)
    ctx = getattr(error, "ctx", None)
    if ctx is not None and ctx.command_path != "verbatim" and "; " not in text:
        text += f"; see {ctx.command_path} --help"
    return text[0].lower() + text[1:] if text[:2].istitle() else text


def complain(message: str) -> None:
    """One line, whatever the message holds: a file name may contain a newline, an error of a library several."""
    line = " ".join(str(message).split())
    try:
        sys.stderr.write(f"verbatim: {line}\n")
        sys.stderr.flush()
    except (BrokenPipeError, ValueError):
        pass


def _flush() -> None:
    """Flush now, while we can still be quiet: at interpreter exit a closed pipe would print a traceback of its own."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError:
        pass


if __name__ == "__main__":
    main()
