"""First use: the help of the bare command, and errors that state the cause and the remedy."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_result import Call
from verbatim import LLM, SamplingParams
from verbatim.base.errors import ContextError, ParameterError
from verbatim.cli import main as module

Spawn = Callable[..., "subprocess.Popen[bytes]"]
FULL = Path("/dev/full")


# -------------------------------------------------------------------------------- help, completion


def test_the_bare_command_prints_the_help(verbatim: Call) -> None:
    bare = verbatim()
    assert bare.code == 0
    assert bare.err == ""
    assert bare.out == verbatim("--help").out == verbatim("-h").out
    lines = bare.out.splitlines()
    for title, group in module.GROUPS.items():
        at = lines.index(f"{title}:")
        assert [line.split()[0] for line in lines[at + 1 : at + 1 + len(group)]] == list(group)
    for example in module.EXAMPLES.splitlines():
        assert f"  {example}" in lines, "an example stands on a line of its own, to be copied"
    assert len(module.EXAMPLES.splitlines()) == 3


def test_every_example_names_a_command_and_its_flags() -> None:
    import shlex

    import click

    for example in module.EXAMPLES.splitlines():
        words = shlex.split(example.split("| ")[-1])
        assert words[0] == "verbatim"
        command = module.cli.get_command(click.Context(module.cli), words[1])
        assert command is not None
        command.make_context(words[1], words[2:])  # parsed, not run


def test_a_narrow_terminal_wraps_between_words(spawn: Spawn) -> None:
    code = "import os; os.environ['COLUMNS'] = '40'\nfrom verbatim.cli.main import main\nmain([])"
    process = spawn(code=code, stdout=subprocess.PIPE)
    out, _ = process.communicate()
    described = [line for line in out.decode().splitlines() if "verbatim" not in line]
    assert max(map(len, described)) <= 50


def test_the_shell_can_complete_commands_and_flags(spawn: Spawn) -> None:
    code = (
        "import os\nos.environ.update(_VERBATIM_COMPLETE='bash_complete', COMP_WORDS={words!r},"
        " COMP_CWORD='{n}')\n"
    )
    code += "from verbatim.cli.main import main\nmain([])"
    for words, n, wanted in [
        ("verbatim ex", 1, b"plain,explain"),
        ("verbatim run --max-t", 2, b"plain,--max-tokens"),
    ]:
        process = spawn(code=code.format(words=words, n=n), stdout=subprocess.PIPE)
        out, _ = process.communicate()
        assert out.strip() == wanted
        assert process.returncode == 0


def test_help_works_as_a_command(verbatim: Call) -> None:
    assert verbatim("help").out == verbatim("--help").out
    assert verbatim("help", "run").out == verbatim("run", "--help").out
    assert verbatim("help", "rum").code == 2


def test_a_prompt_without_a_command_gets_a_hint(verbatim: Call) -> None:
    result = verbatim("Why is the sky blue?")
    assert result.code == 2
    assert result.err.endswith("; to send it as a prompt: verbatim run 'Why is the sky blue?'\n")


# -------------------------------------------------------------------------------------- the prompt


@pytest.mark.parametrize("command", ["run", "explain", "score"])
def test_an_empty_prompt_is_rejected(verbatim: Call, command: str) -> None:
    result = verbatim(command, "")
    assert result.code == 2
    assert result.err.startswith(
        "verbatim: text: is empty" if command == "score" else "verbatim: prompt: is empty"
    )
    assert '"-" to read stdin' in result.err
    assert result.out == ""


@pytest.mark.parametrize("command", ["run", "explain", "score"])
def test_two_prompts_are_rejected_and_never_joined(verbatim: Call, command: str) -> None:
    result = verbatim(command, "why is", "the sky blue")
    assert result.code == 2
    assert (
        f"2 arguments were given, and the {'text' if command == 'score' else 'prompt'} is one"
        f" argument; put it in quotes: verbatim {command} 'why is the sky blue'"
    ) in result.err
    assert result.out == ""
    if command == "score":  # run and explain accept the model as their first argument
        assert "-m smollm2" in verbatim(command, "smollm2", "why").err
        assert "-m x.gguf" in verbatim(command, "x.gguf", "why").err
    assert verbatim(command, *["word"] * 100).err.endswith("put it in quotes\n")


def test_a_closed_stdin_is_an_error(spawn: Spawn) -> None:
    code = "import sys; sys.stdin = None\nfrom verbatim.cli.main import main\nmain(['run'])"
    process = spawn(code=code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate()
    assert process.returncode == 2
    assert b"prompt: stdin was empty; type the prompt in quotes" in err


# ------------------------------------------------------------------- full disks and closed streams


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is a thing of Linux")
@pytest.mark.parametrize(
    "words",
    [
        ("run", "--max-tokens", "3", "the"),
        ("run", "--json", "--max-tokens", "3", "the"),
        ("version",),
        (),
    ],
)
def test_a_full_disk_is_reported_as_a_system_error(spawn: Spawn, words: tuple[str, ...]) -> None:
    with FULL.open("wb") as full:
        process = spawn(*words, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate()
    assert process.returncode == 1
    assert err.decode() == (
        "verbatim: cannot write the output: no space left on device; free some space, or write "
        "elsewhere\n"
    )


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is a thing of Linux")
def test_a_closed_stderr_does_not_fail_the_run(spawn: Spawn) -> None:
    with FULL.open("wb") as full:
        process = spawn("run", "--max-tokens", "3", "the", stdout=subprocess.PIPE, stderr=full)
        out, _ = process.communicate()
    assert process.returncode == 0
    assert out


def test_closed_stdout_or_stderr_do_not_crash(spawn: Spawn) -> None:
    """`>&-` and `2>&-` in a shell."""
    for closed in (1, 2):
        kept = {1: {"stderr": subprocess.PIPE}, 2: {"stdout": subprocess.PIPE}}[closed]
        process = spawn(
            "run", "--max-tokens", "3", "the", preexec_fn=lambda fd=closed: os.close(fd), **kept
        )
        out, err = process.communicate()
        assert process.returncode == 0
        assert b"Traceback" not in (err or b"")
        assert closed == 1 or out


# ------------------------------------------------------------------------------------------ errors


def test_a_missing_backend_is_an_error_with_a_remedy(verbatim: Call) -> None:
    result = verbatim("run", "--backend", "cuda", "the")
    assert result.code == 1
    assert result.err == (
        "verbatim: the cuda backend finds no NVIDIA GPU that PyTorch can use; use the backend cpu\n"
    )
    assert (
        verbatim("run", "--backend", "tpu", "the").err
        == "verbatim: --backend: 'tpu' is not one of auto, cpu, cuda, reference\n"
    )


def test_a_directory_without_a_model_is_an_error(
    verbatim: Call, tiny: Path, tmp_path: Path
) -> None:
    result = verbatim("run", "-m", str(tmp_path), "the")
    assert result.code == 3
    assert "a directory needs config.json and *.safetensors to be a model" in result.err
    (tmp_path / "a.gguf").symlink_to(tiny)
    assert (
        f"give the GGUF file itself: {tmp_path / 'a.gguf'}\n"
        in verbatim("run", "-m", str(tmp_path), "the").err
    )


@pytest.mark.parametrize(
    ("tokens", "params", "wanted"),
    [
        (
            32,
            {},
            (
                "32 tokens and the context holds 32, which leaves no room for an answer; shorten "
                "it by at least 1"
            ),
        ),
        (40, {}, "40 tokens and the context holds 32; shorten it by at least 9"),
        (40, {"max_tokens": 5}, "40 tokens and the context holds 32; shorten it by at least 9"),
        (40, {"max_tokens": 0}, "40 tokens and the context holds 32; shorten it by at least 8"),
        (
            30,
            {"max_tokens": 5},
            "needs 35 of a context of 32; shorten the prompt or ask for at most 2",
        ),
    ],
)
def test_a_prompt_beyond_the_context_is_an_error_with_the_numbers(
    tiny: Path, tokens: int, params: dict[str, int], wanted: str
) -> None:
    with LLM(tiny, context=32) as llm, pytest.raises(ContextError) as caught:
        llm.generate([5] * tokens, SamplingParams(**params))  # type: ignore[arg-type]
    assert wanted in str(caught.value)
    assert "at most 0" not in str(caught.value)
    assert caught.value.param == ("max_tokens" if tokens < 32 else "prompt")


def test_a_context_error_advises_only_what_can_help(tiny: Path) -> None:
    with LLM(tiny) as llm, pytest.raises(ParameterError) as caught:
        llm.generate("the", SamplingParams(logprobs=1, n=1024, max_tokens=4000))
    assert str(caught.value).endswith("too many to report; set a lower max_tokens or n")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (
            ("--what-if", "top_k=2", "--n", "2", "--temperature", "1"),
            "needs a single answer; leave out --n",
        ),
        (
            ("--what-if", "top_k=2", "--max-tokens", "65"),
            "records at most 64 tokens; set --max-tokens to that or less",
        ),
        (("--what-if", "top_k=2", "--num-beams", "2"), "leave out --num-beams"),
        (
            ("--what-if", "stop=x"),
            "stop: cannot be changed by a what-if: it does not decide how a token is sampled",
        ),
    ],
)
def test_an_impossible_what_if_fails_before_the_model_runs(
    verbatim: Call, flags: tuple[str, ...], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "verbatim.cli.commands.explain.open_llm",
        lambda *_, **__: pytest.fail("the model was opened"),
    )
    result = verbatim("explain", *flags, "the")
    assert result.code == 2
    assert wanted in result.err


def test_an_invalid_regex_is_an_error_with_its_reason(verbatim: Call) -> None:
    pytest.importorskip("llguidance")
    assert (
        "is not a regular expression: unclosed group, at character 1"
        in verbatim("run", "--regex", "(", "the").err
    )


def test_doctor_lists_each_subject_once(verbatim: Call) -> None:
    lines = verbatim("doctor").out.splitlines()
    assert max(Counter(line[6:18].strip() for line in lines).values()) == 1


@pytest.mark.native
def test_doctor_reports_a_forced_instruction_set_that_is_missing(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doctor once printed `ready (nonesuch by VERBATIM_ISA)` while every run failed."""
    monkeypatch.setenv("VERBATIM_ISA", "nonesuch")
    result = verbatim("doctor")
    assert result.code == 1
    [line] = [line for line in result.out.splitlines() if line.startswith("BAD")]
    assert "VERBATIM_ISA=nonesuch is not one of scalar" in line
    assert "unset it" in line
    version = verbatim("version").out
    assert "ready (nonesuch" not in version
    assert "VERBATIM_ISA=nonesuch is not one of" in version
    monkeypatch.setenv("VERBATIM_ISA", "scalar")
    result = verbatim("doctor")
    assert "ready (scalar by VERBATIM_ISA" in result.out
    assert "BAD" not in result.out


