"""Embeddings and rerank over HTTP: a tiny encoder and a fake cross-encoder behind a live server."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from live_server import Live

from tiny_encoders import write_encoder
from verbatim import LLM
from verbatim.server.api.native.reranking import rerank
from verbatim.server.problem import Problem
from verbatim.server.settings import Limits

TEXTS = ["the cat sat on the mat.", "why is the sky blue?", "paris"]
LONG = "cat " * 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("bert"), prompts={"query": "why ", "none": ""})


@pytest.fixture(scope="module")
def bert(folder: Path) -> Iterator[Live]:
    live = Live("--model", str(folder), engine=None).wait_ready()
    yield live
    assert live.stop() == 0, live.log_text()


@pytest.fixture(scope="module")
def ranker() -> Iterator[Live]:
    live = Live(engine="hash,rank=yes,context=64").wait_ready()
    yield live
    assert live.stop() == 0, live.log_text()


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_every_protocol_gives_the_vectors_of_the_library(bert: Live, folder: Path) -> None:
    with LLM(folder) as llm:
        vectors = llm.embed(TEXTS)
        queries = llm.embed(TEXTS, prompt_name="query")
        tokens = sum(len(llm.encode(text)) for text in TEXTS)
    made = ok(bert.post("/v1/embeddings", {"input": TEXTS}))
    assert [row["index"] for row in made["data"]] == [0, 1, 2]
    np.testing.assert_allclose([row["embedding"] for row in made["data"]], vectors, atol=1e-7)
    assert made["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    for i, text in enumerate(TEXTS):  # the same bits alone and in a list
        alone = ok(bert.post("/v1/embeddings", {"input": text}))["data"][0]["embedding"]
        assert alone == made["data"][i]["embedding"]
    named = ok(bert.post("/v1/embeddings", {"input": TEXTS, "prompt_name": "query"}))["data"]
    np.testing.assert_allclose([row["embedding"] for row in named], queries, atol=1e-7)
    ollama = ok(bert.post("/api/embed", {"input": TEXTS}))
    assert ollama["embeddings"] == [row["embedding"] for row in made["data"]]
    assert ollama["prompt_eval_count"] == tokens
    llama = ok(bert.client.post("/embedding", json={"content": TEXTS}))
    assert [row["embedding"] for row in llama] == [[v] for v in ollama["embeddings"]]
    plain = ok(bert.client.post("/embedding", json={"content": TEXTS[0], "embd_normalize": -1}))
    np.testing.assert_array_equal(np.float32(plain[0]["embedding"][0]), vectors[0])


def test_dimensions_and_base64(bert: Live) -> None:
    whole = ok(bert.post("/v1/embeddings", {"input": "paris"}))["data"][0]["embedding"]
    ask = {"input": "paris", "dimensions": 5, "encoding_format": "base64"}
    coded = ok(bert.post("/v1/embeddings", ask))["data"][0]["embedding"]
    short = np.array(struct.unpack("<5f", base64.b64decode(coded)))
    np.testing.assert_allclose(short, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)
    assert refused(bert.post("/v1/embeddings", {"input": "a", "dimensions": 33}))[0] == "dimensions"


def test_texts_that_are_too_long_are_truncated_only_on_request(bert: Live) -> None:
    param, message = refused(bert.post("/v1/embeddings", {"input": ["cat", LONG]}))
    assert param == "input"
    assert "102 tokens and the context holds 48" in message
    cut = ok(bert.post("/v1/embeddings", {"input": LONG, "truncate": True}))
    same = ok(bert.post("/v1/embeddings", {"input": "cat " * 46}))
    assert cut["data"] == same["data"]
    assert cut["usage"]["prompt_tokens"] == 48
    assert cut["warnings"] == ["input: 102 tokens were truncated to 48"]
    assert "warnings" not in same
    ollama = ok(bert.post("/api/embed", {"input": LONG, "truncate": True}))
    assert ollama["embeddings"] == [same["data"][0]["embedding"]]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": 7}, "input"),
        ("/v1/embeddings", {"input": [[1], ["a"]]}, "input[1][0]"),
        ("/v1/embeddings", {"input": [10**6]}, "input"),
        ("/v1/embeddings", {"input": "a", "truncate": "yes"}, "truncate"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, "prompt_name"),
        ("/v1/embeddings", {"input": [5], "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"input": "a", "temperature": 0}, "temperature"),
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "model"),
    ],
)
def test_an_encoder_refuses_by_name(bert: Live, path: str, body: Any, named: str) -> None:
    assert refused(bert.post(path, body))[0] == named


def test_an_encoder_says_what_it_can_do(bert: Live) -> None:
    shown = ok(bert.post("/api/show", {}))
    assert shown["capabilities"] == ["embedding"]
    assert shown["details"]["family"] == "bert"


def test_an_encoder_refuses_a_chat_with_the_endpoint_to_use(bert: Live, ranker: Live) -> None:
    for live, use in ((bert, "/v1/embeddings"), (ranker, "/v1/rerank")):
        body = {"messages": [{"role": "user", "content": "a"}]}
        param, message = refused(live.post("/v1/chat/completions", body))
        assert (param, message.endswith(f"generates no text; use {use}")) == ("messages", True)


def test_the_warning_of_a_truncated_query_names_it(ranker: Live) -> None:
    body = {"query": LONG, "documents": ["b"], "truncate": True}
    (warning,) = ok(ranker.post("/v1/rerank", body))["warnings"]
    assert warning == "query and document: 404 tokens were truncated to 64, the longer text first"


def test_documents_are_ranked(ranker: Live) -> None:
    documents = ["one", {"text": "two"}, "three", "four"]
    ask = {"query": "number", "documents": documents}
    made = ok(ranker.post("/v1/rerank", ask))
    scores = [row["relevance_score"] for row in made["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(row["index"] for row in made["results"]) == [0, 1, 2, 3]
    assert all(set(row) == {"index", "relevance_score"} for row in made["results"])
    sizes = [len("number") + len(t) + 3 for t in ("one", "two", "three", "four")]
    assert made["usage"] == {"prompt_tokens": sum(sizes), "total_tokens": sum(sizes)}
    top = ok(ranker.post("/rerank", {**ask, "top_n": 2, "return_documents": True}))
    assert [row["index"] for row in top["results"]] == [r["index"] for r in made["results"][:2]]
    for row in top["results"]:
        text = documents[row["index"]]
        assert row["document"] == (text if isinstance(text, dict) else {"text": text})
    alone = ok(ranker.post("/v1/rerank", {"query": "number", "documents": ["three"]}))
    (whole,) = (row for row in made["results"] if row["index"] == 2)
    assert alone["results"][0]["relevance_score"] == whole["relevance_score"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": ["a", {"text": ""}]}, "documents[1]"),
        ({"documents": "a"}, "documents"),
        ({"documents": [1]}, "documents"),
        ({"documents": ["a"] * 2000}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"return_documents": 1}, "return_documents"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ],
)
def test_a_wrong_rerank_is_refused_by_name(ranker: Live, change: Any, named: str) -> None:
    ask = {"query": "q", "documents": ["a"], **change}
    assert refused(ranker.post("/v1/rerank", ask))[0].startswith(named)


@pytest.mark.parametrize(
    ("task", "query", "named", "rule"),
    [
        ("generate", "q", "model", "no cross-encoder"),
        ("rerank", "é" * 21, "query", "42 bytes times 100 documents are above 4000"),
    ],
)
async def test_a_rerank_is_refused_before_its_query_is_copied_for_each_document(
    task: str, query: str, named: str, rule: str
) -> None:
    body = {"model": "m", "query": query, "documents": ["d"] * 100, "truncate": True}
    state = SimpleNamespace(
        facts=SimpleNamespace(task=task, name="m"), limits=Limits(max_body_bytes=1000)
    )

    async def given(model: Any) -> Any:
        return model.model_validate(body)

    # no submit(): nothing may be sent
    call: Any = SimpleNamespace(state=state, body=given, served_model=lambda: "m")
    with pytest.raises(Problem) as error:
        await rerank(call)
    assert (error.value.status, error.value.param) == (400, named)
    assert rule in error.value.message


def test_a_pair_that_is_too_long_is_refused_with_its_length(ranker: Live) -> None:
    ask = {"query": "q", "documents": ["a", "b" * 99]}
    param, message = refused(ranker.post("/v1/rerank", ask))
    assert param == "documents"
    assert "103 tokens and the context holds 64" in message


def test_a_long_pair_is_truncated_on_request(ranker: Live) -> None:
    ask = {"query": "q", "documents": ["b" * 99], "truncate": True}
    made = ok(ranker.post("/v1/rerank", ask))
    assert made["usage"]["prompt_tokens"] == 64
    assert made["warnings"] == [
        "query and document: 103 tokens were truncated to 64, the longer text first"
    ]


def test_a_cross_encoder_gives_no_embeddings(ranker: Live) -> None:
    assert refused(ranker.post("/v1/embeddings", {"input": "a"}))[0] == "model"
