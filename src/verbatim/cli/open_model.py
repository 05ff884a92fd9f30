"""Opens the model and reads the prompt of a command: flags and arguments come in, an LLM and a text
go out. Loading shows progress on stderr."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import ParameterError
from verbatim.cli.options import engine_of
from verbatim.cli.terminal import Progress, note, warn

if TYPE_CHECKING:
    from verbatim.engine.llm import LLM


def open_llm(flags: dict[str, Any], *, quiet: bool = False) -> LLM:
    """Load the model. Flags are validated before NumPy and the engine are imported, so that a typo
    fails at once."""
    settings = engine_of(flags)
    progress = Progress(quiet=quiet)
    if progress.live:
        progress(f"loading {flags['model']}")
    from verbatim.engine.llm import LLM

    shown = _LoadWarnings(progress)
    log = logging.getLogger("verbatim.engine")
    log.addHandler(shown)
    try:
        llm = LLM(
            flags["model"],
            revision=flags.get("revision"),
            offline=bool(flags.get("offline")),
            progress=progress,
            **settings,
        )
    finally:
        log.removeHandler(shown)
        progress.clear()
    why = llm.parts.backend.info.note
    if why and not quiet:
        note(f"note: {why}")
    return llm


class _LoadWarnings(logging.Handler):
    """Prints the engine's warnings during loading in the format of the command line."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if not self._progress.quiet:
            self._progress.clear()
            warn(record.getMessage())


def read_prompt(args: tuple[str, ...], param: str = "prompt") -> str:
    """The prompt: the only argument of the command, or stdin if it is `-` or missing with a pipe.

    Several arguments are an error and are not joined: one of them may be a model name or a separate
    prompt."""
    if len(args) > 1:
        raise ParameterError(param, _too_many_arguments(args, param))
    if args and args != ("-",):
        if not args[0]:
            raise ParameterError(
                param, f'is empty; type the {param} in quotes, or "-" to read stdin'
            )
        return decode_argument(args[0], param)
    if sys.stdin is None or (not args and sys.stdin.isatty()):
        raise ParameterError(param, 'is missing; type it in quotes, or "-" to read stdin')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ParameterError(
            param, f"stdin is not UTF-8 text (byte {error.start}); convert it first"
        ) from None
    text = text.removesuffix("\n")  # as $(...) does: the shell's final newline is not the prompt's
    if not text:
        raise ParameterError(
            param, f"stdin was empty; type the {param} in quotes, or send it through a pipe"
        )
    return text


def decode_argument(text: str, param: str) -> str:
    """Decode an argument as UTF-8. In another locale Python passes its bytes as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        try:
            return os.fsencode(text).decode("utf-8")
        except UnicodeError:
            raise ParameterError(
                param,
                "is not UTF-8 text; check the encoding of the terminal, or send it through a pipe",
            ) from None
    return text


def _too_many_arguments(args: tuple[str, ...], param: str) -> str:
    """The error for several arguments, with the remedy: `verbatim run smollm2 "Hi"` needs -m, and
    `verbatim run why is the sky blue` needs quotes."""
    import shlex

    import click

    called = click.get_current_context().command_path
    error = f"{len(args)} arguments were given, and it is one"
    if _is_model_name(args[0]):
        return f"{error}; pass the model with -m: {called} -m {shlex.quote(args[0])} …"
    joined = shlex.quote(" ".join(args))
    return (
        f"{error}; put it in quotes: {called} {joined}"
        if len(joined) <= 100
        else f"{error}; put it in quotes"
    )


def _is_model_name(word: str) -> bool:
    from verbatim.weights.catalog import CATALOG

    return word in CATALOG or word.endswith(".gguf")


def speed_limit(llm: LLM, context: int) -> float | None:
    """Decode limit from memory bandwidth at this context, in tokens per second; None until
    `verbatim bench` has measured this machine."""
    from verbatim.observe.roofline import load_limits
    from verbatim.weights.catalog import cache_dir

    limits = load_limits(cache_dir())
    info = llm.parts.backend.info
    if limits is None or info.name != "cpu":
        return None
    return limits.decode_ceiling(info.weight_bytes + context * info.kv_token_bytes)
