"""Exit codes and errors: one line on stderr, the right code, no traceback without --debug."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import click
import pytest

from verbatim.base.errors import (
    BackendError,
    ContextError,
    ModelError,
    OverloadedError,
    ParameterError,
    VerbatimError,
)
from verbatim.cli import main as module


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        module.main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A command that raises the test's exception."""

    def install(error: BaseException) -> None:
        @click.command()
        def command() -> None:
            raise error

        monkeypatch.setattr(import_module("verbatim.cli.commands.version"), "command", command)

    return install


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (VerbatimError("ours"), 1),
        (BackendError("no kernels"), 1),
        (OverloadedError("full"), 1),
        (ParameterError("top_p", "2 is above 1"), 2),
        (ContextError("too long"), 2),
        (ModelError("broken", file="x.gguf"), 3),
        (RuntimeError("bug"), 1),
        (MemoryError(), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
)
def test_exit_codes(
    failing, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:  # type: ignore[no-untyped-def]
    failing(error)
    assert run("version") == code
    result = capsys.readouterr()
    assert result.out == ""
    assert result.err.strip().count("\n") == 0  # click prints a newline after ^C
    assert "Traceback" not in result.err


def test_an_error_with_newlines_is_printed_as_one_line(
    failing, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    failing(ModelError("two\nlines\r\nand a tab\t.", file="evil\nname.gguf"))
    assert run("version") == 3
    assert capsys.readouterr().err == "verbatim: evil name.gguf: two lines and a tab .\n"


def test_debug_shows_the_traceback_at_any_position(
    failing, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    failing(RuntimeError("bug"))
    for words in (["--debug", "version"], ["version", "--debug"]):
        assert run(*words) == 1
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["rum"], "no command 'rum'; did you mean run?"),
        (
            ["run", "--temprature", "1", "x"],
            "no such option '--temprature'; did you mean '--temperature'?",
        ),
        (["xyzzy"], "verbatim --help"),
        (["run", "--top-q", "1", "x"], "'--top-q'"),
        (["run", "--top-k", "many", "x"], "--top-k"),
        (["run", "--on-loop", "explode", "x"], "--on-loop"),
        (["score", "--top", "-1", "x"], "--top"),
        (["run", "--top-p", "7", "x"], "--top-p: 7.0 is above 1"),
        (["run", "--raw", "--system", "x", "y"], "system"),
        (["run", "--logprobs", "2", "x"], "add --json"),
        (["chat", "--n", "2"], "n: "),
        (["convert", "a", "b.bin"], ".gguf"),
        (["bench", "--plot", "x.pdf"], "plot"),
        (["bench", "--contexts", "a,b"], "contexts"),
    ],
)
def test_a_wrong_command_or_flag_exits_with_2_and_names_it(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    result = capsys.readouterr().err
    assert hint in result
    assert result.startswith("verbatim: ")
    assert result.count("\n") == 1


@pytest.mark.parametrize("processors", [2, 48])
def test_too_many_threads_are_rejected_with_the_limit(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verbatim.base.config import EngineConfig
    from verbatim.base.errors import ParameterError

    monkeypatch.setattr("os.cpu_count", lambda: processors)
    most = 64 if processors == 2 else 192
    EngineConfig(threads=most)
    with pytest.raises(
        ParameterError,
        match=f"9999 is more than the {most} .* this machine has {processors} processors",
    ) as raised:
        EngineConfig(threads=9999)
    assert "four for each" not in str(raised.value)


@pytest.mark.parametrize("model", ["/no/such.gguf", "no-such-name", "../x", ""])
def test_a_missing_model_exits_with_3(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "--offline", "--model", model, "hi") == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_every_command_has_help() -> None:
    for name in module.COMMANDS:
        command = module.cli.get_command(click.Context(module.cli), name)
        assert command is not None, name
        assert command.help, name


def test_help_imports_no_command() -> None:
    """`verbatim --help` imports neither NumPy nor the commands, so it is instant."""
    code = (
        "import sys; from verbatim.cli.main import main\ntry: main(['--help'])\n"
        "except SystemExit: pass\n"
    )
    code += (
        "print([m for m in ('numpy', 'rich', 'tokenizers', 'verbatim.cli.commands.run') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_python_dash_m_runs_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verbatim", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("verbatim ")


def test_a_closed_stdin_is_an_empty_one() -> None:
    """`verbatim … <&-`. The null device takes descriptor 0: a socket there aborts uvloop."""
    code = "import os; os.close(0); import sys; sys.stdin = None; import verbatim.cli.main as m\n"
    code += "m.cli = m.click.command()(lambda: print(os.fstat(0).st_rdev == os.stat('/dev/null')"
    code += ".st_rdev, repr(sys.stdin.buffer.read())))\nm.main([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True b''\n"), done.stderr
