"""`verbatim explain` and `verbatim replay`: the numbers are recomputed independently, and a
replayed receipt gives the same tokens or the first difference."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from cli_result import Call
from verbatim import LLM


def test_explain_prints_every_token(verbatim: Call) -> None:
    result = verbatim(
        "explain",
        "--raw",
        "the cat",
        "--max-tokens",
        "3",
        "--temperature",
        "0.8",
        "--seed",
        "5",
        "--top-k",
        "10",
    )
    assert result.code == 0, result.err
    heads = [line for line in result.out.splitlines() if line.startswith("position ")]
    assert len(heads) == 3
    assert "top_k" in result.out
    assert "seed 5" in result.err
    brief = verbatim("explain", "--raw", "the cat", "--max-tokens", "3", "--brief")
    assert len([line for line in brief.out.splitlines() if line.startswith("position ")]) == 3
    assert "seed" not in brief.err


def test_several_explained_answers_are_numbered_and_beams_show_their_scores(verbatim: Call) -> None:
    drawn = [
        *("explain", "--raw", "--brief", "the cat", "--max-tokens", "3", "--temperature", "1"),
        *("--seed", "5", "--n", "2"),
    ]
    out = verbatim(*drawn).out
    texts = [choice["text"] for choice in verbatim(*drawn, "--json").json["choices"]]
    assert [f"[{i}] {text}\n" in out for i, text in enumerate(texts, 1)] == [True, True]
    assert "[1]" not in verbatim(*drawn[:-2]).out
    beams = ["explain", "--raw", "--brief", "the cat", "--max-tokens", "3", "--num-beams", "2"]
    alone = verbatim(*beams, "--json").json
    both = [*beams, "--num-return-sequences", "2"]
    scores = [choice["score"] for choice in verbatim(*both, "--json").json["choices"]]
    out = verbatim(*both).out
    assert all(f"[{i}] ({score:.4f}) " in out for i, score in enumerate(scores, 1))
    assert verbatim(*beams).out.startswith(f"({scores[0]:.4f}) {alone['text']}\n")


def test_explain_matches_the_logits_of_the_model(verbatim: Call, tiny: Path) -> None:
    """Entropy, probabilities, ranks and margins match those recomputed from prompt
    log-probabilities, which come from another path of the engine."""
    data = verbatim(
        "explain",
        "--raw",
        "--json",
        "--explain",
        "4",
        "the cat",
        "--max-tokens",
        "4",
        "--temperature",
        "0.9",
        "--seed",
        "2",
    ).json
    tokens, prompt = data["tokens"], data["prompt_token_ids"]
    with LLM(tiny) as llm:
        everything = llm.score([*prompt, *tokens], top=llm.tokenizer.vocab_size)
    for i, record in enumerate(data["explain"]):
        row = everything.logprobs[len(prompt) + i]
        assert row is not None
        logprobs = dict(row.top)
        logprobs[row.token] = row.logprob
        p = np.exp(np.array(list(logprobs.values())))
        assert record["token"] == tokens[i]
        assert record["entropy"] == pytest.approx(float(-(p * np.log(p)).sum()), abs=1e-3)
        assert record["logprob"] == pytest.approx(row.logprob, abs=1e-4)
        assert record["rank"] == 1 + sum(lp > row.logprob for lp in logprobs.values())
        best = sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:4]
        assert [c["id"] for c in record["top"]] == [token for token, _ in best]
        for candidate, (_, lp) in zip(record["top"], best, strict=True):
            assert math.exp(candidate["logprob"]) == pytest.approx(math.exp(lp), abs=1e-4)


def test_what_if_samples_again_without_the_model(verbatim: Call) -> None:
    base = [
        *("explain", "--raw", "--json", "the cat", "--max-tokens", "6", "--temperature", "1.2"),
        *("--seed", "3"),
    ]
    data = verbatim(
        *base, "--what-if", "temperature=0", "--what-if", "top_k=1", "--what-if", "seed=3"
    ).json
    greedy, single, same = data["what_if"]
    assert [t["after"] for t in greedy["tokens"]] == [record["best"] for record in data["explain"]]
    assert greedy["tokens"] == single["tokens"], "one token left is the best token"
    assert all(t["before"] == t["after"] for t in same["tokens"])
    result = verbatim(*[w for w in base if w != "--json"], "--what-if", "top_p=0.1,temperature=1.5")
    assert "what if top_p=0.1,temperature=1.5:" in result.out
    assert "tokens would differ" in result.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--what-if", "top_p"], "--what-if: "),
        (["--what-if", "top_q=1"], "top_q"),
        (["--what-if", "n=2"], "n:"),
        (["--explain", "0"], "--explain: "),
    ],
)
def test_explain_names_the_flag_it_rejects(verbatim: Call, words: list[str], named: str) -> None:
    result = verbatim("explain", "--raw", "the", "--max-tokens", "2", *words)
    assert result.code == 2
    assert named in result.err


def test_replay(verbatim: Call, tmp_path: Path, tiny: Path) -> None:
    file = tmp_path / "r.json"
    verbatim(
        "run", "the cat", "--temperature", "1", "--max-tokens", "10", "--save-receipt", str(file)
    )
    file.write_text(file.read_text("utf-8"), "utf-16")  # as PowerShell's > does
    again = verbatim("replay", str(file))
    file.write_text(file.read_text("utf-16"), "utf-8")
    assert again.code == 0
    assert again.out == "identical\n"

    from verbatim.explain.receipt import digest_of

    receipt = json.loads(file.read_text())
    receipt["choices"][0]["token_ids"][4] ^= 1
    receipt["sha256"] = digest_of(receipt)
    file.write_text(json.dumps(receipt))
    other = verbatim("replay", str(file), "--json")
    assert other.code == 1
    assert other.json["identical"] is False
    assert "token 4" in other.json["message"]
    lines = verbatim("replay", str(file)).out.splitlines()
    told = "\n".join(lines)
    assert "receipt   …" in told
    assert "this run  …" in told
    assert told.count("in this run ") == 2, "how likely both tokens were"
    receipt["digest"] = "0" * 64
    receipt["sha256"] = digest_of(receipt)
    file.write_text(json.dumps(receipt))
    told = verbatim("replay", str(file)).out
    assert "digest differs: '000000000000…' then" in told

    receipt["prompt_ids"].append(3)
    file.write_text(json.dumps(receipt))
    assert verbatim("replay", str(file)).code == 2, "changed after it was written"
    file.write_text("{")
    assert verbatim("replay", str(file)).code == 2
    assert verbatim("replay", str(tmp_path / "none.json")).code == 2


WORDS = ["explain", "--raw", "the cat", "--max-tokens", "6", "--ignore-eos"]


def test_tokens_are_chosen_by_number_or_text(verbatim: Call, tiny: Path) -> None:
    whole = verbatim(*WORDS).out.split("\n\n")[1:-1]
    assert len(whole) == 6
    second = verbatim(*WORDS, "--token", "2").out.split("\n\n")[1:-1]
    assert second == [whole[1]]
    with LLM(tiny) as llm:
        ids = verbatim(*WORDS, "--json").json["tokens"]
        texts = [llm.tokenizer.token_bytes(t).decode("utf-8", "replace") for t in ids]
    named = verbatim(*WORDS, "--token", "1", "--token", texts[3]).out.split("\n\n")[1:-1]
    assert named == [whole[i] for i, text in enumerate(texts) if i == 0 or texts[3] in text]
    none = verbatim(*WORDS, "--token", "7")
    assert (none.code, "names no token of this answer, which has 6" in none.err) == (2, True)


def test_a_column_without_content_is_left_out(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = verbatim(*WORDS, "--token", "1").out
    for name in ("final p", "noise", "score", "removed by", "processed"):
        assert name not in greedy
    full = [*WORDS, "--token", "1", "--temperature", "1", "--top-k", "2"]
    sampled = verbatim(*full, "--presence-penalty", "1").out
    for name in ("final p", "noise", "score", "removed by"):
        assert name in sampled
    assert "█" not in sampled
    monkeypatch.setenv("COLUMNS", "120")
    assert set("█▏▎▍▌▋▊▉") & set(verbatim(*full, "--bars").out)
    assert "rank 1 is its best" in verbatim(*full).err, "a legend"


def test_a_what_if_says_what_it_assumes_and_writes_the_other_text(verbatim: Call) -> None:
    base = [*WORDS, "--temperature", "1.5", "--seed", "3"]
    result = verbatim(*base, "--what-if", "temperature=0", "--continue")
    assert "are conditional on the recorded text before them" in result.out
    other = verbatim("run", *WORDS[1:], "--temperature", "0", "--seed", "3", "-q").out
    assert f"the answer with temperature=0:\n{other}" in result.out
    data = verbatim(*base, "--what-if", "temperature=0", "--continue", "--json").json
    assert data["what_if"][0]["text"] + "\n" == other
    changed = [t["position"] for t in data["what_if"][0]["tokens"] if t["before"] != t["after"]]
    same = [a == b for a, b in zip(data["what_if"][0]["token_ids"], data["tokens"], strict=True)]
    first = data["what_if"][0]["tokens"][0]["position"]
    assert same.index(False) == changed[0] - first, "equal up to the first difference"
    alone = verbatim(*base, "--continue")
    assert (alone.code, "needs --what-if" in alone.err) == (2, True)


def test_the_page_is_one_offline_file(verbatim: Call, tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    result = verbatim(*WORDS, "--temperature", "1", "--html", str(page))
    assert result.code == 0
    text = page.read_text("utf-8")
    assert text.count("<section id=") == 6
    assert all(f'href="#t{n}"' in text and f'id="t{n}"' in text for n in range(1, 7))
    assert "temperature 1.0 (request)" in text
    for outside in ("http:", "https:", "<script", "src="):
        assert outside not in text
    prompt = verbatim("explain", "--raw", "<b>&", "--max-tokens", "1", "--html", str(page))
    assert prompt.code == 0
    assert "&lt;b&gt;&amp;" in page.read_text("utf-8")
    missing = verbatim(*WORDS, "--html", str(tmp_path / "no" / "x.html"))
    assert (missing.code, missing.out) == (2, "")
