"""Reasoning of a model in `run` and `chat`: dimmed on a terminal, absent from pipes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cli_result import Call
from verbatim import LLM
from verbatim.cli.commands.run import command as run
from verbatim.cli.lib.command_class import with_values
from verbatim.testing.fakes import (
    THINK_SOURCE,
    FakeBackend,
    ThinkByteTokenizer,
    fake_parts,
    fake_spec,
)
from verbatim.text.templates.chat_template import ChatTemplate

FLAGS = (
    "--temperature",
    "1",
    "--seed",
    "0",
    "--thinking-budget",
    "6",
    "--max-tokens",
    "20",
    "--ignore-eos",
)


@pytest.fixture
def level(verbatim: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command line with a fake reasoning model that closes its reasoning at the budget."""
    backend = FakeBackend(fake_spec(vocab=ThinkByteTokenizer.vocab_size), pipeline=True)
    template = ChatTemplate(THINK_SOURCE, "<s>", "</s>")

    def open_llm(*_: Any, **__: Any) -> LLM:
        loaded = replace(fake_parts(backend), tokenizer=ThinkByteTokenizer(), template=template)
        return LLM.from_loaded(loaded)

    for command in ("run", "chat", "explain", "replay"):
        monkeypatch.setattr(f"verbatim.cli.commands.{command}.open_llm", open_llm)
    return verbatim


def as_terminal(monkeypatch: pytest.MonkeyPatch, *, colour: bool) -> None:
    monkeypatch.setattr("verbatim.cli.lib.terminal.is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm" if colour else "dumb")


def without_dim(text: str) -> str:
    return text.replace("\x1b[2m", "").replace("\x1b[0m", "")


def test_a_pipe_gets_the_answer_alone_and_json_the_reasoning(level: Call) -> None:
    found = level("run", "--json", *FLAGS, "hi").json
    assert found["reasoning"]
    assert found["text"]
    assert found["usage"]["reasoning_tokens"] >= 6
    piped = level("run", "-v", *FLAGS, "hi")
    assert piped.out == found["text"] + "\n"
    assert found["reasoning"] not in piped.err
    assert f"{found['usage']['reasoning_tokens']} of them reasoning" in piped.err


