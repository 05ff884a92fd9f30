"""The click classes of this command line: flags with sections and aliases, answers to flags of
other programs (flag_aliases.py), and errors that name the flag.

The library says `top_p: 3 is above 1`; the command line says `--top-p: 3 is above 1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from inspect import signature
from itertools import takewhile
from typing import Any, NamedTuple

import click

from verbatim.base.errors import RequestError
from verbatim.base.json_io import JsonObject
from verbatim.cli.environment import FOREIGN
from verbatim.cli.lib.flag_aliases import FLAG_ALIASES, FLAG_ANSWERS, VALUE_ALIASES

Function = Callable[..., object]
Group = Callable[[Function], Function]  # adds flags to the function of a command
ARGUMENTS = "verbatim.arguments"  # key of click's Context.meta
HELP_ALL = "verbatim.help_all"  # another: --help-all was given
OWN = "Options"  # section of the flags that a command itself declares


def option(*decls: str, least: int | None = None, most: int | None = None, **rule: Any) -> Group:
    """click.option with our class. `least` and `most` are the inclusive range of a whole number."""
    if least is not None or most is not None:
        rule["type"] = click.IntRange(least, most)
    kind = rule.get("type", type(rule.get("default")))
    if kind is int or isinstance(kind, click.IntRange):
        rule.setdefault("metavar", "N")
    elif kind is float:
        rule.setdefault("metavar", "X")
    return click.option(*decls, **{"cls": Option, **rule})


def switch(*decls: str, help: str, **rule: Any) -> Group:
    """A flag without a value."""
    return option(*decls, is_flag=True, help=help, **rule)


class Declared(NamedTuple):
    """A flag or an argument of a command, as the default of the parameter that gets its value."""

    names: tuple[str, ...]  # spellings of a flag; empty: --PARAMETER
    rule: JsonObject
    is_argument: bool = False

    def add_to(self, command: Function, name: str, annotation: str) -> None:
        rule = dict(self.rule)
        if self.is_argument:
            click.argument(name, **rule)(command)
            return
        names = self.names or ("--" + name.replace("_", "-"),)
        if annotation.startswith("tuple"):
            rule["multiple"] = True
        elif annotation == "bool" and not any("/" in flag for flag in names):
            rule["is_flag"] = True
        elif rule.get("default") is None and not rule.keys() & {"least", "most", "type"}:
            kind = {"int | None": int, "float | None": float}.get(annotation)
            rule |= {"type": kind} if kind else {}
        option(*names, name, **rule)(command)


def flag(help: str, *names: str, **rule: Any) -> Any:
    """A flag of a command: `window: int = flag("tokens per mean", default=16)` is --window. The
    parameter and its annotation say what they are: a bool is a switch, a tuple may be repeated.
    Returns Any, so that the parameter keeps its annotation. `rule`: arguments of option()."""
    return Declared(names, {"help": help, **rule})


def argument(metavar: str | None = None, **rule: Any) -> Any:
    """An argument of a command, as flag(). A metavar in brackets: it may be missing."""
    shape: JsonObject = {"metavar": metavar, "required": metavar is None}
    return Declared((), {**shape, **rule}, is_argument=True)


def declared(*groups: Group) -> Group:
    """Add what the parameters of a command's function declare, then groups of flags that several
    commands have; the help shows them in this order."""

    def add(command: Function) -> Function:
        for group in reversed(groups):
            group(command)
        for name, parameter in reversed([*signature(command).parameters.items()]):
            if isinstance(parameter.default, Declared):
                parameter.default.add_to(command, name, str(parameter.annotation))
        return command

    return add


def answered(*names: str, answer: str) -> Group:
    """A flag of another program on one command: an error that names what to type."""
    return click.option(*names, cls=AnsweredFlag, answer=answer)


def with_default(help: str, default: object, size: bool = False) -> str:
    """A help text with the default in brackets: [256], [on], [8G]."""
    match default:
        case None | "":
            return help
        case bool():
            return f"{help} [{'on' if default else 'off'}]"
        case tuple():
            return f"{help} (may be repeated)"
        case int() if size:
            return f"{help} [{default >> 30}G]"
        case float():
            return f"{help} [{default:g}]"
    return f"{help} [{default}]"


class Option(click.Option):
    """A flag with a section of the help, and with aliases (flag_aliases.py) that the help omits.

    A flag with one value that is given twice must have the same value both times: click itself
    would drop the first one without a message."""

    def __init__(
        self,
        decls: Sequence[str],
        *,
        section: str = OWN,
        common: bool | None = None,
        show: bool = True,
        **kwargs: Any,
    ) -> None:
        """`common`: listed by --help, the others by --help-all; default: a flag that the command
        itself declares. `show`: end the help with the default."""
        self.aliases = [name for flag in decls for name in FLAG_ALIASES.get(flag, ())]
        if show:
            default = () if kwargs.get("multiple") else kwargs.get("default")
            kwargs["help"] = with_default(kwargs.get("help", ""), default)
        super().__init__([*decls, *self.aliases], **kwargs)
        self.section = section
        self.common = section == OWN if common is None else common

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Make the parser collect every value of the flag, in a list. handle_parse_result() reads
        the list."""
        multiple, self.multiple = self.multiple, not self.count
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.multiple = multiple

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, object], args: list[str]
    ) -> tuple[object, list[str]]:
        values = opts.get(self.name or "")
        if isinstance(values, list) and not self.multiple:
            # a value that may be missing (`--ray`) is a sentinel of click here
            typed = [v if isinstance(v, str | bool) else self.flag_value for v in values]
            if len(set(typed)) > 1 and not ctx.resilient_parsing:
                raise click.UsageError(self._two_values(ctx, typed), ctx)
            opts = {**opts, self.name or "": values[-1]}
        return super().handle_parse_result(ctx, opts, args)

    def _two_values(self, ctx: click.Context, typed: Sequence[object]) -> str:
        if self.is_flag:
            return f"{self.opts[0]} and {self.secondary_opts[0]} contradict each other; give one"
        first, other = list(dict.fromkeys(typed))[:2]
        name = self.get_error_hint(ctx).strip("'")
        return f"{name}: is given twice, as {first!r:.60} and {other!r:.60}; give it once"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        every = self.opts
        self.opts = [name for name in every if name not in self.aliases]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = every

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """The variable's value, but for VERBATIM_PORT of Kubernetes, for a Service "verbatim"."""
        value = super().resolve_envvar_value(ctx)
        return None if value is None or FOREIGN.fullmatch(f"{self.envvar}={value}") else value

    def get_error_hint(self, ctx: click.Context | None) -> str:
        found = ctx and self.name and ctx.get_parameter_source(self.name)
        if found and found.name == "ENVIRONMENT":
            return f"'{self.envvar}'"
        if typed := flag_in(() if ctx is None else ctx.meta.get(ARGUMENTS, ()), self):
            return f"'{typed}'"
        names = [name for name in self.opts if name not in self.aliases]
        return " / ".join(f"'{name}'" for name in names)


