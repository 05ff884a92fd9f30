"""Where a setting of `verbatim serve` comes from: a flag, else a variable, else a TOML file, else
the default. The names are made from the flags: --max-queue is VERBATIM_MAX_QUEUE and max_queue.

In: the file of --config and the environment. Out: click's parameters, each with its source; errors
that name what the user wrote; the text of --print-config.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

import click
from click.core import ParameterSource

from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError, RequestError
from verbatim.base.setting_rules import parse_size, rules_of
from verbatim.cli.lib.command_class import ARGUMENTS, Command, Option, flag_in, option_of
from verbatim.cli.lib.options import DEFAULT_MODEL
from verbatim.server.settings import Limits, Settings

# Name of a flag's type in click -> types in TOML, and words for an error.
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "boolean": ((bool,), "true or false"),
    "integer": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "text": ((str,), "a string"),
    "SIZE": ((int, str), 'a size such as "512M"'),
}
MODEL_NAME = r"[\w.:+-]+"
VARIABLE, FILE = ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP
Options = Mapping[str, Option]  # by key
Values = dict[str, object]


class ConfiguredCommand(Command):
    """A command whose flags are also variables, and keys of the TOML file of its --config."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        for key, option in options_of(self).items():
            option.envvar = f"VERBATIM_{key.upper()}"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The parameters. Models that are named elsewhere replace those of the file, with their
        pins and settings."""
        rest = super().parse_args(ctx, args)
        options, argument = options_of(self), ctx.params.get("name")
        replaced = "model" in (ctx.default_map or {}) and (
            argument is not None or source(ctx, options["model"]) != FILE
        )
        for option in (options["model"], options["pin"], options["model_setting"]):
            where, name = source(ctx, option), str(option.name)
            if (where == FILE and replaced) or (where == VARIABLE and name == "model" and argument):
                ctx.params[name] = ()
                ctx.set_parameter_source(name, ParameterSource.DEFAULT)
        return rest

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except RequestError as error:
            options = options_of(self)
            option = option_of(error.param or "", list(options.values()))
            if isinstance(option, Option) and source(ctx, option) in (VARIABLE, FILE):
                why = error.message.partition(": ")[2]  # without the flag
                error.message = f"{origin(ctx, option)}: {why}"
            raise


def options_of(command: click.Command) -> dict[str, Option]:
    """The settings of a command by key: its flags, without those for tests."""
    found = [param for param in command.params if isinstance(param, Option) and not param.hidden]
    return {key_of(option): option for option in found if option.name != "print_config"}


def key_of(option: Option) -> str:
    flag = next(name for name in option.opts if name.startswith("--"))
    return flag.removeprefix("--").replace("-", "_")


def source(ctx: click.Context, option: Option) -> ParameterSource | None:
    return ctx.get_parameter_source(str(option.name))


def origin(ctx: click.Context, option: Option) -> str:
    """Where the value of a setting was written."""
    where = source(ctx, option)
    if where == VARIABLE:
        return str(option.envvar)
    if where == FILE:
        return f"{ctx.params['config']}:{key_of(option)}"
    return f"flag {flag_in(ctx.meta[ARGUMENTS], option)}"


# ---------------------------------------------------------------------------------------- the file


def read_config(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """click's callback of --config: the values of the file become defaults of the other flags."""
    if path is None:
        return None
    try:
        data = tomllib.loads(Path(path).read_text("utf-8"))
        ctx.default_map = file_values(data, options_of(ctx.command))
    except OSError as error:
        why = f"cannot read {path}: {error.strerror}"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        why = f"{path} is not TOML: {error}"
    except ParameterError as error:
        why = f"{path}: {error.message}"
    else:
        return path
    raise click.BadParameter(why, ctx, param)


def file_values(data: Values, options: Options) -> Values:
    """The values of a file by the names of click's parameters."""
    tables = data.pop("models", None)
    if tables is not None and (both := {"model", "pin", "model_setting"} & data.keys()):
        raise ParameterError(both.pop(), "and [models.NAME] contradict each other; give one")
    known = {key: option for key, option in options.items() if key != "config"}
    out: Values = {}
    for key, value in data.items():
        option = find(key, key, known, "models")
        out[str(option.name)] = check(key, value, option)
    return out if tables is None else out | values_of_models(tables, known)


