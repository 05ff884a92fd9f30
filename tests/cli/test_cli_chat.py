"""`verbatim chat` through a pipe and through a terminal (a pty)."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_result import Call
from verbatim import LLM, SamplingParams

Spawn = Callable[..., "subprocess.Popen[bytes]"]
SHORT = ("--max-tokens", "6")


def answers(tiny: Path, *asked: str) -> list[str]:
    """The library's answers to the same conversation."""
    result, messages = [], []
    with LLM(tiny) as llm:
        for text in asked:
            messages.append({"role": "user", "content": text})
            result.append(llm.chat(messages, SamplingParams(temperature=0, max_tokens=6)).text)
            messages.append({"role": "assistant", "content": result[-1]})
    return result


def test_a_loop_is_stopped_except_in_beam_search(verbatim: Call) -> None:
    flags = ["--allowed-token-ids", "40", "--max-tokens", "150"]
    result = verbatim("chat", "-q", *flags, stdin="the\n/params num_beams=2 temperature=1\n")
    lines = result.err.splitlines()
    assert lines[0] == (
        "warning: stopped, because the end repeats a run of 1 token; on_loop report lets it "
        "continue"
    )
    assert "num_beams=2" in lines[1]
    assert "on_loop=report" in lines[1]
    let = verbatim("chat", *flags, stdin="/params on_loop=report\nthe\n")
    assert "150 tokens" in let.err


def test_an_answer_that_ends_with_an_error_says_so(verbatim: Call) -> None:
    flags = ["--allowed-token-ids", "40", "--stop-token-ids", "40", "--min-tokens", "1"]
    result = verbatim("chat", "-q", *flags, stdin="the\n/params\n")
    assert result.err.splitlines()[0].startswith("warning: no token is left to draw"), result.err


def test_piped_lines_are_turns_with_history(verbatim: Call, tiny: Path) -> None:
    first = "the cat sat on the mat, and the dog did not mind"  # longer than a KV block
    result = verbatim("chat", *SHORT, stdin=f"{first}\nand the dog\n/stats\n")
    assert result.code == 0
    assert result.out == "".join(answer + "\n" for answer in answers(tiny, first, "and the dog"))
    lines = result.err.strip().splitlines()
    closing = [line for line in lines if line.startswith("6 tokens · ")]
    assert len(closing) == 2
    assert all(len(line) < 80 for line in closing), "one short line per answer"
    assert "from the prefix cache" in lines[-3], (
        "the second turn reuses the first one's keys and values"
    )
    assert "temperature 0 (model: GGUF metadata)" in lines[-2]
    assert "of 8192 tokens of the context" in lines[-1]
    assert " prompt + 6 output tokens" in verbatim("chat", "-v", *SHORT, stdin="the cat\n").err


