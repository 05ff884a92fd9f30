"""`verbatim embed` and `verbatim rerank` on tiny encoders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli_result import Call
from tiny_encoders import write_encoder
from verbatim import LLM
from verbatim.cli.lib.texts import read_lines

TEXTS = ["the cat sat.", "why is the sky blue?"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_encoder(tmp_path_factory.mktemp("bert"), prompts={"query": "why "}))


def test_embed_prints_one_vector_per_text(verbatim: Call, bert: str, tmp_path: Path) -> None:
    with LLM(bert) as llm:
        vectors = llm.embed(TEXTS)
        query = llm.embed("sky", prompt_name="query", dimensions=4)
    done = verbatim("embed", "-m", bert, *TEXTS)
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in done.out.splitlines()]
    np.testing.assert_allclose(rows, vectors, atol=1e-7)
    (tmp_path / "texts").write_text("\n".join(TEXTS) + "\n\n")
    found = verbatim("embed", "-m", bert, "--file", str(tmp_path / "texts"), "--json").json
    assert found["embeddings"] == rows
    (tmp_path / "texts").write_bytes("one\u2028text\x0c\r\nanother\x85text\n".encode())
    assert read_lines((), str(tmp_path / "texts"), "text") == [
        "one\u2028text\x0c",
        "another\x85text",
    ]
    assert found["pooling"] == "mean"
    short = verbatim("embed", "-m", bert, "--prompt-name", "query", "--dimensions", "4", "sky")
    np.testing.assert_allclose(json.loads(short.out), query, atol=1e-7)
    alike = verbatim("embed", "-m", bert, "--similarity", TEXTS[0], TEXTS[0])
    assert [json.loads(line) for line in alike.out.splitlines()] == [[1.0, 1.0], [1.0, 1.0]]


def test_embed_refuses_by_name(verbatim: Call, bert: str) -> None:
    for words, named in (
        (["--prompt-name", "x", "sky"], "--prompt-name: "),
        (["cat " * 60], "62 tokens and the context holds 48"),
        (["--pooling", "max", "sky"], "--pooling: 'max'"),
        (["sky", ""], "is empty"),
    ):
        done = verbatim("embed", "-m", bert, *words)
        assert done.code != 0
        assert named in done.err


def test_rerank_prints_the_best_first(verbatim: Call, tmp_path: Path) -> None:
    model = str(write_encoder(tmp_path, scores=True))
    with LLM(model) as llm:
        ranked = llm.rerank("sky", TEXTS)
    done = verbatim("rerank", "-m", model, "sky", *TEXTS)
    assert done.out.splitlines() == [f"{r.score:.6f}\t{r.index}\t{r.document}" for r in ranked]
    top = verbatim("rerank", "-m", model, "--top-n", "1", "--json", "sky", *TEXTS).json
    assert top["results"] == [
        {"index": ranked[0].index, "score": ranked[0].score, "document": ranked[0].document}
    ]
    assert verbatim("embed", "-m", model, "sky").code != 0
