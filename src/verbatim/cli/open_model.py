"""Opening a model for a command: flags in, an LLM out, with the wait shown."""

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
    """The flags are checked before anything heavy is imported, so that a typo costs no wait."""
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
    """Shows what the engine warns of at load as the command line's own warnings."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if not self._progress.quiet:
            self._progress.clear()
            warn(record.getMessage())


def read_prompt(words: tuple[str, ...], param: str = "prompt") -> str:
    """The prompt: the one argument of the command; stdin where it is `-`, or where there is none and stdin is a pipe.

    Several arguments are refused, not joined: one of them may be a model's name, or meant as a prompt of its own."""
    if len(words) > 1:
        raise ParameterError(param, _too_many(words, param))
    if words and words != ("-",):
        if not words[0]:
            raise ParameterError(
                param, f'is empty; type the {param} in quotes, or "-" to read stdin'
            )
        return typed(words[0], param)
    if sys.stdin is None or (not words and sys.stdin.isatty()):
        raise ParameterError(param, 'is missing; type it in quotes, or "-" to read stdin')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ParameterError(
            param, f"stdin is not UTF-8 text (byte {error.start}); convert it first"
        ) from None
    text = text.removesuffix(
        "\n"
    )  # the newline that ends a line of a shell is not part of the prompt, as with $(...)
    if not text:
        raise ParameterError(
            param, f"stdin was empty; type the {param} in quotes, or send it through a pipe"
        )
    return text


def typed(text: str, param: str) -> str:
    """An argument as the person typed it. In a locale that is not UTF-8, Python hands its bytes over as lone surrogates."""
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


def _too_many(words: tuple[str, ...], param: str) -> str:
    """Which remedy? `verbatim run smollm2 "Hi"` means a model; `verbatim run why is the sky blue` has lost its quotes."""
    import shlex

    import click

    called = click.get_current_context().command_path
    many = f"{len(words)} arguments were given, and it is one"
    if _names_a_model(words[0]):
        return f"{many}; the model goes behind -m: {called} -m {shlex.quote(words[0])} …"
    whole = shlex.quote(" ".join(words))
    return (
        f"{many}; put it in quotes: {called} {whole}"
        if len(whole) <= 100
        else f"{many}; put it in quotes"
    )


def _names_a_model(word: str) -> bool:
    from verbatim.weights.catalog import CATALOG

    return word in CATALOG or word.endswith(".gguf")


def speed_limit(llm: LLM, context: int) -> float | None:
    """Tokens a second that this machine's memory allows at this context; None until `verbatim bench` has measured it."""
    from verbatim.observe.roofline import load_limits
    from verbatim.weights.catalog import cache_dir

    limits = load_limits(cache_dir())
    info = llm.parts.backend.info
    if limits is None or info.name != "cpu":
        return None
    return limits.decode_ceiling(info.weight_bytes + context * info.kv_token_bytes)
