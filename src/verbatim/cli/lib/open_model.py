"""Opens the model of a command: flags come in, an LLM goes out. Loading shows its progress."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from verbatim.base.errors import UnsupportedError
from verbatim.cli.lib.interrupt import exit_on_interrupt
from verbatim.cli.lib.options import Values, engine_of
from verbatim.cli.lib.terminal import Progress, note, warn

if TYPE_CHECKING:
    from verbatim.base.records import Completion
    from verbatim.engine.calls.llm import LLM


def open_llm(
    flags: Values, *, quiet: bool = False, generates: bool = False, interruptible: bool = False
) -> LLM:
    """Load the model. Flags are validated before NumPy and the engine are imported, so that a typo
    fails at once. `generates`: refuse an encoder. `interruptible`: Ctrl-C raises KeyboardInterrupt
    instead of ending the process at once."""
    settings = engine_of(flags)
    progress = Progress(quiet=quiet)
    if progress.live:
        progress(f"loading {flags['model']}")
    with nullcontext() if interruptible else exit_on_interrupt():
        llm = _load(flags, settings, progress, generates=generates)
    why = llm.loaded.backend.info.note
    if why and not quiet:
        note(f"note: {why}")
    return llm


def _load(flags: Values, settings: Values, progress: Progress, *, generates: bool) -> LLM:
    from verbatim.engine.calls.llm import LLM

    model, revision, offline = flags["model"], flags.get("revision"), bool(flags.get("offline"))
    if generates:
        from verbatim.hub.catalog import resolve

        path = resolve(model, revision=revision, offline=offline, progress=progress)
        refuse_encoder(model, path)
    import logging  # not at the head: `--help` needs no logging

    class LoadWarnings(logging.Handler):
        """Prints the engine's warnings during loading in the format of the command line."""

        def emit(self, record: logging.LogRecord) -> None:
            if not progress.quiet:
                progress.clear()
                warn(record.getMessage())

    shown = LoadWarnings(logging.WARNING)
    log = logging.getLogger("verbatim.engine")
    log.addHandler(shown)
    try:
        return LLM(model, revision=revision, offline=offline, progress=progress, **settings)
    finally:
        log.removeHandler(shown)
        progress.clear()


def refuse_encoder(name: str, path: Path) -> None:
    """Refuse an encoder before its engine names settings that the command itself makes."""
    from verbatim.encoder.encoder_load import encoder_type

    if encoder_type(path) is not None:
        runs = "`verbatim embed`, `verbatim rerank` and `verbatim serve` run it"
        why = f"{name} is an encoder and generates no text; {runs}, and `verbatim doctor` checks it"
        raise UnsupportedError("model", why)


def speed_limit(llm: LLM, completion: Completion) -> float | None:
    """Decode limit from memory bandwidth at this context, in tokens per second; None until
    `verbatim bench` or `plan` has measured this machine. A run without drafts that is faster shows
    that the limit was measured while the machine was busy."""
    from verbatim.hub.catalog import cache_dir
    from verbatim.observe.roofline import cost_card, load_limits, mark_beaten

    limits, usage = load_limits(cache_dir()), completion.usage
    info = llm.loaded.backend.info
    if limits is None or info.name != "cpu":
        return None
    card = cost_card(llm.loaded.backend.spec, info)
    context = len(completion.prompt_ids)
    limit = limits.decode_ceiling(card.read_bytes() + context * info.kv_token_bytes)
    alone = not usage.drafted_tokens and len(completion.choices) == 1
    if alone and completion.timings.decode_rate(usage.output_tokens) > limit:
        with suppress(OSError):
            mark_beaten(cache_dir())
    return limit
