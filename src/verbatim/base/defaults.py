"""Sampling defaults: what a request does not say, and where each value in force came from.

A SamplingParams with some parameters given comes in; one with every parameter of DEFAULTED decided
goes out, with its origin beside it. The order, for the library, the command line and the server:

    1  the request
    2  the model: generation_config.json, GGUF general.sampling.*, the catalog  (defaults=model)
    3  the protocol's documentation                                             (defaults=protocol)
    -  temperature 0 and no filter, whatever model and protocol say             (defaults=greedy)

Nothing is silent: Completion.params, receipts, --json and the server report values and origins.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonObject
from verbatim.base.params import DEFAULTED, FIELDS, FILTERS, SamplingParams

# Values that a protocol's own documentation states. OpenAI's and Anthropic's (temperature 1, no
# filter) are those of SamplingParams.
PROTOCOLS: dict[str, JsonObject] = {
    "openai": {},
    "anthropic": {},
    "ollama": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "llama.cpp": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}
# Always in the report; other parameters when they differ from their default.
SHOWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "on_loop")

REQUEST, DEFAULT = "request", "default"
UNBOUNDED = "default without max_tokens"  # origin of on_loop=stop if max_tokens is not set
# generate() continues a text, which has no natural end: it ends here, with a warning, unless
# max_tokens says otherwise. A conversation ends by itself, so chat() has no such limit.
GENERATE_TOKENS = 1024
GENERATE = "default of generate()"  # origin of that max_tokens

# generation_config.json key -> parameter
_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
GENERATION_CONFIG = {**{n: n for n in _SAME}, "no_repeat_ngram_size": "no_repeat_ngram"}
# Keys of generation_config.json that change the tokens in transformers and are not followed here,
# with the values that change nothing. null changes nothing under any key.
_OFF: tuple[Any, ...] = (0, [], {})
_ONE = (0, 1)
GENERATION_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), _ONE),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty"), _ONE),
    **dict.fromkeys(("min_length", "min_new_tokens", "max_new_tokens", "max_time"), _OFF),
    **dict.fromkeys(("stop_strings", "bad_words_ids", "suppress_tokens"), _OFF),
    **dict.fromkeys(("begin_suppress_tokens", "sequence_bias", "force_words_ids"), _OFF),
    **dict.fromkeys(("top_h", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), _OFF),
    **dict.fromkeys(("exponential_decay_length_penalty", "encoder_no_repeat_ngram_size"), _OFF),
    **dict.fromkeys(("token_healing", "watermarking_config", "dola_layers", "constraints"), _OFF),
}
# GGUF general.sampling.* key -> parameter, as llama.cpp writes them
GGUF = {
    "temp": "temperature",
    **{n: n for n in ("top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold")},
    "penalty_repeat": "repetition_penalty",
}
GGUF_PREFIX = "general.sampling."
# Keys with these values ask for nothing that the engine lacks.
GGUF_WITHOUT_EFFECT = {"mirostat": (0,), "penalty_last_n": (-1,)}
GGUF_OF_MIROSTAT = ("mirostat_tau", "mirostat_eta")


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """The sampling parameters that a model states. `source`: generation_config.json, GGUF metadata
    or catalog; empty: the model states none."""

    values: tuple[tuple[str, Any], ...] = ()
    source: str = ""
    warnings: tuple[str, ...] = ()


NO_DEFAULTS = ModelDefaults()


def read_generation_config(
    config: Mapping[str, object], context: int | None = None
) -> ModelDefaults:
    """The defaults in transformers' generation_config.json. `do_sample: false` is temperature 0.
    `context` of the model: a max_length below it, which counts the prompt, is not followed."""
    given = {key: value for key, value in config.items() if value is not None}
    stated = {param: given[key] for key, param in GENERATION_CONFIG.items() if key in given}
    if config.get("do_sample") is False:
        stated = {n: v for n, v in stated.items() if n not in (*FILTERS, "temperature")}
        stated["temperature"] = 0.0
    if stated.get("top_k", 0) == -1:  # vLLM's "off"
        del stated["top_k"]
    source = "generation_config.json"
    ignored = [
        f"{source}: {key}: the model suggests {given[key]!r:.40}, which is not followed"
        for key, neutral in GENERATION_NOT_FOLLOWED.items()
        if key in given and given[key] not in neutral
    ]
    longest = config.get("max_length")
    # 20 is transformers' default, so no model suggests it
    if type(longest) is int and longest != 20 and context and longest < context:
        ignored.append(
            f"{source}: max_length: the model suggests at most {longest} tokens of prompt and "
            "answer, which is not followed; set max_tokens"
        )
    sample = config.get("do_sample")
    if not isinstance(sample, bool | None):
        why = f"{sample!r:.40} is not true or false; it is not followed"
        ignored.append(f"{source}: do_sample: {why}")
    found = _checked(stated, source)
    return ModelDefaults(found.values, found.source, (*found.warnings, *ignored))


def read_gguf(metadata: Mapping[str, object]) -> ModelDefaults:
    """The defaults in a GGUF file's general.sampling.* keys."""
    stated: dict[str, object] = {}
    ignored = []
    for key, value in metadata.items():
        if not key.startswith(GGUF_PREFIX):
            continue
        name = key.removeprefix(GGUF_PREFIX)
        if name in GGUF:
            stated[GGUF[name]] = _shortest(value)
        elif name not in GGUF_OF_MIROSTAT and value not in GGUF_WITHOUT_EFFECT.get(name, ()):
            ignored.append(f"{key}: the model suggests {value!r:.40}, which is not followed")
    found = _checked(stated, "GGUF metadata")
    return ModelDefaults(found.values, found.source, (*found.warnings, *ignored))


