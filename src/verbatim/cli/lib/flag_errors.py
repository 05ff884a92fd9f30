"""Errors that name the flag. In: the error for a parameter, and the command line. Out: its message
with the flag that the user typed in place of the parameter's name.

The library says `top_p: 3 is above 1`; the command line says `--top-p: 3 is above 1`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import click


def option_of(param: str, options: Sequence[click.Option]) -> click.Option | None:
    """The option of a parameter: p_NAME is a sampling parameter, e_NAME a setting of the engine."""
    for name in (f"p_{param}", f"e_{param}", param):
        if found := [option for option in options if option.name == name]:
            return found[0]
    flag = "--" + param.replace("_", "-")
    return next((option for option in options if flag in option.opts), None)


def flag_in(args: Sequence[str], option: click.Option) -> str:
    """The name of the option that the arguments contain, an alias included; empty: none of them."""
    names = (*option.opts, *option.secondary_opts)
    for arg in args:
        if arg == "--":
            break
        for name in names:
            short = not name.startswith("--") and len(name) == 2  # -n5
            if arg == name or arg.startswith(name if short else f"{name}="):
                return name
    return ""


def with_flags(
    message: str, param: str | None, options: Sequence[click.Option], args: Sequence[str]
) -> str:
    """The message with flags in place of parameters: the one at fault, which starts the message,
    and others that it mentions."""
    rest = message
    start = ""
    if param is not None and message.startswith(f"{param}: "):
        option = option_of(param, options)
        flag = "" if option is None else flag_in(args, option)
        if option is not None and not flag and not _assigned(param, args):
            flag = next((name for name in option.opts if name.startswith("--")), option.opts[0])
        if not flag:  # an argument, or NAME=VALUE of --what-if and --setting
            return message
        start, rest = f"{flag}: ", message.removeprefix(f"{param}: ")
    for option in options:
        name = (option.name or "").removeprefix("p_").removeprefix("e_")
        if "_" in name and (flag := flag_in(args, option)):
            rest = re.sub(rf"(?<![\w./'\"-]){name}(?![\w./'\"=-])", flag, rest)
    return start + rest


def _assigned(param: str, args: Sequence[str]) -> bool:
    names = (param, param.replace("_", "-"))
    return any(re.search(rf"(^|[,= ]){name}=", arg) for arg in args for name in names)
