"""`verbatim compare PROMPT`: the same prompts under several settings, side by side; with --quiz,
the accuracy of greedy, sampled, best-of-n and majority vote."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verbatim.base.config import SETTINGS, EngineConfig
from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonObject
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import (
    BASE_MODEL,
    JSON,
    PLOT,
    RAW,
    UNUSED,
    Values,
    engine_of,
    engine_options,
    engine_value,
    model_options,
)
from verbatim.cli.lib.sampling_options import (
    DEFAULTS,
    given_sampling,
    pairs,
    parse_parameter,
    sampling_of,
    sampling_options,
)
from verbatim.cli.lib.tables import console, put, section, visible
from verbatim.cli.lib.terminal import write_json
from verbatim.cli.lib.texts import check_plot, file_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from verbatim.diagnose.comparison import Outcome, Setting
    from verbatim.diagnose.quiz import QuizResult
    from verbatim.engine.calls.llm import LLM

DEFAULT_SETTINGS = ("temperature=0", "temperature=1,seed=0")
SEED = 0
DEFAULT_TOKENS = 96
QUIZ_TOKENS = 32
ENGINE = [name for name in SETTINGS if name not in BASE_MODEL]
COLUMN = 38  # characters: two texts side by side on 80 columns


@as_command(model_options, engine_options(unused=BASE_MODEL), sampling_options)
def command(
    prompts: tuple[str, ...] = argument("[PROMPT]...", nargs=-1),
    texts: tuple[str, ...] = flag(
        "one column: sampling parameters, engine settings (quant, speculate, backend, kv_type, …)"
        " and model [temperature=0 and temperature=1,seed=0]",
        *("-s", "--setting"),
        metavar="NAME=VALUE,…",
    ),
    vary: bool = flag(
        "columns that must be equal: batch, prefill chunks, prefix cache, threads and drafts, as"
        " `verbatim verify` varies them; exit code 1 if one is not"
    ),
    file: str | None = flag("one prompt per line", metavar="FILE"),
    raw: bool = flag(RAW),
    quiz: str | None = flag("questions and answers, .jsonl or .csv", metavar="FILE"),
    samples: int = flag("with --quiz: sampled answers per question", default=8, least=2, most=1024),
    plot: str | None = PLOT,
    as_json: bool = JSON,
    **flags: Any,
) -> int:
    """Run each PROMPT under several settings: texts side by side with their differences marked,
    log-probability, repetition, diversity, speed.

    Flags are common to all settings; a setting overrides them. Answers end after 96 tokens unless
    --max-tokens is given. With --quiz FILE the questions of the file are answered greedily and by
    sampling instead.
    """
    check_plot(plot)
    if quiz is not None:
        if prompts or texts or file or vary:
            named = "leave out PROMPT, --file, --setting and --vary"
            raise ParameterError("quiz", f"has its own prompts; {named}")
        return _quiz(quiz, samples, plot, as_json, flags)
    lines = file_text(file, "file", "utf-8-sig").split("\n") if file else []
    asked = [*prompts, *(line for line in lines if line.strip())]
    if not asked:
        raise ParameterError("prompt", "is missing; type it in quotes, or give --file or --quiz")
    if vary:
        texts = _varied(texts, flags)
    elif not texts:
        _check_default_settings(flags)
    settings = read_settings(texts or DEFAULT_SETTINGS, flags)
    outcomes = _run(asked, settings, raw, as_json, flags)
    shown = _differing(outcomes) if vary else outcomes
    if as_json:
        write_json(outcomes_json(asked, outcomes))
    else:
        _print(asked, outcomes, shown)
    if plot:
        _plot(outcomes, plot)
    return 1 if vary and len(shown) > 1 else 0


# -------------------------------------------------------------------------------------- settings


def _check_default_settings(flags: Values) -> None:
    """Reject flags that the default settings would override, which would silently ignore them."""
    for name in ("temperature", "seed"):
        if name in given_sampling(flags):
            why = f"the default columns ({' and '.join(DEFAULT_SETTINGS)}) set it themselves"
            remedy = "columns of your own, such as -s temperature=0.3 -s temperature=1,seed=4"
            raise ParameterError(name, f"{why}; give {remedy}")


def _varied(texts: tuple[str, ...], flags: Values) -> tuple[str, ...]:
    """Columns of --vary."""
    from verbatim.diagnose.needle import settings_of

    if texts:
        raise ParameterError("vary", "has its own columns; leave out --setting")
    return settings_of(flags["e_backend"] or "auto")


def _differing(outcomes: list[Outcome]) -> list[Outcome]:
    """The first outcome, and those with other tokens."""
    return [outcomes[0], *(o for o in outcomes if o.same < len(o.texts))]


def read_settings(texts: tuple[str, ...], flags: Values) -> list[Setting]:
    """`temperature=1,seed=4` as a Setting, over the flags that are common to all."""
    from verbatim.diagnose.comparison import Setting

    # One seed for all settings, so that the same noise meets each; a beam search draws nothing.
    seed = {} if (flags.get("p_num_beams") or 1) > 1 else {"seed": SEED}
    base = sampling_of(flags, max_tokens=DEFAULT_TOKENS, **seed)
    out = []
    for text in texts:
        params: JsonObject = {}
        engine: JsonObject = {}
        model = ""
        for name, value in pairs(text, "setting", "top_p=0.9").items():
            if name == "model":
                model = value
            elif name in ENGINE:
                engine[name] = engine_value(name, value)
            else:
                params[name] = parse_parameter(name, value)
        if "adapter" in params:
            raise ParameterError("adapter", UNUSED["adapters"])
        EngineConfig(**engine)
        out.append(Setting(text, _with(base, params), engine, model))
    return out


def _with(base: SamplingParams, changes: Values) -> SamplingParams:
    if changes.get("num_beams", 1) > 1:  # beam search refuses the command line's own defaults
        plain = {
            name: FIELDS[name].default
            for name, value in {**DEFAULTS, "seed": SEED}.items()
            if getattr(base, name) == value
        }
        changes = {**plain, **changes}
    return base.with_(**changes)


def _run(
    asked: list[str], settings: list[Setting], raw: bool, quiet: bool, flags: Values
) -> list[Outcome]:
    from verbatim.diagnose.comparison import compare
    from verbatim.diagnose.quiz import prompt_ids

    def open_one(model: str, engine: JsonObject) -> LLM:
        own = {**flags, **{f"e_{name}": value for name, value in engine.items()}}
        if model:
            own["model"] = model
        return open_llm(own, quiet=quiet)

    def encode(llm: LLM, text: str) -> list[int]:
        return llm.tokenizer.encode_prompt(text) if raw else prompt_ids(llm, text)

    engine_of(flags)
    return compare(open_one, asked, settings, encode)


# -------------------------------------------------------------------------------------- printing


def _print(asked: list[str], outcomes: list[Outcome], texts_of: list[Outcome]) -> None:
    out = console()
    for at, prompt in enumerate(asked):
        _print_texts(out, prompt, at, texts_of)
    header = ("setting", "tokens", "nats", "repeats", "distinct", "loops", "same", "tokens/s")
    rows = []
    for o in outcomes:
        text = (f"{o.logprob:.3f}", f"{o.repetition:.0%}", f"{o.diversity:.0%}", str(o.loops))
        same, name = f"{o.same}/{len(asked)}", o.setting.name.replace(",", " ")
        rows.append((name, str(o.tokens), *text, same, f"{o.rate:.1f}"))
    section(out, "Summary", rows, right=range(1, 8), header=header, wide=0)
    out.print(
        "nats: mean log-probability of a token; repeats: share of 4-grams seen before in their"
        " text; distinct: different 2-grams of all texts; same: prompts with the tokens of the"
        " first setting; tokens/s of the batch",
        style="dim",
    )


def _print_texts(out: Console, prompt: str, at: int, outcomes: list[Outcome]) -> None:
    from rich.table import Table

    out.print(prompt, style="bold")
    columns = max(1, min(len(outcomes), out.width // COLUMN))
    for low in range(0, len(outcomes), columns):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=columns > 1)
        shown = outcomes[low : low + columns]
        for outcome in shown:
            head = f"{outcome.setting.name} ({outcome.finish[at]})"
            table.add_column(head, header_style="cyan", ratio=1, overflow="fold")
        table.add_row(*[_marked(outcomes[0].texts[at], o.texts[at], out) for o in shown])
        put(out, table)
        out.print()


def _marked(first: str, other: str, out: Console) -> Text:
    """The text with what differs from the first one in colour, or in ⟨⟩ where there is none."""
    from rich.text import Text

    from verbatim.diagnose.comparison import differences

    text = Text()
    colour = out.is_terminal and not out.no_color
    for part, differs in differences(visible(first), visible(other)):
        if differs and not colour and part.strip():
            part = f"⟨{part}⟩"
        text.append(part, style="yellow" if differs else "")
    return text


def outcomes_json(asked: list[str], outcomes: list[Outcome]) -> JsonObject:
    rows = []
    for o in outcomes:
        row = asdict(o)
        own = {**row.pop("setting"), "params": o.setting.params.to_mapping()}
        rows.append({**own, **row, "rate": o.rate})
    return {"prompts": asked, "settings": rows}


def _plot(outcomes: list[Outcome], path: str) -> None:
    from verbatim.observe.tool_plots import Panel, draw_bars

    panels = [
        Panel("log-probability, nats per token", tuple(o.logprob for o in outcomes)),
        Panel("repeated 4-grams", tuple(o.repetition for o in outcomes), percent=True),
        Panel("distinct 2-grams", tuple(o.diversity for o in outcomes), percent=True),
        Panel("tokens per second", tuple(o.rate for o in outcomes)),
    ]
    draw_bars([o.setting.name for o in outcomes], panels, path)


# ------------------------------------------------------------------------------------------ quiz


def _quiz(file: str, samples: int, plot: str | None, as_json: bool, flags: Values) -> int:
    from verbatim.diagnose.quiz import read_quiz, run_quiz

    questions = read_quiz(file)
    given = {"temperature": 1.0, "max_tokens": QUIZ_TOKENS, **given_sampling(flags)}
    seed = given.pop("seed", 0)
    params = SamplingParams.from_mapping(given)
    for name in ("n", "best_of", "num_beams"):
        if getattr(params, name) != FIELDS[name].default:
            raise ParameterError(name, "--quiz sets it itself; leave it out, and set --samples")
    with open_llm(flags, quiet=as_json) as llm:
        result = run_quiz(llm, questions, samples=samples, params=params, seed=seed)
        fingerprint = llm.fingerprint
    if as_json:
        write_json(quiz_json(result, params, seed, fingerprint))
    else:
        _print_quiz(result, params, seed)
    if plot:
        from verbatim.observe.tool_plots import Panel, draw_bars

        values = tuple(a.share for a in result.methods)
        intervals = tuple(a.interval for a in result.methods)
        title = f"{len(result.rows)} questions, 95 % intervals"
        panel = Panel(title, values, intervals, percent=True)
        draw_bars([a.method for a in result.methods], [panel], plot)
    return 0


def _print_quiz(result: QuizResult, params: SamplingParams, seed: int) -> None:
    from rich.text import Text

    out = console()
    mark = {True: Text("right", style="green"), False: Text("wrong", style="red")}
    rows = []
    for row in result.rows:
        best, vote = mark[row["best_right"]], mark[row["vote_right"]]
        greedy, sampled = mark[row["greedy_right"]], f"{row['sampled_right']:.0%}"
        rows.append((row["question"], row["answer"], greedy, sampled, best, vote))
    header = ("question", "answer", "greedy", "sampled", "best", "vote")
    section(out, "", rows, right=(3,), header=header, wide=0)
    width = 24
    rows2 = []
    for a in result.methods:
        low, high = a.interval
        bar = "█" * round(width * a.share)
        rows2.append((a.method, f"{a.share:.1%}", f"{low:.0%} to {high:.0%}", bar))
    title = f"Accuracy, {len(result.rows)} questions"
    section(out, title, rows2, right=(1,), header=("", "right", "95 % interval", ""))
    how = f"{result.samples} samples per question at temperature {params.temperature:g}"
    what = "best: highest mean log-probability; intervals count questions"
    out.print(f"{how}, seed {seed}; {what}", style="dim")


def quiz_json(
    result: QuizResult, params: SamplingParams, seed: int, fingerprint: str
) -> JsonObject:
    names = ("method", "right", "share", "interval")
    methods = [{name: getattr(a, name) for name in names} for a in result.methods]
    how = {"samples": result.samples, "seed": seed, "params": params.to_mapping()}
    found = {"fingerprint": fingerprint, "methods": methods, "rows": list(result.rows)}
    return {"questions": len(result.rows), **how, **found}