class OptionalValue(Option):
    """A flag whose value may be missing: `--think` is `--think=true`. The next argument is its
    value only if it is one of `words`, so that a prompt may follow the flag, as in Ollama."""

    def __init__(
        self, decls: Sequence[str], *, words: Sequence[str], bare: str, **kwargs: Any
    ) -> None:
        super().__init__(decls, **kwargs)
        self.words, self.bare = words, bare


def with_values(args: Sequence[str], params: Sequence[click.Parameter]) -> list[str]:
    """The arguments with a value behind each OptionalValue: `--think` becomes `--think=true`; and
    with the flag of ours for each of VALUE_ALIASES: `--draft-head X` is `--speculate head:X`."""
    options = [param for param in params if isinstance(param, click.Option)]
    ours = {name for option in options for name in option.opts}
    aliases = {name: to for name, to in VALUE_ALIASES.items() if to[0] in ours}
    flags = {n: o for o in options if isinstance(o, OptionalValue) for n in o.opts}
    valued = {n for o in options if not o.is_flag for n in o.opts} - flags.keys()
    out: list[str] = []
    rest = list(args)
    while rest and rest[0] != "--":
        arg = rest.pop(0)
        name, given, value = arg.partition("=")
        if name in aliases and (given or rest):
            flag_name, prefix = aliases[name]
            arg = f"{flag_name}={prefix}{value if given else rest.pop(0)}"
        if arg in flags and not (out and out[-1] in valued):
            flag = flags[arg]
            arg += "=" + (rest.pop(0) if rest and rest[0] in flag.words else flag.bare)
        out.append(arg)
    return out + rest