def gguf_metadata(defaults: ModelDefaults) -> dict[str, object]:
    """The general.sampling.* keys that state these defaults."""
    names = {param: key for key, param in GGUF.items()}
    return {GGUF_PREFIX + names[name]: v for name, v in defaults.values if name in names}


def without_gguf_key(defaults: ModelDefaults) -> list[str]:
    """The parameters that gguf_metadata() leaves out."""
    return [name for name, _ in defaults.values if name not in GGUF.values()]


def _shortest(value: object) -> object:
    """A float32 as the shortest decimal number that rounds to it: 0.2, not 0.20000000298."""
    if not isinstance(value, float):
        return value
    single = struct.Struct("f")
    try:
        short = float(f"{value:.7g}")
        same = single.unpack(single.pack(value))[0] == value
        return short if same and single.pack(short) == single.pack(value) else value
    except (OverflowError, ValueError):
        return value


def catalog_defaults(values: Mapping[str, object]) -> ModelDefaults:
    return _checked(dict(values), "catalog")


def _checked(stated: JsonObject, source: str) -> ModelDefaults:
    """Drop values that break a parameter's rule, with a warning: a model file is not a request."""
    warnings = []
    for name, value in list(stated.items()):
        try:
            stated[name] = getattr(SamplingParams(**{name: value}), name)
        except ParameterError as error:
            del stated[name]
            warnings.append(f"{source}: {error.message}; the suggestion is not followed")
    return ModelDefaults(tuple(stated.items()), source if stated else "", tuple(warnings))


def resolve(
    params: SamplingParams, stated: ModelDefaults, mode: str = "model", protocol: str = "openai"
) -> SamplingParams:
    """`params` with every parameter of DEFAULTED decided. Resolved parameters stay as they are.

    >>> model = catalog_defaults({"temperature": 0.2, "top_p": 0.9})
    >>> p = resolve(SamplingParams(top_p=0.5), model)
    >>> p.temperature, dict(p.origins)["temperature"], p.top_p, dict(p.origins)["top_p"]
    (0.2, 'model: catalog', 0.5, 'request')
    """
    known = {name for name, _ in params.origins}
    missing = [name for name in DEFAULTED if name not in known]
    if not missing:
        return params
    values: dict[str, object] = {}
    origins = dict.fromkeys(missing, DEFAULT)
    for name, (value, origin) in _supplied(params, stated, mode, protocol).items():
        if name in origins:
            values[name], origins[name] = value, origin
    if values.get("temperature", params.temperature) == 0:
        for name in FILTERS:
            if values.pop(name, None) is not None:
                origins[name] = DEFAULT
    return params.with_origins(origins, checked=values)


def _supplied(
    params: SamplingParams, stated: ModelDefaults, mode: str, protocol: str
) -> dict[str, tuple[object, str]]:
    """(value, origin) of each parameter that something other than the request supplies."""
    out: dict[str, tuple[object, str]] = {}
    if params.num_beams > 1:  # beam search draws nothing, and refuses these parameters
        return out
    if mode == "greedy":
        out["temperature"] = 0.0, "defaults: greedy"
    else:
        for name, value in PROTOCOLS[protocol].items():
            out[name] = value, f"protocol: {protocol}"
        if mode == "model":
            for name, value in stated.values:
                out[name] = value, f"model: {stated.source}"
    if params.max_tokens is None and not params.ignore_eos and not params.min_tokens:
        out["on_loop"] = "stop", UNBOUNDED
    return out


def report(params: SamplingParams, seed: int | None = None) -> dict[str, JsonObject]:
    """The parameters in force, each with its value and origin, as plain data. `seed`: the one that
    was used; a request without a seed gets a random one.

    >>> report(SamplingParams(temperature=0.5))["temperature"]
    {'value': 0.5, 'origin': 'request'}
    """
    origins = dict(params.origins)
    out: dict[str, dict[str, object]] = {}
    for name, value in {**dict.fromkeys(SHOWN), **params.to_mapping()}.items():
        value = getattr(params, name)
        if name in SHOWN or value != FIELDS[name].default:
            plain = dict(value) if name == "logit_bias" else value
            given = REQUEST if value != FIELDS[name].default else DEFAULT
            out[name] = {
                "value": list(plain) if isinstance(plain, tuple) else plain,
                "origin": origins.get(name, given),
            }
    if seed is not None and params.num_beams == 1 and params.seed is None:
        out["seed"] = {"value": seed, "origin": "random"}
    return out
