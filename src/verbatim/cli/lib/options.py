"""Flags that many commands have: the model, the engine, JSON, plots.

The flags of a record of settings (EngineConfig, the server's Settings and Limits) are made from its
rules: a new setting is a flag without further code. Only flags that the user gave are passed on, so
each default is defined in one place.
"""

from __future__ import annotations

import os
from typing import Any

import click

from verbatim.base.config import SETTINGS, TYPES, EngineConfig
from verbatim.base.errors import ParameterError
from verbatim.base.setting_rules import SettingRule, parse_size, rules_of, types_of
from verbatim.cli.lib.command_class import (
    Function,
    Group,
    answered,
    flag,
    option,
    switch,
    with_default,
)

Values = dict[str, Any]

DEFAULT_MODEL = "smollm2"
ENGINE = "Model and engine"  # section of the help
# Flag whose name is not that of its parameter: --adapter loads, --use-adapter chooses.
FLAG_NAMES = {"adapter": "--use-adapter"}
# Settings without effect on a kind of command, which refuses their flags by name.
ONE_ANSWER = ("pooling", "max_waiting", "suffix_tenants")
NO_SAMPLING = ("max_waiting", "suffix_tenants", "speculate", "defaults")
BASE_MODEL = ("pooling", "adapters")
UNUSED = {
    "pooling": "this command makes no embeddings; `verbatim embed` and `verbatim serve` do",
    "max_waiting": "this command has no queue; it is a flag of `verbatim serve`",
    "suffix_tenants": "this command has no tenants; it is a flag of `verbatim serve`",
    "speculate": "this command generates nothing that could be drafted; leave it out",
    "defaults": "this command takes no sampling parameters from the model; leave it out",
    "adapters": "this command runs the base model; `verbatim merge` writes a model with an adapter",
}


def flag_name(field: str) -> str:
    """The flag of a setting or a parameter."""
    own = SETTINGS[field].flag if field in SETTINGS else FLAG_NAMES.get(field)
    return own or "--" + field.replace("_", "-")


def all_of(*options: Group) -> Group:
    """One decorator for several flags, which the help shows in this order."""

    def add(command: Function) -> Function:
        for one in reversed(options):
            command = one(command)
        return command

    return add


# --------------------------------------------------------------------------------------- one flag


RAW = "continue the text as it is, without the chat template"
# Flags of several commands, as the defaults of their parameters.
JSON = flag("print one JSON object", "--json")
PLOT = flag("write a plot, .svg or .png; needs the extra 'bench'", metavar="FILE")
REVISION = flag("revision of a model on the hub", metavar="REV")
OFFLINE = flag("use the cache only, never the network")


def ray_options(runs: str, replicas: str) -> Group:
    """Add --ray and --replicas; scale/ray_options.py reads them."""
    where = "HOST:PORT, auto (this machine's cluster), or a new local one"
    count = f"{replicas}; needs --ray [1]"
    ray: Values = {"is_flag": False, "flag_value": "local", "metavar": "[ADDRESS]"}
    return all_of(
        option("--ray", section="Replicas", help=f"run the {runs} on Ray: {where}", **ray),
        option("--replicas", section="Replicas", metavar="N|MIN-MAX", help=count),
    )


_FAKE = "tests: an engine of verbatim.testing.fakes instead of a model"
fake_engine_option = option("--test-engine", default="", hidden=True, help=_FAKE)


# ---------------------------------------------------------------------------------------- the model

MODEL_HELP = "a .gguf file, a safetensors directory, a catalog name or org/name on the hub"


def _model_flags(help: str, **model: Any) -> Group:
    shape = {"help": f"{MODEL_HELP}{help} [{DEFAULT_MODEL}]", "section": ENGINE, **model}
    return all_of(
        option("-m", "--model", common=True, show=False, **shape),
        option("--revision", section=ENGINE, **REVISION.rule),
        switch("--offline", section=ENGINE, **OFFLINE.rule),
    )


class _Lines(click.types.StringParamType):
    envvar_list_splitter = "\n"  # a path may have spaces


