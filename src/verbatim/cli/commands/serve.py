"""`verbatim serve`: runs the HTTP server with settings from flags and environment. Exits with 0
after SIGTERM or Ctrl-C, when the drain has ended every stream."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from verbatim.base.config import SETTINGS, EngineConfig, served
from verbatim.base.errors import BackendError, ParameterError
from verbatim.cli.lib.options import (
    DEFAULT_MODEL,
    Command,
    Option,
    engine_of,
    engine_options,
    engine_value,
    several_model_options,
)

if TYPE_CHECKING:
    from verbatim.server.settings import NamedModel

F = TypeVar("F", bound=Callable[..., Any])


def limit_options(command: F) -> F:
    """Add one flag per limit. Values arrive as `l_<name>`; None: not given."""
    from verbatim.server.settings import Limits

    for field in reversed(fields(Limits)):
        kind = float if isinstance(field.default, float) else int
        default = field.default if kind is int else format(field.default, "g")
        text = f"{field.metadata['help']} [{default}]"
        flag, dest = "--" + field.name.replace("_", "-"), "l_" + field.name
        command = click.option(
            flag,
            dest,
            type=kind,
            default=None,
            cls=Option,
            section="Limits",
            help=text,
            metavar="N",
        )(command)
    return command


@click.command(cls=Command)
@click.argument("name", required=False, metavar="[MODEL]")
@click.option(
    "--host",
    cls=Option,
    default="127.0.0.1",
    help="address to listen on; beyond loopback a key is needed [127.0.0.1]",
)
@click.option("--port", cls=Option, default=8000, type=int, help="port to listen on; 0: any [8000]")
@click.option(
    "--served-model-name",
    "names",
    cls=Option,
    multiple=True,
    metavar="NAME",
    help="name that clients may use for the model, such as llama3.2 (may be repeated)",
)
@click.option(
    "--pin",
    "pinned",
    cls=Option,
    multiple=True,
    metavar="NAME",
    help="of several models: load this one at the start and never unload it (may be repeated)",
)
@click.option(
    "--model-setting",
    "model_settings",
    cls=Option,
    multiple=True,
    metavar="NAME.KEY=VALUE",
    help="engine setting of one of several models, such as code.context=4096 (may be repeated)",
)
@click.option(
    "--max-loaded-models",
    cls=Option,
    default=0,
    type=int,
    metavar="N",
    help="of several models: maximum number loaded at once; 0: as many as fit in memory [0]",
)
@click.option(
    "--model-idle-seconds",
    cls=Option,
    default=0.0,
    type=float,
    help="of several models: unload one after this time without a request; 0: never [0]",
)
@click.option(
    "--api-key-file",
    cls=Option,
    metavar="FILE",
    help="API keys, one per line; VERBATIM_API_KEY adds one",
)
@click.option(
    "--allow-host",
    cls=Option,
    multiple=True,
    metavar="NAME",
    help="further name accepted in the Host header",
)
@click.option(
    "--cors-origin",
    cls=Option,
    multiple=True,
    metavar="ORIGIN",
    help="origin allowed to call from a browser; default: none",
)
@click.option("--tls-cert", cls=Option, metavar="FILE", help="certificate chain (PEM)")
@click.option("--tls-key", cls=Option, metavar="FILE", help="its private key (PEM)")
@click.option(
    "--drain-seconds",
    cls=Option,
    default=30.0,
    type=float,
    help="time for running requests to finish after SIGTERM [30]",
)
@click.option(
    "--keepalive-seconds",
    cls=Option,
    default=15.0,
    type=float,
    help="silence of a stream after which it sends a keep-alive comment [15]",
)
@click.option(
    "--engine-silence-seconds",
    cls=Option,
    default=60.0,
    type=float,
    help="time without heartbeat or progress until the engine is killed [60]",
)
@click.option(
    "--backoff-seconds",
    cls=Option,
    default=0.5,
    type=float,
    help="wait before a dead engine is restarted; doubles each time [0.5]",
)
@click.option(
    "--backoff-limit",
    cls=Option,
    default=30.0,
    type=float,
    help="maximum wait before a restart [30]",
)
@click.option(
    "--store-items",
    cls=Option,
    default=1000,
    type=int,
    help="answers kept in memory, for previous_response_id; 0 keeps none [1000]",
)
@click.option(
    "--log-format",
    cls=Option,
    type=click.Choice(["text", "json"]),
    default="text",
    help="format of the log on stderr [text]",
)
@click.option(
    "--log-prompts",
    cls=Option,
    is_flag=True,
    help="write request bodies to the log; without it no prompt text is ever logged",
)
@click.option(
    "-v",
    "--verbose",
    cls=Option,
    is_flag=True,
    help="also log the progress of long prefills",
)
@click.option(
    "--test-engine",
    cls=Option,
    default="",
    hidden=True,
    help="tests: an engine of verbatim.testing.fakes instead of a model",
)
@click.option(
    "--ray",
    cls=Option,
    section="Replicas",
    is_flag=False,
    flag_value="local",
    default=None,
    metavar="[ADDRESS]",
    help="run the engines on Ray: HOST:PORT, auto (this machine's cluster), or a new local one",
)
@click.option(
    "--replicas",
    cls=Option,
    section="Replicas",
    default=None,
    metavar="N|MIN-MAX",
    help="engines behind this server; MIN-MAX scales with the load; needs --ray [1]",
)
@limit_options
@several_model_options
@engine_options
def command(
    name: str | None,
    names: tuple[str, ...],
    pinned: tuple[str, ...],
    model_settings: tuple[str, ...],
    api_key_file: str | None,
    **flags: Any,
) -> int:
    """Serve OpenAI's, Anthropic's and Ollama's APIs over HTTP until SIGTERM or Ctrl-C.

    HTTP and the engine are two processes: an engine that dies is restarted, and HTTP stays up.
    """
    try:
        from verbatim.server.http_process import run
        from verbatim.server.settings import Limits, Settings
    except ImportError as error:
        raise BackendError(
            f"the server needs {error.name}; install the extra 'server': "
            "pip install '.[server]' in the checkout"
        ) from None
    models = read_models(name, flags["model"], pinned, model_settings)
    if len(models) == 1 and not models[0].name and not (pinned or model_settings):
        model, models = models[0].model, ()
    else:
        model = models[0].model
    if models and not flags["test_engine"]:
        from verbatim.hub.catalog import check_known

        for named in models:
            check_known(named.model)
    if models and names:
        raise ParameterError("served_model_name", "belongs to one model; write --model NAME=MODEL")
    limits = {
        f.name: flags["l_" + f.name] for f in fields(Limits) if flags["l_" + f.name] is not None
    }
    settings = Settings(
        model=model,
        models=models,
        max_loaded_models=flags["max_loaded_models"],
        model_idle_seconds=flags["model_idle_seconds"],
        served_names=names,
        engine=served(engine_of(flags)),
        revision=flags.get("revision"),
        offline=bool(flags.get("offline")),
        host=flags["host"],
        port=flags["port"],
        keys=read_keys(api_key_file),
        allowed_hosts=flags["allow_host"],
        cors_origins=flags["cors_origin"],
        tls_cert=flags["tls_cert"],
        tls_key=flags["tls_key"],
        drain_seconds=flags["drain_seconds"],
        keepalive_seconds=flags["keepalive_seconds"],
        engine_silence_seconds=flags["engine_silence_seconds"],
        backoff_seconds=flags["backoff_seconds"],
        backoff_limit=flags["backoff_limit"],
        store_items=flags["store_items"],
        log_format=flags["log_format"],
        log_prompts=flags["log_prompts"],
        verbose=flags["verbose"],
        test_engine=flags["test_engine"],
        limits=Limits(**limits),
    )
    if flags["ray"] is None:
        if flags["replicas"] is not None:
            raise ParameterError("replicas", "needs --ray; one server has one engine")
        return run(settings)
    if flags["verbose"]:
        raise ParameterError("verbose", "works without --ray; replicas log no prefills")
    from verbatim.scale.deploy import serve_on_ray
    from verbatim.scale.ray_options import RayOptions, parse_address, parse_replicas

    replicas = parse_replicas(flags["replicas"] or 1)
    return serve_on_ray(settings, RayOptions(parse_address(flags["ray"]), replicas))


NAMED = re.compile(r"([\w.:+-]+)=(.+)")


def read_models(
    positional: str | None,
    given: tuple[str, ...],
    pinned: tuple[str, ...],
    model_settings: tuple[str, ...],
) -> tuple[NamedModel, ...]:
    """The models to serve, in order. A single one without NAME= has the name ""."""
    from verbatim.server.settings import NamedModel

    if positional and len(given) == 1 and given[0] != positional and "=" not in given[0]:
        raise ParameterError(
            "model",
            f"{positional!r} and --model {given[0]!r} contradict each other; for several models"
            " write --model NAME=MODEL for each",
        )
    if positional and positional not in given:
        given = (positional, *given)
    if not given:
        return (NamedModel("", os.environ.get("VERBATIM_MODEL", DEFAULT_MODEL)),)
    several = len(given) > 1
    models: dict[str, str] = {}
    for text in given:
        match = None if Path(text).expanduser().exists() else NAMED.fullmatch(text)
        name, model = (match[1], match[2]) if match else (text if several else "", text)
        if name in models:
            raise ParameterError(
                "model", f"two models have the name {name!r}; write NAME=MODEL with another name"
            )
        models[name] = model
    settings: dict[str, dict[str, Any]] = {name: {} for name in models}
    for text in model_settings:
        name, key, value = _model_setting(text, tuple(models))
        earlier = settings[name].get(key, ())
        if key in settings[name] and not isinstance(value, tuple):
            raise ParameterError("model_setting", f"{name}.{key} is given twice; give it once")
        settings[name][key] = (*earlier, *value) if isinstance(value, tuple) else value
    for name in pinned:
        if name not in models:
            raise ParameterError(
                "pin", f"no model has the name {name!r}; there are {', '.join(models)}"
            )
    return tuple(
        NamedModel(name, model, settings[name], name in pinned) for name, model in models.items()
    )


def _model_setting(text: str, names: tuple[str, ...]) -> tuple[str, str, Any]:
    """code.context=4096 -> ("code", "context", 4096)."""
    where, equals, value = text.partition("=")
    name, dot, key = where.rpartition(".")
    key = key.replace("-", "_")
    if not (equals and dot) or key not in SETTINGS:
        raise ParameterError(
            "model_setting", f"{text!r} is not NAME.KEY=VALUE with an engine setting as KEY"
        )
    if name not in names:
        raise ParameterError(
            "model_setting", f"no model has the name {name!r}; there are {', '.join(names)}"
        )
    parsed = engine_value(key, value)
    EngineConfig(**{key: parsed})
    return name, key, parsed


def read_keys(path: str | None) -> tuple[str, ...]:
    """API keys from the file and the environment. A file without keys is an error: the server would
    otherwise run without access control."""
    keys = [key for key in os.environ.get("VERBATIM_API_KEY", "").split() if key]
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError):
            raise ParameterError(
                "api_key_file", f"{path} cannot be read as text; check its path and encoding"
            ) from None
        found = [
            line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")
        ]
        if not found:
            raise ParameterError("api_key_file", f"{path} contains no key; put one on a line")
        keys += found
    return tuple(dict.fromkeys(keys))
