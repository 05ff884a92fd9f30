"""The split rules of `tokenizer.ggml.pre`: against transformers' tokenizer classes, against
another regular-expression engine, and on written-out examples."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim.base.errors import ModelError
from verbatim.text.pretokenize import (
    BYTES_GPT2,
    DIGIT,
    GPT2,
    SPLIT_RULES,
    normalizer_of,
    pre_tokenizer_of,
    split_rules_of,
)
from verbatim.text.vocabulary import BYTE_ALPHABET

PIECES = [
    *("a", "B", "ß", " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "1", "23", "456", "½", "é"),
    *(
        "e\u0301",
        "中",
        "가",
        "あ",
        "!",
        "$",
        "<=",
        "`",
        "_",
        "🤯",
        "\u3000",
        "\u00a0",
        "ǅ",
        "ʰ",
        "٣",
    ),
    "/",
]
texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    # Characters of an old Unicode version only, so that the two engines' tables agree about them.
    st.text(
        alphabet=st.characters(exclude_categories=["Cs", "Cn"]).filter(
            lambda c: unicodedata.ucd_3_2_0.category(c) != "Cn"
        ),
        max_size=20,
    ),
)


def cut_by_us(name: str, text: str) -> list[bytes]:
    cut = split_rules_of(name)
    normalizer = normalizer_of(cut)
    if normalizer is not None:
        text = normalizer.normalize_str(text)
    return [
        bytes(BYTE_ALPHABET[c] for c in piece)
        for piece, _ in pre_tokenizer_of(cut).pre_tokenize_str(text)
    ]


def cut_by_regex(steps: list[str], text: str) -> list[bytes]:
    """Each pattern splits every piece so far; matches and gaps are pieces."""
    parts = [text]
    for step in steps:
        parts = [p for part in parts for p in isolated(step, part)]
    return [p.encode() for p in parts]


def isolated(pattern: str, text: str) -> list[str]:
    out, at = [], 0
    for match in regex.finditer(pattern, text):
        out += [text[at : match.start()], match.group()]
        at = match.end()
    return [p for p in [*out, text[at:]] if p]


def test_an_unknown_name_is_an_error_that_names_it() -> None:
    with pytest.raises(ModelError, match=r"'marsian-bpe'.*qwen2"):
        split_rules_of("marsian-bpe")


# Names whose steps are all patterns; falcon splits inside the byte alphabet and has its own test.
@pytest.mark.parametrize(
    "name", sorted({cut: name for name, cut in SPLIT_RULES.items() if name != "falcon"}.values())
)
@settings(max_examples=20)
@given(text=texts)
def test_another_regex_engine_splits_the_same_pieces(name: str, text: str) -> None:
    cut = split_rules_of(name)
    steps = [GPT2 if s == BYTES_GPT2 else r"\p{N}" if s == DIGIT else s for s in cut.steps]
    steps = [regex.sub(r"\$$", r"\\Z", s) for s in steps]
    if cut.nfc:
        text = unicodedata.normalize("NFC", text)
    assert cut_by_us(name, text) == cut_by_regex(steps, text)


def transformers_cutters() -> dict[str, Any]:
    from transformers import (
        CodeGenTokenizer,
        CohereTokenizer,
        GPT2Tokenizer,
        GPTNeoXTokenizer,
        Qwen2Tokenizer,
        Qwen3_5Tokenizer,
    )

    vocab = {c: i for i, c in enumerate([*BYTE_ALPHABET, "<|endoftext|>"])}
    classes = {
        "gpt-2": GPT2Tokenizer,
        "phi-2": CodeGenTokenizer,
        "olmo": GPTNeoXTokenizer,
        "mpt": GPTNeoXTokenizer,
    }
    classes |= {"qwen2": Qwen2Tokenizer, "command-r": CohereTokenizer, "qwen35": Qwen3_5Tokenizer}
    return {
        name: kind(vocab=dict(vocab), merges=[]).backend_tokenizer for name, kind in classes.items()
    }


@pytest.mark.torch
def test_transformers_classes_split_the_same_pieces() -> None:
    cutters = transformers_cutters()

    @settings(max_examples=100)
    @given(text=texts)
    def check(text: str) -> None:
        for name, theirs in cutters.items():
            normal = (
                theirs.normalizer.normalize_str(text) if theirs.normalizer is not None else text
            )
            want = [
                bytes(BYTE_ALPHABET[c] for c in piece)
                for piece, _ in theirs.pre_tokenizer.pre_tokenize_str(normal)
            ]
            assert cut_by_us(name, text) == want, name

    check()


EXAMPLES = {
    "llama-bpe": (
        "I'LL pay $1234.5!\n\n ok",
        ["I", "'LL", " pay", " $", "123", "4", ".", "5", "!\n\n", " ok"],
    ),
    "qwen2": ("a 12\n  b", ["a", " ", "1", "2", "\n", " ", " b"]),
    "qwen35": ("e\u0301 ab हिन्दी 12", ["é", " ab", " हिन्दी", " ", "1", "2"]),
    "tekken": ("HelloWORLDfoo x/\n12", ["Hello", "WORLDfoo", " x", "/\n", "1", "2"]),
    "smollm": ("a 12 b's", ["a", " ", "1", "2", " b", "'s"]),
    "deepseek-coder": ("x = 12\ny日本", ["x", " = ", "1", "2", "\n", "y", "日本"]),
    "deepseek-llm": ("don't 日本 12  ", ["don", "'", "t", " ", "日本", " ", "1", "2", "  "]),
    "falcon": (
        "price: 12,3456 don't",
        ["price", ":", " ", "12", ",", "345", "6", " don", "'", "t"],
    ),
    "default": ("a==b 1234", ["a", "==", "b", " ", "123", "4"]),
    "gpt-4o": ("It's 12345", ["It's", " ", "123", "45"]),
    "stablelm2": ("e\u0301 12", ["e", "\u0301", " ", "1", "2"]),
    "seed-coder": ("a 12!\n\nb", ["a", " ", "1", "2", "!", "\n\n", "b"]),
    "chatglm-bpe": ("We'll 1234!\n", ["We", "'ll", " ", "123", "4", "!\n"]),
    "hunyuan-dense": ("x=12日本", ["x", "=", "12", "日本"]),
}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples(name: str) -> None:
    text, pieces = EXAMPLES[name]
    assert cut_by_us(name, text) == [p.encode() for p in pieces]
