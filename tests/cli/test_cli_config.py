"""Settings of `verbatim serve`: a flag, else a variable, else the file, else the default; errors
name what was written; the text of --print-config can be fed back."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from cli_result import CliResult
from verbatim.cli.commands.serve import command, read_models
from verbatim.cli.config_file import options_of, source
from verbatim.cli.main import main

Serve = Callable[..., CliResult]
MODELS = """
[models.chat]
model = "smollm2"
pin = true
context = 512
adapter = ["sql=a.gguf", "x=b.gguf"]
[models.code]
model = "a b/coder.gguf"
cache_dir = "d"
cache_dir_size = "2G"
"""


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., click.Context]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VERBATIM_MODEL", raising=False)

    def make(*args: str, file: str = "") -> click.Context:
        Path("v.toml").write_text(file)
        return command.make_context("serve", [*args, "--config", "v.toml"])

    return make


def shown(ctx: click.Context, key: str) -> tuple[object, str]:
    option = options_of(command)[key]
    return ctx.params[str(option.name)], str(getattr(source(ctx, option), "name", None))


def test_every_flag_is_a_variable_and_a_key() -> None:
    options = options_of(command)
    flags = {
        name
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden
        for name in param.opts
        if name.startswith("--") and name not in getattr(param, "aliases", ())
    }
    assert {f"--{key.replace('_', '-')}" for key in options} == flags - {"--print-config"}
    assert all(option.envvar == f"VERBATIM_{key.upper()}" for key, option in options.items())


@pytest.mark.parametrize(
    ("key", "flag", "variable", "file", "values"),
    [
        ("max_queue", "--max-queue=1", "2", "3", (1, 2, 3)),
        ("log_prompts", "--no-log-prompts", "true", "false", (False, True, False)),
        ("body_seconds", "--body-seconds=1", "2.5", "3", (1.0, 2.5, 3.0)),
        ("kv_memory", "--kv-memory=1G", "2G", '"3G"', ("1G", "2G", "3G")),
        ("allow_host", "--allow-host=a", "b c", '["d e"]', (("a",), ("b", "c"), ("d e",))),
        ("model", "--model=a", "b c", '"d"', (("a",), ("b c",), ("d",))),
    ],
)
def test_a_flag_comes_before_its_variable_and_that_before_the_file(
    context: Callable[..., click.Context],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    flag: str,
    variable: str,
    file: str,
    values: tuple[object, ...],
) -> None:
    text = f"{key} = {file}"
    assert shown(context(file=text), key) == (values[2], "DEFAULT_MAP")
    monkeypatch.setenv(f"VERBATIM_{key.upper()}", variable)
    assert shown(context(file=text), key) == (values[1], "ENVIRONMENT")
    assert shown(context(flag, file=text), key) == (values[0], "COMMANDLINE")
    monkeypatch.delenv(f"VERBATIM_{key.upper()}")
    assert shown(context(), key)[1] == "DEFAULT"


def test_a_variable_of_kubernetes_is_no_setting(
    context: Callable[..., click.Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERBATIM_PORT", "tcp://10.0.0.1:8000")
    assert shown(context(), "port") == (None, "DEFAULT")


def test_the_tables_of_models_are_the_flags(context: Callable[..., click.Context]) -> None:
    values = context(file=MODELS).params
    chat, code = read_models(None, values["model"], values["pinned"], values["model_settings"])
    assert (chat.name, chat.model, chat.pinned) == ("chat", "smollm2", True)
    assert chat.engine == {"context": 512, "adapters": ("sql=a.gguf", "x=b.gguf")}
    assert (code.name, code.model, code.pinned) == ("code", "a b/coder.gguf", False)
    assert code.engine == {"cache_dir": "d", "cache_dir_size": 2 << 30}


def test_models_named_elsewhere_replace_those_of_the_file(
    context: Callable[..., click.Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("model", "pinned", "model_settings")
    for values in (context("one", file=MODELS).params, context("one", file='model="x"').params):
        assert [values[key] for key in keys] == [(), (), ()]
    values = context("-m", "a=x", "-m", "b=y", "--pin", "b", file=MODELS).params
    assert [values[key] for key in keys] == [("a=x", "b=y"), ("b",), ()]
    values = context("-m", "a=x", "-m", "b=y", file='pin = "b"').params
    assert [values[key] for key in keys] == [("a=x", "b=y"), ("b",), ()]
    monkeypatch.setenv("VERBATIM_MODEL", "z")
    assert [context("one", file=MODELS).params[key] for key in keys] == [(), (), ()]
    assert [context(file=MODELS).params[key] for key in keys] == [("z",), (), ()]


@pytest.fixture
def serve(
    context: Callable[..., click.Context], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Run `verbatim serve --print-config`."""

    def run(*args: str, file: str = "") -> tuple[object, str, str]:
        Path("v.toml").write_text(file)
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--print-config", "--config", "v.toml", *args])
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("max_quue = 1", "max_quue: is no setting; did you mean max_queue?"),
        ("max-queue = 1", "max-queue: is no setting; did you mean max_queue?"),
        ('config = "x"', "config: is no setting; `verbatim serve --print-config` lists them"),
        ('max_queue = "a"', 'max_queue: "a" is not a whole number'),
        ("max_queue = true", "max_queue: true is not a whole number"),
        ("host = 1", "host: 1 is not a string"),
        ("allow_host = [1]", "allow_host: [1] is not a string or a list of them"),
        ("log_prompts = 1", "log_prompts: 1 is not true or false"),
        ("max_queue = -1", "max_queue: -1 is below 0"),
        ("drain_seconds = -1", "drain_seconds: -1.0 is below 0"),
        ("port = 70000", "port: 70000 is not a port (0 to 65535)"),
        ('log_format = "x"', "log_format: 'x' is not one of text, json"),
        ('kv_memory = "3X"', "kv_memory: '3X' is not a size such as 512M or 2G"),
        ("x\n", "is not TOML: Expected '=' after a key in a key/value pair (at line 1, column 2)"),
        ("models = 3", "models: has no table; write [models.NAME] for each model"),
        ("[models.a]", "models.a.model: is required"),
        ('[models."a b"]', "models.a b: is not a table [models.NAME] of a plain name"),
        ('[models.a]\nmodel = "x"\ncontex = 1', "models.a.contex: is no setting; did you mean"),
        ('[models.a]\nmodel = "x"\ncontext = 0', "v.toml:model_setting: a.context: 0 is below 1"),
        ('[models.a]\nmodel = "x"\ncontext = "4"', 'context: "4" is not a whole number'),
        ('[models.a]\nmodel = "x"\nkv_memory = "3X"', "models.a.kv_memory: '3X' is not a size"),
        ('model = "a"\n[models.b]\nmodel = "x"', "model: and [models.NAME] contradict each other"),
    ],
)
def test_an_error_names_the_file_the_key_and_the_rule(serve: Serve, file: str, why: str) -> None:
    code, _, err = serve(file=file)
    assert code == 2
    assert why in err
    assert "v.toml" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("VERBATIM_PORT", "abc", "'abc' is not a valid integer"),
        ("VERBATIM_MAX_QUEUE", "-1", "VERBATIM_MAX_QUEUE: -1 is below 0"),
    ],
)
def test_an_error_names_the_variable(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    monkeypatch.setenv(name, value)
    code, _, err = serve()
    assert (code, name in err, why in err) == (2, True, True), err


def test_the_printed_settings_have_origins_and_can_be_fed_back(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERBATIM_MAX_QUEUE", "9")
    monkeypatch.setenv("VERBATIM_API_KEY", "a-secret-key")
    Path("a b").mkdir()
    Path("a b/coder.gguf").touch()
    file = 'cors_origin = ["https://a.example", "ü"]\nmax_queue = 8\n' + MODELS
    code, out, err = serve("--port", "0", "--kv-memory", "2G", "--no-prefix-cache", file=file)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for line in (
        "port = 0  # flag --port",
        "max_queue = 9  # VERBATIM_MAX_QUEUE",
        'pin = ["chat"]  # v.toml:pin',
        'kv_memory = "2G"  # flag --kv-memory',
        'cors_origin = ["https://a.example", "ü"]  # v.toml:cors_origin',
        "# max_prompts = 128  # default",
        "# threads is not set",
        "prefix_cache = false  # flag --no-prefix-cache",
        "# VERBATIM_API_KEY is set; keys are not printed",
    ):
        assert line in lines, line
    assert "secret" not in out
    monkeypatch.delenv("VERBATIM_MAX_QUEUE")
    _, again, _ = serve(file=out)
    assert tomllib.loads(again) == tomllib.loads(out)
    assert len(again.splitlines()) == len(lines)
    _, out, _ = serve("phi3:mini")
    assert 'model = "phi3:mini"  # argument' in out
