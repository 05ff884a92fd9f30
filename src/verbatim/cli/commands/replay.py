"""`verbatim replay FILE`: runs the request of a receipt again and compares the tokens. Reports the
first token that differs, and its likely cause."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonObject
from verbatim.cli.lib.command_class import argument, as_command
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import JSON, ONE_ANSWER, engine_options, model_options

DIFFERENT = 1
CANDIDATES = 20  # best tokens per position that an explanation of a mismatch can name
NEAR = 12  # tokens shown before and after the first difference

if TYPE_CHECKING:
    from verbatim.base.records import Completion
    from verbatim.engine.calls.llm import LLM
    from verbatim.explain.receipt import Verdict


@as_command(model_options, engine_options(unused=(*ONE_ANSWER, "defaults")))
def command(file: str = argument(), as_json: bool = JSON, **flags: Any) -> int:
    """Repeat the answer of the receipt FILE and compare token by token.

    A receipt comes from `verbatim run --save-receipt`, or from `"receipt": true` over HTTP. The
    model is the receipt's own unless --model names another. Exit code 0: identical; 1: a token
    differs.
    """
    from verbatim.base.params import DEFAULTED, FIELDS, SamplingParams
    from verbatim.engine.read_prompt import conversation
    from verbatim.explain.receipt import compare, read_receipt

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
    if params.num_beams == 1:
        params = params.with_(explain=CANDIDATES)  # how close the first difference was
    with open_llm(flags, quiet=as_json) as llm:
        info = llm.loaded.backend.info
        prompt = list(receipt["prompt_ids"])
        if receipt.get("thinks"):
            prompt = conversation(prompt, llm.reasoning, llm.tokenizer)
        done = llm.generate(prompt, params)
        environment = {"digest": llm.loaded.digest, "backend": info.name, "context": llm.context}
        digests = {adapter.name: adapter.digest for adapter in llm.loaded.adapters}
        environment |= {"numerics": info.numerics, "adapter": digests.get(params.adapter, "")}
        verdict = compare(receipt, done.choices, environment)
        around = [] if verdict.identical else _around(llm, receipt, done, verdict)
    if as_json:
        tokens = sum(len(choice.token_ids) for choice in done.choices)
        out = {"identical": verdict.identical, "tokens": tokens, "message": str(verdict)}
        out |= {"around": around} if around else {}
        sys.stdout.write(json.dumps(out) + "\n")
    else:
        sys.stdout.write("\n".join([str(verdict), *around]) + "\n")
    return 0 if verdict.identical else DIFFERENT


def _around(llm: LLM, receipt: JsonObject, done: Completion, verdict: Verdict) -> list[str]:
    """The two texts around the first difference, and how likely both tokens were here."""
    from verbatim.explain.explanation import percent, quoted

    def shown(token: int | None) -> str:
        return "the end" if token is None else quoted(llm.tokenizer.token_bytes(token))

    at = verdict.position
    then = next(c["token_ids"] for c in receipt["choices"] if c["index"] == verdict.choice)
    choice = next((c for c in done.choices if c.index == verdict.choice), None)
    now = list(choice.token_ids) if choice is not None else []
    lines = []
    for name, ids in (("receipt ", then), ("this run", now)):
        before, after = llm.decode(ids[max(at - NEAR, 0) : at]), llm.decode(ids[at : at + NEAR])
        lines.append(f"{name}  …{before!r} then {after!r}…")
    if choice is None or at >= len(choice.explain):
        return lines
    record = choice.explain[at]
    places = {c["id"]: (rank, c["logprob"]) for rank, c in enumerate(record["top"], 1)}
    for token in dict.fromkeys((verdict.expected, verdict.got)):
        if token in places:
            rank, logprob = places[token]
            chance = f"p {percent(math.exp(logprob))}, rank {rank}"
        else:
            chance = f"not among the {len(places)} most likely tokens"
        if token is not None:
            lines.append(f"in this run {shown(token)} has {chance}")
    if record.get("lead") is not None:
        lead = f"{shown(record['token'])} led by {record['lead']:.4f}"
        lines.append(f"{lead}; other rounding can reverse a small lead")
    return lines


def _read(file: str) -> object:
    try:
        # bytes: json recognises UTF-8 and UTF-16, with and without a byte order mark
        return json.loads(sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes())
    except OSError as error:
        raise ParameterError("file", f"cannot read {file!r}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ParameterError("file", f"{file!r} is not JSON") from None
