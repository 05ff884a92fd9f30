"""Flags of the model and the engine: one per setting of base.config.EngineConfig.

In: values that click parsed. Out: the keyword arguments of an engine. A new setting is a flag
without further code. Only flags that the user gave are passed on, so each default is defined in
one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from verbatim.base.config import SIZES, EngineConfig, parse_size
from verbatim.base.errors import ParameterError
from verbatim.cli.lib.command_class import AnsweredFlag
from verbatim.cli.lib.command_class import Command as Command
from verbatim.cli.lib.command_class import Option as Option
from verbatim.cli.lib.common_options import offline_option, revision_option

F = TypeVar("F", bound=Callable[..., Any])
Values = dict[str, Any]

DEFAULT_MODEL = "smollm2"
# Help of the engine flags. base.config documents the same fields for programmers.
ENGINE_HELP = {
    "backend": "auto, cpu, cuda or reference; auto: cuda where a GPU can run the model, else cpu",
    "threads": "threads of the CPU backend; default: the physical cores",
    "context": "maximum tokens of prompt and output; default: the model's own limit",
    "step_tokens": "maximum tokens computed in one step; default: 512, on a GPU up to 8,192",
    "step_ms": "maximum milliseconds of a step that prefills beside other sequences; default: 100,"
    " on a GPU no limit",
    "max_running": "maximum sequences in one step [256]",
    "max_waiting": "maximum requests in the engine's queue; a server's --max-queue comes first"
    " [4096]",
    "kv_memory": "memory for the KV cache, such as 512M or 2G; default: a quarter of the free"
    " memory, half of a GPU's",
    "kv_blocks": "exact number of KV cache blocks (tests)",
    "kv_type": "element type of the KV cache: f16, q8 or fp8; doctor MODEL measures what the"
    " 8-bit types cost [f16]",
    "prefix_cache": "reuse the KV cache of a shared prompt prefix [on]",
    "cache_dir": "directory that keeps the KV cache of prompts, so that a prefix hit survives a"
    " restart",
    "cache_dir_size": "maximum size of --cache-dir, such as 512M or 8G; each engine counts what it"
    " found at its start and what it wrote [8G]",
    "use_cache": "use a KV cache; without it every step recomputes the whole sequence, and"
    " --speculate auto drafts nothing",
    "speculate": "speculative decoding: off, ngram, suffix, head, head:FILE, draft:MODEL or auto;"
    " changes the speed, never the output [auto]",
    "suffix_tenants": "tenant whose recent outputs --speculate suffix (and auto) may use for its"
    " drafts; *: every tenant, at most 256 (may be repeated)",
    "defaults": "sampling parameters that are not given: model (what the model states, else the"
    " protocol's), protocol, or greedy (temperature 0)",
    "pooling": "how a text's hidden states become one embedding: mean, cls or last; default: as the"
    " model's files say",
    "quant": "quantise float weights while loading: q8_0 or q4_0; packed: compute AWQ, GPTQ and "
    "compressed-tensors in blocks",
    "check": "verify the KV block accounting after every step",
    "warm_up": "on a GPU: compile the kernels before the first request, not during it; `verbatim"
    " serve` does unless --no-warm-up is given",
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


def flag_name(field: str) -> str:
    return FLAG_NAMES.get(field, "--" + field.replace("_", "-"))


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