def _alike(one: str, other: str) -> bool:
    """click compares the names with their dashes, which makes --metrics resemble --replicas."""
    return SequenceMatcher(None, one.lstrip("-"), other.lstrip("-")).ratio() >= 0.6


class AnsweredFlag(click.Option):
    """A flag of another program without a counterpart: an error that names what to type."""

    def __init__(self, names: Sequence[str], answer: str) -> None:
        super().__init__(
            [*names, "answered_" + names[0].lstrip("-").replace("-", "_")],
            is_flag=True,
            is_eager=True,
            hidden=True,
            expose_value=False,
            callback=self.refuse,
        )
        self.answer = answer

    def refuse(self, ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value:
            typed = flag_in(ctx.meta.get(ARGUMENTS, ()), self) or self.opts[0]
            raise click.UsageError(f"no such option: {typed}; {self.answer}", ctx)


class Command(click.Command):
    """A command whose help groups its flags by section: the few general flags come before the fifty
    sampling flags. Flags of other programs are answered (flag_aliases.py).
    An error names the flag that the user typed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        taken = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        for names, answer in FLAG_ANSWERS.items():
            if free := [name for name in names if name not in taken]:
                self.params.append(AnsweredFlag(free, answer))
        arguments = {param.name for param in self.params if isinstance(param, click.Argument)}
        if arguments & {"model", "source"} and "--model" not in taken:
            answer = "the model is an argument of this command, without a flag"
            self.params.append(AnsweredFlag(["-m", "--model"], answer))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except RequestError as error:
            options = [param for param in self.params if isinstance(param, Option)]
            error.message = with_flags(error.message, error.param, options, ctx.meta[ARGUMENTS])
            raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = tuple(args)  # with_flags() reads which names the user typed
        ours = {
            name: param.opts[0] if name in param.aliases else name
            for param in self.params
            if isinstance(param, Option)
            for name in (*param.opts, *param.secondary_opts)
        }
        for arg in takewhile(lambda arg: arg != "--", args):  # -model x is not -m odel x
            if arg.startswith("-") and len(arg) > 2 and f"-{arg.partition('=')[0]}" in ours:
                near = [ours[f"-{arg.partition('=')[0]}"]]
                raise click.NoSuchOption(arg, possibilities=near, ctx=ctx)
        try:
            return super().parse_args(ctx, with_values(args, self.params))
        except click.NoSuchOption as error:  # suggest flags of ours only
            near = [name for name in error.possibilities or () if ours.get(name) == name]
            near = [name for name in near if _alike(name, error.option_name)]
            if (hyphened := error.option_name.replace("_", "-")) in ours:  # --top_k
                near = [ours[hyphened]]
            name, why = error.option_name, error.message
            raise click.NoSuchOption(name, why, possibilities=near, ctx=error.ctx) from None
        except click.BadOptionUsage as error:  # --n-gpu-layers=99
            for param in self.params:
                if isinstance(param, AnsweredFlag) and error.option_name in param.opts:
                    param.refuse(ctx, param, True)
            raise

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The flags, with --help-all where --help leaves some out."""
        params = super().get_params(ctx)
        shown = [getattr(p, "common", True) or getattr(p, "hidden", False) for p in params]
        if rest := shown.count(False):
            text = f"Show this message with the other {rest} flags and exit."
            eager = {"is_flag": True, "is_eager": True, "expose_value": False}
            params.append(click.Option(["--help-all"], callback=_help_all, help=text, **eager))
        return params

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None and (getattr(param, "common", True) or ctx.meta.get(HELP_ALL)):
                sections.setdefault(getattr(param, "section", OWN), []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def as_command(*groups: Group, cls: type[Command] = Command) -> Callable[[Function], Command]:
    """A function as a command, with the flags that declared() adds."""
    return lambda function: click.command(cls=cls)(declared(*groups)(function))


def _help_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


# --------------------------------------------------------------------------- errors that name flags


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
