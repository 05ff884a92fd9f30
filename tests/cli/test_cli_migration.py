"""Commands and flags of Ollama, llama.cpp and vLLM: each works, or is answered by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli_result import Call
from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError
from verbatim.cli.lib.flag_aliases import (
    COMMAND_ALIASES,
    COMMAND_ANSWERS,
    FLAG_ALIASES,
    FLAG_ANSWERS,
)
from verbatim.cli.main import COMMANDS
from verbatim.hub import hub

SHORT = ["--raw", "--max-tokens", "4"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["--temp", "0.7"], ["--temperature", "0.7"]),
        (["-n", "3"], ["--max-tokens", "3"]),
        (["--n-predict", "3"], ["--max-tokens", "3"]),
        (["-c", "64"], ["--context", "64"]),
        (["--ctx-size", "64"], ["--context", "64"]),
        (["--max-model-len", "64"], ["--context", "64"]),
        (["-t", "1"], ["--threads", "1"]),
        (["--kv-cache-dtype", "fp8"], ["--kv-type", "fp8"]),
        (["--repeat-penalty", "1.5"], ["--repetition-penalty", "1.5"]),
    ],
)
def test_flags_of_other_programs_work(verbatim: Call, theirs: list[str], ours: list[str]) -> None:
    length = [] if "--max-tokens" in ours else ["--max-tokens", "5"]
    base = ["run", "--json", "--raw", "--seed", "1", *length, "the cat"]
    one, other = verbatim(*base, *theirs), verbatim(*base, *ours)
    assert (one.code, other.code) == (0, 0), one.err
    assert one.json["tokens"] == other.json["tokens"]
    assert one.json["params"] == other.json["params"]


def test_aliases_are_not_in_the_help_and_name_real_flags(verbatim: Call) -> None:
    text = verbatim("run", "--help-all").out
    assert "--temperature X" in text
    assert "--temp " not in text
    assert "-ngl" not in text
    others = verbatim("serve", "--help-all").out + verbatim("convert", "--help").out
    for flag in FLAG_ALIASES:
        assert flag in text + others, flag
    wrong = verbatim("run", "--temp", "hot", "x")
    assert wrong.code == 2
    assert "'--temp': 'hot'" in wrong.err


@pytest.mark.parametrize("flags", FLAG_ANSWERS, ids=" ".join)
def test_flags_without_a_counterpart_are_answered(verbatim: Call, flags: tuple[str, ...]) -> None:
    for words in (["run", flags[0], "99", "hello"], ["serve", flags[-1], "99"]):
        result = verbatim(*words)
        assert result.code == 2
        assert f"no such option: {words[1]}; {FLAG_ANSWERS[flags]}" in result.err
        assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --n-gpu-layers=99 x", "--n-gpu-layers; a model runs whole on one backend"),
        ("run --top_k 5 x", "no such option '--top_k'; did you mean '--top-k'?"),
        ("run --max_new_tokens=5 x", "did you mean '--max-tokens'?"),
        ("bench -p 512 -n 128", "no such option: -p; --prefills N,N sets the prompt lengths"),
        ("plan --gpu h100", "no such option: --gpu; write --device NAME"),
        ("quantize in.gguf out.gguf Q8_0", "is not an argument; write --quant q8_0"),
        ("convert IN OUT Q4_K_M", "is not an argument; write --quant q4_k_m"),
        ("run -temperature 0 x", "no such option '-temperature'; did you mean '--temperature'?"),
        ("run -model=x y", "no such option '-model=x'; did you mean '--model'?"),
        ("run -md draft.gguf x", "no such option: -md; --speculate draft:MODEL drafts with"),
        ("run --draft-head x --speculate off hi", "--speculate: is given twice, as 'head:x' and"),
        ("run --draft-model=x --speculate off hi", "--speculate: is given twice, as 'draft:x' and"),
        ("plan -m smollm2", "no such option: -m; the model is an argument of this command"),
        ("models show --model x", "no such option: --model; the model is an argument"),
        ("run --sloths x", "no such option '--sloths'; see verbatim run --help"),
        ("lst", "no command 'lst'; did you mean list?"),
    ],
)
def test_a_habit_is_answered_with_what_to_type(verbatim: Call, words: str, said: str) -> None:
    result = verbatim(*words.split())
    assert result.code == 2
    assert said in result.err
    assert result.err.count("\n") == 1


def test_plan_names_one_remedy_for_a_model_to_fetch(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_find_in_cache", lambda *_: (Path(), "it is not in the cache"))
    result = verbatim("plan", "qwen3:8b")
    assert (result.code, result.out) == (3, "")
    assert result.err == (
        "verbatim: qwen3:8b is not in the cache, and plan needs a config.json or a local file; "
        "fetch it once with `verbatim pull qwen3:8b`\n"
    )


def test_commands_of_other_programs() -> None:
    for name, meant in COMMAND_ALIASES.items():
        assert name not in COMMANDS
        assert meant[0] in COMMANDS
    assert {"list", "ls", "ps", "rm", "generate", "show", "stop"} <= {
        *COMMAND_ALIASES,
        *COMMAND_ANSWERS,
    }


def test_list_show_and_generate_work(verbatim: Call, tiny: Path) -> None:
    assert verbatim("list").out == verbatim("models").out == verbatim("ls").out
    shown = verbatim("show", str(tiny)).out
    for part in ("family      llama", "context     8,192 tokens", "template    yes"):
        assert part in shown
    assert verbatim("generate", *SHORT, "the").out == verbatim("run", *SHORT, "the").out


@pytest.mark.parametrize("name", COMMAND_ANSWERS)
def test_commands_without_a_counterpart_are_answered(verbatim: Call, name: str) -> None:
    result = verbatim(name, "smollm2")
    assert (result.code, result.out) == (2, "")
    assert COMMAND_ANSWERS[name] in result.err


def test_the_model_as_an_argument(verbatim: Call, tiny: Path) -> None:
    plain = verbatim("run", *SHORT, "the").out
    assert verbatim("run", str(tiny), *SHORT, "the").out == plain
    assert verbatim("run", str(tiny), *SHORT, stdin="the\n").out == plain
    chat = verbatim("chat", str(tiny), "--max-tokens", "4", "-q", stdin="the\n")
    assert chat.code == 0
    assert chat.out == verbatim("chat", "--max-tokens", "4", "-q", stdin="the\n").out
    two = verbatim("chat", str(tiny), "-m", "smollm2", stdin="the\n")
    assert (two.code, "contradict each other" in two.err) == (2, True)
    missing = verbatim("serve", "/no/such/model.gguf", "-m", "smollm2")
    assert (missing.code, "contradict each other" in missing.err) == (2, True)


def test_models_rm_and_show(verbatim: Call, tiny: Path, tmp_path: Path) -> None:
    from verbatim.hub.catalog import CATALOG, catalog_path

    path = catalog_path(CATALOG["smollm2"])
    path.parent.mkdir(parents=True)
    shutil.copy(tiny, path)
    result = verbatim("rm", "smollm2")
    assert (result.code, result.out) == (0, f"{path}\n")
    assert not path.exists()
    assert verbatim("models", "rm", "smollm2").code == 3
    refused = verbatim("rm", str(tiny))
    assert (refused.code, "delete the file yourself" in refused.err) == (3, True)
    assert tiny.exists()
    assert "verbatim models show smollm2" in verbatim("models", "smollm2").err
    assert verbatim("models", "list", "--json").json == verbatim("models", "--json").json


def test_score_reads_a_file_and_not_its_name(verbatim: Call, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on the mat\n")
    text = verbatim("score", "the cat sat on the mat").out
    assert verbatim("score", f"@{file}").out == text
    assert verbatim("score", "--file", str(file)).out == text
    named = verbatim("score", str(file))
    assert named.out != text
    assert f"warning: the text is the name of a file; --file {file} reads the file" in named.err
    receipt = tmp_path / "answer.json"
    verbatim("run", *SHORT, "--save-receipt", str(receipt), "the cat")
    said = verbatim("explain", *SHORT, str(receipt)).err
    assert f"the name of a receipt; verbatim replay {receipt} repeats its answer" in said
    assert "--file" not in said
    assert verbatim("run", *SHORT, "-f", str(file)).out == (
        verbatim("run", *SHORT, "the cat sat on the mat").out
    )
    gone = verbatim("score", "@/no/such/file")
    assert (gone.code, "cannot read '/no/such/file'" in gone.err) == (2, True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--json-schema", "none.json"], "for a file write @none.json"),
        (["--regex", "["], "regex: '[' is not a regular expression"),
        (["--json-schema", '{"type": "no"}'], "--json-schema:"),
        (["--speculate", "fast"], "speculate: 'fast' is not one of"),
        (["--backend", "gpu"], "backend: 'gpu' is not one of auto, cpu, cuda, reference"),
        (["--kv-type", "q4"], "--kv-type: 'q4' is not one of f16, q8, fp8"),
        (["--quant", "q5"], "quant: 'q5' is not one of q8_0, q4_0, packed"),
        (["--kv-memory", "lots"], "--kv-memory: 'lots' is not a size"),
    ],
)
def test_values_are_checked_before_the_model_loads(
    verbatim: Call, flags: list[str], said: str
) -> None:
    result = verbatim("run", "-m", "/no/such/model.gguf", *flags, "hello")
    assert result.code == 2, "3 would mean that the model was opened"
    assert said in result.err


def test_sizes_in_human_units(verbatim: Call) -> None:
    result = verbatim("run", "--kv-memory", "1K", "hello")
    assert result.code == 2
    assert "--kv-memory: 1 KiB does not hold one block of" in result.err
    assert "iB; a context of 8192 tokens needs" in result.err


def test_the_engine_checks_the_same_values() -> None:
    for options in ({"speculate": "draft"}, {"speculate": "head:x"}, {"quant": "q8_0"}):
        EngineConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="off:x"):
        EngineConfig(speculate="off:x")


def test_a_misspelt_model_before_the_prompt_is_named(verbatim: Call) -> None:
    result = verbatim("run", "smolm2", "hi there")
    assert result.code == 2
    assert "there is no model 'smolm2'; did you mean smollm2" in result.err
    assert "put it in quotes: verbatim run 'hello world'" in verbatim("run", "hello", "world").err
