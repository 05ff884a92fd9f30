"""`verbatim run PROMPT`: one prompt comes in; a streamed answer, or one JSON object, goes out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verbatim.base.errors import ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.cli.lib.answer import PromptFlags, check_shown, collect, prompt_options
from verbatim.cli.lib.command_class import Command, declared, flag
from verbatim.cli.lib.error_lines import FAILED, OK, OS_REMEDIES, print_error
from verbatim.cli.lib.open_model import open_llm, speed_limit
from verbatim.cli.lib.options import ONE_ANSWER, Values, engine_options, model_options
from verbatim.cli.lib.report import (
    broken_structure,
    choice_head,
    closing_line,
    completion_json,
    error_text,
    length_line,
    params_line,
    short_line,
)
from verbatim.cli.lib.sampling_options import sampling_of, sampling_options
from verbatim.cli.lib.terminal import ReasoningView, note, warn, write, write_json
from verbatim.cli.lib.texts import check_output, check_structure

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM

NO_TEMPLATE = (
    "this model has no chat template: the prompt is continued as plain text"
    " (--raw does so without this notice)"
)
# Parameters whose results only --json shows.
REPORTS = ("logprobs", "prompt_logprobs", "explain", "receipt")


@click.command(
    cls=Command,
    epilog="Exit codes: 0 done, 1 failure, 2 wrong flag or value, 3 model, 130 interrupted.",
)
@prompt_options
@declared(model_options, engine_options(unused=ONE_ANSWER), sampling_options)
def command(
    as_json: bool = flag("print one JSON object instead of text", "--json"),
    quiet: bool = flag("no closing line, no progress, no warnings", "-q", "--quiet"),
    verbose: bool = flag(
        "also print counts, seed, backend, and each parameter in force", "-v", "--verbose"
    ),
    save_receipt: str | None = flag("write a receipt for `verbatim replay`", metavar="FILE"),
    **flags: Any,
) -> int:
    """Answer PROMPT, streamed: as a chat turn if the model has a chat template, else as a
    continuation.

    PROMPT is one argument, in quotes; `-`, or no argument and a pipe, reads stdin. Sampling
    parameters that are not given are the model's own, and so is the seed, which is random unless
    --seed N is given; --verbose prints it with the values in force. An answer that ends in a
    repeating loop is stopped; --on-loop report lets it continue. A model's reasoning is shown
    dimmed on a terminal, never in a pipe; --json has it as `reasoning`. --no-think switches it off.
    """
    if quiet and verbose:
        why = "--quiet and --verbose contradict each other; leave one out"
        raise ParameterError("verbose", why)
    params = _params(flags, as_json, save_receipt)
    asked = PromptFlags.of(flags)
    with open_llm(flags, quiet=quiet or as_json) as llm:
        notices = () if asked.raw or llm.has_template else (NO_TEMPLATE,)
        if notices and not (quiet or as_json):
            note(NO_TEMPLATE)
        stream = asked.start(llm, params)
        # In a pipe, structured output is printed whole: valid, or not at all.
        shown = _streams(params) and not as_json and not _held_back(params)
        reasoning = ReasoningView(quiet=quiet or as_json or not _streams(params))
        code, completion = collect(stream, show=write if shown else None, reasoning=reasoning)
        broken = broken_structure(completion) or error_text(completion)
        if as_json:
            write_json(completion_json(llm, completion, notices))
        elif shown or not broken:
            _show(completion, shown=shown)
        if save_receipt is not None and completion.receipt is not None:
            _save(Path(save_receipt), completion.receipt)
        if not (as_json or quiet):
            _close(llm, completion, cut=not broken, verbose=verbose)
        if broken is not None:
            print_error(broken)
        return code or (FAILED if broken is not None else OK)


def _params(flags: Values, as_json: bool, save_receipt: str | None) -> SamplingParams:
    """The sampling parameters, checked with the other flags before the model loads."""
    params = sampling_of(flags, receipt=save_receipt is not None)
    if save_receipt is not None:
        if not params.receipt:
            raise ParameterError("receipt", "--save-receipt needs one; leave out --no-receipt")
        check_output("save_receipt", save_receipt)
    if not as_json:
        check_shown(params, REPORTS if save_receipt is None else REPORTS[:-1])
    check_structure(params)
    return params


def _held_back(params: SamplingParams) -> bool:
    return params.structured and not sys.stdout.isatty()


def _streams(params: SamplingParams) -> bool:
    """Whether the first answer can be streamed: not with several answers, nor with best_of, whose
    winner is known only at the end."""
    return params.num_beams > 1 or (params.n == 1 and params.best_of is None)


def _show(completion: Completion, *, shown: bool) -> None:
    """Print the answers. `shown`: the first one was streamed already."""
    if len(completion.choices) > 1:  # beam search: the best choice is streamed
        if shown:
            write("\n")
        for choice in completion.choices[1 if shown else 0 :]:
            write(f"{choice_head(choice, several=True)}{choice.text}\n")
        return
    if not shown:
        write(completion.text)
    if not completion.text.endswith("\n"):
        write("\n")


def _close(llm: LLM, completion: Completion, *, cut: bool, verbose: bool) -> None:
    """Print warnings and the closing line. `cut`: warn of a cut answer, too."""
    for line in completion.warnings:
        warn(line)
    if cut and (why := length_line(completion)):
        warn(why)
    several = completion.usage.output_tokens > 1
    limit = speed_limit(llm, completion) if several else None
    if verbose:
        note(closing_line(llm, completion, limit=limit))
        note(params_line(completion))
    else:
        note(short_line(completion))


def _save(path: Path, receipt: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(receipt, ensure_ascii=False, indent=1) + "\n", "utf-8")
    except OSError as error:
        if error.errno in OS_REMEDIES:  # a full disk is not a usage error
            error.filename = str(path)  # Python names the file only if open() fails
            raise
        why = f"cannot write {path}: {error.strerror}; choose another file"
        raise ParameterError("save_receipt", why) from None