# --model, --revision and --offline: where the weights come from
model_options = _model_flags("", default=DEFAULT_MODEL, envvar="VERBATIM_MODEL", metavar="MODEL")
# the same with a --model that may be repeated; it arrives as a tuple
several_model_options = _model_flags(
    "; repeated as NAME=MODEL: several models behind one port",
    multiple=True,
    type=_Lines(),
    metavar="[NAME=]MODEL",
)


def positional_model(flags: Values, name: str | None) -> None:
    """Take the model from an argument, as in `verbatim serve MODEL`; -m must not contradict it."""
    if name is None:
        return
    if model_source() == "COMMANDLINE" and flags["model"] != name:
        why = f"{name!r} and --model {flags['model']!r} contradict each other; give one of them"
        raise ParameterError("model", why)
    flags["model"] = name


def model_or_default(name: str | None) -> str:
    """The model of an argument that may be missing."""
    return name or os.environ.get("VERBATIM_MODEL") or DEFAULT_MODEL


def model_source() -> str:
    """Where --model comes from: COMMANDLINE, ENVIRONMENT or DEFAULT."""
    source = click.get_current_context().get_parameter_source("model")
    return "" if source is None else source.name


# ------------------------------------------------------------------------------ records of settings


def engine_options(own: tuple[str, ...] = (), unused: tuple[str, ...] = ()) -> Group:
    """Add one flag per setting of EngineConfig. Values arrive as `e_<name>`; None: not given.

    own: settings that the command defines itself; unused: those that have no effect on it (keys of
    UNUSED), which it refuses by name"""
    refused = [answered(flag_name(name), answer=UNUSED[name]) for name in unused]
    return all_of(*record_flags(EngineConfig, "e_", ENGINE, (*own, *unused)), *refused)


def record_flags(
    record: type, prefix: str, section: str, without: tuple[str, ...] = ()
) -> list[Group]:
    """One flag per rule of a record. Values arrive as `<prefix><name>`; None or (): not given."""
    types = types_of(record)
    return [
        _record_flag(name, rule, types[name], prefix, section)
        for name, rule in rules_of(record).items()
        if name not in without
    ]


def _record_flag(name: str, rule: SettingRule, kind: str, prefix: str, section: str) -> Group:
    typed = rule.flag or "--" + name.replace("_", "-")
    shape: Values = {"metavar": rule.metavar, "default": None}
    if rule.size:
        shape["metavar"] = "SIZE"
    elif kind.startswith("bool"):
        typed, shape = f"{typed}/--no-{typed[2:]}", {"default": None}
    elif kind.startswith("tuple"):
        shape.update(multiple=True, default=())
    elif kind.startswith("int"):
        shape.update(type=int, metavar="N")
    elif kind.startswith("float"):
        shape.update(type=float, metavar="X")
    if rule.choices:
        shape["shell_complete"] = lambda ctx, param, text: [
            name for name in rule.choices if name.startswith(text)
        ]
    help = with_default(rule.help, rule.default, rule.size)
    shape |= {"section": section, "help": help, "hidden": rule.hidden, "show": False}
    shape["common"] = rule.common
    return option(*filter(None, (rule.short, typed)), prefix + name, **shape)


def given_of(record: type, flags: Values, prefix: str) -> Values:
    """The values of a record's flags that the user gave."""
    rules = rules_of(record)
    given = {name: flags.get(prefix + name) for name in rules}
    return {
        name: parse_size(name, value) if rules[name].size else value
        for name, value in given.items()
        if value is not None and value != ()
    }


def engine_of(flags: Values) -> Values:
    """Keyword arguments of an engine: only the given flags, validated by EngineConfig."""
    settings = given_of(EngineConfig, flags, "e_")
    EngineConfig(**settings)
    return settings


def engine_value(name: str, text: str) -> Any:
    """Parse the value of one engine setting, as in `verbatim compare -s threads=2`."""
    kind = TYPES[name]
    if SETTINGS[name].size:
        return parse_size(name, text)
    try:
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("bool"):
            return {"true": True, "false": False}[text.lower()]
    except (ValueError, KeyError):
        wanted = "a whole number" if kind.startswith("int") else "true or false"
        raise ParameterError(name, f"{text!r} is not {wanted}") from None
    return (text,) if kind.startswith("tuple") else text
