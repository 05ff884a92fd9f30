"""`verbatim explain PROMPT`: prints the answer and, for each token, why the sampler chose it.
--what-if samples the recorded logits again with other parameters; --continue writes the other
text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verbatim.base.defaults import report
from verbatim.base.errors import ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.cli.lib.common_options import check_output, json_option
from verbatim.cli.lib.options import (
    ONE_ANSWER,
    Command,
    Option,
    engine_options_without,
    model_options,
)
from verbatim.cli.lib.sampling_options import (
    PARSE_HELP,
    parse_parameter,
    sampling_of,
    sampling_options,
)
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
from verbatim.cli.lib.think_options import think_options, thinking_of

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM
    from verbatim.explain.explained import WhatIfs

DEFAULT_TOP = 5
DEFAULT_TOKENS = 16


@click.command(cls=Command)
@click.argument("prompt", nargs=-1, metavar="[PROMPT]")
@click.option(
    "--raw", cls=Option, is_flag=True, help="continue the text as it is, without the chat template"
)
@click.option("--parse-special", cls=Option, is_flag=True, help=PARSE_HELP)
@click.option("--file", "file", cls=Option, metavar="FILE", help="read the prompt from FILE")
@click.option("--system", cls=Option, metavar="TEXT", help="system message of the chat turn")
@click.option("--brief", cls=Option, is_flag=True, help="one line per token")
@click.option(
    "--token",
    "wanted",
    cls=Option,
    multiple=True,
    metavar="N|TEXT",
    help="only token number N, or tokens that contain TEXT (may be repeated)",
)
@click.option("--bars/--no-bars", cls=Option, default=None, help="draw bars [on a terminal]")
@click.option(
    "--what-if",
    "what_ifs",
    cls=Option,
    multiple=True,
    metavar="NAME=VALUE,…",
    help="sample the same logits with other parameters, without the model (may be repeated)",
)
@click.option(
    "--continue",
    "continues",
    cls=Option,
    is_flag=True,
    help="with --what-if: also write the text that those parameters give",
)
@click.option("--html", "page", cls=Option, metavar="FILE", help="write one page for a browser")
@json_option()
@think_options
@model_options
@engine_options_without(unused=ONE_ANSWER)
@sampling_options
def command(
    prompt: tuple[str, ...],
    raw: bool,
    parse_special: bool,
    file: str | None,
    system: str | None,
    brief: bool,
    wanted: tuple[str, ...],
    bars: bool | None,
    what_ifs: tuple[str, ...],
    continues: bool,
    page: str | None,
    as_json: bool,
    **flags: Any,
) -> int:
    """Show why each token of the answer to PROMPT was chosen.

    Shows the model's distribution, the tokens that each sampler stage removed, the noise, the
    scores, and the distance to the runner-up. --explain N sets the number of candidates [5];
    without --max-tokens the answer ends after 16 tokens.
    """
    from verbatim.cli.commands.run import check_shown, collect, start
    from verbatim.cli.lib.open_model import check_structure, open_llm, read_prompt, split_model
    from verbatim.explain.explained import Explanation

    thinking = thinking_of(flags)
    params = sampling_of(
        flags, max_tokens=DEFAULT_TOKENS, explain=DEFAULT_TOP, receipt=bool(what_ifs)
    )
    if not params.explain:
        raise ParameterError("explain", "0 explains nothing; ask for 1 or more candidates")
    if not as_json:
        check_shown(params, ("logprobs", "prompt_logprobs", *(() if what_ifs else ("receipt",))))
    changes = [_changes(text) for text in what_ifs]
    if what_ifs:
        _check_what_if(params)
    elif continues:
        raise ParameterError("continue", "needs --what-if NAME=VALUE, the parameters to change")
    if page is not None:
        check_output("html", page)
    check_structure(params)
    text = read_prompt(split_model(prompt, flags), file=file)
    with open_llm(flags, quiet=as_json) as llm:

        def run(request: SamplingParams) -> tuple[int, Completion]:
            stream = start(
                llm,
                text,
                request,
                raw=raw,
                system=system,
                parse_special=parse_special,
                thinking=thinking,
            )
            return collect(stream, show=None)

        code, completion = run(params)
        in_force = completion.params
        assert in_force is not None, "the engine reports the parameters in force"
        report_what_if = [
            (
                words,
                Explanation(completion, in_force, llm.tokenizer).what_if(**change),
                # The same seed gives the same noise, so the texts are equal up to the difference.
                run(_unexplained(in_force, completion, change))[1] if continues else None,
            )
            for words, change in zip(what_ifs, changes, strict=True)
        ]
        if page is not None:
            _write_page(page, llm, completion, text)
        if as_json:
            _print_json(llm, completion, report_what_if)
        else:
            drawn = use_colour(sys.stdout) if bars is None else bars
            _print(llm, completion, brief, wanted, columns() if drawn else 0, report_what_if)
    return code


def _changes(text: str) -> dict[str, Any]:
    """`top_p=0.5,temperature=1.2` as parameters."""
    from verbatim.explain.explanation import CHANGEABLE

    changes: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ParameterError("what_if", f"{part!r} is not NAME=VALUE, such as top_p=0.5")
        changes[name.strip().replace("-", "_")] = parse_parameter(name, value)
    for name in changes:
        if name not in CHANGEABLE:
            raise ParameterError(
                name, "cannot be changed by a what-if: it does not decide how a token is sampled"
            )
    return changes


def _check_what_if(params: SamplingParams) -> None:
    """Check, before the model runs, that a what-if can sample this answer again."""
    from verbatim.sampling.record import WHOLE_ROWS

    if params.num_beams > 1:
        raise ParameterError(
            "what_if", "needs sampled tokens, and beam search samples none; leave out --num-beams"
        )
    if params.width > 1:
        raise ParameterError("what_if", "needs a single answer; leave out --n and --best-of")
    if params.max_tokens is None or params.max_tokens > WHOLE_ROWS:
        raise ParameterError(
            "what_if", f"records at most {WHOLE_ROWS} tokens; set --max-tokens to that or less"
        )


def _unexplained(
    params: SamplingParams, completion: Completion, changes: dict[str, Any]
) -> SamplingParams:
    """The request of the answer with `changes`, without its reports."""
    return params.with_(**{"seed": completion.seed, "explain": 0, "receipt": False, **changes})


def _chosen(
    records: tuple[dict[str, Any], ...], wanted: tuple[str, ...], llm: LLM
) -> list[dict[str, Any]]:
    """The records of the tokens that --token names; all of them without it."""
    if not wanted:
        return list(records)
    found = []
    for number, record in enumerate(records, 1):
        text = llm.tokenizer.token_bytes(record["token"]).decode("utf-8", "replace")
        if any(int(w) == number if w.isdecimal() else w in text for w in wanted):
            found.append(record)
    if not found:
        raise ParameterError(
            "token",
            f"{', '.join(wanted)!r:.60} names no token of this answer, which has {len(records)}",
        )
    return found


def _print(
    llm: LLM,
    completion: Completion,
    brief: bool,
    wanted: tuple[str, ...],
    screen: int,
    what_ifs: list[tuple[str, WhatIfs, Completion | None]],
) -> None:
    from verbatim.cli.lib.report import choice_head, closing_line, is_sampled, loop_line
    from verbatim.explain.explanation import LEGEND, headline, render, render_what_if

    show = llm.tokenizer.token_bytes
    for choice in completion.choices:
        if brief and choice.index:
            write("\n")
        head = choice_head(choice, several=len(completion.choices) > 1)
        write(head + paint(choice.text, BOLD, sys.stdout) + "\n\n")
        for record in _chosen(choice.explain, wanted, llm):
            write(
                f"{headline(record, show, screen=screen)}\n"
                if brief
                else f"{render(record, show, screen=screen)}\n\n"
            )
    for changes, results, other in what_ifs:
        title = f"{'' if not brief else chr(10)}what if {changes}"
        write(f"{title}:\n{render_what_if(results, show)}\n")
        if other is not None:
            write(f"the answer with {changes}:\n{paint(other.text, BOLD, sys.stdout)}\n")
    loop = loop_line(completion, "--on-loop report", "--on-loop stop")
    for line in (*completion.warnings, *([loop] if loop else [])):
        warn(line)
    if not brief:
        for line in LEGEND:
            note(line)
    note(closing_line(llm, completion, sampled=is_sampled(completion)))


def _write_page(page: str, llm: LLM, completion: Completion, prompt: str) -> None:
    from verbatim.explain.explain_html import explain_page

    assert completion.params is not None, "the engine reports the parameters in force"
    Path(page).write_text(
        explain_page(
            completion.choices[0].explain,
            llm.tokenizer.token_bytes,
            title=f"Why {llm.parts.name} chose each token",
            prompt=prompt,
            params=report(completion.params, completion.seed),
        ),
        "utf-8",
    )


def _print_json(
    llm: LLM,
    completion: Completion,
    what_ifs: list[tuple[str, WhatIfs, Completion | None]],
) -> None:
    from verbatim.cli.lib.report import completion_json

    out = completion_json(llm, completion)
    if what_ifs:
        out["what_if"] = [
            {
                "changes": changes,
                "tokens": [
                    {"position": r.position, "before": r.before, "after": r.after} for r in results
                ],
                **({"text": other.text, "token_ids": list(other.token_ids)} if other else {}),
            }
            for changes, results, other in what_ifs
        ]
    write_json(out)
