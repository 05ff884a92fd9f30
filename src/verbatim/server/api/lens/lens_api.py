"""The questions of the Lens that no other route answers. Its page is verbatim.lens.

    GET  /lens/api/info     model, backend, parameters with their ranges, limits
    GET  /lens/api/vocab    the bytes of every token
    GET  /lens/api/engine   running requests of this key, cache blocks, the last steps
    POST /lens/api/step     the distribution before one token, stage by stage
    POST /lens/api/replay   a receipt, run again and compared

The page generates with /tokenize and /v1/completions, like any other client.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, cast

from starlette.responses import Response

from verbatim import __version__
from verbatim.base.defaults import DEFAULT, report
from verbatim.base.errors import RequestError
from verbatim.base.json_io import JsonObject
from verbatim.base.params import DEFAULTED, FIELDS, SamplingParams
from verbatim.base.records import Choice
from verbatim.explain.receipt import MAKERS, compare, read_receipt
from verbatim.server.api.common import to_params
from verbatim.server.api.common.default_params import default_params
from verbatim.server.api.common.generate import observe_latency, usage_of
from verbatim.server.api.common.request_context import Json, RequestContext
from verbatim.server.api.lens.lens_fields import LensReplay, LensStep
from verbatim.server.problem import Problem, invalid, problem_of
from verbatim.server.process.messages import Generate, Generated, Inspect, Inspected

COMPARED = ("identical", "choice", "position", "expected", "got", "reasons")  # fields of a Verdict
SHOWN = ("kind", "default", "help", "low", "high", "above", "choices", "slider")  # a Field's
# They decide how long an output is and what is reported, not how one token is drawn.
NOT_OF_A_STEP = ("max_tokens", "n", "best_of", "logprobs", "prompt_logprobs", "explain", "receipt")


async def _inspect(call: RequestContext, what: str, **arguments: Any) -> JsonObject:
    running = call.submit(Inspect(call.next_id(), call.tenant, what, arguments))
    done = await running.result()
    assert isinstance(done, Inspected)
    return done.data


async def info(call: RequestContext) -> Response:
    facts = await _inspect(call, "facts")
    state = call.state
    in_force = report(default_params(state, SamplingParams()))
    supplied = {name: entry for name, entry in in_force.items() if name in DEFAULTED}
    parameters = {
        name: {part: getattr(rule, part) for part in SHOWN} | {"origin": DEFAULT}
        for name, rule in FIELDS.items()
    }
    for name, entry in supplied.items():
        parameters[name] |= {"default": entry["value"], "origin": entry["origin"]}
    return Json(
        {
            **facts,
            "model": state.names()[0],  # the model's own name may be a path
            "models": list(state.names()),
            "version": __version__,
            "parameters": parameters,
            "max_logprobs": state.limits.max_logprobs,
            "max_output_tokens": state.limits.max_output_tokens,
        }
    )


async def vocab(call: RequestContext) -> Response:
    data = await _inspect(call, "vocab")
    return Json({**data, "bytes": base64.b64encode(data["bytes"]).decode()})


async def engine(call: RequestContext) -> Response:
    return Json(await _inspect(call, "engine", after=int(call.query.get("after", "0"))))


async def step(call: RequestContext) -> Response:
    """The row of logits comes from a request for one more token, which the prefix cache makes
    cheap: the same tokens give the same bits."""
    body = await call.body(LensStep)
    prompt, output = body.prompt, body.output or []
    to_params.check_id_count("prompt", [*prompt, *output], call.state.facts)
    for name, ids in (("prompt", prompt), ("output", output)):
        to_params.check_vocabulary(name, ids, call.state.facts)
    params = _params(call, body.params or {})
    if params.get("num_beams", 1) > 1:
        raise Problem("invalid_parameter", "params.num_beams: beam search draws no token", "params")
    shared: JsonObject = {
        name: params[name] for name in ("adapter", "cache_salt") if name in params
    }
    row = await _row(call, [*prompt, *output], shared)
    more = {"choice": body.choice or 0, "rest": bool(body.rest)}
    data = await _inspect(
        call, "step", row=row, prompt=prompt, output=output, params=params, **more
    )
    if "row" in data:
        data["row"] = base64.b64encode(data["row"]).decode()
    done = call.runs[0].generated
    assert done is not None
    return Json({**data, "cached_tokens": done.usage.cached_tokens, "seconds": done.timings.total})


def _params(call: RequestContext, params: JsonObject) -> JsonObject:
    """The sampling parameters of a step, with the server's limits applied. Missing ones get the
    defaults of /v1/completions, with which the page generates."""
    try:
        values = {name: value for name, value in params.items() if name not in NOT_OF_A_STEP}
        given = _limited(call, values)
        return default_params(call.state, SamplingParams.from_mapping(given)).to_mapping()
    except (RequestError, Problem) as error:
        problem = problem_of(error)
        raise Problem(problem.code, f"params.{problem.message}", "params") from None


def _limited(call: RequestContext, values: JsonObject) -> JsonObject:
    """Parameters with the server's limits applied. Their types are checked first: validate.py knows
    only that these routes get a mapping."""
    typed = SamplingParams.from_mapping(values).to_mapping()
    return to_params.finish_params(typed, call.state)


async def _row(call: RequestContext, known: list[int], shared: JsonObject) -> bytes:
    call.admission.enter_context(call.state.admission.admit_rows())
    params = {"max_tokens": 1, "temperature": 0.0, "explain": 1, "receipt": True, "seed": 0}
    params |= shared
    call.submit(Generate(call.next_id(), call.tenant, params, False, known, explain_rows=True))
    (done,) = await call.results(Generated)
    observe_latency(call)
    return base64.b64decode(done.choices[0].explain[0]["row"])


async def replay(call: RequestContext) -> Response:
    body = await call.body(LensReplay)
    try:
        receipt = read_receipt(body.receipt)
    except (RecursionError, binascii.Error):
        raise invalid("receipt", "cannot be read") from None
    prompt = receipt["prompt_ids"]
    if not prompt:
        raise invalid("receipt", "has no prompt")
    to_params.check_id_count("receipt", prompt, call.state.facts)
    to_params.check_vocabulary("receipt", prompt, call.state.facts)
    values = {**receipt["params"], "receipt": True, "explain": body.explain or 0}
    if body.explain and values.get("max_tokens") is None:  # all reports must fit in memory
        longest = max((len(choice["token_ids"]) for choice in receipt["choices"]), default=0)
        values["max_tokens"] = max(1, min(longest + 1, receipt["context"] - len(prompt)))
    params = _limited(call, values)
    reasoning = receipt.get("thinks", False)
    call.submit(Generate(call.next_id(), call.tenant, params, False, prompt, reasoning=reasoning))
    (done,) = await call.results(Generated)
    observe_latency(call)
    assert done.receipt is not None
    # WireChoice has the fields of Choice that compare() reads
    choices = cast(Sequence[Choice], done.choices)
    makers = {name: done.receipt[name] for name in MAKERS}
    verdict = compare(receipt, choices, makers | {"adapter": done.receipt.get("adapter", "")})
    return Json.of(
        **{name: getattr(verdict, name) for name in COMPARED},
        message=str(verdict),
        tokens=sum(len(choice.token_ids) for choice in done.choices),
        explain=[list(choice.explain) for choice in done.choices],
        loops=[choice.loop for choice in done.choices],
        scores=[choice.score for choice in done.choices],
        receipt=done.receipt,
        usage=usage_of(call.runs),
    )
