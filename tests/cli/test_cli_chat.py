"""`verbatim chat`, through a pipe and through a terminal (a pty, driven by hand)."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_said import Call

from verbatim import LLM, SamplingParams

Spawn = Callable[..., "subprocess.Popen[bytes]"]
SHORT = ("--max-tokens", "6")


def answers(tiny: Path, *asked: str) -> list[str]:
    """What the library says to the same conversation."""
    said, messages = [], []
    with LLM(tiny) as llm:
        for text in asked:
            messages.append({"role": "user", "content": text})
            said.append(llm.chat(messages, SamplingParams(temperature=0, max_tokens=6)).text)
            messages.append({"role": "assistant", "content": said[-1]})
    return said


def test_a_loop_is_stopped_and_beams_go_without(verbatim: Call) -> None:
    flags = ["--allowed-token-ids", "40", "--max-tokens", "150"]
    said = verbatim("chat", "-q", *flags, stdin="the\n/params num_beams=2 temperature=1\n")
    lines = said.err.splitlines()
    assert (
        lines[0]
        == "warning: stopped, because the end repeats a run of 1 token; /params on_loop=report lets it go on"
    )
    assert "num_beams=2" in lines[1]
    assert "on_loop" not in lines[1]
    let = verbatim("chat", *flags, stdin="/params on_loop=report\nthe\n")
    assert "150 output tokens" in let.err


def test_piped_lines_are_turns_with_history(verbatim: Call, tiny: Path) -> None:
    first = "the cat sat on the mat, and the dog did not mind"  # longer than a cache block
    said = verbatim("chat", *SHORT, stdin=f"{first}\nand the dog\n")
    assert said.code == 0
    assert said.out == "".join(answer + "\n" for answer in answers(tiny, first, "and the dog"))
    closing = said.err.strip().splitlines()
    assert len(closing) == 2
    assert "from the prefix cache" in closing[1], (
        "the second turn reuses the first one's keys and values"
    )


def test_commands(verbatim: Call, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = [
        "/help",
        "the cat",
        "/reset",
        "the cat",
        f"/save {file}",
        "/params temperature=0.5 seed=3",
        "/params",
        "/nope",
        "/quit",
        "never read",
    ]
    said = verbatim("chat", "-q", *SHORT, stdin="\n".join(lines) + "\n")
    assert said.code == 0
    [answer] = answers(tiny, "the cat")
    assert said.out == answer + "\n" + answer + "\n", (
        "after /reset the same question has the same answer"
    )
    record = json.loads(file.read_text())
    assert [m["role"] for m in record["messages"]] == ["user", "assistant"]
    assert record["messages"][1]["content"] == answer
    assert "temperature=0.5" in said.err
    assert "no command /nope" in said.err
    assert "never read" not in said.out + said.err


@pytest.mark.parametrize("name", ["~no-such-user-here/x", "a\0b", "/no/such/place/x"])
def test_a_file_that_cannot_be_written_does_not_end_the_conversation(
    verbatim: Call, tiny: Path, name: str
) -> None:
    said = verbatim("chat", "-q", *SHORT, stdin=f"/save {name}\nthe cat\n")
    assert said.code == 0
    assert said.err.startswith(f"verbatim: cannot write {name!r}: ")
    assert said.err.count("\n") == 1
    assert said.out == answers(tiny, "the cat")[0] + "\n"


def test_explain_shows_the_last_answer_token_by_token(verbatim: Call) -> None:
    flags = ("--temperature", "1.3", "--max-tokens", "6", "--ignore-eos")
    said = verbatim("chat", "-q", *flags, stdin="/explain\nthe cat\n/explain\n/reset\n/explain\n")
    lines = said.out.splitlines()
    rows = [line for line in lines if line.startswith("position ")]
    assert len(rows) == 6, "one line a token, of the one answer there is"
    assert all(" nats" in row for row in rows)
    assert said.err.count("there is no answer yet") == 2


def test_a_command_mistyped_is_named(verbatim: Call) -> None:
    said = verbatim("chat", "-q", stdin="/expain\n/xyzzy\n/params temperature\n/params xyzzy=1\n")
    assert "no command /expain; did you mean /explain?" in said.err
    assert "no command /xyzzy; /help lists them" in said.err
    assert "such as temperature=0.7" in said.err
    assert "xyzzy: no such parameter; `verbatim run --help` lists them" in said.err


def test_system_message(verbatim: Call, tiny: Path) -> None:
    said = verbatim(
        "chat", "-q", *SHORT, "--system", "purr", stdin="/system\nthe cat\n/system bark\nthe cat\n"
    )
    with LLM(tiny) as llm:
        wanted = [
            llm.chat(
                [{"role": "system", "content": s}, {"role": "user", "content": "the cat"}],
                SamplingParams(temperature=0, max_tokens=6),
            )
            for s in ("purr", "bark")
        ]
    assert said.out == "".join(done.text + "\n" for done in wanted)
    assert "purr" in said.err


def test_a_refused_turn_does_not_end_the_conversation(verbatim: Call, tiny: Path) -> None:
    said = verbatim(
        "chat",
        "-q",
        *SHORT,
        "--context",
        "64",
        stdin="x" * 400 + "\n/params top_p=7\n/params top_q=1\nthe cat\n",
    )
    assert said.code == 0
    assert said.out == answers(tiny, "the cat")[0] + "\n"
    errors = [line for line in said.err.splitlines() if line.startswith("verbatim: ")]
    assert len(errors) == 3
    assert "top_p: 7.0 is above 1" in errors[1]
    assert "did you mean" in errors[2]


def test_continuation_lines_and_empty_lines(verbatim: Call, tiny: Path) -> None:
    said = verbatim("chat", "-q", *SHORT, stdin="\n   \nthe cat\\\nand the dog\n")
    assert said.out == answers(tiny, "the cat\nand the dog")[0] + "\n"


class Terminal:
    """A person at a terminal: reads until it sees something, types."""

    def __init__(self, spawn: Spawn, *words: str) -> None:
        self.master, slave = pty.openpty()
        self.process = spawn(
            *words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.seen = b""

    def read(self) -> bool:
        """Read what is there, or wait a moment for it. False: the other end is closed."""
        if select.select([self.master], [], [], 0.05)[0]:
            try:
                self.seen += os.read(self.master, 4096)
            except OSError:
                return False
        return True

    def wait_for(self, what: bytes) -> None:
        """No deadline: a program that never says it runs into the timeout of the test."""
        while what not in self.seen:
            assert self.read(), f"never saw {what!r} in {self.seen[-2000:]!r}"
        self.seen = self.seen.split(what, 1)[1]

    def interrupt_prompt(self) -> None:
        """Ctrl-C until a new prompt appears. Python shows the prompt a moment before it waits for keys, and a
        signal that arrives between the two is lost until the next one: then the program sleeps, with no
        signal pending and no new prompt. A program that is only slow is running, so it gets one signal."""
        while b">>> " not in self.seen:
            self.process.send_signal(signal.SIGINT)
            quiet = 0  # looks in a row at which the main thread slept: 10 are half a second
            while b">>> " not in self.seen and quiet < 10:
                assert self.read(), f"the chat ended: {self.seen[-2000:]!r}"
                quiet = quiet + 1 if self.asleep() else 0

    def asleep(self) -> bool:
        """The main thread waits for something and has no signal to handle."""
        pid = self.process.pid
        file = Path(f"/proc/{pid}/task/{pid}/status")
        if not file.exists():  # not Linux
            return True
        lines = file.read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
        return status["State"].startswith("S") and not pending

    def type(self, line: str) -> None:
        os.write(self.master, line.encode() + b"\n")

    def leave(self) -> int:
        code = self.process.wait()
        os.close(self.master)
        return code


def test_ctrl_c_stops_the_answer_not_the_program(spawn: Spawn) -> None:
    terminal = Terminal(spawn, "chat", "--ignore-eos")
    try:
        terminal.wait_for(b">>> ")
        terminal.type("the cat")
        terminal.wait_for(b"the cat")  # the echo
        terminal.wait_for(b"\n")
        while len(terminal.seen) < 20:  # the answer runs
            assert terminal.read()
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(b"cancel")
        terminal.wait_for(b">>> ")
        terminal.interrupt_prompt()  # at the prompt it only clears the line
        terminal.wait_for(b">>> ")
        terminal.type("/params max_tokens=3")
        terminal.wait_for(b"max_tokens=3")
        terminal.wait_for(b">>> ")
        terminal.type("the dog")
        terminal.wait_for(b"+ 3 output tokens")
        terminal.wait_for(b">>> ")
        terminal.type("/quit")
        assert terminal.leave() == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()


def test_ctrl_d_leaves(spawn: Spawn) -> None:
    terminal = Terminal(spawn, "chat", *SHORT)
    try:
        terminal.wait_for(b">>> ")
        os.write(terminal.master, b"\x04")
        assert terminal.leave() == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()


@pytest.mark.parametrize(
    "flag",
    [
        "--n=2",
        "--best-of=1",
        "--logprobs=0",
        "--logprobs=1",
        "--prompt-logprobs=1",
        "--explain=1",
        "--receipt",
    ],
)
def test_what_a_conversation_does_not_show_is_refused(verbatim: Call, flag: str) -> None:
    said = verbatim("chat", flag, stdin="hello\n")
    assert (said.code, said.out) == (2, "")
    assert flag.lstrip("-").partition("=")[0].replace("-", "_") in said.err


def test_what_a_conversation_does_not_show_is_not_set_either(verbatim: Call) -> None:
    said = verbatim("chat", "--max-tokens=3", stdin="/params n=2\n/params logprobs=1\nhello\n")
    assert said.err.count("chat does not support it") == 2
    assert said.out.strip()
