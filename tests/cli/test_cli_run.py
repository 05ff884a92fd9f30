"""`verbatim run` and `score`: what goes to stdout, what to stderr, and that flags reach the engine."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_said import Call

from verbatim import LLM, SamplingParams

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def llm(tiny: Path):  # type: ignore[no-untyped-def]
    with LLM(tiny) as opened:
        yield opened


def test_piped_output_is_the_text_and_nothing_else(verbatim: Call, llm: LLM) -> None:
    said = verbatim("run", "the cat", "--max-tokens", "12")
    whole = llm.chat([{"role": "user", "content": "the cat"}], SamplingParams(temperature=0, max_tokens=12))
    assert said.code == 0
    assert said.out == whole.text + "\n"
    assert f"{whole.usage.prompt_tokens} prompt + {whole.usage.output_tokens} output tokens" in said.err
    assert "first token" in said.err
    assert "tokens/s" in said.err
    assert whole.finish_reason in said.err
    assert "seed" not in said.err  # temperature 0: there is no draw
    assert "\x1b" not in said.out + said.err


def test_the_same_answer_every_time(verbatim: Call) -> None:
    assert verbatim("run", "a dog", "--max-tokens", "9").out == verbatim("run", "a dog", "--max-tokens", "9").out


def test_json_is_one_object(verbatim: Call, llm: LLM) -> None:
    said = verbatim("run", "--json", "--max-tokens", "5", "Hello")
    whole = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=5))
    data = said.json
    assert said.err == ""
    assert data["text"] == whole.text
    assert data["tokens"] == list(whole.token_ids)
    assert data["finish_reason"] == whole.finish_reason
    assert data["usage"]["output_tokens"] == len(whole.token_ids)
    assert data["usage"]["total_tokens"] == data["usage"]["prompt_tokens"] + data["usage"]["output_tokens"]
    assert data["fingerprint"] == llm.fingerprint
    assert {"first_token", "total", "queued", "tokens_per_second"} <= set(data["timings"])
    assert isinstance(data["seed"], int)
    assert {"model", "backend", "warnings", "prompt_token_ids"} <= set(data)


def test_raw_system_and_stdin(verbatim: Call, llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6)
    raw = verbatim("run", "--raw", "--json", "--max-tokens", "6", "the cat").json
    assert raw["tokens"] == list(llm.generate("the cat", greedy).token_ids)
    system = verbatim("run", "--system", "be kind", "--json", "--max-tokens", "6", "the cat").json
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the cat"}]
    assert system["prompt_token_ids"] == llm.encode_chat(messages)
    for words in (["-"], []):
        piped = verbatim("run", "--raw", "--json", "--max-tokens", "6", *words, stdin="the cat\n").json
        assert piped["tokens"] == raw["tokens"], "the shell's last newline is not part of the prompt"
    assert verbatim("run", stdin=b"\xff\xfe").code == 2
    assert verbatim("run", stdin="").code == 2


def test_sampling_flags_reach_the_engine(verbatim: Call, llm: LLM) -> None:
    flags = ["--temperature", "0.9", "--seed", "7", "--top-k", "20", "--logit-bias", "40=3", "--max-tokens", "8"]
    params = SamplingParams(temperature=0.9, seed=7, top_k=20, logit_bias={40: 3}, max_tokens=8)
    said = verbatim("run", "--raw", "--json", *flags, "the")
    assert said.json["tokens"] == list(llm.generate("the", params).token_ids)
    assert said.json["seed"] == 7
    assert "seed 7" in verbatim("run", "--raw", *flags, "the").err


def test_an_unseeded_draw_tells_its_seed(verbatim: Call) -> None:
    first = verbatim("run", "--raw", "--json", "--temperature", "1.2", "--max-tokens", "16", "the").json
    again = verbatim(
        "run", "--raw", "--json", "--temperature", "1.2", "--max-tokens", "16", "--seed", str(first["seed"]), "the"
    ).json
    assert first["tokens"] == again["tokens"]


def test_several_answers(verbatim: Call) -> None:
    flags = ["--raw", "--temperature", "1", "--seed", "3", "--n", "3", "--max-tokens", "5", "the"]
    data = verbatim("run", "--json", *flags).json
    assert [c["index"] for c in data["choices"]] == [0, 1, 2]
    plain = verbatim("run", *flags).out
    for choice in data["choices"]:
        assert f"[{choice['index'] + 1}]" in plain
        assert choice["text"] in plain


def test_beams(verbatim: Call) -> None:
    flags = ["--raw", "--num-beams", "3", "--num-return-sequences", "2", "--max-tokens", "5", "the"]
    data = verbatim("run", "--json", *flags).json
    assert len(data["choices"]) == 2
    said = verbatim("run", *flags)
    assert said.out.startswith(data["choices"][0]["text"])
    assert data["choices"][1]["text"] in said.out


def test_stop_strings_do_not_leak(verbatim: Call, llm: LLM) -> None:
    text = llm.generate("the", SamplingParams(temperature=0, max_tokens=20)).text
    stop = text[4:7]
    said = verbatim("run", "--raw", "--max-tokens", "20", "--stop", stop, "the")
    assert said.out == text[: text.index(stop)] + "\n"
    assert "stop" in said.err


def test_logprobs_in_json(verbatim: Call) -> None:
    data = verbatim("run", "--raw", "--json", "--logprobs", "2", "--prompt-logprobs", "1", "--max-tokens", "3", "the cat").json
    assert len(data["logprobs"]) == 3
    assert all(len(row["top"]) == 2 and row["logprob"] <= 0 for row in data["logprobs"])
    assert data["prompt_logprobs"][0] is None


@pytest.mark.parametrize(("best_of", "n"), [("1", "1"), ("3", "1"), ("3", "2")])
def test_the_best_of_several_is_shown(verbatim: Call, best_of: str, n: str) -> None:
    flags = ["--raw", "--best-of", best_of, "--n", n, "--temperature", "1.5", "--seed", "3", "--max-tokens", "6", "the"]
    data = verbatim("run", "--json", *flags).json
    said = verbatim("run", *flags)
    assert data["text"]
    if n == "1":
        assert said.out == data["text"].removesuffix("\n") + "\n"
    else:
        assert all(choice["text"] in said.out for choice in data["choices"])


@pytest.mark.parametrize("command", ["run", "explain"])
@pytest.mark.parametrize("flag", [["--logprobs", "0"], ["--logprobs", "2"], ["--prompt-logprobs", "0"], ["--receipt"]])
def test_a_report_that_plain_text_does_not_show_is_refused(verbatim: Call, command: str, flag: list[str]) -> None:
    said = verbatim(command, "--max-tokens", "2", *flag, "the")
    assert (said.code, said.out) == (2, "")
    assert flag[0].lstrip("-").replace("-", "_") in said.err
    assert "--json" in said.err
    assert verbatim(command, "--json", "--max-tokens", "2", *flag, "the").code == 0


def test_a_receipt_to_save_cannot_be_left_out(verbatim: Call, tmp_path: Path) -> None:
    said = verbatim("run", "--no-receipt", "--save-receipt", str(tmp_path / "r.json"), "the")
    assert (said.code, said.out) == (2, "")
    assert "receipt" in said.err


def test_quiet_says_nothing_more(verbatim: Call) -> None:
    assert verbatim("run", "-q", "the", "--max-tokens", "3").err == ""


def test_a_prompt_that_does_not_fit_is_refused_by_name(verbatim: Call) -> None:
    said = verbatim("run", "--raw", "--context", "32", "x" * 500)
    assert said.code == 2
    assert "32" in said.err
    assert said.out == ""


def test_receipt_is_written(verbatim: Call, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    assert verbatim("run", "the", "--max-tokens", "4", "--save-receipt", str(file)).code == 0
    assert json.loads(file.read_text())["prompt_ids"]
    assert verbatim("run", "the", "--max-tokens", "4", "--save-receipt", str(tmp_path / "no" / "r.json")).code == 2


def test_score(verbatim: Call, llm: LLM) -> None:
    score = llm.score("the cat sat on the mat")
    said = verbatim("score", "the cat sat on the mat")
    assert said.out == f"perplexity\t{score.perplexity:.4f}\n"
    data = verbatim("score", "--json", "--top", "2", "the cat sat on the mat").json
    assert data["perplexity"] == score.perplexity
    assert data["tokens"] == list(score.token_ids)
    lines = verbatim("score", "--tokens", "the cat sat on the mat").out.splitlines()
    assert len(lines) == len(score.token_ids) + 1
    assert float(lines[2].split()[0]) == pytest.approx(score.logprobs[2].logprob, abs=1e-3)  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------------------- as a process of its own


def test_ctrl_c_ends_cleanly(spawn: Spawn) -> None:
    process = spawn("run", "--raw", "--ignore-eos", "the", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)  # it writes
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first
    assert b"Traceback" not in err
    assert b"cancel" in err
    assert b"output tokens" in err


def test_a_reader_that_leaves_is_no_error(spawn: Spawn) -> None:
    process = spawn("run", "--raw", "--ignore-eos", "the", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(60) == 141
    assert err == b""


def test_a_terminal_gets_colour_and_a_progress_line(spawn: Spawn) -> None:
    master, slave = pty.openpty()
    process = spawn("run", "--raw", "--max-tokens", "4", "the", stdout=subprocess.PIPE, stderr=slave)
    out, _ = process.communicate(timeout=60)
    os.close(slave)
    err = b""
    try:
        while chunk := os.read(master, 4096):
            err += chunk
    except OSError:
        pass
    os.close(master)
    assert b"\x1b" not in out
    assert b"\x1b[2m" in err
    assert b"loading" in err


def test_what_is_loaded_for_a_run(spawn: Spawn) -> None:
    """The first token must not wait for libraries that the run does not use."""
    code = "import sys\nfrom verbatim.cli.main import main\ntry: main(['run', '--raw', '--json', '--max-tokens', '2', 'the'])\nexcept SystemExit: pass\n"
    code += "heavy = ('rich', 'torch', 'transformers', 'huggingface_hub', 'starlette', 'llguidance', 'matplotlib', 'asyncio', 'hypothesis')\n"
    code += "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    process = spawn(code=code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=60)
    assert err.decode().strip().splitlines()[-1] == "[]"


def test_a_terminal_without_unicode_gets_question_marks(spawn: Spawn) -> None:
    code = "import sys; sys.stdout.reconfigure(encoding='ascii')\nfrom verbatim.cli.main import main\n"
    code += "main(['run', '--raw', '-q', '--max-tokens', '40', '--ignore-eos', '--temperature', '2', '--seed', '1', 'the'])"
    process = spawn(code=code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"?" in out
    assert out.isascii()
