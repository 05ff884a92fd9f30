"""Sampling defaults of a request over HTTP: the parameters that a client gave come in; the Generate
message with all parameters in force and their origins goes out (base/defaults.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from verbatim.base.defaults import ModelDefaults, resolve
from verbatim.base.json_io import JsonMapping
from verbatim.base.params import SamplingParams
from verbatim.server.process.messages import Generate, ModelFacts

if TYPE_CHECKING:
    from verbatim.server.server_state import State

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")


def default_params(
    state: State, params: SamplingParams | None = None, protocol: str = "openai"
) -> SamplingParams:
    """The parameters in force for a request that gives only `params`."""
    return model_params(state.facts, state, params, protocol)


def model_params(
    facts: ModelFacts, state: State, params: SamplingParams | None = None, protocol: str = "openai"
) -> SamplingParams:
    """default_params of the model with these facts."""
    stated = ModelDefaults(tuple(facts.sampling.items()), facts.sampling_source)
    mode = state.settings.engine.get("defaults", "model")
    return resolve(params or SamplingParams(), stated, mode, protocol)


def with_defaults(message: Generate, body: JsonMapping, state: State, protocol: str) -> Generate:
    """The message with the defaults of model and protocol, and the origins of what the server
    filled in."""
    params = default_params(state, SamplingParams.from_mapping(message.params), protocol)
    params = params.with_origins(_filled_in(params, body, state.limits.max_output_tokens, protocol))
    values, origins = params.to_mapping(), dict(params.origins)
    reports = bool(body.get("report_params"))
    return replace(message, params=values, origins=origins, report_params=reports)


def _filled_in(
    params: SamplingParams, body: JsonMapping, longest: int, protocol: str
) -> dict[str, str]:
    """Origins of the seed and the length limit, where the client gave none."""
    options = body.get("options") or {}
    out: dict[str, str] = {}
    if params.seed is not None and body.get("seed", options.get("seed", -1)) in (None, -1):
        out["seed"] = "server: random"
    # -1: up to the context length, like a missing limit
    given = any(body.get(name) not in (None, -1) for name in LENGTHS) or "num_predict" in options
    if params.max_tokens is not None and not given:
        limited = params.max_tokens == longest
        out["max_tokens"] = "server: --max-output-tokens" if limited else f"protocol: {protocol}"
    return out