def values_of_models(tables: object, options: Options) -> Values:
    """The tables [models.NAME] as the values of --model, --pin and --model-setting."""
    engine = {key: o for key, o in options.items() if str(o.name).startswith("e_")}
    models: list[str] = []
    settings: list[str] = []
    pinned: list[str] = []
    for name, table in tables.items() if isinstance(tables, dict) else ():
        if not re.fullmatch(MODEL_NAME, name) or not isinstance(table, dict):
            raise ParameterError(f"models.{name}", "is not a table [models.NAME] of a plain name")
        for key, value in {"model": None, **table}.items():
            where = f"models.{name}.{key}"
            if key == "model":
                models.append(f"{name}={check(where, value)}")
            elif key == "pin":
                pinned += [name] * bool(check(where, value, kind="boolean"))
            else:
                option = find(key, where, engine, "model", "pin")
                given = check(where, value, option)
                field = f"{name}.{str(option.name).removeprefix('e_')}"
                settings += [
                    f"{field}={str(v).lower() if isinstance(v, bool) else v}"
                    for v in (given if isinstance(given, list) else [given])
                ]
    if not models:
        raise ParameterError("models", "has no table; write [models.NAME] for each model")
    return {"model": models, "pinned": pinned, "model_settings": settings}


def find(key: str, where: str, options: Options, *others: str) -> Option:
    if key in options:
        return options[key]
    near = get_close_matches(key.replace("-", "_"), [*options, *others], 1)
    hint = f"did you mean {near[0]}?" if near else "`verbatim serve --print-config` lists them"
    raise ParameterError(where, f"is no setting; {hint}")


def check(where: str, value: object, option: Option | None = None, kind: str = "text") -> object:
    """The value, if its type is that of the option. A flag that may be repeated takes a list."""
    if option is not None:
        kind = "SIZE" if option.metavar == "SIZE" else option.type.name
    types, words = KINDS[kind]
    several = option is not None and option.multiple
    values = value if several and isinstance(value, list) else [value]
    if all(isinstance(v, types) and (not isinstance(v, bool) or bool in types) for v in values):
        if kind == "SIZE":
            parse_size(where, str(value))
        return values if several else value
    if value is None:
        raise ParameterError(where, "is required")
    words = f"{words} or a list of them" if several else words
    raise ParameterError(where, f"{toml(value):.60} is not {words}")


# ---------------------------------------------------------------------------------- --print-config


def print_settings(ctx: click.Context, argument: str | None) -> None:
    """Print each setting with its origin, as TOML for --config. Defaults are comments, so that the
    file sets what is set now and nothing else. `argument`: the model, if no flag named it."""
    if os.environ.get("VERBATIM_API_KEY"):
        click.echo("# VERBATIM_API_KEY is set; keys are not printed")
    section = ""
    for key, option in options_of(ctx.command).items():
        if key == "config":
            continue
        if option.section != section:
            section = option.section
            click.echo(f"\n# {section}")
        value, where = ctx.params[str(option.name)], source(ctx, option)
        default = default_of(key, option, value)
        if key == "model" and argument is not None:
            click.echo(f"{key} = {toml(argument)}  # argument")
        elif where != ParameterSource.DEFAULT:
            click.echo(f"{key} = {toml(value)}  # {origin(ctx, option)}")
        elif default in (None, ()):
            click.echo(f"# {key} is not set")
        else:
            click.echo(f"# {key} = {toml(default)}  # default")


def default_of(key: str, option: Option, value: object) -> object:
    """The default of a setting; `value`: that of a flag that is in no record."""
    name = str(option.name)
    for prefix, record in (("l_", Limits), ("e_", EngineConfig), ("", Settings)):
        rule = rules_of(record).get(name.removeprefix(prefix))
        if rule is not None and name.startswith(prefix):
            return rule.default if rule.served is None else rule.served
    return DEFAULT_MODEL if key == "model" else value


def toml(value: object) -> str:
    if isinstance(value, (str, list, tuple)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)
