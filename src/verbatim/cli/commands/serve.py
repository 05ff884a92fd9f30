"""`verbatim serve`: runs the HTTP server with settings from flags and environment. Exits with 0
after SIGTERM or Ctrl-C, when the drain has ended every stream."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from verbatim.base.config import SETTINGS, EngineConfig, served
from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonObject
from verbatim.cli.config_file import MODEL_NAME, ConfiguredCommand, print_settings, read_config
from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.error_lines import missing_extra
from verbatim.cli.lib.options import (
    Values,
    all_of,
    engine_of,
    engine_options,
    engine_value,
    fake_engine_option,
    given_of,
    model_or_default,
    ray_options,
    record_flags,
    several_model_options,
)
from verbatim.server.http.api_keys import read_keys
from verbatim.server.settings import Limits, NamedModel, Settings

# Flags of one server: values arrive by the names of Settings, and as `l_<name>` of Limits.
server_options = all_of(
    *record_flags(Settings, "", "Options"),
    ray_options("engines", "engines behind this server; MIN-MAX scales with the load"),
    *record_flags(Limits, "l_", "Limits"),
)


@as_command(
    fake_engine_option,
    server_options,
    several_model_options,
    engine_options(),
    cls=ConfiguredCommand,
)
def command(
    name: str | None = argument("[MODEL]"),
    config: str | None = flag(
        "TOML file of settings; --max-queue is VERBATIM_MAX_QUEUE, or max_queue in the file",
        metavar="FILE",
        is_eager=True,
        callback=read_config,
    ),
    print_config: bool = flag("print each setting and its origin as such a file, and exit"),
    names: tuple[str, ...] = flag(
        "name that clients may use for the model, such as llama3.2",
        "--served-model-name",
        metavar="NAME",
    ),
    pinned: tuple[str, ...] = flag(
        "of several models: load this one at the start and never unload it", "--pin", metavar="NAME"
    ),
    model_settings: tuple[str, ...] = flag(
        "engine setting of one of several models, such as code.context=4096",
        "--model-setting",
        metavar="NAME.KEY=VALUE",
    ),
    *,
    ray: str | None,
    replicas: str | None,
    **flags: Any,
) -> int:
    """Serve OpenAI's, Anthropic's and Ollama's APIs over HTTP until SIGTERM or Ctrl-C.

    HTTP and the engine are two processes: an engine that dies is restarted, and HTTP stays up.
    """
    model, models = _models_of(name, flags, pinned, model_settings)
    if models and names:
        raise ParameterError("served_model_name", "belongs to one model; write --model NAME=MODEL")
    settings = Settings(
        model=model,
        models=models,
        served_names=names,
        engine=served(engine_of(flags)),
        keys=read_keys(flags["api_key_file"]),
        **{name: flags[name] for name in ("revision", "offline", "test_engine")},
        limits=Limits(**given_of(Limits, flags, "l_")),
        **given_of(Settings, flags, ""),
    )
    if print_config:
        print_settings(click.get_current_context(), name)
        return 0
    return _serve(settings, ray, replicas)


def _serve(settings: Settings, ray: str | None, replicas: str | None) -> int:
    run = _server()
    if ray is None:
        if replicas is not None:
            raise ParameterError("replicas", "needs --ray; one server has one engine")
        return run(settings)
    if settings.verbose:
        raise ParameterError("verbose", "works without --ray; replicas log no prefills")
    from verbatim.scale.deploy import serve_on_ray
    from verbatim.scale.ray_options import RayOptions, parse_address, parse_replicas

    return serve_on_ray(settings, RayOptions(parse_address(ray), parse_replicas(replicas or 1)))


def _server() -> Callable[[Settings], int]:
    try:
        from verbatim.server.http_process import run
    except ImportError as error:
        raise missing_extra("the server", error) from None
    return run


def _models_of(
    name: str | None, flags: Values, pinned: tuple[str, ...], settings: tuple[str, ...]
) -> tuple[str, tuple[NamedModel, ...]]:
    """(the model, all models); of a single one without NAME=: (it, none)."""
    models = read_models(name, flags["model"], pinned, settings)
    model = models[0].model
    if len(models) == 1 and not models[0].name and not (pinned or settings):
        return model, ()
    from verbatim.hub.catalog import check_known

    if not flags["test_engine"]:
        for named in models:
            check_known(named.model)
    return model, models


NAMED = re.compile(rf"({MODEL_NAME})=(.+)")


def read_models(
    positional: str | None,
    given: tuple[str, ...],
    pinned: tuple[str, ...],
    model_settings: tuple[str, ...],
) -> tuple[NamedModel, ...]:
    """The models to serve, in order. A single one without NAME= has the name ""."""
    if positional and len(given) == 1 and given[0] != positional and "=" not in given[0]:
        why = f"{positional!r} and --model {given[0]!r} contradict each other"
        remedy = "for several models write --model NAME=MODEL for each"
        raise ParameterError("model", f"{why}; {remedy}")
    if positional and positional not in given:
        given = (positional, *given)
    if not given:
        return (NamedModel("", model_or_default(None)),)
    several = len(given) > 1
    models: dict[str, str] = {}
    for text in given:
        match = None if Path(text).expanduser().exists() else NAMED.fullmatch(text)
        name, model = (match[1], match[2]) if match else (text if several else "", text)
        if name in models:
            why = f"two models have the name {name!r}; write NAME=MODEL with another name"
            raise ParameterError("model", why)
        models[name] = model
    settings: dict[str, JsonObject] = {name: {} for name in models}
    for text in model_settings:
        name, key, value = _model_setting(text, tuple(models))
        earlier = settings[name].get(key, ())
        if key in settings[name] and not isinstance(value, tuple):
            raise ParameterError("model_setting", f"{name}.{key} is given twice; give it once")
        settings[name][key] = (*earlier, *value) if isinstance(value, tuple) else value
    for name, own in settings.items():
        try:
            EngineConfig(**own)
        except ParameterError as error:
            raise ParameterError("model_setting", f"{name}.{error.message}") from None
    for name in pinned:
        if name not in models:
            why = f"no model has the name {name!r}; there are {', '.join(models)}"
            raise ParameterError("pin", why)
    return tuple(
        NamedModel(name, model, settings[name], name in pinned) for name, model in models.items()
    )


def _model_setting(text: str, names: tuple[str, ...]) -> tuple[str, str, Any]:
    """code.context=4096 -> ("code", "context", 4096)."""
    where, equals, value = text.partition("=")
    name, dot, key = where.rpartition(".")
    key = key.replace("-", "_")
    if not (equals and dot) or key not in SETTINGS:
        why = f"{text!r} is not NAME.KEY=VALUE with an engine setting as KEY"
        raise ParameterError("model_setting", why)
    if name not in names:
        why = f"no model has the name {name!r}; there are {', '.join(names)}"
        raise ParameterError("model_setting", why)
    return name, key, engine_value(key, value)