def test_partial_utf8_characters_are_shown_as_bytes(verbatim: Call, tiny: Path) -> None:
    with LLM(tiny) as llm:
        [half] = [
            t for t in range(llm.tokenizer.vocab_size) if llm.tokenizer.token_bytes(t) == b"\xf0"
        ]
    result = verbatim(
        "explain", "--raw", "--brief", "--max-tokens", "1", "--allowed-token-ids", str(half), "the"
    )
    assert rf"'\xf0' ({half})" in result.out
    assert "\n'\\xf0'" not in result.out
    assert result.out.startswith("\n"), "and the text itself, cut inside a character, is empty"


def test_one_token_has_no_perplexity(verbatim: Call) -> None:
    result = verbatim("score", "the")
    assert result.out == "perplexity\tnan\n"
    assert "give a longer text" in result.err


# ------------------------------------------------------------------- locales, homes, odd folders


def c_locale(spawn: Spawn, *words: str | bytes) -> tuple[int, bytes, bytes]:
    """Run the command in an ASCII locale, where Python passes other bytes as lone surrogates."""
    code = (
        "import os, sys\nos.environ.update(LC_ALL='C', PYTHONUTF8='0', PYTHONCOERCECLOCALE='0')\n"
    )
    code += "os.execv(sys.executable, [sys.executable, '-m', 'verbatim', *sys.argv[1:]])"
    process = spawn(*words, code=code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    return process.returncode, out, err


def test_an_ascii_locale_loses_no_characters(spawn: Spawn, verbatim: Call) -> None:
    import json

    flags = (
        *("run", "--json", "--temperature", "2", "--seed", "1", "--max-tokens", "40"),
        "--ignore-eos",
    )
    wanted = verbatim(*flags, "--system", "Grüße", "é → 🙂").json
    code, out, err = c_locale(spawn, *flags, "--system", "Grüße", "é → 🙂")
    assert code == 0, err
    result = json.loads(out)
    assert result["prompt_token_ids"] == wanted["prompt_token_ids"], "the prompt is what was typed"
    assert result["text"] == wanted["text"]
    assert not wanted["text"].isascii(), "the answer has characters that this locale cannot say"
    assert out.isascii()


def test_an_ascii_terminal_gets_plain_notes(spawn: Spawn) -> None:
    code, _, err = c_locale(spawn, "run", "--max-tokens", "3", "the")
    assert code == 0
    assert b"3 tokens, " in err
    assert b"\\" not in err


def test_arguments_that_are_not_utf8_are_rejected(spawn: Spawn) -> None:
    code, _, err = c_locale(spawn, "run", b"\xff\xfe")
    assert code == 2
    assert b"prompt: is not UTF-8 text" in err


def test_a_user_without_a_home_directory(verbatim: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert verbatim("models").code == 0, "VERBATIM_CACHE is set: nothing else is needed"
    monkeypatch.delenv("VERBATIM_CACHE")
    result = verbatim("run", "-m", "smollm2", "the")
    assert result.code == 3
    assert "no home directory" in result.err
    assert "VERBATIM_CACHE" in result.err


def test_doctor_tries_to_write(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VERBATIM_CACHE", str(tmp_path / "file" / "cache"))
    result = verbatim("doctor")
    assert result.code == 1
    [line] = [line for line in result.out.splitlines() if line.startswith("BAD")]
    assert "not writable: Not a directory; set VERBATIM_CACHE to another path" in line
