"""The thought of a reasoning model in `run` and `chat`: dimmed on a terminal, absent from pipes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cli_result import Call
from verbatim import LLM
from verbatim.testing import (
    THINK_SOURCE,
    FakeBackend,
    ThinkByteTokenizer,
    fake_parts,
    fake_spec,
)
from verbatim.text.chat_template import ChatTemplate

FLAGS = ("--temperature", "1", "--thinking-budget", "6", "--max-tokens", "20", "--ignore-eos")


@pytest.fixture
def thinking(verbatim: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command line with a fake reasoning model that closes its thought at the budget."""
    backend = FakeBackend(fake_spec(vocab=ThinkByteTokenizer.vocab_size), pipeline=True)
    template = ChatTemplate(THINK_SOURCE, "<s>", "</s>")

    def open_llm(flags: Any, *, quiet: bool = False) -> LLM:
        parts = replace(fake_parts(backend), tokenizer=ThinkByteTokenizer(), template=template)
        return LLM.from_parts(parts)

    monkeypatch.setattr("verbatim.cli.open_model.open_llm", open_llm)
    return verbatim


def as_terminal(monkeypatch: pytest.MonkeyPatch, *, colour: bool) -> None:
    monkeypatch.setattr("verbatim.cli.terminal.is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm" if colour else "dumb")
    monkeypatch.delenv("NO_COLOR", raising=False)


def without_dim(text: str) -> str:
    return text.replace("\x1b[2m", "").replace("\x1b[0m", "")


def test_a_pipe_gets_the_answer_alone_and_json_the_thought(thinking: Call) -> None:
    found = thinking("run", "--json", *FLAGS, "hi").json
    assert found["reasoning"]
    assert found["text"]
    assert found["usage"]["reasoning_tokens"] >= 6
    piped = thinking("run", *FLAGS, "hi")
    assert piped.out == found["text"] + "\n"
    assert found["reasoning"] not in piped.err
    assert f"{found['usage']['reasoning_tokens']} of them thought" in piped.err


def test_a_terminal_shows_the_thought_dimmed_before_the_answer(
    thinking: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = thinking("run", "--json", *FLAGS, "hi").json
    as_terminal(monkeypatch, colour=True)
    shown = thinking("run", *FLAGS, "hi")
    assert shown.out == found["text"] + "\n"
    assert shown.err.startswith("\x1b[2m")
    assert without_dim(shown.err).startswith(found["reasoning"] + "\n\n")
    assert thinking("run", "-q", *FLAGS, "hi").err == ""
    as_terminal(monkeypatch, colour=False)
    plain = thinking("run", *FLAGS, "hi").err
    assert plain.startswith(f"<think>\n{found['reasoning']}\n</think>\n")


def test_a_chat_shows_the_thought_and_keeps_it_out_of_the_conversation(
    thinking: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    found = thinking("run", "--json", *FLAGS, "hi").json
    piped = thinking("chat", *FLAGS, stdin="hi\n")
    assert piped.out == found["text"] + "\n"
    assert found["reasoning"] not in piped.err
    as_terminal(monkeypatch, colour=True)
    file = tmp_path / "talk.json"
    shown = thinking("chat", *FLAGS, stdin=f"hi\n/save {file}\n")
    assert without_dim(shown.err).startswith(found["reasoning"] + "\n\n")
    messages = json.loads(file.read_text("utf-8"))["messages"]
    assert messages[1] == {"role": "assistant", "content": found["text"]}


def test_a_thought_that_the_limit_cut_is_named(thinking: Call) -> None:
    cut = thinking("run", "--temperature", "1", "--max-tokens", "3", "--ignore-eos", "hi")
    assert cut.out == "\n"
    assert "the thought was cut after 3 tokens, so there is no answer" in cut.err
