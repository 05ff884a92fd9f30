"""Broken tokenizers: mutated GGUF metadata and tokenizer.json files either work or raise
ModelError."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verbatim.base.errors import ModelError, RequestError
from verbatim.text.templates.template_files import template_from_directory, template_from_gguf
from verbatim.text.tokenizer import Tokenizer, from_directory, from_gguf
from verbatim.text.vocabulary import BYTE_ALPHABET

G = "tokenizer.ggml."


def byte_level() -> dict[str, Any]:
    merges = ["h e", "he l", "l o", "hel lo", "Ġ w"]
    words = [*BYTE_ALPHABET, *("".join(m.split()) for m in merges)]
    return {
        "general.architecture": "llama",
        G + "model": "gpt2",
        G + "pre": "smollm",
        G + "tokens": ["<|im_start|>", "<|im_end|>", "<tool>", *words],
        G + "token_type": [3, 3, 4] + [1] * len(words),
        G + "merges": merges,
        G + "bos_token_id": 0,
        G + "eos_token_id": 1,
        G + "add_bos_token": True,
        "tokenizer.chat_template": (
            "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        ),
    }


def pieces() -> dict[str, Any]:
    words = ["\u2581", *"abcdehlorw", "he", "ll", "hell", "hello", "\u2581w", "or"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    return {
        "general.architecture": "llama",
        G + "model": "llama",
        G + "tokens": tokens,
        G + "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        G + "scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        G + "bos_token_id": 1,
        G + "eos_token_id": 2,
        G + "unknown_token_id": 0,
    }


def use(tokenizer: Tokenizer) -> None:
    """Everything an engine does with a tokenizer. A text it cannot encode is a RequestError."""
    for text in ("hello world </s> <|im_end|> é🤯\n", "", " "):
        for special in (False, True):
            try:
                ids = tokenizer.encode_prompt(text, special=special)
            except RequestError:
                continue
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            tokenizer.decode(ids)
    for i in range(0, tokenizer.vocab_size, 7):
        tokenizer.token_bytes(i)
    assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.eos_ids)


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_unmutated_tokenizers_work(make: Any) -> None:
    tokenizer = from_gguf(make())
    use(tokenizer)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


BROKEN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no model": (byte_level, {G + "model": None}, "model is missing"),
    "unknown model": (byte_level, {G + "model": "marsian"}, "'marsian'"),
    "model of the wrong type": (byte_level, {G + "model": 3}, "is int, not str"),
    "unknown pre": (byte_level, {G + "pre": "marsian"}, "'marsian'"),
    "no tokens": (byte_level, {G + "tokens": None}, "tokens is missing"),
    "empty tokens": (byte_level, {G + "tokens": []}, "tokens is missing or empty"),
    "tokens not text": (byte_level, {G + "tokens": [1, 2]}, "holds int"),
    "tokens one string": (byte_level, {G + "tokens": "abc"}, "not an array"),
    "twice": (byte_level, {G + "tokens": ["a", "b", "a"], G + "token_type": [1, 1, 1]}, "twice"),
    "a token too long": (byte_level, {G + "tokens": ["a" * 100_000]}, "100000 characters"),
    "types too short": (byte_level, {G + "token_type": [1]}, "1 entries"),
    "types out of range": (byte_level, {G + "token_type": [99] * 264}, "99"),
    "types not numbers": (byte_level, {G + "token_type": ["a"] * 264}, "holds str"),
    "merge of unknown tokens": (byte_level, {G + "merges": ["x yz"]}, "cannot be built"),
    "merge without space": (byte_level, {G + "merges": ["he"]}, "two tokens"),
    "merge with two spaces": (byte_level, {G + "merges": ["h e l"]}, "two tokens"),
    "merges of numbers": (byte_level, {G + "merges": [1]}, "holds int"),
    "bos outside": (byte_level, {G + "bos_token_id": 10**6}, "outside the vocabulary"),
    "eos negative": (byte_level, {G + "eos_token_id": -5}, "outside the vocabulary"),
    "eos of the wrong type": (byte_level, {G + "eos_token_id": "1"}, "is str, not int"),
    "eos a flag": (byte_level, {G + "eos_token_id": True}, "is bool, not int"),
    "flag a number": (byte_level, {G + "add_bos_token": 1}, "is int, not bool"),
    "add bos, no id": (byte_level, {G + "bos_token_id": None}, "add_bos_token is true"),
    "add bos, id -1": (byte_level, {G + "bos_token_id": -1}, "add_bos_token is true"),
    "add eos, no id": (
        byte_level,
        {G + "eos_token_id": None, G + "add_eos_token": True},
        "add_eos_token is true",
    ),
    "scores missing": (pieces, {G + "scores": None}, "0 entries"),
    "scores of text": (pieces, {G + "scores": ["a"] * 276}, "holds str"),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_vocabulary_is_named(name: str) -> None:
    make, change, says = BROKEN[name]
    meta = {k: v for k, v in (make() | change).items() if v is not None}
    with pytest.raises(ModelError, match=says) as error:
        from_gguf(meta, file="some.gguf")
    assert str(error.value).startswith("some.gguf: ")


@pytest.mark.parametrize(
    "merges", [["P A", "PA D"], ["P A"]], ids=["by merging", "as a whole word"]
)
def test_a_control_token_that_is_an_ordinary_word_is_not_typed(merges: list[str]) -> None:
    """Llama 3's rules take whole words from the vocabulary; here a control token is spelled like
    a word."""
    meta = byte_level()
    meta[G + "tokens"] += ["PA", "PAD"]
    meta[G + "token_type"] += [1, 3]
    meta |= {G + "merges": merges, G + "pre": "llama-bpe"}
    tokenizer = from_gguf(meta)
    pad = tokenizer.control_tokens["PAD"]
    for text in ("PAD", "the PAD and PADPAD", "xPADx"):
        ids = tokenizer.encode(text)
        assert pad not in ids
        assert tokenizer.decode(ids) == text
    assert pad in tokenizer.encode("PAD", special=True)


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_padding_tokens_of_other_converters_have_no_text(make: Any) -> None:
    """SentencePiece files number them from 1 and may repeat a name; files of early 2024 mark them
    as user-defined, under the number of the id."""
    meta = make()
    size = len(meta[G + "tokens"])
    padding = ["[PAD1]", "[PAD2]", "[PAD2]", f"[PAD{size + 3}]"]
    meta[G + "tokens"] += [*padding, "[PAD7]", "[PAD8]", "<unused9>"]
    meta[G + "token_type"] += [5, 5, 5, 4, 4, 1, 5]
    if G + "scores" in meta:
        meta[G + "scores"] += [-1000.0] * 7
    tokenizer = from_gguf(meta)
    texts = [tokenizer.decode([i]) for i in range(size, size + 7)]
    assert texts == ["", "", "", "", "[PAD7]", "[PAD8]", "<unused9>"]
    for text in padding:
        assert max(tokenizer.encode(text, special=True)) < size
    assert tokenizer.encode("[PAD7]")[-1] == size + 4
    use(tokenizer)


def test_sentencepiece_without_ids_has_those_of_llama_cpp() -> None:
    """bos 1 and eos 2, if they are control tokens: such a file ran without both."""
    without = {
        k: v for k, v in pieces().items() if not k.endswith(("bos_token_id", "eos_token_id"))
    }
    tokenizer = from_gguf(without)
    assert tokenizer.encode_prompt("hello") == from_gguf(pieces()).encode_prompt("hello")
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    without[G + "token_type"][1:3] = [1, 1]
    assert from_gguf(without).bos_id is from_gguf(without).eos_id is None
    none = from_gguf(pieces() | {G + "bos_token_id": -1, G + "add_bos_token": False})
    assert none.bos_id is None


def test_merges_missing_from_a_real_vocabulary() -> None:
    meta = byte_level()
    meta[G + "tokens"] = meta[G + "tokens"] + [f"word{i}" for i in range(600)]
    meta[G + "token_type"] = meta[G + "token_type"] + [1] * 600
    del meta[G + "merges"]
    with pytest.raises(ModelError, match="merges is missing"):
        from_gguf(meta)


def test_numpy_arrays_are_arrays_too() -> None:
    meta = pieces()
    meta[G + "scores"] = np.array(meta[G + "scores"], np.float32)
    meta[G + "token_type"] = np.array(meta[G + "token_type"], np.int32)
    assert from_gguf(meta).encode("hello") == from_gguf(pieces()).encode("hello")


JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "a",
    "\x00",
    "é",
    "\ud800",
    [],
    [[]],
    {},
    ["a"],
    [1],
    b"x",
    (1, 2),
    object(),
]


def mutate(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """A copy with a random fault."""
    roll = rng.random()
    if depth > 6 or roll < 0.08:
        return rng.choice(JUNK)
    if isinstance(value, dict) and value:
        out = dict(value)
        key = rng.choice(list(out))
        if roll < 0.25:
            del out[key]
        elif roll < 0.32:
            out[key + rng.choice("xX_")] = out.pop(key)
        else:
            out[key] = mutate(rng, out[key], depth + 1)
        return out
    if isinstance(value, list) and value:
        out2 = list(value)
        at = rng.randrange(len(out2))
        if roll < 0.25:
            del out2[at : at + rng.choice([1, 1, len(out2)])]
        elif roll < 0.4:
            out2.insert(at, copy.copy(rng.choice(out2)))
        elif roll < 0.5:
            rng.shuffle(out2)
        else:
            out2[at] = mutate(rng, out2[at], depth + 1)
        return out2
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return (
            value[:at]
            + rng.choice(["", "\x00", "é", "\u2581", "\ufffd", " ", "Ġ", "{{", value])
            + value[at + 1 :]
        )
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice([-1, 1, 255, -256, 2**31, -(2**63)])
    return rng.choice(JUNK)


def fuzz_gguf(count: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    outcome = {"works": 0, "refused": 0}
    for turn in range(count):
        meta = (byte_level, pieces)[turn % 2]()
        for _ in range(rng.randint(1, 3)):
            changed = mutate(rng, meta)
            meta = changed if isinstance(changed, dict) else meta
        try:
            tokenizer = from_gguf(meta)
            use(tokenizer)
            template_from_gguf(meta, tokenizer)
            outcome["works"] += 1
        except ModelError:
            outcome["refused"] += 1
    return outcome


def test_mutated_gguf_metadata() -> None:
    outcome = fuzz_gguf(500, seed=1)
    assert min(outcome.values()) > 60


def write_directory(folder: Path, spec: Any, config: Any) -> None:
    (folder / "tokenizer.json").write_text(
        json.dumps(spec, default=str), encoding="utf-8", errors="replace"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, default=str), encoding="utf-8", errors="replace"
    )


def specs() -> list[dict[str, Any]]:
    """The JSON of both kinds of tokenizer, with everything that real files have."""
    found = []
    for make in (byte_level, pieces):
        spec = json.loads(from_gguf(make())._vocab.special.to_str())
        spec["decoder"] = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "BOS", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"BOS": {"id": "BOS", "ids": [1], "tokens": ["BOS"]}},
        }
        found.append(spec)
    found[1]["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    metaspace = copy.deepcopy(found[1])
    metaspace["normalizer"] = None
    metaspace["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "first",
        "split": False,
    }
    return [*found, metaspace]


CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "add_bos_token": True,
    "chat_template": "{{ bos_token }}{{ messages[0].content }}",
}


def fuzz_directories(folder: Path, count: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    outcome = {"works": 0, "refused": 0}
    originals = specs()
    for turn in range(count):
        spec, config = originals[turn % len(originals)], CONFIG
        for _ in range(rng.randint(1, 2)):
            if rng.random() < 0.8:
                part = rng.choice(list(spec))
                spec = (
                    mutate(rng, spec)
                    if rng.random() < 0.2
                    else {**spec, part: mutate(rng, spec[part])}
                )
            else:
                config = mutate(rng, config)
            if not isinstance(spec, dict) or not spec:
                break
        write_directory(folder, spec, config)
        if rng.random() < 0.1:
            data = bytearray((folder / "tokenizer.json").read_bytes())
            for _ in range(3):
                data[rng.randrange(len(data))] = rng.randrange(256)
            (folder / "tokenizer.json").write_bytes(data)
        try:
            tokenizer = from_directory(folder)
            use(tokenizer)
            template_from_directory(folder, tokenizer)
            outcome["works"] += 1
        except ModelError:
            outcome["refused"] += 1
    return outcome


def test_mutated_directories(tmp_path: Path) -> None:
    outcome = fuzz_directories(tmp_path, 120, seed=2)
    assert min(outcome.values()) > 13


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_mutated_tokenizers(tmp_path: Path) -> None:
    fuzz_gguf(100_000, seed=3)
    fuzz_directories(tmp_path, 50_000, seed=4)


def test_metaspace_first_puts_its_space_only_at_the_beginning(tmp_path: Path) -> None:
    write_directory(tmp_path, specs()[2], CONFIG)
    tokenizer = from_directory(tmp_path)
    for text in ("hello<s>hello</s> w", "</s>hello", "hello w"):
        assert tokenizer.encode_parts(tokenizer.split_control(text)) == tokenizer.encode(
            text, special=True
        )
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert tokenizer.encode_prompt("hello")[0] == tokenizer.bos_id


@pytest.mark.parametrize(("flag", "begins"), [(True, True), (False, False), (None, True)])
def test_the_configuration_overrides_the_post_processor_about_bos(
    tmp_path: Path, flag: bool | None, begins: bool
) -> None:
    write_directory(tmp_path, specs()[1], CONFIG | {"add_bos_token": flag})
    tokenizer = from_directory(tmp_path)
    assert (tokenizer.encode_prompt("hello")[0] == tokenizer.bos_id) is begins


HOSTILE_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "doubling": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}]
                * 40,
            }
        },
        "times longer",
    ),
    "one long replacement": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 10**6}},
        "times longer",
    ),
    "bytes of bytes": (
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "ByteLevel",
                        "add_prefix_space": False,
                        "trim_offsets": True,
                        "use_regex": False,
                    }
                ]
                * 40,
            }
        },
        "times longer",
    ),
    "too many steps": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}},
        "steps",
    ),
    "other kind": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
        "WordLevel",
    ),
    "a bomb as prefix": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "B", "type_id": 0}}] * 100
                + [{"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [
                    {"Sequence": {"id": "A", "type_id": 0}},
                    {"Sequence": {"id": "B", "type_id": 1}},
                ],
                "special_tokens": {"B": {"id": "B", "ids": [1], "tokens": ["B"]}},
            }
        },
        "around a prompt",
    ),
}


@pytest.mark.parametrize("name", sorted(HOSTILE_PARTS))
def test_hostile_steps_are_refused_before_they_run(tmp_path: Path, name: str) -> None:
    change, says = HOSTILE_PARTS[name]
    write_directory(tmp_path, specs()[0] | change, CONFIG)
    with pytest.raises(ModelError, match=says) as error:
        from_directory(tmp_path)
    assert "tokenizer.json" in str(error.value)


def test_a_post_processor_cannot_add_ids_that_do_not_exist(tmp_path: Path) -> None:
    spec = specs()[0]
    spec["post_processor"]["special_tokens"]["BOS"]["ids"] = [70_000]
    write_directory(tmp_path, spec, CONFIG | {"add_bos_token": None})
    with pytest.raises(ModelError, match="70000, outside"):
        from_directory(tmp_path)


def test_dropout_would_make_tokens_random(tmp_path: Path) -> None:
    spec = specs()[0]
    spec["model"]["dropout"] = 0.5
    write_directory(tmp_path, spec, CONFIG)
    with pytest.raises(ModelError, match="dropout"):
        from_directory(tmp_path)


def test_a_pattern_without_end_is_the_models_fault(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    spec = specs()[0]
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, spec["pre_tokenizer"]]}
    write_directory(tmp_path, spec, CONFIG)
    tokenizer = from_directory(tmp_path)
    with pytest.raises(ModelError, match="tokenizer fails on a text of 41"):
        tokenizer.encode("a" * 40 + "b")


@pytest.mark.torch
def test_prompts_equal_transformers_with_a_post_processor(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    for spec in specs():
        write_directory(tmp_path, spec, {})
        ours = from_directory(tmp_path)
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
        for text in ("hello world", "é🤯", " hello", "a</s>b<|im_end|> w"):
            assert ours.encode_prompt(text, special=True) == theirs(text).input_ids
            assert (
                ours.encode(text, special=True) == theirs(text, add_special_tokens=False).input_ids
            )


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        from_directory(tmp_path)
