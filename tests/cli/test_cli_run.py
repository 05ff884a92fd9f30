"""`verbatim run` and `score`: what goes to stdout and stderr, and that flags reach the engine."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cli_result import Call
from verbatim import LLM, SamplingParams
from verbatim.cli.lib.error_lines import print_error
from verbatim.observe.roofline import MachineLimits, load_limits, save_limits

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def llm(tiny: Path):  # type: ignore[no-untyped-def]
    with LLM(tiny) as opened:
        yield opened


def test_piped_output_is_the_text_and_nothing_else(verbatim: Call, llm: LLM) -> None:
    result = verbatim("run", "the cat", "--max-tokens", "12")
    whole = llm.chat(
        [{"role": "user", "content": "the cat"}], SamplingParams(temperature=0, max_tokens=12)
    )
    assert result.code == 0
    assert result.out == whole.text + "\n"
    *_, line = result.err.splitlines()
    assert re.fullmatch(r"12 tokens · [\d.]+ s · [\d.]+ tokens per second · length \(.*\)", line)
    assert "\x1b" not in result.out + result.err
    line = verbatim("run", "-v", "the cat", "--max-tokens", "12").err.splitlines()[-2]
    assert line.startswith(f"{whole.usage.prompt_tokens} prompt + 12 output tokens")
    assert "first token" in line
    assert "seed" not in line  # temperature 0: nothing is sampled


def test_the_default_temperature_gives_the_same_answer_every_time(verbatim: Call) -> None:
    assert (
        verbatim("run", "a dog", "--max-tokens", "9").out
        == verbatim("run", "a dog", "--max-tokens", "9").out
    )


def test_json_is_one_object(verbatim: Call, llm: LLM) -> None:
    result = verbatim("run", "--json", "--max-tokens", "5", "Hello")
    whole = llm.chat(
        [{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=5)
    )
    data = result.json
    assert result.err == ""
    assert data["text"] == whole.text
    assert data["tokens"] == list(whole.token_ids)
    assert data["finish_reason"] == whole.finish_reason
    assert data["usage"]["output_tokens"] == len(whole.token_ids)
    assert (
        data["usage"]["total_tokens"]
        == data["usage"]["prompt_tokens"] + data["usage"]["output_tokens"]
    )
    assert data["usage"]["mean_accepted_length"] == 5 / (5 - data["usage"]["accepted_tokens"])
    assert data["fingerprint"] == llm.fingerprint
    assert {"first_token", "total", "queued", "tokens_per_second"} <= set(data["timings"])
    assert isinstance(data["seed"], int)
    assert {"model", "backend", "warnings", "prompt_token_ids"} <= set(data)


def test_beam_search_rejects_an_explicit_speculate_flag(verbatim: Call) -> None:
    result = verbatim(
        "run", "the", "--num-beams", "2", "--speculate", "suffix", "--max-tokens", "4"
    )
    assert result.code == 2
    assert "speculate: cannot be combined with beam search" in result.err
    assert (
        verbatim("run", "the", "--num-beams", "2", "--speculate", "off", "--max-tokens", "4").code
        == 0
    )


def test_raw_system_and_stdin(verbatim: Call, llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6)
    raw = verbatim("run", "--raw", "--json", "--max-tokens", "6", "the cat").json
    assert raw["tokens"] == list(llm.generate("the cat", greedy).token_ids)
    system = verbatim("run", "--system", "be kind", "--json", "--max-tokens", "6", "the cat").json
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the cat"}]
    assert system["prompt_token_ids"] == llm.encode_chat(messages)
    for words in (["-"], []):
        piped = verbatim(
            "run", "--raw", "--json", "--max-tokens", "6", *words, stdin="the cat\n"
        ).json
        assert piped["tokens"] == raw["tokens"], (
            "the shell's last newline is not part of the prompt"
        )
    assert verbatim("run", stdin=b"\xff\xfe").code == 2
    assert verbatim("run", stdin="").code == 2


def test_sampling_flags_reach_the_engine(verbatim: Call, llm: LLM) -> None:
    flags = [
        *("--temperature", "0.9", "--seed", "7", "--top-k", "20", "--logit-bias", "40=3"),
        *("--max-tokens", "8"),
    ]
    params = SamplingParams(temperature=0.9, seed=7, top_k=20, logit_bias={40: 3}, max_tokens=8)
    result = verbatim("run", "--raw", "--json", *flags, "the")
    assert result.json["tokens"] == list(llm.generate("the", params).token_ids)
    assert result.json["seed"] == 7
    assert "seed 7" in verbatim("run", "-v", "--raw", *flags, "the").err.splitlines()[-2]


def test_a_sampled_answer_without_a_seed_reports_its_seed(verbatim: Call) -> None:
    first = verbatim(
        "run", "--raw", "--json", "--temperature", "1.2", "--max-tokens", "16", "the"
    ).json
    again = verbatim(
        "run",
        "--raw",
        "--json",
        "--temperature",
        "1.2",
        "--max-tokens",
        "16",
        "--seed",
        str(first["seed"]),
        "the",
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
    result = verbatim("run", *flags)
    assert result.out.startswith(data["choices"][0]["text"])
    assert data["choices"][1]["text"] in result.out


def test_stop_strings_do_not_leak(verbatim: Call, llm: LLM) -> None:
    text = llm.generate("the", SamplingParams(temperature=0, max_tokens=20)).text
    stop = text[4:7]
    result = verbatim("run", "--raw", "--max-tokens", "20", "--stop", stop, "the")
    assert result.out == text[: text.index(stop)] + "\n"
    assert "stop" in result.err


def test_json_of_a_beam_search_has_no_seed(verbatim: Call) -> None:
    found = verbatim("run", "--json", "--num-beams", "2", "--max-tokens", "3", "the").json
    assert found["seed"] is None
    assert "seed" not in found["params"]


def test_logprobs_in_json(verbatim: Call) -> None:
    data = verbatim(
        "run",
        "--raw",
        "--json",
        "--logprobs",
        "2",
        "--prompt-logprobs",
        "1",
        "--max-tokens",
        "3",
        "the cat",
    ).json
    assert len(data["logprobs"]) == 3
    assert all(len(row["top"]) == 2 and row["logprob"] <= 0 for row in data["logprobs"])
    assert data["prompt_logprobs"][0] is None


@pytest.mark.parametrize(("best_of", "n"), [("1", "1"), ("3", "1"), ("3", "2")])
def test_best_of_prints_the_best_answer(verbatim: Call, best_of: str, n: str) -> None:
    flags = [
        "--raw",
        "--best-of",
        best_of,
        "--n",
        n,
        "--temperature",
        "1.5",
        "--seed",
        "3",
        "--max-tokens",
        "6",
        "the",
    ]
    data = verbatim("run", "--json", *flags).json
    result = verbatim("run", *flags)
    assert data["text"]
    if n == "1":
        assert result.out == data["text"].removesuffix("\n") + "\n"
    else:
        assert all(choice["text"] in result.out for choice in data["choices"])


@pytest.mark.parametrize("command", ["run", "explain"])
@pytest.mark.parametrize(
    "flag", [["--logprobs", "0"], ["--logprobs", "2"], ["--prompt-logprobs", "0"], ["--receipt"]]
)
def test_a_report_that_plain_text_does_not_show_is_rejected(
    verbatim: Call, command: str, flag: list[str]
) -> None:
    result = verbatim(command, "--max-tokens", "2", *flag, "the")
    assert (result.code, result.out) == (2, "")
    assert f"{flag[0]}: " in result.err
    assert "--json" in result.err
    assert verbatim(command, "--json", "--max-tokens", "2", *flag, "the").code == 0


def test_save_receipt_contradicts_no_receipt(verbatim: Call, tmp_path: Path) -> None:
    result = verbatim("run", "--no-receipt", "--save-receipt", str(tmp_path / "r.json"), "the")
    assert (result.code, result.out) == (2, "")
    assert "receipt" in result.err


def test_quiet_prints_only_the_answer(verbatim: Call) -> None:
    assert verbatim("run", "-q", "the", "--max-tokens", "3").err == ""


def test_a_prompt_that_does_not_fit_is_rejected(verbatim: Call) -> None:
    result = verbatim("run", "--raw", "--context", "32", "x" * 500)
    assert result.code == 2
    assert "32" in result.err
    assert result.out == ""


def test_receipt_is_written(verbatim: Call, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    assert verbatim("run", "the", "--max-tokens", "4", "--save-receipt", str(file)).code == 0
    assert json.loads(file.read_text())["prompt_ids"]
    assert (
        verbatim(
            "run", "the", "--max-tokens", "4", "--save-receipt", str(tmp_path / "no" / "r.json")
        ).code
        == 2
    )


def test_an_unwritable_output_path_fails_before_the_work(verbatim: Call, tmp_path: Path) -> None:
    """The model is not opened, nothing is written, and no folder is created."""
    gone, requests = tmp_path / "no", tmp_path / "in.jsonl"
    requests.write_text("")
    for words, named in (
        (["run", "--save-receipt", str(gone / "r.json"), "the"], "--save-receipt"),
        (["bench", "--plot", str(gone / "p.svg")], "--plot"),
        (["bench", "--speculate", "--plot", str(gone / "p.svg")], "--plot"),
        (["batch", str(requests), str(gone / "out.jsonl")], "OUT"),
        (["convert", "nothing.gguf", str(gone / "q.gguf")], "target"),
    ):
        if words[0] != "convert":
            words += ["--model", "/no/such/model.gguf"]  # would exit with 3 if it were opened
        result = verbatim(*words)
        assert (result.code, result.out) == (2, ""), words
        assert result.err.startswith(f"verbatim: {named}: cannot write")
        assert "does not exist; make it (mkdir -p)" in result.err
        assert not gone.exists()
    result = verbatim(
        "run", "--save-receipt", str(tmp_path), "--model", "/no/such/model.gguf", "the"
    )
    assert (result.code, result.out) == (2, "")
    assert "is a folder" in result.err


LOOP = ["--raw", "--allowed-token-ids", "40", "--max-tokens", "300", "the"]


def test_a_loop_is_stopped_and_reported_in_one_line(verbatim: Call) -> None:
    result = verbatim("run", *LOOP)
    told = [line for line in result.err.splitlines() if "on_loop" in line]
    assert told == [
        "warning: stopped, because the end repeats a run of 1 token; on_loop report lets it "
        "continue"
    ]
    assert "64 tokens · " in result.err
    assert verbatim("run", "--json", *LOOP).json["finish_reason"] == "loop"
    let = verbatim("run", "--on-loop", "report", *LOOP)
    assert "300 tokens · " in let.err
    assert "on_loop stop ends such an answer" in let.err
    assert len(let.out) > 4 * len(result.out)


@pytest.mark.parametrize(
    "flag", [["--ignore-eos"], ["--min-tokens", "200"], ["--on-loop", "report"]]
)
def test_min_tokens_and_ignore_eos_disable_the_loop_stop(verbatim: Call, flag: list[str]) -> None:
    data = verbatim("run", "--json", *flag, *LOOP).json
    assert (data["finish_reason"], len(data["tokens"])) == ("length", 300)


def test_the_library_only_reports_a_loop(llm: LLM) -> None:
    done = llm.generate(
        "the", SamplingParams(temperature=0, allowed_token_ids=[40], max_tokens=300)
    )
    assert (done.finish_reason, len(done.token_ids), done.choices[0].loop) == ("length", 300, 1)


def test_a_full_disk_at_the_receipt_is_a_system_error(verbatim: Call) -> None:
    result = verbatim("run", "--max-tokens", "2", "--save-receipt", "/dev/full", "the")
    assert result.code == 1
    assert "'/dev/full': no space left" in result.err


def test_score(verbatim: Call, llm: LLM) -> None:
    score = llm.score("the cat sat on the mat")
    result = verbatim("score", "the cat sat on the mat")
    assert result.out == f"perplexity\t{score.perplexity:.4f}\n"
    data = verbatim("score", "--json", "--top", "2", "the cat sat on the mat").json
    assert data["perplexity"] == score.perplexity
    assert data["tokens"] == list(score.token_ids)
    lines = verbatim("score", "--tokens", "the cat sat on the mat").out.splitlines()
    assert len(lines) == len(score.token_ids) + 1
    assert float(lines[2].split()[0]) == pytest.approx(score.logprobs[2].logprob, abs=1e-3)  # type: ignore[union-attr]
    result = verbatim("score", "--window", "4", "--stride", "2", "the cat sat on the mat")
    assert (
        result.out
        == f"perplexity\t{llm.score('the cat sat on the mat', window=4, stride=2).perplexity:.4f}\n"
    )
    result = verbatim("score", "--context", "4", "the cat sat on the mat")
    assert result.code == 2
    assert "or score it in windows (--window 4)" in result.err


def test_a_closed_llm_can_be_printed(tiny: Path) -> None:
    with LLM(tiny, context=64) as llm:
        shown = repr(llm)
    assert repr(llm) == shown


# ---------------------------------------------------------------------------- as a separate process


def test_ctrl_c_ends_cleanly(spawn: Spawn) -> None:
    process = spawn(
        "run", "--raw", "--ignore-eos", "the", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)  # the answer has started
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert first
    assert b"Traceback" not in err
    assert b"cancel" in err


@pytest.mark.parametrize(
    "module", ["click", "verbatim.cli.commands.run", "verbatim.engine.calls.llm"]
)
def test_ctrl_c_during_an_import_ends_the_process(module: str, spawn: Spawn) -> None:
    """The signal arrives where Python drops a KeyboardInterrupt: in a destructor, as in the weak
    reference callbacks of its import system."""
    code = f"""if True:
        import os, signal, sys
        class Interrupted:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
                sum(range(9))  # Python handles a signal between two instructions
        class Finder:
            def find_spec(name, path=None, target=None):
                if name == {module!r}:
                    Interrupted()
        sys.meta_path.insert(0, Finder)
        from verbatim.__main__ import main
        main()
    """
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = spawn("run", "-q", "--raw", "--max-tokens", "2", "the", code=code, **streams)
    assert process.communicate() == (b"", b"\nverbatim: interrupted\n")
    assert process.returncode == 130


def test_a_broken_pipe_is_not_an_error(spawn: Spawn) -> None:
    process = spawn(
        "run", "--raw", "--ignore-eos", "the", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait() == 141
    assert err == b""


@pytest.mark.server
@pytest.mark.parametrize("quiet", [True, False])
def test_a_quiet_batch_prints_nothing(spawn: Spawn, tmp_path: Path, quiet: bool) -> None:
    """The engine process, which has its own log, prints nothing either."""
    body = {"prompt": "the", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    words = [
        "batch",
        str(tmp_path / "in.jsonl"),
        str(tmp_path / "out.jsonl"),
        *(["-q"] if quiet else []),
    ]
    process = spawn(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    assert (process.returncode, out) == (0, b""), err
    assert (err == b"") == quiet
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["status_code"] == 200


def test_a_terminal_gets_colour_and_a_progress_line(spawn: Spawn) -> None:
    master, slave = pty.openpty()
    process = spawn(
        "run", "--raw", "--max-tokens", "4", "the", stdout=subprocess.PIPE, stderr=slave
    )
    out, _ = process.communicate()
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


def test_errors_wrap_between_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "the model's config.json has a key that this engine does not follow; " * 4
    print_error(message)
    whole = capsys.readouterr().err
    assert whole.count("\n") == 1, "one line in a pipe or a log"
    monkeypatch.setattr("verbatim.cli.lib.terminal.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    print_error(message)
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) < 60
    assert " ".join(lines) == whole.strip()


def test_a_run_above_the_saved_limit_marks_it(llm: LLM, verbatim: Call, tmp_path: Path) -> None:
    slow = MachineLimits(1.0, threads=2, method="native")  # a byte per second
    save_limits(tmp_path / "cache", slow)
    verbatim("run", "the cat", "--max-tokens", "12", "--speculate", "off")
    assert load_limits(tmp_path / "cache") == replace(slow, beaten=True)
    fast = replace(slow, read_bytes=1e15)
    save_limits(tmp_path / "cache", fast)
    verbatim("run", "the cat", "--max-tokens", "12", "--speculate", "off")
    assert load_limits(tmp_path / "cache") == fast


def test_run_imports_no_unused_libraries(spawn: Spawn) -> None:
    """The first token must not wait for libraries that the run does not use."""
    code = (
        "import sys\nfrom verbatim.cli.main import main\n"
        "try: main(['run', '--raw', '--json', '--max-tokens', '2', 'the'])\n"
        "except SystemExit: pass\n"
    )
    code += (
        "heavy = ('rich', 'torch', 'transformers', 'huggingface_hub', 'starlette', "
        "'llguidance', 'matplotlib', 'asyncio', 'hypothesis')\n"
    )
    code += "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    process = spawn(code=code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate()
    assert err.decode().strip().splitlines()[-1] == "[]"


def test_an_ascii_terminal_gets_question_marks(spawn: Spawn) -> None:
    code = (
        "import sys; sys.stdout.reconfigure(encoding='ascii')\nfrom verbatim.cli.main import main\n"
    )
    code += (
        "main(['run', '--raw', '-q', '--max-tokens', '40', '--ignore-eos', '--temperature', "
        "'2', '--seed', '1', 'the'])"
    )
    process = spawn(code=code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert b"?" in out
    assert out.isascii()


# -------------------------------------------------------------------- notices about a model file


@pytest.fixture(scope="module")
def odd(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without a chat template, and with an unknown metadata key whose value means
    off."""
    from verbatim.files.gguf import read_gguf
    from verbatim.files.gguf_write import write_gguf

    source = read_gguf(tiny)
    metadata = {k: v for k, v in source.metadata.items() if k != "tokenizer.chat_template"}
    path = tmp_path_factory.mktemp("odd") / "odd.gguf"
    write_gguf(path, {**metadata, "llama.mystery": False}, source.tensors.values())
    return path


