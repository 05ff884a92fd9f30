"""`verbatim drift PROMPT`: log-probability and entropy along free-running texts, against the same
model teacher-forced on a given text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import ParameterError
from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import BASE_MODEL, JSON, PLOT, engine_options, model_options
from verbatim.cli.lib.tables import console, section
from verbatim.cli.lib.terminal import write_json
from verbatim.cli.lib.texts import check_plot, file_text, read_prompt

if TYPE_CHECKING:
    from verbatim.diagnose.exposure import Series
    from verbatim.engine.calls.llm import LLM

SPARKS = "▁▂▃▄▅▆▇█"


@as_command(model_options, engine_options(unused=BASE_MODEL))
def command(
    prompt: tuple[str, ...] = argument("[PROMPT]", nargs=-1),
    file: str | None = flag(
        "the given text [the opening of Alice in Wonderland]; without PROMPT the free-running"
        " texts start with its first tokens",
        metavar="FILE",
    ),
    prefix: int = flag(
        "tokens of the given text that are read before the measurement starts", default=32, least=1
    ),
    tokens: int = flag("length of each text", "--max-tokens", "--tokens", default=192, least=8),
    temperature: float = flag(
        "temperature of the sampled text; the other text is greedy", default=1.0
    ),
    seed: int = flag("of the sampled text", default=0, least=0),
    window: int = flag("tokens per printed mean", default=16, least=1),
    plot: str | None = PLOT,
    as_json: bool = JSON,
    **flags: Any,
) -> int:
    """How a text drifts when the model reads its own output (exposure bias): log-probability and
    entropy along a greedy and a sampled continuation of PROMPT, against a given text whose true
    tokens the model reads. The loop detector marks where a text begins to repeat itself.
    """
    from verbatim.diagnose.exposure import GIVEN, measure_drift

    check_plot(plot)
    if not temperature > 0:
        why = f"{temperature:g} is not above 0; the greedy text is always included"
        raise ParameterError("temperature", why)
    given = file_text(file, "file") if file is not None else GIVEN
    start = read_prompt(prompt) if prompt or file is None else None
    with open_llm(flags, quiet=as_json) as llm:
        ids = _long_enough(llm.tokenizer.encode_prompt(given), prefix + 8)
        first = ids[:prefix] if start is None else llm.tokenizer.encode_prompt(start)
        length = _fitting(llm, len(first), prefix, tokens)
        found = measure_drift(
            *(llm, first, ids), tokens=length, temperature=temperature, seed=seed, context=prefix
        )
        report = drift_json(found, seed, llm.fingerprint)
    write_json(report) if as_json else _print(found, window)
    if plot:
        _plot(found, window, plot)
    return 0


def _long_enough(ids: list[int], least: int) -> list[int]:
    if len(ids) < least:
        raise ParameterError("file", f"{len(ids)} tokens are too few; give a text of {least}")
    return ids


def _fitting(llm: LLM, start: int, prefix: int, tokens: int) -> int:
    most = llm.context - max(start, prefix) - 1
    if tokens > most:
        why = f"{tokens} is more than the {most} that the context leaves"
        raise ParameterError("max_tokens", why)
    return tokens


# -------------------------------------------------------------------------------------- printing


def _print(found: list[Series], window: int) -> None:
    from verbatim.diagnose.exposure import smooth

    out = console()
    rows = [
        (
            s.name,
            str(len(s.token_ids)),
            f"{s.mean(s.logprobs, 0):.2f} → {s.mean(s.logprobs, 2):.2f}",
            f"{s.mean(s.entropies, 0):.2f} → {s.mean(s.entropies, 2):.2f}",
            f"{s.repetition:.0%}",
            "-" if s.loop_at is None else f"{s.loop}, from {_loop_start(s)}",
        )
        for s in found
    ]
    header = ("text", "tokens", "log-prob.", "entropy", "repeats", "loop")
    section(out, "First third → last third, nats per token", rows, right=(1, 4), header=header)
    width = max(20, out.width - 6)
    for title, name in (("log-probability", "logprobs"), ("entropy", "entropies")):
        lines = [smooth(getattr(s, name), window) for s in found]
        low, high = min(map(min, lines)), max(map(max, lines))
        out.print()
        out.print(f"{title}, {low:.2f} (▁) to {high:.2f} (█)", style="bold")
        for series, values in zip(found, lines, strict=True):
            out.print(series.name, style="dim")
            out.print("  " + spark(values, width, low, high))


def spark(values: tuple[float, ...], width: int, low: float, high: float) -> str:
    """A line of block characters: the means of `width` equal parts of the values."""
    parts = min(width, len(values))
    out = []
    for at in range(parts):
        some = values[len(values) * at // parts : len(values) * (at + 1) // parts]
        share = (sum(some) / len(some) - low) / (high - low) if high > low else 0.0
        out.append(SPARKS[min(len(SPARKS) - 1, int(share * len(SPARKS)))])
    return "".join(out)


def _plot(found: list[Series], window: int, path: str) -> None:
    from verbatim.diagnose.exposure import smooth
    from verbatim.observe.tool_plots import Curve, draw_curves

    panels = [
        (title, [Curve(s.name, smooth(getattr(s, name), window), _loop_start(s)) for s in found])
        for title, name in (("log-probability, nats", "logprobs"), ("entropy, nats", "entropies"))
    ]
    draw_curves(panels, f"token (means of {window})", path)


def _loop_start(series: Series) -> int | None:
    """The detector needs 64 repeated tokens, or four repeats: the loop began that much earlier."""
    if series.loop_at is None:
        return None
    return series.loop_at - max(64, 4 * series.loop)


def drift_json(found: list[Series], seed: int, fingerprint: str) -> dict[str, object]:
    rows = [asdict(s) | {"repetition": s.repetition} for s in found]
    for row in rows:
        row["tokens"] = row.pop("token_ids")
    return {"seed": seed, "fingerprint": fingerprint, "series": rows}
