"""Flags of the model and the engine: one per row of base.config.SETTINGS.

In: values that click parsed. Out: the keyword arguments of an engine. A new setting is a flag
without further code. Only flags that the user gave are passed on, so each default is defined in
one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from verbatim.base.config import SETTINGS, TYPES, EngineConfig, SettingRule, parse_size
from verbatim.base.errors import ParameterError
from verbatim.cli.lib.command_class import AnsweredFlag
from verbatim.cli.lib.command_class import Command as Command
from verbatim.cli.lib.command_class import Option as Option
from verbatim.cli.lib.common_options import offline_option, revision_option

F = TypeVar("F", bound=Callable[..., Any])
Values = dict[str, Any]

DEFAULT_MODEL = "smollm2"
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


def positional_model(flags: Values, name: str | None) -> None:
    """Take the model from an argument, as in `verbatim serve MODEL`; -m must not contradict it."""
    if name is None:
        return
    source = click.get_current_context().get_parameter_source("model")
    if source is not None and source.name == "COMMANDLINE" and flags["model"] != name:
        raise ParameterError(
            "model",
            f"{name!r} and --model {flags['model']!r} contradict each other; give one of them",
        )
    flags["model"] = name


MODEL_HELP = "a .gguf file, a safetensors directory, a catalog name or org/name on the hub"


def model_options(command: F) -> F:
    """Add --model, --revision and --offline: where the weights come from."""
    return _model_flags(
        command,
        default=DEFAULT_MODEL,
        envvar="VERBATIM_MODEL",
        metavar="MODEL",
        help=f"{MODEL_HELP} [{DEFAULT_MODEL}]",
    )


def several_model_options(command: F) -> F:
    """model_options with a --model that may be repeated; it arrives as a tuple."""
    return _model_flags(
        command,
        multiple=True,
        metavar="[NAME=]MODEL",
        help=f"{MODEL_HELP}; repeated as NAME=MODEL: several models behind one port"
        f" [{DEFAULT_MODEL}]",
    )


def _model_flags(command: F, **model: Any) -> F:
    section = "Model and engine"
    add = [
        click.option("-m", "--model", cls=Option, section=section, **model),
        revision_option(section=section),
        offline_option(section=section),
    ]
    for option in reversed(add):
        command = option(command)
    return command


def engine_options(command: F) -> F:
    """Add one flag per setting of EngineConfig. Values arrive as `e_<name>`; None: not given."""
    return _engine_flags(command, (), ())


def engine_options_without(*own: str, unused: tuple[str, ...] = ()) -> Callable[[F], F]:
    """engine_options without the settings that the command defines itself, and with an answer to
    those that have no effect on it (a key of UNUSED)."""
    return lambda command: _engine_flags(command, own, unused)


def _engine_flags(command: F, own: tuple[str, ...], unused: tuple[str, ...]) -> F:
    for name in reversed(SETTINGS):
        if name in unused:
            option = click.option(flag_name(name), cls=AnsweredFlag, answer=UNUSED[name])
            command = option(command)
        elif name not in own:
            command = _engine_flag(name, SETTINGS[name])(command)
    return command


def _engine_flag(name: str, rule: SettingRule) -> Callable[[F], F]:
    flag, kind = flag_name(name), TYPES[name]
    shape: Values = {"metavar": rule.metavar, "default": None}
    if rule.size:
        shape["metavar"] = "SIZE"
    elif kind.startswith("bool"):
        flag, shape = f"{flag}/--no-{flag[2:]}", {"default": None}
    elif kind.startswith("tuple"):
        shape.update(multiple=True, default=())
    elif kind.startswith("int"):
        shape.update(type=int, metavar="N")
    return click.option(
        flag,
        "e_" + name,
        cls=Option,
        section="Model and engine",
        help=_engine_help(rule),
        hidden=rule.hidden,
        **shape,
    )


def _engine_help(rule: SettingRule) -> str:
    """The setting's help, with its default in brackets."""
    match rule.default:
        case None:
            return rule.help
        case bool():
            return f"{rule.help} [{'on' if rule.default else 'off'}]"
        case tuple():
            return f"{rule.help} (may be repeated)"
        case int() if rule.size:
            return f"{rule.help} [{rule.default >> 30}G]"
    return f"{rule.help} [{rule.default}]"


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


def engine_of(flags: Values) -> Values:
    """Keyword arguments of an engine: only the given flags, validated by EngineConfig."""
    settings: Values = {}
    for name, rule in SETTINGS.items():
        value = flags.get("e_" + name)
        if value is not None and value != ():
            settings[name] = parse_size(name, value) if rule.size else value
    EngineConfig(**settings)
    return settings