def test_a_terminal_shows_the_reasoning_dimmed_before_the_answer(
    level: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = level("run", "--json", *FLAGS, "hi").json
    as_terminal(monkeypatch, colour=True)
    shown = level("run", *FLAGS, "hi")
    assert shown.out == found["text"] + "\n"
    assert shown.err.startswith("\x1b[2m")
    assert without_dim(shown.err).startswith(found["reasoning"] + "\n\n")
    assert level("run", "-q", *FLAGS, "hi").err == ""
    as_terminal(monkeypatch, colour=False)
    plain = level("run", *FLAGS, "hi").err
    assert plain.startswith(f"<think>\n{found['reasoning']}\n</think>\n")


def test_a_chat_shows_the_reasoning_and_keeps_it_out_of_the_conversation(
    level: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    found = level("run", "--json", *FLAGS, "hi").json
    piped = level("chat", *FLAGS, stdin="hi\n")
    assert piped.out == found["text"] + "\n"
    assert found["reasoning"] not in piped.err
    as_terminal(monkeypatch, colour=True)
    file = tmp_path / "talk.json"
    shown = level("chat", *FLAGS, stdin=f"hi\n/save {file}\n")
    assert without_dim(shown.err).startswith(found["reasoning"] + "\n\n")
    messages = json.loads(file.read_text("utf-8"))["messages"]
    assert messages[1] == {"role": "assistant", "content": found["text"]}


def test_reasoning_that_the_limit_cut_is_named(level: Call) -> None:
    cut = level("run", "--temperature", "1", "--max-tokens", "3", "--ignore-eos", "hi")
    assert cut.out == "\n"
    assert "the reasoning was cut after 3 tokens, so there is no answer" in cut.err


# ---------------------------------------------------------------------------------- the switches

ANSWER = ("--temperature", "1", "--max-tokens", "8", "--ignore-eos")  # no budget: thinking is off


def template_llm(source: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A fake model with this chat template. Returns the template variables of each prompt."""
    seen: list[dict[str, Any]] = []
    backend = FakeBackend(fake_spec(vocab=ThinkByteTokenizer.vocab_size), pipeline=True)
    template = ChatTemplate(source, "<s>", "</s>")

    class Recorded(LLM):
        def encode_chat(self, messages: Any, /, **variables: Any) -> list[int]:
            seen.append(variables)
            return super().encode_chat(messages, **variables)

    def open_llm(*_: Any, **__: Any) -> LLM:
        loaded = replace(fake_parts(backend), tokenizer=ThinkByteTokenizer(), template=template)
        return Recorded.from_loaded(loaded)

    for command in ("run", "chat", "explain", "replay"):
        monkeypatch.setattr(f"verbatim.cli.commands.{command}.open_llm", open_llm)
    return seen


PLAIN = "{{ messages[0].content }}<|assistant|>"
LEVELLED = PLAIN + "{{ reasoning_effort }}<think></think><think>"
ALWAYS = PLAIN + "<think></think><think>"


@pytest.mark.parametrize(
    ("words", "source", "variables"),
    [
        ((), THINK_SOURCE, {}),
        (("--think",), THINK_SOURCE, {"enable_thinking": True}),
        (("--think=true",), THINK_SOURCE, {"enable_thinking": True}),
        (("--no-think",), THINK_SOURCE, {"enable_thinking": False}),
        (("--think=false",), THINK_SOURCE, {"enable_thinking": False}),
        (("--think", "false"), THINK_SOURCE, {"enable_thinking": False}),
        (("--think", "low"), THINK_SOURCE, {"enable_thinking": True}),
        (("--reasoning-effort", "none"), THINK_SOURCE, {"enable_thinking": False}),
        (("--think", "low"), LEVELLED, {"reasoning_effort": "low"}),
        (("--think=high",), LEVELLED, {"reasoning_effort": "high"}),
        (("--reasoning-effort", "medium"), LEVELLED, {"reasoning_effort": "medium"}),
        (("--think", "--reasoning-effort=high"), LEVELLED, {"reasoning_effort": "high"}),
        (("--think",), LEVELLED, {}),
        (("--think",), ALWAYS, {}),
        (("--no-think",), PLAIN, {}),
    ],
)
def test_the_switch_reaches_the_chat_template(
    verbatim: Call,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    source: str,
    variables: dict[str, Any],
) -> None:
    """In `run`, where the prompt may follow the flag; some also in `explain` and in `chat`."""
    seen = template_llm(source, monkeypatch)
    verbatim("run", *ANSWER, *words, "hi there")
    assert seen == [variables]
    if words in ((), ("--no-think",), ("--think", "--reasoning-effort=high")):
        verbatim("explain", "--brief", *ANSWER, *words, "hi there")
        verbatim("chat", *ANSWER, *words, stdin="hi\n")
        assert seen == [variables] * 3


@pytest.mark.parametrize(
    ("words", "source", "error"),
    [
        (("--no-think",), ALWAYS, "--no-think: this model always thinks"),
        (("--think=false",), LEVELLED, "--think: this model always thinks"),
        (("--think",), PLAIN, "--think: this model's chat template has no reasoning"),
        (("--reasoning-effort", "high"), PLAIN, "--reasoning-effort: this model's chat template"),
        (
            ("--think", "--no-think"),
            THINK_SOURCE,
            "--no-think: contradicts --think=true; leave one out",
        ),
        (
            ("--no-think", "--reasoning-effort", "low"),
            THINK_SOURCE,
            "contradicts --no-think; leave",
        ),
        (("--think", "--reasoning-effort", "none"), THINK_SOURCE, "contradicts --think=true"),
        (("--think=maybe",), THINK_SOURCE, "'--think': 'maybe' is not one of 'true', 'false'"),
    ],
)
def test_a_switch_that_the_template_does_not_have_is_refused(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], source: str, error: str
) -> None:
    seen = template_llm(source, monkeypatch)
    for command, stdin in (("run", None), ("chat", "hi\n")):
        arguments = [*ANSWER, *words, *(["hi"] if stdin is None else [])]
        found = verbatim(command, *arguments, stdin=stdin)
        assert found.code == 2
        assert error in found.err
    assert seen == []


def test_a_raw_continuation_has_no_reasoning(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    template_llm(THINK_SOURCE, monkeypatch)
    found = verbatim("run", "--raw", "--no-think", "hi")
    assert found.code == 2
    assert "--no-think: only a chat turn" in found.err


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["--think", "hi"], ["--think=true", "hi"]),
        (["--think", "low", "hi"], ["--think=low", "hi"]),
        (["--think=low", "false"], ["--think=low", "false"]),
        (["hi", "--think"], ["hi", "--think=true"]),
        (["--json", "--think"], ["--json", "--think=true"]),
        (["--system", "--think", "hi"], ["--system", "--think", "hi"]),
        (["--", "--think"], ["--", "--think"]),
    ],
)
def test_the_value_of_another_flag_is_not_a_switch(typed: list[str], read: list[str]) -> None:
    assert with_values(typed, run.params) == read


def test_a_chat_switches_the_reasoning_between_turns(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/think and /nothink, and Ollama's /set think and /set nothink."""
    seen = template_llm(THINK_SOURCE, monkeypatch)
    lines = ["a", "/nothink", "b", "/set think", "c", "/set nothink", "d", "/think low", "e"]
    lines += ["/think off", "f", "/think maybe", "/explain", "/think", "/explain"]
    found = verbatim("chat", *ANSWER, "--think", stdin="\n".join(lines) + "\n")
    on, off = {"enable_thinking": True}, {"enable_thinking": False}
    # /explain repeats the last turn with the switch of that turn
    assert seen == [on, off, on, off, on, off, off, off]
    assert "think=low" in found.err
    assert "'maybe' is not one of true, false" in found.err


def test_a_chat_refuses_a_switch_and_goes_on(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = template_llm(PLAIN, monkeypatch)
    found = verbatim("chat", *ANSWER, stdin="/think\na\n")
    assert "think: this model's chat template has no reasoning" in found.err
    assert seen == [{}]


def test_another_model_without_the_switch_resets_it(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = template_llm(THINK_SOURCE, monkeypatch)

    def reads(self: ChatTemplate, variable: str) -> bool:
        return not seen and variable in self.source

    monkeypatch.setattr(ChatTemplate, "reads", reads)
    found = verbatim("chat", *ANSWER, "--no-think", stdin="a\n/model other\nb\n")
    assert "this model always thinks" in found.err
    assert seen == [{"enable_thinking": False}, {}]


@pytest.mark.parametrize(
    "flags",
    [
        ("--thinking-budget", "6"),
        ("--thinking-budget", "6", "--json-schema", '{"enum": ["x", "y"]}'),
        ("--thinking-budget", "30", "--stop", "e", "--ignore-eos"),
    ],
)
def test_a_receipt_replays_with_the_reasoning_before_structure_and_stop_strings(
    flags: tuple[str, ...], level: Call, tmp_path: Any
) -> None:
    file = str(tmp_path / "receipt.json")
    asked = ("--temperature", "1", "--max-tokens", "60", *flags, "--save-receipt", file)
    assert level("run", "--json", *asked, "hi").json["reasoning"]
    assert json.loads((tmp_path / "receipt.json").read_text())["thinks"] is True
    assert level("replay", file).out == "identical\n"
