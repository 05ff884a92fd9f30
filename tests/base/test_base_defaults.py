"""Sampling defaults: request, then model, then protocol; every value in force has an origin."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from verbatim import LLM, SamplingParams
from verbatim.base.config import CHOICES
from verbatim.base.defaults import (
    GENERATION_CONFIG,
    GENERATION_NOT_FOLLOWED,
    NO_DEFAULTS,
    PROTOCOLS,
    catalog_defaults,
    gguf_metadata,
    read_generation_config,
    read_gguf,
    report,
    resolve,
)
from verbatim.base.errors import ParameterError
from verbatim.base.params import DEFAULTED, FIELDS
from verbatim.testing.fakes import fake_parts

MODEL = catalog_defaults({"temperature": 0.25, "top_p": 0.5, "repetition_penalty": 1.1})


def in_force(params: SamplingParams, *names: str) -> dict[str, tuple[Any, str]]:
    origins = dict(params.origins)
    return {name: (getattr(params, name), origins[name]) for name in names}


def test_the_request_wins_over_the_model_and_the_model_over_the_protocol() -> None:
    made = resolve(SamplingParams(top_p=0.75), MODEL, protocol="ollama")
    assert in_force(made, "temperature", "top_p", "top_k", "min_p") == {
        "temperature": (0.25, "model: catalog"),
        "top_p": (0.75, "request"),
        "top_k": (40, "protocol: ollama"),
        "min_p": (0.0, "default"),
    }


def test_a_value_equal_to_the_declared_default_counts_as_given() -> None:
    for name in DEFAULTED:
        default = FIELDS[name].default
        made = resolve(SamplingParams(**{name: default}), MODEL, protocol="ollama")
        assert in_force(made, name) == {name: (default, "request")}
    assert SamplingParams(temperature=1.0) != SamplingParams(), "they sample differently"
    assert resolve(SamplingParams(5, temperature=1.0), MODEL).temperature == 1.0


def test_the_modes() -> None:
    """protocol: the model is ignored; greedy: temperature 0, and no filter that could act."""
    assert set(CHOICES["defaults"]) == {"model", "protocol", "greedy"}
    made = resolve(SamplingParams(), MODEL, "protocol", "ollama")
    assert (made.temperature, made.top_k, made.top_p) == (0.8, 40, 0.9)
    made = resolve(SamplingParams(), MODEL, "protocol")
    assert (made.temperature, made.top_p, dict(made.origins)["top_p"]) == (1.0, 1.0, "default")
    made = resolve(SamplingParams(top_k=3), MODEL, "greedy", "ollama")
    assert in_force(made, "temperature", "top_k", "top_p") == {
        "temperature": (0.0, "defaults: greedy"),
        "top_k": (3, "request"),
        "top_p": (1.0, "default"),
    }


def test_greedy_requests_take_no_filter_and_beams_nothing_from_the_model() -> None:
    """Otherwise a warning would name a filter that the client never set, or beams be refused."""
    made = resolve(SamplingParams(temperature=0), MODEL)
    assert (made.top_p, made.repetition_penalty) == (1.0, 1.1)
    beams = resolve(SamplingParams(num_beams=2), MODEL, "model", "ollama")
    assert (beams.temperature, beams.repetition_penalty, beams.on_loop) == (1.0, 1.0, "report")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "stop"),
        ({"max_tokens": 5}, "report"),
        ({"ignore_eos": True}, "report"),
        ({"min_tokens": 3}, "report"),
        ({"on_loop": "report"}, "report"),
    ],
)
def test_an_output_without_a_bound_stops_in_a_loop(given: dict[str, Any], found: str) -> None:
    assert resolve(SamplingParams(**given), NO_DEFAULTS).on_loop == found


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(SamplingParams(top_k=7), MODEL, protocol="ollama")
    assert resolve(once, catalog_defaults({"temperature": 2.0}), "greedy") is once


def test_origins_survive_copies_pickles_and_the_wire() -> None:
    made = resolve(SamplingParams(top_p=0.75), MODEL)
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.with_(n=2).origins == made.origins
    assert dict(made.with_(temperature=0.5).origins)["temperature"] == "request"
    sent = SamplingParams.from_mapping(made.to_mapping()).with_origins(dict(made.origins))
    assert sent == made
    # dataclasses.replace names every field: all of them then count as given
    assert resolve(dataclasses.replace(SamplingParams(n=2), n=1), MODEL).temperature == 1.0


def test_generation_config() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 3, "do_sample": True}
    read = read_generation_config(config)
    assert dict(read.values) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert (read.source, read.warnings) == ("generation_config.json", ())
    greedy = read_generation_config({"do_sample": False, "top_p": 0.9, "repetition_penalty": 1.2})
    assert dict(greedy.values) == {"temperature": 0.0, "repetition_penalty": 1.2}
    assert read_generation_config({"bos_token_id": 1}).source == ""


def test_a_suggestion_that_breaks_a_rule_is_a_warning_and_not_followed() -> None:
    read = read_generation_config({"temperature": "hot", "top_p": 0, "top_k": 5})
    assert dict(read.values) == {"top_k": 5}
    assert len(read.warnings) == 2
    assert all("not followed" in line for line in read.warnings)


def test_a_max_length_below_the_context_is_a_warning() -> None:
    (line,) = read_generation_config({"max_length": 512}, context=2048).warnings
    assert "max_length" in line
    assert "not followed" in line
    for config, context in (
        ({"max_length": 2048}, 2048),
        ({"max_length": 4096}, 2048),
        ({"max_length": 20}, 2048),  # transformers' default
        ({"max_length": None}, 2048),
        ({"max_length": 512}, None),
    ):
        assert not read_generation_config(config, context).warnings


def test_gguf_keys() -> None:
    metadata = {
        "general.name": "x",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 12,
        "general.sampling.penalty_repeat": 1.05,
        "general.sampling.mirostat": 0,
    }
    read = read_gguf(metadata)
    assert dict(read.values) == {"temperature": 0.5, "top_k": 12, "repetition_penalty": 1.05}
    assert not read.warnings
    (line,) = read_gguf({"general.sampling.mirostat": 2}).warnings
    assert line.startswith("general.sampling.mirostat")


def test_the_library_applies_and_reports_them() -> None:
    loaded = dataclasses.replace(fake_parts(), defaults=MODEL)
    with LLM.from_loaded(loaded, kv_blocks=64) as llm:
        done = llm.generate("hello", SamplingParams(max_tokens=4, receipt=True))
        explicit = SamplingParams(
            max_tokens=4, temperature=0.25, top_p=0.5, repetition_penalty=1.1, seed=done.seed
        )
        assert llm.generate("hello", explicit).token_ids == done.token_ids
    assert done.params is not None
    rows = report(done.params, done.seed)
    assert rows["temperature"] == {"value": 0.25, "origin": "model: catalog"}
    assert rows["max_tokens"] == {"value": 4, "origin": "request"}
    assert rows["seed"] == {"value": done.seed, "origin": "random"}
    assert done.receipt is not None
    assert done.receipt["params"]["temperature"] == 0.25
    assert done.receipt["origins"]["temperature"] == "model: catalog"


def test_the_option_of_the_engine() -> None:
    loaded = dataclasses.replace(fake_parts(), defaults=MODEL)
    with LLM.from_loaded(loaded, kv_blocks=64, defaults="greedy") as llm:
        done = llm.generate("hello", SamplingParams(max_tokens=4))
    assert done.params is not None
    assert done.params.greedy
    with pytest.raises(ParameterError, match="defaults: 'hot' is not one of model"):
        LLM.from_loaded(fake_parts(), defaults="hot")


def test_every_protocol_default_is_a_valid_parameter() -> None:
    for values in PROTOCOLS.values():
        SamplingParams(**values)
        assert set(values) <= set(DEFAULTED)


def test_gguf_keys_state_the_same_defaults_in_float32() -> None:
    stated = catalog_defaults({"temperature": 0.2, "top_p": 0.9, "top_k": 12, "min_p": 0.015})
    keys = gguf_metadata(stated)
    assert keys["general.sampling.temp"] == 0.2
    single = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in keys.items()}
    assert single["general.sampling.temp"] != 0.2
    assert dict(read_gguf(single).values) == dict(stated.values)
    double = {"general.sampling.temp": 0.1234567890123}  # not a float32
    assert dict(read_gguf(double).values) == {"temperature": 0.1234567890123}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suppress_tokens", [5]),
        ("forced_eos_token_id", 0),
        ("num_beams", 4),
        ("max_new_tokens", 64),
        ("epsilon_cutoff", 3e-4),
    ],
)
def test_a_suggestion_that_is_not_followed_gives_a_warning(key: str, value: object) -> None:
    found = read_generation_config({"temperature": 0.5, key: value})
    assert found.values == (("temperature", 0.5),)
    assert [key in text for text in found.warnings] == [True]


@pytest.mark.parametrize("value", [0, 1, 0.0, "", "false", []])
def test_do_sample_is_a_boolean_or_gives_a_warning(value: object) -> None:
    """transformers refuses other values when it generates."""
    found = read_generation_config({"temperature": 0.5, "do_sample": value})
    assert found.values == (("temperature", 0.5),)
    assert found.warnings == (
        f"generation_config.json: do_sample: {value!r} is not true or false; it is not followed",
    )


# Lengths and beams of a search that is not done, the cache, kernels, outputs, drafts, metadata.
WITHOUT_EFFECT = (
    "max_length early_stopping length_penalty diversity_penalty low_memory use_cache "
    "cache_implementation cache_config max_cache_len compile_config disable_compile "
    "continuous_batching_config prefill_chunk_size output_attentions output_hidden_states "
    "output_scores output_logits return_dict_in_generate renormalize_logits "
    "remove_invalid_values is_assistant num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size "
    "assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight "
    "speculation_type use_mtp pad_token_id bos_token_id decoder_start_token_id "
    "_from_model_config transformers_version"
)


@pytest.mark.torch
def test_every_key_of_transformers_generation_config_is_followed_or_warned_of() -> None:
    from transformers import GenerationConfig

    known = {*GENERATION_CONFIG, *GENERATION_NOT_FOLLOWED, *WITHOUT_EFFECT.split()}
    assert set(GenerationConfig().to_dict()) <= known | {"do_sample", "eos_token_id"}
    defaults = GenerationConfig._get_default_generation_params()
    assert read_generation_config(defaults).warnings == ()
