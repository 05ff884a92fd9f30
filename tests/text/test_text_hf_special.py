"""tokenizer_config.json and special_tokens_map.json beside a tokenizer.json: tokens and settings
that only they have, against transformers; what is not supported is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from verbatim.base.errors import ModelError
from verbatim.convert.export_tokenizer import tokenizer_metadata
from verbatim.text.templates.chat_template import encode_chat
from verbatim.text.templates.template_files import template_from_directory
from verbatim.text.tokenizer import from_directory

TEXTS = ("hello world", "Hello WÖRLD", "a<s>b<new> c</s><extra>d", "[UNK] hello [SEP]")
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
NEW = {"content": "<new>", "lstrip": True, "rstrip": False, "single_word": False}
TEMPLATE = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ img }}|{{ messages[0].content }}"
FLAGS = {"normalized": False, "special": True}


def byte_level() -> Encoder:
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    encoder.train_from_iterator(
        ["hello world"] * 2,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return encoder


def word_piece() -> Encoder:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdehlowörd", "##l", "##o"]
    words = ["hello", "world", "Hello", "wörld", "WÖRLD", "WORLD"]
    vocab = {token: i for i, token in enumerate([*tokens, *words])}
    encoder = Encoder(models.WordPiece(vocab, unk_token="[UNK]"))
    encoder.normalizer = normalizers.BertNormalizer(lowercase=True)
    encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoder.decoder = decoders.WordPiece()
    encoder.add_special_tokens(tokens[:5])
    encoder.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return encoder


def write(folder: Path, encoder: Encoder, config: Any, special_map: Any = None) -> None:
    encoder.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if special_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_map))


BERT = {
    "tokenizer_class": "BertTokenizer",
    **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "eos_token": ({**NAMES, "eos_token": "<new>"}, None),
    "bos_token, an object": ({**NAMES, "bos_token": {**NEW, "__type": "AddedToken"}}, None),
    "image_token": ({**NAMES, "image_token": "<new>"}, None),
    "additional_special_tokens": ({**NAMES, "additional_special_tokens": ["<new>"]}, None),
    "extra_special_tokens": ({**NAMES, "extra_special_tokens": ["<extra>", "<new>"]}, None),
    "named extra_special_tokens": ({**NAMES, "extra_special_tokens": {"img": "<new>"}}, None),
    "added_tokens_decoder": ({**NAMES, "added_tokens_decoder": {"267": {**NEW, **FLAGS}}}, None),
    "other flags": (
        {**NAMES, "added_tokens_decoder": {"0": {**NEW, **FLAGS, "content": "<s>"}}},
        None,
    ),
    "the map wins": (NAMES, {"eos_token": "<new>", "bos_token": {**NEW, "content": "<s>"}}),
    "the map does not count": (
        {**NAMES, "added_tokens_decoder": {"1": {**NEW, **FLAGS, "content": "</s>"}}},
        {"eos_token": "<new>"},
    ),
    "add_prefix_space": (
        {**NAMES, "tokenizer_class": "GPT2Tokenizer", "unk_token": "<s>", "add_prefix_space": True},
        None,
    ),
    "do_lower_case": ({**BERT, "do_lower_case": False}, None),
    "strip_accents": ({**BERT, "do_lower_case": True, "strip_accents": False}, None),
}


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_settings_of_the_configuration_equal_transformers(
    tmp_path: Path, case: str
) -> None:
    from transformers import AutoTokenizer

    config, special_map = CASES[case]
    config = {**config, "chat_template": TEMPLATE}
    bert = config["tokenizer_class"] == "BertTokenizer"
    write(tmp_path, word_piece() if bert else byte_level(), config, special_map)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), from_directory(tmp_path)
    for text in TEXTS:
        assert ours.encode(text, special=True) == theirs.encode(text, add_special_tokens=False)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    chat = [{"role": "user", "content": "hello"}]
    template = template_from_directory(tmp_path, ours)
    assert template is not None
    assert template.render(chat) == theirs.apply_chat_template(chat, tokenize=False)
    assert encode_chat(ours, template, chat) == theirs.apply_chat_template(chat)["input_ids"]


def test_an_ordinary_token_used_as_padding_stays_text(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), {**NAMES, "pad_token": "!"})
    tokenizer = from_directory(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello!")) == "hello!"
    assert not tokenizer.is_control(tokenizer.encode("!")[0])


def test_a_token_of_the_configuration_without_a_row_is_not_exported(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), {**NAMES, "pad_token": "<pad>"})
    tokenizer = from_directory(tmp_path)
    assert tokenizer.pad_id == 267
    found = tokenizer_metadata(tmp_path, tokenizer, 267, "gpt2")
    assert len(found["tokenizer.ggml.tokens"]) == 267
    assert "tokenizer.ggml.padding_token_id" not in found
    more = tokenizer_metadata(tmp_path, from_directory(tmp_path), 268, "gpt2")
    assert more["tokenizer.ggml.padding_token_id"] == 267


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"added_tokens_decoder": {"900": {**NEW, **FLAGS}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"x": {**NEW, **FLAGS}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": ["<new>"]}, "added_tokens_decoder"),
        ({"extra_special_tokens": "<new>"}, "extra_special_tokens"),
        ({"additional_special_tokens": [3]}, "additional_special_tokens"),
        ({"split_special_tokens": True}, "split_special_tokens"),
        ({"eos_token": 3}, "eos_token"),
        ({**BERT, "do_lower_case": "no"}, "do_lower_case"),
    ],
)
def test_a_setting_that_cannot_be_followed_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    write(tmp_path, word_piece() if "do_lower_case" in config else byte_level(), config)
    with pytest.raises(ModelError, match=named):
        from_directory(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(suffix="</w>"),
        decoders.CTC(),
        decoders.Replace("l", "L"),
        decoders.Metaspace(replacement="_"),
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_a_decoder_that_is_not_implemented_is_refused_by_name(tmp_path: Path, decoder: Any) -> None:
    encoder = byte_level()
    encoder.decoder = decoder
    write(tmp_path, encoder, NAMES)
    with pytest.raises(ModelError, match="decoder"):
        from_directory(tmp_path)


def test_a_post_processor_that_repeats_the_text_is_refused(tmp_path: Path) -> None:
    encoder = byte_level()
    encoder.post_processor = processors.TemplateProcessing(
        single="$A <s> $A", special_tokens=[("<s>", 0)]
    )
    write(tmp_path, encoder, NAMES)
    with pytest.raises(ModelError, match="post-processor"):
        from_directory(tmp_path)
