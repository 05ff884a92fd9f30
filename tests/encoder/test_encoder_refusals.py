"""What an encoder refuses, by name: settings, files, texts and tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_encoders import POSITIONS, write_encoder
from verbatim import LLM, SamplingParams
from verbatim.base.errors import (
    BackendError,
    ContextError,
    ModelError,
    ParameterError,
    UnsupportedError,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = {"query": "why ", "document": ""}
    return write_encoder(tmp_path_factory.mktemp("bert"), prompts=prompts, max_tokens=32)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("ranker"), "xlm-roberta", scores=True)


def change(directory: Path, target: Path, file: str, **values: Any) -> Path:
    """A copy of a model with changed keys of one JSON file."""
    import shutil

    shutil.copytree(directory, target)
    path = target / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return target


def test_texts_that_do_not_fit(tiny: Path) -> None:
    with LLM(tiny) as llm:
        assert llm.context == 32, "max_seq_length of sentence_bert_config.json"
        long = "cat " * 40
        with pytest.raises(ContextError, match="42 tokens and the context holds 32"):
            llm.embed(long)
        np.testing.assert_array_equal(llm.embed(long, truncate=True), llm.embed("cat " * 30))
        np.testing.assert_array_equal(llm.embed("sky", prompt_name="query"), llm.embed("why sky"))
        with pytest.raises(ParameterError, match="prompt: is empty"):
            llm.embed(["sky", ""])
        with pytest.raises(ParameterError, match=r"prompt_name: 'x'.*query, document"):
            llm.embed("sky", prompt_name="x")
        with pytest.raises(ParameterError, match="is not a token id"):
            llm.embed([1, 10**6])
    with LLM(tiny, context=POSITIONS) as llm:
        assert llm.embed(long).shape == (32,)
        assert llm.embed("cat " * (POSITIONS - 2)).shape == (32,)
    with pytest.raises(ParameterError, match=f"context: 4096 .*{POSITIONS} positions"):
        LLM(tiny, context=4096)


def test_pairs_that_do_not_fit(ranker: Path) -> None:
    with LLM(ranker) as llm:
        long = " ".join(["cat"] * 60)
        with pytest.raises(ContextError, match=rf"65 tokens and the context holds {llm.context}"):
            llm.rerank("sky", [long])
        cut = llm.rerank("sky", [long], truncate=True)[0]
        assert cut.document == long
        assert cut.score == llm.rerank("sky", [" ".join(["cat"] * (llm.context - 5))])[0].score
        for query, documents, named in (
            ("", ["a"], "query: is empty"),
            ("a", ["b", ""], r"documents\[1\]: is empty"),
            ("a", ["b", 7], r"documents\[1\]: int is not a text"),
            ("a", [], "documents: a list of at least one"),
            ("a", "b", "documents: a list of at least one"),
        ):
            with pytest.raises(ParameterError, match=named):
                llm.rerank(query, documents)  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match="top_n: 0"):
            llm.rerank("a", ["b"], top_n=0)


def test_a_task_that_the_model_does_not_have_is_named(tiny: Path, ranker: Path) -> None:
    with LLM(tiny) as llm:
        with pytest.raises(UnsupportedError, match="encoder and generates no text; use embed"):
            llm.generate("sky", SamplingParams(max_tokens=1))
        with pytest.raises(UnsupportedError, match="generates no text"):
            llm.score("sky")
        with pytest.raises(UnsupportedError, match=r"no cross-encoder.*such as ms-marco-minilm"):
            llm.rerank("sky", ["blue"])
    with LLM(ranker) as llm, pytest.raises(UnsupportedError, match="use rerank"):
        llm.embed("sky")
    with pytest.raises(ParameterError, match="adapters: has no effect on an encoder"):
        LLM(str(ranker), adapters={"a": "/no/such"})
    with pytest.raises(ParameterError, match="pooling: has no effect on a cross-encoder"):
        LLM(ranker, pooling="mean")


@pytest.mark.parametrize(
    "setting",
    [
        {"quant": "q8_0"},
        {"kv_type": "q8"},
        {"speculate": "ngram"},
        {"step_tokens": 64},
        {"max_running": 2},
        {"kv_memory": "1M"},
        {"prefix_cache": False},
    ],
)
def test_a_setting_without_effect_is_refused(setting: dict[str, Any], tiny: Path) -> None:
    with pytest.raises(ParameterError, match=f"{next(iter(setting))}: has no effect"):
        LLM(tiny, **setting)


def test_the_loader_of_causal_models_names_the_commands_for_encoders(tiny: Path) -> None:
    from verbatim.model.loading.load import load_model

    with pytest.raises(ModelError, match=r"'bert' is an encoder.*verbatim embed"):
        load_model(tiny)


def test_cuda_is_refused(tiny: Path) -> None:
    with pytest.raises(BackendError, match="cuda backend runs no encoders"):
        LLM(tiny, backend="cuda")


def test_a_model_that_states_no_pooling_is_refused(tiny: Path, tmp_path: Path) -> None:
    bare = change(tiny, tmp_path / "m", "config.json")
    (bare / "modules.json").unlink()
    with LLM(bare) as llm, pytest.raises(UnsupportedError, match=r"pooling: .*does not state"):
        llm.embed("sky")
    with LLM(bare, pooling="cls") as llm:
        assert llm.embed("sky").shape == (32,)


@pytest.mark.parametrize(
    ("file", "values", "named"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "2 pooling modes are on"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "0 pooling modes are on"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "pooling_mode is"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompt 'a' is not a text"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length is -1"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is True"),
        ("config.json", {"is_decoder": True}, "is_decoder"),
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("config.json", {"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ("config.json", {"num_attention_heads": 5}, r"multiple of num_attention_heads \(5\)"),
        (
            "config.json",
            {"num_hidden_layers": 3},
            r"encoder\.layer\.2\..* is missing.*num_hidden_layers",
        ),
        ("config.json", {"num_hidden_layers": 1}, r"layer\.1\..* is not known.*num_hidden_layers"),
        ("config.json", {"intermediate_size": 40}, r"has shape \(48,( 32)?\).*intermediate_size"),
        ("config.json", {"layer_norm_eps": "big"}, "layer_norm_eps is 'big'"),
        ("config.json", {"new_key": 7}, "new_key is 7: not known for bert"),
        (
            "config.json",
            {"model_type": "nomic_bert", "rope_parameters": {"rope_theta": None}},
            "rope_parameters is {'rope_theta': None}",
        ),
        (
            "config.json",
            {"architectures": ["BertForSequenceClassification"]},
            "the classifier has 2 labels; a cross-encoder has 1",
        ),
    ],
)
def test_files_that_state_what_is_not_implemented(
    file: str, values: dict[str, Any], named: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=named):
        LLM(change(tiny, tmp_path / "m", file, **values))


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ({}, "a list of modules"),
        ([7], "a list of modules"),
        ([{"type": "os.system", "path": ""}], "not one of sentence_transformers"),
        ([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], "'Dense'"),
        ([{"type": "sentence_transformers.models.Pooling", "path": "../x"}], "leads out"),
        ([{"type": "sentence_transformers.models.Pooling", "path": "none"}], "missing"),
    ],
)
def test_module_lists_are_checked(modules: Any, named: str, tiny: Path, tmp_path: Path) -> None:
    model = change(tiny, tmp_path / "m", "config.json")
    (model / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=named):
        LLM(model)


def test_a_cross_encoder_with_an_unknown_activation(ranker: Path, tmp_path: Path) -> None:
    named: dict[str, Any] = {"activation_fn": None}
    model = change(ranker, tmp_path / "n", "config.json", sentence_transformers=named)
    with pytest.raises(ModelError, match="activation is None"):
        LLM(model)
    named = {"activation_fn": "os.system"}
    model = change(ranker, tmp_path / "m", "config.json", sentence_transformers=named)
    with pytest.raises(ModelError, match=r"activation is 'os\.system'"):
        LLM(model)