def test_chat_commands(verbatim: Call, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = [
        "/help",
        "the cat",
        "/reset",
        "the cat",
        f"/save {file}",
        "/params temperature=0.5 seed=3",
        "/params",
        "/set temperature 0.25",
        "/show info",
        "/nope",
        "/quit",
        "never read",
    ]
    result = verbatim("chat", "-q", *SHORT, stdin="\n".join(lines) + "\n")
    assert result.code == 0
    [answer] = answers(tiny, "the cat")
    assert result.out == answer + "\n" + answer + "\n", (
        "after /reset the same question has the same answer"
    )
    record = json.loads(file.read_text())
    assert [m["role"] for m in record["messages"]] == ["user", "assistant"]
    assert record["messages"][1]["content"] == answer
    assert "temperature=0.5" in result.err
    assert "temperature=0.25 seed=3" in result.err
    assert ", context " in result.err
    assert "no command /nope" in result.err
    assert "never read" not in result.out + result.err


@pytest.mark.parametrize("name", ["~no-such-user-here/x", "a\0b", "/no/such/place/x"])
def test_a_file_that_cannot_be_written_does_not_end_the_conversation(
    verbatim: Call, tiny: Path, name: str
) -> None:
    result = verbatim("chat", "-q", *SHORT, stdin=f"/save {name}\nthe cat\n")
    assert result.code == 0
    assert result.err.startswith(f"verbatim: cannot write {name!r}: ")
    assert result.err.count("\n") == 1
    assert result.out == answers(tiny, "the cat")[0] + "\n"


def test_explain_shows_the_last_answer_token_by_token(verbatim: Call) -> None:
    flags = ("--temperature", "1.3", "--max-tokens", "12", "--ignore-eos")
    lines = "/explain\nthe cat\n/explain\n/explain all\n/reset\n/explain\n"
    result = verbatim("chat", "-q", *flags, stdin=lines)
    rows = [line for line in result.out.splitlines() if "  position " in line]
    assert all(" nats" in row for row in rows)
    least, every = rows[:10], rows[10:]
    assert [int(row.split()[0]) for row in every] == list(range(1, 13)), "all: in order"
    chance = [float(re.search(r"  p ([\d.]+) %", row)[1]) for row in rows]  # type: ignore[index]
    assert chance[:10] == sorted(chance[10:])[:10], "the ten least certain tokens come first"
    assert set(least) < set(every)
    assert "the 10 least certain of 12 tokens" in result.err
    assert result.err.count("there is no answer yet") == 2


def test_a_mistyped_command_gets_a_suggestion(verbatim: Call) -> None:
    result = verbatim("chat", "-q", stdin="/expain\n/xyzzy\n/params temperature\n/params xyzzy=1\n")
    assert "no command /expain; did you mean /explain?" in result.err
    assert "no command /xyzzy; /help lists them" in result.err
    assert "such as temperature=0.7" in result.err
    assert "xyzzy: no such parameter; `verbatim run --help-all` lists them" in result.err


def test_system_message(verbatim: Call, tiny: Path) -> None:
    result = verbatim(
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
    assert result.out == "".join(done.text + "\n" for done in wanted)
    assert "purr" in result.err


def test_a_failed_turn_does_not_end_the_conversation(verbatim: Call, tiny: Path) -> None:
    result = verbatim(
        "chat",
        "-q",
        *SHORT,
        "--context",
        "64",
        stdin="x" * 400 + "\n/params top_p=7\n/params top_q=1\nthe cat\n",
    )
    assert result.code == 0
    assert result.out == answers(tiny, "the cat")[0] + "\n"
    errors = [line for line in result.err.splitlines() if line.startswith("verbatim: ")]
    assert len(errors) == 3
    assert "top_p: 7.0 is above 1" in errors[1]
    assert "did you mean" in errors[2]


def test_continuation_lines_and_empty_lines(verbatim: Call, tiny: Path) -> None:
    result = verbatim("chat", "-q", *SHORT, stdin="\n   \nthe cat\\\nand the dog\n")
    assert result.out == answers(tiny, "the cat\nand the dog")[0] + "\n"


def test_triple_quotes_hold_a_message_of_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from verbatim.cli.commands import chat

    typed = iter(['"""first', "", 'a "quoted" \\', 'last"""', '"""', "x", '"""', '"""one"""', "y"])
    loop = chat.ChatLoop.__new__(chat.ChatLoop)
    loop.interactive = True
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    got = [loop._read() for _ in range(4)]
    assert got == ['first\n\na "quoted" \\\nlast', "x", "one", "y"]


class Terminal:
    """A user at a terminal: waits for output and types input."""

    def __init__(self, spawn: Spawn, *words: str) -> None:
        self.master, slave = pty.openpty()
        self.process = spawn(
            *words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.seen = b""

    def read(self) -> bool:
        """Read what is available, waiting a moment for it. False: the other end is closed."""
        if select.select([self.master], [], [], 0.05)[0]:
            try:
                self.seen += os.read(self.master, 4096)
            except OSError:
                return False
        return True

    def wait_for(self, what: bytes) -> None:
        """Wait for output. Has no deadline of its own: the test's timeout applies."""
        while what not in self.seen:
            assert self.read(), f"never saw {what!r} in {self.seen[-2000:]!r}"
        self.seen = self.seen.split(what, 1)[1]

    def interrupt_prompt(self) -> None:
        """Ctrl-C until a new prompt appears. Python prints the prompt shortly before it waits for
        keys, and a signal that arrives between the two is lost until the next one: then the program
        sleeps, with no signal pending and no new prompt. A program that is only slow is running, so
        it gets one signal."""
        while b">>> " not in self.seen:
            self.process.send_signal(signal.SIGINT)
            quiet = 0  # consecutive polls with a sleeping main thread; 10 are 0.5 s
            while b">>> " not in self.seen and quiet < 10:
                assert self.read(), f"the chat ended: {self.seen[-2000:]!r}"
                quiet = quiet + 1 if self.asleep() else 0

    def asleep(self) -> bool:
        """Whether the main thread sleeps and has no pending signal."""
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
        while len(terminal.seen) < 20:  # the answer is being generated
            assert terminal.read()
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(b"cancel")
        terminal.wait_for(b">>> ")
        terminal.interrupt_prompt()  # Ctrl-C at the prompt only clears the line
        terminal.wait_for(b">>> ")
        terminal.type("/params max_tokens=3")
        terminal.wait_for(b"max_tokens=3")
        terminal.wait_for(b">>> ")
        terminal.type("the dog")
        terminal.wait_for(b"3 tokens ")
        terminal.wait_for(b">>> ")
        terminal.type("/quit")
        assert terminal.leave() == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()


def test_a_full_context_offers_to_drop_the_oldest_turns(spawn: Spawn) -> None:
    terminal = Terminal(spawn, "chat", *SHORT, "--context", "128", "--plain")
    try:
        for _ in range(3):  # each line is 48 tokens: two fit, the third does not
            terminal.wait_for(b">>> ")
            terminal.type("x" * 48)
        terminal.wait_for(b"the context is full")
        terminal.wait_for(b"[y/N] ")
        terminal.type("y")
        terminal.wait_for(b"forgot the oldest ")
        terminal.wait_for(b"6 tokens ")
        terminal.type("/quit")
        assert terminal.leave() == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()


def test_ctrl_d_ends_the_chat(spawn: Spawn) -> None:
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
        *("--n=2", "--best-of=1", "--logprobs=0", "--logprobs=1", "--prompt-logprobs=1"),
        *("--explain=1", "--receipt"),
    ],
)
def test_flags_that_chat_does_not_support_are_rejected(verbatim: Call, flag: str) -> None:
    result = verbatim("chat", flag, stdin="hello\n")
    assert (result.code, result.out) == (2, "")
    assert f"{flag.partition('=')[0]}: " in result.err


def test_params_that_chat_does_not_support_are_rejected(verbatim: Call) -> None:
    result = verbatim("chat", "--max-tokens=3", stdin="/params n=2\n/params logprobs=1\nhello\n")
    assert result.err.count("chat does not support it") == 2
    assert result.out.strip()


def test_retry_undo_and_drop(verbatim: Call, tiny: Path) -> None:
    """/retry takes the next seed; /undo and /drop change what the next turn sees."""
    flags = ["-q", *SHORT, "--temperature", "1.5", "--ignore-eos"]
    twice = verbatim("chat", *flags, "--seed", "0", stdin="the cat\n/retry\n")
    seeds = [verbatim("chat", *flags, "--seed", s, stdin="the cat\n").out for s in ("0", "1")]
    assert twice.out == "".join(seeds)
    assert seeds[0] != seeds[1]
    assert "again, with seed 1" in twice.err
    same = verbatim("chat", "-q", *SHORT, stdin="/retry\nthe cat\n/retry\n")
    assert "there is no answer yet" in same.err
    assert "it was not sampled" in same.err
    [first, _] = answers(tiny, "the cat", "the dog")
    undone = verbatim("chat", "-q", *SHORT, stdin="the dog\n/undo\nthe cat\n/undo\n/undo\n")
    assert undone.out.endswith("\n" + first + "\n")
    assert "forgot: the dog" in undone.err
    assert "nothing to undo" in undone.err
    dropped = verbatim("chat", "-q", *SHORT, stdin="the dog\n/drop 3\nthe cat\n/drop x\n")
    assert dropped.out.endswith("\n" + first + "\n")
    assert "forgot the oldest 1 turn; 0 left" in dropped.err
    assert "'x' is not a number of turns" in dropped.err


def test_save_and_load(verbatim: Call, tiny: Path, tmp_path: Path) -> None:
    file, list_file = tmp_path / "a.json", tmp_path / "list.json"
    verbatim("chat", "-q", *SHORT, "--system", "purr", stdin=f"the cat\n/save {file}\n")
    went_on = verbatim("chat", "-q", *SHORT, "--system", "purr", stdin="the cat\nthe dog\n")
    loaded = verbatim("chat", "-q", *SHORT, stdin=f"/load {file}\nthe dog\n")
    assert loaded.out == went_on.out.splitlines()[1] + "\n"
    assert "loaded 1 turn from" in loaded.err
    list_file.write_text(json.dumps(json.loads(file.read_text())["messages"]))
    assert verbatim("chat", "-q", *SHORT, stdin=f"/load {list_file}\nthe dog\n").out == loaded.out
    for content, why in (
        ("[", "it is not JSON"),
        ("[1]", "no list of messages"),
        ('[{"role": "user", "content": "x"}]', "must alternate"),
    ):
        file.write_text(content)
        assert why in verbatim("chat", "-q", stdin=f"/load {file}\n").err
    assert "cannot read '/no/such'" in verbatim("chat", "-q", stdin="/load /no/such\n").err


def test_another_model_in_the_same_chat(verbatim: Call, tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other.gguf"
    copy.write_bytes(tiny.read_bytes())
    lines = ["the cat", "/model /no/such.gguf", f"/model {copy}", "/model", "the dog"]
    result = verbatim("chat", "-q", *SHORT, stdin="\n".join(lines) + "\n")
    assert result.out == "".join(a + "\n" for a in answers(tiny, "the cat", "the dog"))
    assert "no file, directory or model '/no/such.gguf'" in result.err
    assert f"{copy}, context 8192 tokens; the conversation stays" in result.err


def test_a_wrong_model_name_keeps_the_last_answer(verbatim: Call) -> None:
    lines = ["the cat", "/model /no/such.gguf", "/explain 1"]
    result = verbatim("chat", "-q", *SHORT, stdin="\n".join(lines) + "\n")
    assert "position " in result.out
    assert "there is no answer yet" not in result.err


def test_explain_one_token(verbatim: Call) -> None:
    flags = ("--temperature", "1.3", "--max-tokens", "4", "--ignore-eos")
    result = verbatim("chat", "-q", *flags, stdin="the cat\n/explain 2\n/explain 9\n")
    assert result.out.count("position ") == 1
    assert "final p" in result.out
    assert "'9' is not a token of the answer, which has 4" in result.err


def test_a_full_context_says_what_to_do(verbatim: Call) -> None:
    turn = "x" * 48 + "\n"
    lines = turn * 3 + "/drop 2\n" + turn
    result = verbatim("chat", *SHORT, "--context", "128", stdin=lines)
    assert result.err.count("the context is full") == 1
    assert "/drop forgets the oldest turn" in result.err
    assert "forgot the oldest 2 turns; 0 left" in result.err
    assert result.err.count("tokens per second") == 3, "two answers before, one after"


def test_a_first_turn_that_fills_the_context_names_the_flag(verbatim: Call) -> None:
    result = verbatim("chat", "--context", "40", "--on-loop", "report", stdin="the\n")
    assert "where the context ends" in result.err
    assert "a larger --context makes room" in result.err
    assert "/drop" not in result.err


def test_a_pipe_is_utf8_in_every_locale(verbatim: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    want = verbatim("chat", "-q", *SHORT, stdin="caf\u00e9\n")
    raw = io.BytesIO(b"caf\xe9\ncaf\xc3\xa9\r\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="latin-1"))
    result = verbatim("chat", "-q", *SHORT)
    assert result.out == want.out
    assert result.err == "verbatim: stdin: a line is not UTF-8 text (byte 3); convert it first\n"
