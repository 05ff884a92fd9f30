"""Flags of the sampling parameters: one per row of base.params.FIELDS.

In: values that click parsed. Out: a SamplingParams. A new row is a flag without further code. Only
flags that the user gave are passed on, so each default is defined in one place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from verbatim.base.config import split_adapter
from verbatim.base.errors import ParameterError
from verbatim.base.param_checks import Field
from verbatim.base.params import DEFAULTED, FIELDS, SamplingParams
from verbatim.cli.lib.command_class import Function, Group, flag, option
from verbatim.cli.lib.options import UNUSED, Values, all_of, flag_name
from verbatim.cli.lib.texts import file_text

# The one default of the command line that differs from those of the library and the server (ADR
# 10): a small model may otherwise fill max_tokens with a repeated passage.
DEFAULTS: Values = {"on_loop": "stop"}
COMMAND_LINE = "command line"  # the origin of these defaults
FROM_FILE = {"json_schema", "grammar"}  # @FILE as a value reads the file
METAVARS = {"ids": "ID,ID", "schema": "JSON|@FILE", "grammar": "TEXT|@FILE", "str": "TEXT"}
NOT_FLAGS = {"speculate"}  # covered by the engine's --speculate, which also takes draft:MODEL


def _sampling_flag(name: str, rule: Field) -> Group:
    typed, dest = flag_name(name), "p_" + name
    shown = DEFAULTS.get(name, rule.default)
    text = rule.help.partition("; missing:")[0] if name in DEFAULTS else rule.help
    if name in DEFAULTED and name not in DEFAULTS:
        text += f" [the model's, else {shown:g}]"
    elif isinstance(shown, (int, float)) and not isinstance(shown, bool):
        text += f" [{shown:g}]"
    elif name in DEFAULTS:
        text += f" [{shown}]"
    shape: Values = {"default": None}
    match rule.kind:
        case "int":
            shape.update(type=int, metavar="N")
        case "float":
            shape.update(type=float, metavar="X")
        case "bool":
            typed = f"{typed}/--no-{typed[2:]}"
        case "choice":
            shape.update(type=click.Choice([_choice_text(c) for c in rule.choices]))
        case "strings" | "bias":
            shape.update(multiple=True, default=())
            shape.update(metavar="TEXT" if rule.kind == "strings" else "ID=X")
            text += " (may be repeated)" if rule.kind == "strings" else ""
        case _:
            shape.update(metavar=METAVARS.get(name) or METAVARS[rule.kind])
    shape.update(section="Sampling", common=rule.common, show=False, help=text)
    return option(typed, dest, **shape)


def sampling_options(command: Function) -> Function:
    """Add one flag per sampling parameter. Parsed values arrive as `p_<name>`; None or (): not
    given."""
    named = [(name, rule) for name, rule in FIELDS.items() if name not in NOT_FLAGS]
    return all_of(*(_sampling_flag(name, rule) for name, rule in named))(command)


def sampling_of(flags: Values, **defaults: Any) -> SamplingParams:
    """SamplingParams from the parsed flags. A wrong value raises a ParameterError that names it."""
    given = given_sampling(flags)
    values: Values = {**DEFAULTS, **defaults, **given}
    if flags.get("e_adapters") or given.get("adapter"):
        values["adapter"] = chosen_adapter(flags, given.get("adapter"))
    if values.get("num_beams", 1) > 1:  # beam search supports neither default
        values = {n: value for n, value in values.items() if n not in DEFAULTS or n in given}
    if "on_loop" not in given and (given.get("ignore_eos") or given.get("min_tokens")):
        values.pop("on_loop", None)  # the user asks for output beyond the model's own end
    filled = {name: COMMAND_LINE for name in DEFAULTS if name in values and name not in given}
    params = SamplingParams.from_mapping(values).with_origins(filled)
    if params.num_beams > 1 and flags.get("e_speculate") not in (None, "off"):
        # Raises the error that beam search cannot use speculative decoding.
        params.with_(speculate=flags["e_speculate"])
    return params


def use_adapter_flag() -> Any:
    """--use-adapter, for a command without the sampling flags."""
    return flag("name of the adapter to use, if --adapter loads several", metavar="NAME")


def chosen_adapter(flags: Values, given: str | None = None) -> str:
    """The adapter that a command of one request uses: the one that --adapter loads, or of several
    the one that --use-adapter names."""
    names = [split_adapter(entry)[0] for entry in flags.get("e_adapters") or ()]
    if given and not names:
        remedy = "add --adapter NAME=PATH" if "e_adapters" in flags else UNUSED["adapters"]
        raise ParameterError("use_adapter", f"no adapter is loaded; {remedy}")
    if given is None and len(names) > 1:
        why = f"several adapters are loaded; --use-adapter NAME chooses one of {', '.join(names)}"
        raise ParameterError("use_adapter", why)
    return names[0] if given is None and names else given or ""


def given_sampling(flags: Values) -> Values:
    """The parameters that the user gave, by name."""
    values: Values = {}
    for name, rule in FIELDS.items():
        raw = flags.get("p_" + name)
        if raw is not None and raw != ():
            values[name] = _value(name, rule, raw)
    return values


def pairs(text: str, param: str, example: str, separator: str | None = ",") -> Values:
    """`top_p=0.5,temperature=1.2` as names with the texts of their values."""
    out: Values = {}
    for part in text.split(separator):
        name, equals, value = part.partition("=")
        if not equals:
            raise ParameterError(param, f"{part!r} is not NAME=VALUE, such as {example}")
        out[name.strip().replace("-", "_")] = value
    return out


def parse_changes(text: str, param: str, example: str) -> Values:
    """`top_p=0.5,temperature=1.2` as parameters."""
    given = pairs(text, param, example).items()
    return {name: parse_parameter(name, value) for name, value in given}


def parse_parameter(name: str, text: str) -> object:
    """Parse the value of one parameter, as in `--what-if top_p=0.5` and chat's `/params
    top_p=0.5`."""
    name = name.strip().replace("-", "_")
    if name not in FIELDS:
        from difflib import get_close_matches

        matches = get_close_matches(name, FIELDS, 1)
        hint = f"did you mean {matches[0]}?" if matches else "`verbatim run --help-all` lists them"
        raise ParameterError(name, f"no such parameter; {hint}")
    rule = FIELDS[name]
    if rule.optional and text.strip().lower() == "none":
        return None
    try:
        match rule.kind:
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "bool":
                return WORDS[text.strip().lower()]
            case "strings":
                return (text,)
            case "bias":
                return _value(name, rule, (text,))
    except (ValueError, KeyError):
        raise ParameterError(name, f"{text!r} is not {_KIND_WORDS[rule.kind]}") from None
    return _value(name, rule, text)


WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_KIND_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def _value(name: str, rule: Field, raw: Any) -> Any:
    if rule.kind == "ids":
        return _ids(name, raw)
    if rule.kind == "bias":
        return dict(_bias(name, item) for item in raw)
    if rule.kind == "choice":
        for choice in rule.choices:
            if raw == _choice_text(choice):
                return choice
        return raw
    if name in FROM_FILE and raw.startswith("@"):
        return file_text(raw[1:], name, "utf-8-sig")
    if name in FROM_FILE and _is_file_name(raw):
        raise ParameterError(name, f"{raw!r} is not {_CONTENT[name]}; for a file write @{raw}")
    return raw


_CONTENT = {"json_schema": "JSON", "grammar": "a grammar"}


def _is_file_name(text: str) -> bool:
    """Whether a value that should be a schema or a grammar names a file instead."""
    if "\n" in text or len(text) > 1000 or text.lstrip()[:1] in "{[":
        return False
    return text.endswith((".json", ".lark", ".gbnf", ".txt")) or Path(text).is_file()


def _choice_text(choice: object) -> str:
    return str(choice).lower() if isinstance(choice, bool) else str(choice)


def _ids(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ParameterError(name, f"{text!r} is not a list of token ids such as 11,42") from None


def _bias(name: str, text: str) -> tuple[int, float]:
    key, _, number = text.partition("=")
    try:
        return int(key), float(number)
    except ValueError:
        raise ParameterError(name, f"{text!r} is not ID=NUMBER, such as 42=-5") from None
