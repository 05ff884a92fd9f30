"""Entry point of the `verbatim` command: arguments come in, an exit code goes out.

Each command is one module of this package, imported only when it is called. Exit codes: 0 success;
1 failure; 2 wrong command, flag or value; 3 model not found or not readable; 130 interrupted
(Ctrl-C); 141 stdout closed by its reader (broken pipe). An error is one line on stderr, `verbatim:
what; why; remedy`. --debug adds the traceback.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from verbatim import __version__
from verbatim.cli.environment import unknown_variables
from verbatim.cli.lib.error_lines import BROKEN_PIPE, OK, print_error, report
from verbatim.cli.lib.interrupt import exit_on_interrupt

# Heading -> command -> summary. A table, so that `verbatim --help` does not import every command.
GROUPS = {
    "Generate": {
        "run": "Answer one prompt, streamed.",
        "chat": "Chat with a model in the terminal.",
        "batch": "Answer a file of requests.",
        "serve": "Serve OpenAI's, Anthropic's and Ollama's APIs over HTTP.",
        "rank": "Join a model that runs on several machines.",
        "embed": "Compute the embedding of each text.",
        "rerank": "Sort documents by their relevance to a query.",
    },
    "Inspect": {
        "lens": "Open the page that shows how each token is made.",
        "explain": "Show why each token was chosen.",
        "score": "Score a text: the log-probability of every token, and perplexity.",
        "replay": "Repeat an answer from its receipt and compare the tokens.",
        "compare": "Run prompts or a quiz under several settings, side by side.",
        "drift": "Show how log-probability and entropy change along a generated text.",
    },
    "Models": {
        "models": "List, show or rm (delete) models: the catalog and the downloads.",
        "pull": "Download a model into the cache.",
        "convert": "Write a model as a (quantised) GGUF file.",
        "merge": "Add a LoRA adapter to the weights of a model.",
    },
    "System": {
        "plan": "Estimate memory, speed limits and cost of a model from its config.",
        "simulate": "Simulate many replicas: throughput and latencies.",
        "bench": "Measure throughput and compare it with the limits of this machine.",
        "doctor": "Check the installation, or a model.",
        "verify": "Check that one request gives the same tokens under all conditions.",
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
        with exit_on_interrupt():
            command: click.Command = import_module(f"verbatim.cli.commands.{cmd_name}").command
        gc.enable()
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click itself would end with code 1
            return BROKEN_PIPE

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        indent = max(len(name) for name in COMMANDS)
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{indent}}", line) for name, line in group.items()])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Help in the order commands, examples, options."""
        self.format_commands(ctx, formatter)
        with formatter.section("Examples"):
            for line in EXAMPLES.splitlines():
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        click.Command.format_options(self, ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from verbatim.cli.lib.flag_aliases import COMMAND_ALIASES, COMMAND_ANSWERS

        if args and args[0] in COMMAND_ALIASES:
            args = [*COMMAND_ALIASES[args[0]], *args[1:]]
        if args and args[0] in COMMAND_ANSWERS:
            raise click.UsageError(f"no command {args[0]!r}; {COMMAND_ANSWERS[args[0]]}", ctx)
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import shlex
            from difflib import get_close_matches

            matches = get_close_matches(args[0], COMMANDS, 1)
            matches = matches or get_close_matches(args[0], COMMAND_ALIASES, 1)
            hint = "verbatim --help lists the commands"
            if " " in args[0]:  # probably a prompt
                shown = shlex.quote(args[0]) if len(args[0]) <= 100 else "'…'"
                hint = f"to send it as a prompt: verbatim run {shown}"
            elif matches:
                hint = f"did you mean {matches[0]}?"
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
    if ctx.invoked_subcommand is None:  # `verbatim` alone shows the help, without an error
        click.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of the `verbatim` command. Always ends in SystemExit."""
    args = list(sys.argv[1:] if argv is None else argv)
    flags = args[: args.index("--")] if "--" in args else args
    debug = "--debug" in flags or os.environ.get("VERBATIM_DEBUG", "") not in ("", "0")
    if "--debug" in flags:  # accepted anywhere, also at the end of a command line that failed
        args.remove("--debug")
    if args[:1] == ["help"]:  # `verbatim help run` is `verbatim run --help`
        args = [*args[1:2], "--help"]
    _open_missing_streams()
    _replace_unencodable()
    for warning in unknown_variables(os.environ, args[:1] in (["serve"], ["server"])):
        print_error(f"warning: {warning}")
    try:
        code = _call(args)
    except BaseException as error:
        if debug and not isinstance(error, (SystemExit, KeyboardInterrupt, click.exceptions.Exit)):
            import traceback

            traceback.print_exc()
        code = report(error)
    sys.exit(_flush() or code)


def _open_missing_streams() -> None:
    """Replace a stream that the shell closed (`<&-`, `>&-`, `2>&-`) with the null device. stdin
    first: the null device gets its descriptor, 0, which uvloop must not get for a socket."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            null = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  it stays open
            setattr(sys, name, null)


def _replace_unencodable() -> None:
    """Print a question mark for a character that the terminal cannot encode, instead of failing."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "")
    if not encoding.startswith("utf") and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _call(args: list[str]) -> int:
    result: object = cli.main(args=args, prog_name="verbatim", standalone_mode=False)
    return result if isinstance(result, int) else OK


def _flush() -> int:
    """Flush stdout and report an error as one line: at interpreter exit Python would print a
    traceback instead."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return report(error)
    except ValueError:
        pass
    return OK


if __name__ == "__main__":
    main()
