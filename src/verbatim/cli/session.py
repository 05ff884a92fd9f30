"""Opening a model for a command: flags in, an LLM out, with the wait shown."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import ParameterError
from verbatim.cli.options import engine_of
from verbatim.cli.screen import Progress

if TYPE_CHECKING:
    from verbatim.engine.llm import LLM


def open_llm(flags: dict[str, Any], *, quiet: bool = False) -> LLM:
    """The flags are checked before anything heavy is imported, so that a typo costs no wait."""
    settings = engine_of(flags)
    progress = Progress(quiet=quiet)
    if progress.live:
        progress(f"loading {flags['model']}")
    from verbatim.engine.llm import LLM

    try:
        return LLM(
            flags["model"], revision=flags.get("revision"), offline=bool(flags.get("offline")), progress=progress, **settings
        )
    finally:
        progress.clear()


def read_prompt(words: tuple[str, ...]) -> str:
    """The prompt from the words of the command; from stdin where it is `-`, or where there is none and stdin is a pipe."""
    if words and words != ("-",):
        return " ".join(words)
    if not words and sys.stdin.isatty():
        raise ParameterError("prompt", 'is missing; type it in quotes, or "-" to read stdin')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ParameterError("prompt", f"stdin is not UTF-8 text (byte {error.start})") from None
    text = text.removesuffix("\n")  # the newline that ends a line of a shell is not part of the prompt, as with $(...)
    if not text:
        raise ParameterError("prompt", "stdin was empty")
    return text


def speed_limit(llm: LLM, context: int) -> float | None:
    """Tokens a second that this machine's memory allows at this context; None until `verbatim bench` has measured it."""
    from verbatim.observe.roofline import load_limits
    from verbatim.weights.catalog import cache_dir

    limits = load_limits(cache_dir())
    info = llm.parts.backend.info
    if limits is None or info.name != "cpu":
        return None
    return limits.decode_ceiling(info.weight_bytes + context * info.kv_token_bytes)
