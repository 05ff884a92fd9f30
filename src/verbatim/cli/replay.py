"""`verbatim replay FILE`: runs the request of a receipt again and compares the tokens. Reports the
first token that differs, and its likely cause."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from verbatim.base.errors import ParameterError
from verbatim.cli.options import Command, Option, engine_options, model_options

DIFFERENT = 1


@click.command(cls=Command)
@click.argument("file")
@click.option("--json", "as_json", cls=Option, is_flag=True, help="print one JSON object")
@model_options
@engine_options
def command(file: str, as_json: bool, **flags: Any) -> int:
    """Repeat the answer of the receipt FILE and compare token by token.

    A receipt comes from `verbatim run --save-receipt`, or from `"receipt": true` over HTTP. The
    model is the receipt's own unless --model names another. Exit code 0: identical; 1: a token
    differs.
    """
    from verbatim.base.params import DEFAULTED, FIELDS, SamplingParams
    from verbatim.cli.open_model import open_llm
    from verbatim.observe.receipt import compare, read_receipt

    receipt = read_receipt(_read(file))
    source = click.get_current_context().get_parameter_source("model")
    if source is not None and source.name == "DEFAULT":
        flags["model"] = receipt["model"]
    flags["e_context"] = flags["e_context"] or receipt["context"]
    if flags["e_backend"] in (None, "auto") and receipt["backend"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU has other numerics than the receipt's cpu
    # A receipt holds every value that is not the declared default: no model default may fill in.
    declared = {name: FIELDS[name].default for name in DEFAULTED}
    params = SamplingParams.from_mapping({**declared, **receipt["params"]})
    with open_llm(flags, quiet=as_json) as llm:
        info = llm.parts.backend.info
        done = llm.generate(list(receipt["prompt_ids"]), params)
        environment = {
            "digest": llm.parts.digest,
            "backend": info.name,
            "numerics": info.numerics,
            "context": llm.context,
        }
    verdict = compare(receipt, done.choices, environment)
    if as_json:
        out = {
            "identical": verdict.identical,
            "tokens": sum(len(c.token_ids) for c in done.choices),
            "message": str(verdict),
        }
        sys.stdout.write(json.dumps(out) + "\n")
    else:
        sys.stdout.write(f"{verdict}\n")
    return 0 if verdict.identical else DIFFERENT


def _read(file: str) -> Any:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
        return json.loads(text)
    except OSError as error:
        raise ParameterError("file", f"cannot read {file!r}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ParameterError("file", f"{file!r} is not JSON") from None
