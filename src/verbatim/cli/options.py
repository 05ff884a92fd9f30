"""Command line flags built from tables: one flag per sampling parameter of base.params.FIELDS and
one per setting of base.config.EngineConfig.

The values that click parsed come in; a SamplingParams and the keyword arguments of an engine go
out. A new row of a table is a flag without further code. Only flags that the user gave are passed
on, so each default is defined in one place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from verbatim.base.config import SIZES, EngineConfig, parse_size, split_adapter
from verbatim.base.errors import ParameterError
from verbatim.base.param_checks import Field
from verbatim.base.params import DEFAULTED, FIELDS, SamplingParams
from verbatim.cli.command_class import AnsweredFlag
from verbatim.cli.command_class import Command as Command
from verbatim.cli.command_class import Option as Option

F = TypeVar("F", bound=Callable[..., Any])
Values = dict[str, Any]

DEFAULT_MODEL = "smollm2"
# Defaults of the command line, which differ from those of the library and the server (ADR 10). A
# fixed seed: the same command gives the same text. on_loop=stop, because a small model may
# otherwise fill its whole context with a repeated passage.
DEFAULTS: Values = {"seed": 0, "on_loop": "stop"}
COMMAND_LINE = "command line"  # the origin of these defaults

# Help of the engine flags. base.config documents the same fields for programmers.
ENGINE_HELP = {
    "backend": "auto, cpu, cuda or reference; auto: cuda where a GPU can run the model, else cpu",
    "threads": "threads of the CPU backend; default: the physical cores",
    "context": "maximum tokens of prompt and output; default: the model's own limit",
    "step_tokens": "maximum tokens computed in one step",
    "max_running": "maximum sequences in one step",
    "max_waiting": "maximum requests in the queue",
    "kv_memory": "memory for the KV cache, such as 512M or 2G",
    "kv_blocks": "exact number of KV cache blocks (tests)",
    "kv_type": "element type of the KV cache: f16, q8 or fp8; doctor MODEL measures what the"
    " 8-bit types cost",
    "prefix_cache": "reuse the KV cache of a shared prompt prefix",
    "cache_dir": "directory that keeps the KV cache of prompts, so that a prefix hit survives a"
    " restart",
    "cache_dir_size": "maximum size of --cache-dir, such as 512M or 8G [8G]",
    "use_cache": "use a KV cache; without it every step recomputes the whole sequence, and"
    " --speculate auto drafts nothing",
    "speculate": "speculative decoding: off, ngram, suffix, head, head:FILE, draft:MODEL or auto;"
    " changes the speed, never the output",
    "suffix_tenants": "tenant whose recent outputs --speculate suffix (and auto) may use for its"
    " drafts; *: every tenant, at most 256 (may be repeated)",
    "defaults": "sampling parameters that are not given: model (what the model states, else the"
    " protocol's), protocol, or greedy (temperature 0)",
    "pooling": "how a text's hidden states become one embedding: mean, cls or last; default: as the"
    " model's files say",
    "quant": "quantise float weights while loading: q8_0 or q4_0",
    "check": "verify the KV block accounting after every step",
    "adapters": "load a LoRA adapter, a PEFT directory or a GGUF file (may be repeated)",
}
# Flags whose names are not those of their fields: --adapter loads, --use-adapter chooses.
FLAG_NAMES = {"adapters": "--adapter", "adapter": "--use-adapter"}
HIDDEN = {"kv_blocks", "check"}
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
FROM_FILE = {"json_schema", "grammar"}  # @FILE as a value reads the file
PARSE_HELP = "with --raw: the text of a control token (<|im_start|>) becomes that token"
NOT_FLAGS = {"speculate"}  # covered by the engine's --speculate, which also takes draft:MODEL


# --------------------------------------------------------------------------------------- sampling


def sampling_options(command: F) -> F:
    """Add one flag per sampling parameter. Parsed values arrive as `p_<name>`; None or (): not
    given."""
    for name, rule in reversed(FIELDS.items()):
        if name not in NOT_FLAGS:
            command = _sampling_flag(name, rule)(command)
    return command


def flag_name(field: str) -> str:
    return FLAG_NAMES.get(field, "--" + field.replace("_", "-"))


def _sampling_flag(name: str, rule: Field) -> Callable[[F], F]:
    flag, dest = flag_name(name), "p_" + name
    shown = DEFAULTS.get(name, rule.default)
    text = rule.help.partition("; missing:")[0] if name in DEFAULTS else rule.help
    if name in DEFAULTED and name not in DEFAULTS:
        text += f" [the model's, else {shown:g}]"
    elif isinstance(shown, (int, float)) and not isinstance(shown, bool):
        text += f" [{shown:g}]"
    elif name in DEFAULTS:
        text += f" [{shown}]"
    common: Values = {"cls": Option, "section": "Sampling", "default": None, "help": text}
    match rule.kind:
        case "int":
            return click.option(flag, dest, type=int, metavar="N", **common)
        case "float":
            return click.option(flag, dest, type=float, metavar="X", **common)
        case "bool":
            return click.option(f"{flag}/--no-{flag[2:]}", dest, **common)
        case "choice":
            return click.option(
                flag, dest, type=click.Choice([_choice_text(c) for c in rule.choices]), **common
            )
        case "ids":
            return click.option(flag, dest, metavar="ID,ID", **common)
        case "strings":
            common["help"] += " (may be repeated)"
            return click.option(
                flag, dest, multiple=True, metavar="TEXT", **{**common, "default": ()}
            )
        case "bias":
            return click.option(
                flag, dest, multiple=True, metavar="ID=X", **{**common, "default": ()}
            )
        case "schema":
            return click.option(flag, dest, metavar="JSON|@FILE", **common)
        case "str":
            return click.option(
                flag, dest, metavar="TEXT|@FILE" if name in FROM_FILE else "TEXT", **common
            )


def sampling_of(flags: Values, **defaults: Any) -> SamplingParams:
    """SamplingParams from the parsed flags. A wrong value raises a ParameterError that names it."""
    given = given_sampling(flags)
    values: Values = {**DEFAULTS, **defaults, **given}
    if flags.get("e_adapters") or given.get("adapter"):
        values["adapter"] = chosen_adapter(flags, given.get("adapter"))
    if values.get("num_beams", 1) > 1:  # beam search supports neither default
        values = {
            name: value for name, value in values.items() if name not in DEFAULTS or name in given
        }
    if "on_loop" not in given and (given.get("ignore_eos") or given.get("min_tokens")):
        values.pop("on_loop", None)  # the user asks for output beyond the model's own end
    filled = {name: COMMAND_LINE for name in DEFAULTS if name in values and name not in given}
    params = SamplingParams.from_mapping(values).with_origins(filled)
    if params.num_beams > 1 and flags.get("e_speculate") not in (None, "off"):
        # Raises the error that beam search cannot use speculative decoding.
        params.with_(speculate=flags["e_speculate"])
    return params


def use_adapter_option(command: F) -> F:
    """Add --use-adapter, for a command without the sampling flags. Arrives as `use_adapter`."""
    text = "name of the adapter to use, if --adapter loads several"
    return click.option("--use-adapter", cls=Option, metavar="NAME", help=text)(command)


def chosen_adapter(flags: Values, given: str | None = None) -> str:
    """The adapter that a command of one request uses: the one that --adapter loads, or of several
    the one that --use-adapter names."""
    names = [split_adapter(entry)[0] for entry in flags.get("e_adapters") or ()]
    if given and not names:
        remedy = "add --adapter NAME=PATH" if "e_adapters" in flags else UNUSED["adapters"]
        raise ParameterError("use_adapter", f"no adapter is loaded; {remedy}")
    if given is None and len(names) > 1:
        raise ParameterError(
            "use_adapter",
            f"several adapters are loaded; --use-adapter NAME chooses one of {', '.join(names)}",
        )
    return names[0] if given is None and names else given or ""


def given_sampling(flags: Values) -> Values:
    """The parameters that the user gave, by name."""
    values: Values = {}
    for name, rule in FIELDS.items():
        raw = flags.get("p_" + name)
        if raw is not None and raw != ():
            values[name] = _value(name, rule, raw)
    return values


def parse_parameter(name: str, text: str) -> Any:
    """Parse the value of one parameter, as in `--what-if top_p=0.5` and chat's `/params
    top_p=0.5`."""
    name = name.strip().replace("-", "_")
    if name not in FIELDS:
        from difflib import get_close_matches

        matches = get_close_matches(name, FIELDS, 1)
        raise ParameterError(
            name,
            "no such parameter; "
            + (f"did you mean {matches[0]}?" if matches else "`verbatim run --help` lists them"),
        )
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
                return {
                    "true": True,
                    "yes": True,
                    "1": True,
                    "false": False,
                    "no": False,
                    "0": False,
                }[text.strip().lower()]
            case "strings":
                return (text,)
            case "bias":
                return _value(name, rule, (text,))
    except (ValueError, KeyError):
        raise ParameterError(name, f"{text!r} is not {_KIND_WORDS[rule.kind]}") from None
    return _value(name, rule, text)


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
        return _file(name, raw[1:])
    if name in FROM_FILE and _is_file_name(raw):
        raise ParameterError(name, f"{raw!r} is not {_CONTENT[name]}; for a file write @{raw}")
    return raw


_CONTENT = {"json_schema": "JSON", "grammar": "a grammar"}


def _is_file_name(text: str) -> bool:
    """Whether a value that should be a schema or a grammar names a file instead."""
    if "\n" in text or len(text) > 1000 or text.lstrip()[:1] in "{[":
        return False
    return text.endswith((".json", ".lark", ".gbnf", ".txt")) or Path(text).is_file()


def _choice_text(choice: Any) -> str:
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


def _file(name: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            name, f"cannot read {path!r}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}"
        ) from None


def check_output(name: str, file: str) -> None:
    """Raise if `file` cannot be written, before any work is done. Folders are not created."""
    path = Path(file)
    folder = path.parent
    if path.is_dir():
        raise ParameterError(name, f"{file!r} is a folder; name a file in it")
    if not folder.is_dir():
        why = "is not a folder" if folder.exists() else "does not exist"
        raise ParameterError(
            name,
            f"cannot write {file!r}: {str(folder)!r} {why}; make it (mkdir -p), or choose another"
            " path",
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ParameterError(name, f"cannot write {file!r}: permission denied; choose another path")


def check_plot(file: str | None) -> None:
    """check_output for --plot, whose file name decides the format. None: no plot was asked for."""
    if file is None:
        return
    from verbatim.observe.plot import require_matplotlib

    if Path(file).suffix not in (".svg", ".png"):
        raise ParameterError("plot", f"{file!r} ends in neither .svg nor .png; choose one of them")
    check_output("plot", file)
    require_matplotlib()


# ------------------------------------------------------------------------------- model and engine


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
        click.option(
            "--revision",
            cls=Option,
            section=section,
            metavar="REV",
            help="revision of a model on the hub",
        ),
        click.option(
            "--offline",
            cls=Option,
            section=section,
            is_flag=True,
            help="use the cache only, never the network",
        ),
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
    for field in reversed(fields(EngineConfig)):
        if field.name in own:
            continue
        flag, dest, kind = flag_name(field.name), "e_" + field.name, str(field.type)
        if field.name in unused:
            command = click.option(flag, cls=AnsweredFlag, answer=UNUSED[field.name])(command)
            continue
        common: Values = {
            "cls": Option,
            "section": "Model and engine",
            "default": None,
            "hidden": field.name in HIDDEN,
        }
        common["help"] = ENGINE_HELP.get(field.name, "")
        if field.name in SIZES:
            option = click.option(flag, dest, metavar="SIZE", **common)
        elif kind.startswith("bool"):
            option = click.option(f"{flag}/--no-{flag[2:]}", dest, **common)
        elif kind.startswith("tuple"):
            metavar = "NAME=PATH" if field.name == "adapters" else "NAME"
            option = click.option(
                flag, dest, multiple=True, metavar=metavar, **{**common, "default": ()}
            )
        elif kind.startswith("int"):
            option = click.option(flag, dest, type=int, metavar="N", **common)
        else:
            option = click.option(flag, dest, metavar="NAME", **common)
        command = option(command)
    return command


def engine_value(name: str, text: str) -> Any:
    """Parse the value of one engine setting, as in `verbatim compare -s threads=2`."""
    kind = {field.name: str(field.type) for field in fields(EngineConfig)}[name]
    if name in SIZES:
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
    for field in fields(EngineConfig):
        value = flags.get("e_" + field.name)
        if value is not None and value != ():
            settings[field.name] = parse_size(field.name, value) if field.name in SIZES else value
    EngineConfig(**settings)
    return settings
