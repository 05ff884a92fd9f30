"""Encoders against transformers and sentence-transformers' formulas, on tiny checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_encoders import KINDS, write_encoder, write_modules, write_unigram
from verbatim import LLM
from verbatim.base.errors import UnsupportedError
from verbatim.encoder.encoder import erf
from verbatim.encoder.encoder_keys import ENCODER_KEYS
from verbatim.model.architecture import ENCODERS

pytestmark = pytest.mark.torch

TEXTS = [
    "the cat sat on the mat.",
    "Why is the sky blue?",
    "paris",
    "a dog, zebra & naïve QUICK café [SEP] <s>",
    "the " * 20,
]
QUERY = "capital of france"


def oracle_ids(directory: Path, *texts: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json")).encode(*texts)


@functools.cache
def oracle(directory: Path) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()


def states_of(directory: Path, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        found: np.ndarray = oracle(directory)(torch.tensor([ids]))[0][0].numpy()
    return found


def pooled(states: np.ndarray, pooling: str) -> np.ndarray:
    if pooling == "mean":
        return np.asarray(states.mean(axis=0))
    return np.asarray(states[0 if pooling == "cls" else -1])


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_equal_transformers(kind: str, tmp_path: Path) -> None:
    directory = write_encoder(tmp_path, kind, pooling="mean", normalise=False)
    assert set(ENCODER_KEYS) == set(KINDS) == set(ENCODERS)
    for text in TEXTS[:3]:
        with LLM(directory) as llm:
            ids = llm.encode(text)
            made = llm.embed(text)
        assert ids == oracle_ids(directory, text).ids
        expected = states_of(directory, ids)
        np.testing.assert_allclose(made, pooled(expected, "mean"), atol=2e-6)
        for pooling in ("cls", "last"):
            with LLM(directory, pooling=pooling) as llm:
                np.testing.assert_allclose(llm.embed(text), pooled(expected, pooling), atol=2e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooling_and_normalisation_are_those_of_the_files(pooling: str, tmp_path: Path) -> None:
    plain = LLM(write_encoder(tmp_path / "a", pooling=pooling, normalise=False))
    unit = LLM(write_encoder(tmp_path / "b", pooling=pooling, normalise=True))
    assert plain.parts.embedding.pooling == pooling
    vector = plain.embed(TEXTS[0])
    np.testing.assert_allclose(unit.embed(TEXTS[0]), vector / np.linalg.norm(vector), atol=1e-6)
    others = {"mean", "cls", "last"} - {pooling}
    for other in others:
        chosen = LLM(tmp_path / "a", pooling=other).embed(TEXTS[0])
        assert np.abs(chosen - vector).max() > 0.01


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
@pytest.mark.parametrize("activation", ["", "Identity"])
def test_relevance_equals_transformers(kind: str, activation: str, tmp_path: Path) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    more = {}
    if activation:
        more = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.linear.{activation}"}}
    directory = write_encoder(tmp_path, kind, scores=True, **more)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with LLM(directory) as llm:
        ranked = llm.rerank(QUERY, TEXTS)
    assert sorted(row.index for row in ranked) == list(range(len(TEXTS)))
    assert [row.score for row in ranked] == sorted((r.score for r in ranked), reverse=True)
    for row in ranked:
        if "[SEP]" in row.document:
            continue  # a typed control token stays text here
        pair = oracle_ids(directory, QUERY, row.document)
        with torch.no_grad():
            types = torch.tensor([pair.type_ids])
            logit = model(torch.tensor([pair.ids]), token_type_ids=types).logits[0, 0]
        expected = logit if activation else torch.sigmoid(logit)
        assert row.score == pytest.approx(float(expected), abs=3e-6)
        assert row.document == TEXTS[row.index]


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "nomic_bert"])
def test_a_text_has_the_same_bits_alone_and_in_any_batch(kind: str, tmp_path: Path) -> None:
    with LLM(write_encoder(tmp_path, kind)) as llm:
        alone = [llm.embed(text) for text in TEXTS]
        np.testing.assert_array_equal(llm.embed(TEXTS), alone)
        np.testing.assert_array_equal(llm.embed(TEXTS[::-1] * 3), [*alone[::-1]] * 3)


def test_pairs_have_the_same_bits_alone_and_in_any_list(tmp_path: Path) -> None:
    with LLM(write_encoder(tmp_path, scores=True)) as llm:
        alone = {text: llm.rerank(QUERY, [text])[0].score for text in TEXTS}
        assert {r.document: r.score for r in llm.rerank(QUERY, TEXTS)} == alone
        assert len({round(score, 9) for score in alone.values()}) == len(TEXTS)
        top = llm.rerank(QUERY, [*TEXTS, *TEXTS], top_n=2)
        assert top[0].score == top[1].score == max(alone.values())
        assert top[0].index == top[1].index - len(TEXTS), "ties keep the order of the documents"


@pytest.mark.parametrize(("first", "second"), [(3, 60), (60, 3), (40, 41), (41, 40), (30, 30)])
@pytest.mark.parametrize("limit", [16, 17, 48])
def test_pairs_are_truncated_as_the_library_does(
    first: int, second: int, limit: int, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    from verbatim.text.tokenizer import from_directory

    write_encoder(tmp_path, scores=True)
    texts = "cat " * first, "dog " * second
    oracle = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    oracle.enable_truncation(limit, strategy="longest_first")
    assert from_directory(tmp_path).encode_pair(*texts, limit) == oracle.encode(*texts).ids


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_tables_are_those_of_transformers(kind: str) -> None:
    import transformers

    name = {"nomic_bert": "NomicBert"}.get(kind, KINDS[kind])
    config = getattr(transformers, f"{name}Config")
    table = ENCODER_KEYS[kind]
    written = set(config().to_dict())
    assert sorted(written - set(table) - {"_post_init_done"}) == []
    for field in dataclasses.fields(config):
        key = table[field.name]
        if key.treatment == "followed" and key.default is not None:
            assert key.default == field.default, field.name


def test_nomics_published_config_is_read(tmp_path: Path) -> None:
    """The checkpoint's own names of the sizes give the bits of transformers' names."""
    directory = write_encoder(tmp_path, "nomic_bert")
    with LLM(directory) as llm:
        expected = llm.embed(TEXTS[0])
    config = json.loads((directory / "config.json").read_text())
    names = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    }
    renamed = {names.get(key, key): value for key, value in config.items()}
    renamed |= {"activation_function": "swiglu", "rotary_emb_base": 1000, "prenorm": False}
    renamed |= {"max_trained_positions": 24, "layer_norm_epsilon": 1e-12, "causal": False}
    (directory / "config.json").write_text(json.dumps(renamed))
    with LLM(directory) as llm:
        assert llm.context == 24
        np.testing.assert_array_equal(llm.embed(TEXTS[0]), expected)


def test_the_error_function_is_exact_in_float32() -> None:
    x = np.concatenate([np.linspace(-7, 7, 20001), [0.0, -0.0, 1e-30, 6.0, -6.0]])
    x = x.astype(np.float32)
    exact = np.array([math.erf(float(v)) for v in x])
    np.testing.assert_allclose(erf(x), exact, atol=6e-8, rtol=6e-8)
    assert erf(np.float32([np.nan, np.inf, -np.inf])).tolist()[1:] == [1.0, -1.0]


def test_a_causal_model_embeds_as_its_files_say(tmp_path: Path) -> None:
    """The form of Qwen3-Embedding: a bare Qwen3Model, the last state, length 1, a query prompt."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    vocab = write_unigram(tmp_path)
    config = transformers.Qwen3Config(vocab_size=vocab, tie_word_embeddings=True, **sizes, **heads)
    model = transformers.Qwen3Model(config).eval()
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, backend="reference") as llm, pytest.raises(UnsupportedError, match="state"):
        llm.embed(TEXTS[0])
    write_modules(tmp_path, "last", True, prompts={"query": "why "})
    with LLM(tmp_path, backend="reference") as llm:
        made, asked = llm.embed(TEXTS[0]), llm.embed("the sky", prompt_name="query")
        ids, query = llm.encode(TEXTS[0]), llm.encode("why the sky")
    for vector, tokens in ((made, ids), (asked, query)):
        with torch.no_grad():
            last = model(torch.tensor([tokens]))[0][0, -1]
        expected = torch.nn.functional.normalize(last, dim=0).numpy()
        np.testing.assert_allclose(vector, expected, atol=2e-6)
