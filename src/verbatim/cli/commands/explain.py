"""`verbatim explain PROMPT`: prints the answer and, for each token, why the sampler chose it.
--what-if samples the recorded logits again with other parameters; --continue writes the other
text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verbatim.base.errors import ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.cli.lib.answer import PromptFlags, check_shown, collect, prompt_options
from verbatim.cli.lib.command_class import Command, declared, flag
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import JSON, ONE_ANSWER, Values, engine_options, model_options
from verbatim.cli.lib.report import choice_head, closing_line, completion_json, params_in_force
from verbatim.cli.lib.sampling_options import parse_changes, sampling_of, sampling_options
from verbatim.cli.lib.terminal import (
    BOLD,
    columns,
    note,
    paint,
    use_colour,
    warn,
    write,
    write_json,
)
from verbatim.cli.lib.texts import check_output, check_structure

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM
    from verbatim.explain.explained import Explanation, WhatIfs

DEFAULT_TOP = 5
DEFAULT_TOKENS = 16


# changes as typed, what they give, and the text of --continue
WhatIf = tuple[str, "WhatIfs", Completion | None]


@click.command(cls=Command)
@prompt_options
@declared(model_options, engine_options(unused=ONE_ANSWER), sampling_options)
def command(
    brief: bool = flag("one line per token"),
    wanted: tuple[str, ...] = flag(
        "only token number N, or tokens that contain TEXT", "--token", metavar="N|TEXT"
    ),
    bars: bool | None = flag("draw bars [on a terminal]", "--bars/--no-bars"),
    what_ifs: tuple[str, ...] = flag(
        "sample the same logits with other parameters, without the model",
        "--what-if",
        metavar="NAME=VALUE,…",
    ),
    continues: bool = flag(
        "with --what-if: also write the text that those parameters give", "--continue"
    ),
    page: str | None = flag("write one page for a browser", "--html", metavar="FILE"),
    as_json: bool = JSON,
    **flags: Any,
) -> int:
    """Show why each token of the answer to PROMPT was chosen.

    Shows the model's distribution, the tokens that each sampler stage removed, the noise, the
    scores, and the distance to the runner-up. --explain N sets the number of candidates [5];
    without --max-tokens the answer ends after 16 tokens.
    """
    params = _params(flags, as_json, bool(what_ifs))
    changes = [_changes(text) for text in what_ifs]
    if continues and not what_ifs:
        raise ParameterError("continue", "needs --what-if NAME=VALUE, the parameters to change")
    if page is not None:
        check_output("html", page)
    check_structure(params)
    asked = PromptFlags.of(flags)
    with open_llm(flags, quiet=as_json) as llm:
        code, completion = collect(asked.start(llm, params), show=None)
        found = []
        for words, change in zip(what_ifs, changes, strict=True):
            results = _explanation(llm, completion).what_if(**change)
            other = _other(llm, asked, completion, change) if continues else None
            found.append((words, results, other))
        if page is not None:
            _write_page(page, llm, completion, asked.text)
        if as_json:
            _print_json(llm, completion, found)
        else:
            drawn = use_colour(sys.stdout) if bars is None else bars
            _print(llm, completion, brief, wanted, columns() if drawn else 0, found)
    return code


def _params(flags: Values, as_json: bool, what_if: bool) -> SamplingParams:
    """The sampling parameters, checked before the model loads."""
    params = sampling_of(flags, max_tokens=DEFAULT_TOKENS, explain=DEFAULT_TOP, receipt=what_if)
    if not params.explain:
        raise ParameterError("explain", "0 explains nothing; ask for 1 or more candidates")
    if not as_json:
        check_shown(params, ("logprobs", "prompt_logprobs", *(() if what_if else ("receipt",))))
    if what_if:
        _check_what_if(params)
    return params


def _explanation(llm: LLM, completion: Completion) -> Explanation:
    from verbatim.explain.explained import Explanation

    assert completion.params is not None, "the engine reports the parameters in force"
    return Explanation(completion, completion.params, llm.tokenizer)


def _other(llm: LLM, asked: PromptFlags, completion: Completion, change: Values) -> Completion:
    """The text that `change` gives. The same seed gives the same noise, so the texts are equal up
    to the first difference."""
    assert completion.params is not None, "the engine reports the parameters in force"
    unexplained = {"seed": completion.seed, "explain": 0, "receipt": False}
    params = completion.params.with_(**{**unexplained, **change})
    return collect(asked.start(llm, params), show=None)[1]


def _changes(text: str) -> Values:
    """`top_p=0.5,temperature=1.2` as parameters."""
    from verbatim.explain.explanation import CHANGEABLE

    changes = parse_changes(text, "what_if", "top_p=0.5")
    for name in changes:
        if name not in CHANGEABLE:
            why = "cannot be changed by a what-if: it does not decide how a token is sampled"
            raise ParameterError(name, why)
    return changes


def _check_what_if(params: SamplingParams) -> None:
    """Check, before the model runs, that a what-if can sample this answer again."""
    from verbatim.sampling.record import WHOLE_ROWS

    if params.num_beams > 1:
        why = "needs sampled tokens, and beam search samples none; leave out --num-beams"
        raise ParameterError("what_if", why)
    if params.width > 1:
        raise ParameterError("what_if", "needs a single answer; leave out --n and --best-of")
    if params.max_tokens is None or params.max_tokens > WHOLE_ROWS:
        why = f"records at most {WHOLE_ROWS} tokens; set --max-tokens to that or less"
        raise ParameterError("what_if", why)


def _chosen(records: tuple[Values, ...], wanted: tuple[str, ...], llm: LLM) -> list[Values]:
    """The records of the tokens that --token names; all of them without it."""
    if not wanted:
        return list(records)
    found = []
    for number, record in enumerate(records, 1):
        text = llm.tokenizer.token_bytes(record["token"]).decode("utf-8", "replace")
        if any(int(w) == number if w.isdecimal() else w in text for w in wanted):
            found.append(record)
    if not found:
        why = f"{', '.join(wanted)!r:.60} names no token of this answer, which has {len(records)}"
        raise ParameterError("token", why)
    return found


def _print(
    llm: LLM,
    completion: Completion,
    brief: bool,
    wanted: tuple[str, ...],
    screen: int,
    what_ifs: list[WhatIf],
) -> None:
    from verbatim.explain.explanation import LEGEND, headline, render, render_what_if

    show = llm.tokenizer.token_bytes
    for choice in completion.choices:
        if brief and choice.index:
            write("\n")
        head = choice_head(choice, several=len(completion.choices) > 1)
        write(head + paint(choice.text, BOLD, sys.stdout) + "\n\n")
        for record in _chosen(choice.explain, wanted, llm):
            draw, space = (headline, "\n") if brief else (render, "\n\n")
            write(draw(record, show, screen=screen) + space)
    for changes, results, other in what_ifs:
        title = f"{'' if not brief else chr(10)}what if {changes}"
        write(f"{title}:\n{render_what_if(results, show)}\n")
        if other is not None:
            write(f"the answer with {changes}:\n{paint(other.text, BOLD, sys.stdout)}\n")
    for line in completion.warnings:
        warn(line)
    if not brief:
        for line in LEGEND:
            note(line)
    note(closing_line(llm, completion))


def _write_page(page: str, llm: LLM, completion: Completion, prompt: str) -> None:
    from verbatim.explain.explain_html import explain_page

    records, show = completion.choices[0].explain, llm.tokenizer.token_bytes
    title, params = f"Why {llm.loaded.name} chose each token", params_in_force(completion)
    text = explain_page(records, show, title=title, prompt=prompt, params=params)
    Path(page).write_text(text, "utf-8")


def _print_json(llm: LLM, completion: Completion, what_ifs: list[WhatIf]) -> None:
    out = completion_json(llm, completion)
    if what_ifs:
        out["what_if"] = []
        for changes, results, other in what_ifs:
            names = ("position", "before", "after")
            tokens = [{name: getattr(r, name) for name in names} for r in results]
            more = {"text": other.text, "token_ids": other.token_ids} if other else {}
            out["what_if"].append({"changes": changes, "tokens": tokens, **more})
    write_json(out)
