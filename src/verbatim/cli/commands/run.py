"""`verbatim run PROMPT`: one prompt comes in; a streamed answer, or one JSON object, goes out."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verbatim.base.errors import ParameterError
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.base.records import Completion
from verbatim.cli.lib.common_options import check_output, json_option
from verbatim.cli.lib.options import (
    ONE_ANSWER,
    Command,
    Option,
    engine_options_without,
    model_options,
)
from verbatim.cli.lib.sampling_options import PARSE_HELP, sampling_of, sampling_options
from verbatim.cli.lib.terminal import Thoughts, note, warn, write, write_json
from verbatim.cli.lib.think_options import Thinking, think_options, thinking_of
from verbatim.cli.main import FAILED, OK, OS_REMEDIES, print_error

if TYPE_CHECKING:
    from verbatim.engine.calls.blocking_engine import Stream
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
@click.argument("prompt", nargs=-1, metavar="[PROMPT]")
@click.option(
    "--raw", cls=Option, is_flag=True, help="continue the text as it is, without the chat template"
)
@click.option("--parse-special", cls=Option, is_flag=True, help=PARSE_HELP)
@click.option("--file", "file", cls=Option, metavar="FILE", help="read the prompt from FILE")
@click.option("--system", cls=Option, metavar="TEXT", help="system message of the chat turn")
@json_option("print one JSON object instead of text")
@click.option(
    "-q", "--quiet", cls=Option, is_flag=True, help="no closing line, no progress, no warnings"
)
@click.option(
    "-v",
    "--verbose",
    cls=Option,
    is_flag=True,
    help="also print the parameters in force and where each came from",
)
@click.option(
    "--save-receipt", cls=Option, metavar="FILE", help="write a receipt for `verbatim replay`"
)
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
    as_json: bool,
    quiet: bool,
    verbose: bool,
    save_receipt: str | None,
    **flags: Any,
) -> int:
    """Answer PROMPT, streamed: as a chat turn if the model has a chat template, else as a
    continuation.

    PROMPT is one argument, in quotes; `-`, or no argument and a pipe, reads stdin. Sampling
    parameters that are not given are the model's own, and the seed is 0: the same command gives the
    same answer every time. --seed N gives others; --verbose lists the values in force. An answer
    that ends in a repeating loop is stopped; --on-loop report lets it continue. A reasoning model's
    thought is shown dimmed on a terminal, never in a pipe; --json has it as `reasoning`.
    --no-think switches it off.
    """
    if quiet and verbose:
        raise ParameterError(
            "verbose", "--quiet and --verbose contradict each other; leave one out"
        )
    from verbatim.cli.lib.open_model import check_structure, open_llm, read_prompt, split_model
    from verbatim.cli.lib.report import broken_structure, error_text

    thinking = thinking_of(flags)
    params = sampling_of(flags, receipt=save_receipt is not None)
    if save_receipt is not None and not params.receipt:
        raise ParameterError("receipt", "--save-receipt needs one; leave out --no-receipt")
    if save_receipt is not None:
        check_output("save_receipt", save_receipt)
    if not as_json:
        check_shown(params, REPORTS if save_receipt is None else REPORTS[:-1])
    if raw and system is not None:
        raise ParameterError(
            "system", "cannot be used with a raw continuation; leave out --raw or --system"
        )
    check_structure(params)
    text = read_prompt(split_model(prompt, flags), file=file)
    with open_llm(flags, quiet=quiet or as_json) as llm:
        if not (raw or llm.has_template or quiet or as_json):
            note(NO_TEMPLATE)
        stream = start(
            llm,
            text,
            params,
            raw=raw,
            system=system,
            parse_special=parse_special,
            thinking=thinking,
        )
        # In a pipe, structured output is printed whole: valid, or not at all.
        shown = _streams(params) and not as_json and not _held_back(params)
        thoughts = Thoughts(quiet=quiet or as_json or not _streams(params))
        code, completion = collect(stream, show=write if shown else None, thoughts=thoughts)
        broken = broken_structure(completion) or error_text(completion)
        notices = () if raw or llm.has_template else (NO_TEMPLATE,)
        _finish(
            llm,
            completion,
            shown=shown,
            broken=broken is not None,
            as_json=as_json,
            quiet=quiet,
            verbose=verbose,
            save_receipt=save_receipt,
            notices=notices,
        )
        if broken is not None:
            print_error(broken)
        return code or (FAILED if broken is not None else OK)


def check_shown(params: SamplingParams, reports: Sequence[str]) -> None:
    """Reject reports that would be computed but that plain text output does not show."""
    remedies = {
        "explain": "; or use `verbatim explain`",
        "receipt": "; or --save-receipt FILE with `verbatim run`",
    }
    for name in reports:
        if getattr(params, name) != FIELDS[name].default:
            raise ParameterError(
                name, f"plain text does not show its report; add --json{remedies.get(name, '')}"
            )


def start(
    llm: LLM,
    text: str,
    params: SamplingParams,
    *,
    raw: bool,
    system: str | None,
    parse_special: bool = False,
    thinking: Thinking | None = None,
) -> Stream:
    """Start a chat turn if the model has a chat template, a continuation otherwise. A flag that
    does not fit the chosen kind raises."""
    if raw or not llm.has_template:
        if system is not None:
            raise ParameterError(
                "system",
                "this model has no chat template, so it takes no system message; leave out"
                " --system, or write its text into the prompt",
            )
        if thinking is not None:
            raise ParameterError(
                thinking.field,
                "only a chat turn with a chat template has thoughts; leave it out",
            )
        return llm.stream(llm.encode(text, parse_special=parse_special), params)
    if parse_special:
        raise ParameterError(
            "parse_special",
            "belongs to --raw: in a chat turn the template writes the control tokens",
        )
    from verbatim.cli.lib.open_model import decode_argument

    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": decode_argument(system, "system")})
    variables = {} if thinking is None else thinking.variables(llm)
    return llm.chat_stream(messages, params, **variables)


def collect(
    stream: Stream, *, show: Callable[[str], None] | None, thoughts: Thoughts | None = None
) -> tuple[int, Completion]:
    """Read a stream to its end, passing the text of the first answer to `show` and its thought to
    `thoughts`. Returns the exit code and the completion.

    The first Ctrl-C cancels the request after the running step, and the partial completion is
    returned with code 130. A second Ctrl-C raises at once."""
    code = 0

    def stop(signum: int, frame: Any) -> None:
        nonlocal code
        if code:
            raise KeyboardInterrupt
        code = 130
        stream.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        with stream:
            for delta in stream:
                if delta.index != 0:
                    continue
                if thoughts is not None and delta.reasoning:
                    thoughts.push(delta.reasoning)
                if delta.text:
                    if thoughts is not None:
                        thoughts.close()
                    if show is not None:
                        show(delta.text)
    finally:
        if thoughts is not None:
            thoughts.close()
        signal.signal(signal.SIGINT, before)
    assert stream.completion is not None, "a stream ends with its completion"
    return code, stream.completion


def _held_back(params: SamplingParams) -> bool:
    return params.structured and not sys.stdout.isatty()


def _streams(params: SamplingParams) -> bool:
    """Whether the first answer can be streamed: not with several answers, nor with best_of, whose
    winner is known only at the end."""
    return params.num_beams > 1 or (params.n == 1 and params.best_of is None)


def _finish(
    llm: LLM,
    completion: Completion,
    *,
    shown: bool,
    broken: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    save_receipt: str | None,
    notices: Sequence[str] = (),
) -> None:
    from verbatim.cli.lib.open_model import speed_limit
    from verbatim.cli.lib.report import (
        closing_line,
        completion_json,
        is_sampled,
        length_line,
        loop_line,
        params_line,
    )

    if as_json:
        write_json(completion_json(llm, completion, notices))
    elif broken and not shown:
        pass
    elif len(completion.choices) > 1:
        _show_choices(completion, shown=shown)
    else:
        if not shown:
            write(completion.text)
        if not completion.text.endswith("\n"):
            write("\n")
    if save_receipt is not None and completion.receipt is not None:
        _save(Path(save_receipt), completion.receipt)
    if as_json or quiet:
        return
    for line in completion.warnings:
        warn(line)
    loop = loop_line(completion, "--on-loop report", "--on-loop stop")
    for cut in (loop, length_line(completion)):
        if cut and not broken:
            warn(cut)
    limit = (
        speed_limit(llm, len(completion.prompt_ids)) if completion.usage.output_tokens > 1 else None
    )
    note(closing_line(llm, completion, sampled=is_sampled(completion), limit=limit))
    if verbose:
        note(params_line(completion))


def _show_choices(completion: Completion, *, shown: bool) -> None:
    """Print several answers. `shown`: the first one was streamed already (beam search)."""
    from verbatim.cli.lib.report import choice_head

    if shown:
        write("\n")
    for choice in completion.choices[1 if shown else 0 :]:
        write(f"{choice_head(choice, several=True)}{choice.text}\n")


def _save(path: Path, receipt: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(receipt, ensure_ascii=False, indent=1) + "\n", "utf-8")
    except OSError as error:
        if error.errno in OS_REMEDIES:  # a full disk is not a usage error
            error.filename = str(path)  # Python names the file only if open() fails
            raise
        raise ParameterError(
            "save_receipt", f"cannot write {path}: {error.strerror}; choose another file"
        ) from None