def test_a_model_without_a_template_is_continued_with_a_notice(verbatim: Call, odd: Path) -> None:
    result = verbatim("run", "-m", str(odd), "the cat", "--max-tokens", "4")
    assert result.code == 0
    assert "no chat template" in result.err
    raw = verbatim("run", "-m", str(odd), "--raw", "the cat", "--max-tokens", "4")
    assert raw.out == result.out
    assert "no chat template" not in raw.err
    assert (
        "no chat template"
        not in verbatim("run", "-q", "-m", str(odd), "the cat", "--max-tokens", "4").err
    )
    whole = verbatim("run", "--json", "-m", str(odd), "the cat", "--max-tokens", "4")
    assert whole.err == ""
    assert any("no chat template" in line for line in whole.json["warnings"])


def test_warnings_of_the_loader_are_shown(
    verbatim: Call, odd: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = verbatim("run", "-m", str(odd), "--raw", "the cat", "--max-tokens", "2")
    assert "warning:" in result.err
    assert result.err.count("llama.mystery") == 1
    assert (
        "llama.mystery"
        not in verbatim("run", "-q", "-m", str(odd), "--raw", "the cat", "--max-tokens", "2").err
    )
    data = verbatim("run", "--json", "-m", str(odd), "--raw", "the cat", "--max-tokens", "2").json
    assert any("llama.mystery" in line for line in data["warnings"])
    caplog.clear()
    with LLM(odd) as opened:
        assert any("llama.mystery" in line for line in opened.warnings)
    assert any("llama.mystery" in record.getMessage() for record in caplog.records)


WORD = ["--raw", "--regex", "[a-z]{200}", "the"]


def test_structured_output_is_whole_or_an_error(verbatim: Call) -> None:
    """In a pipe: valid text and code 0, or no text and code 1."""
    whole = verbatim("run", "--max-tokens", "200", *WORD)
    assert (whole.code, len(whole.out)) == (0, 201)
    cut = verbatim("run", "--max-tokens", "8", *WORD)
    assert (cut.code, cut.out) == (1, "")
    assert "regex: the answer is not complete: it was cut after 8 tokens" in cut.err
    as_json = verbatim("run", "--json", "--max-tokens", "8", *WORD)
    assert (as_json.code, as_json.json["finish_reason"]) == (1, "length")
    several = verbatim("run", "--n", "2", "--max-tokens", "8", *WORD)
    assert (several.code, several.out) == (1, "")
    stopped = verbatim("run", "--max-tokens", "200", "--stop", whole.out[3:6], *WORD)
    assert (stopped.code, stopped.out) == (1, "")
    assert "a stop string or token ended it" in stopped.err


def test_a_loop_in_a_structure_is_an_error(verbatim: Call) -> None:
    """An answer such as {"name": "aaaa must not look like a result."""
    result = verbatim("run", "--raw", "--regex", "a{3000}b", "--max-tokens", "3100", "the")
    assert (result.code, result.out) == (1, "")
    assert "its end repeats a run of 1 token" in result.err


def test_an_answer_cut_at_its_length_says_so(verbatim: Call) -> None:
    result = verbatim("run", "--raw", "--max-tokens", "4", "the")
    assert result.code == 0
    told = "warning: the answer was cut after 4 tokens; a larger --max-tokens allows more"
    assert told in result.err.splitlines()
    assert told not in verbatim("run", "-q", "--raw", "--max-tokens", "4", "the").err


def test_verbose_lists_the_parameters_and_their_origins(verbatim: Call) -> None:
    err = verbatim(
        "run", "-v", "--raw", "--max-tokens", "4", "--top-p", "0.5", "--seed", "3", "the"
    ).err
    line = err.splitlines()[-1]
    for part in (
        "temperature 0 (model: GGUF metadata)",
        "top_p 0.5 (request)",
        "max_tokens 4 (request)",
        "seed 3 (request)",
        "min_p 0 (default)",
    ):
        assert part in line.split(" · "), part
    data = verbatim("run", "--json", "--raw", "--max-tokens", "4", "the").json["params"]
    assert data["temperature"] == {"value": 0.0, "origin": "model: GGUF metadata"}


def test_the_defaults_flag(verbatim: Call) -> None:
    words = ["run", "--json", "--raw", "--max-tokens", "4", "--seed", "1", "the"]
    assert verbatim(*words, "--defaults", "protocol").json["params"]["temperature"] == {
        "value": 1.0,
        "origin": "default",
    }
    assert (
        verbatim(*words, "--defaults", "protocol").json["tokens"]
        == (verbatim(*words, "--temperature", "1").json["tokens"])
    )
    wrong = verbatim(*words, "--defaults", "hot")
    assert (wrong.code, "defaults: 'hot' is not one of" in wrong.err) == (2, True)
