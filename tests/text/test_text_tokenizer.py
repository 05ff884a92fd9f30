"""The default model's tokenizer, rebuilt from its GGUF file, against Hugging Face's and against
the textbook algorithm."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim.base.errors import RequestError
from verbatim.text.pretokenize import GPT2
from verbatim.text.tokenizer import Tokenizer, from_directory, from_gguf
from verbatim.text.vocabulary import BYTE_ALPHABET

pytestmark = pytest.mark.model

WORDS = [
    *(
        "the",
        " quick",
        "  ",
        "\n",
        "\t",
        "123",
        "4.56",
        "don't",
        "I'LL",
        "é",
        "naïve",
        "中文",
        "日本語",
    ),
    *("한국어", "🤯", "👩‍👩‍👧", "a\u0301"),
]
WORDS += [
    *("<|im_end|>", "<|im_start|>", "def f(x):", "\u00a0", "\u2028", "\u200d", "\ufeff", "½", "٣٤"),
    *("\x00", "\r\n", "Ġ", "ÿ", "\ufffd"),
]
texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=st.characters(max_codepoint=0x24F, exclude_categories=["Cs"]), max_size=60),
    st.lists(st.sampled_from(WORDS), max_size=12).map("".join),
    st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), max_size=10).map("".join),
)


# Bytes of UTF-8 text without a token in this vocabulary. The published tokenizer drops them too.
UNWRITABLE = bytes([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2])


def writable(text: str) -> str:
    data = bytes(b for b in text.encode("utf-8") if b not in UNWRITABLE)
    return data.decode("utf-8", errors="replace")


def published(metadata: dict[str, Any], folder: Path) -> Path:
    """The published tokenizer.json of this model, built from its parts: single digits, then
    GPT-2's rule."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], list(metadata["tokenizer.ggml.token_type"])
    added = [
        {
            "id": i,
            "content": t,
            "special": True,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == 3
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": list(metadata["tokenizer.ggml.merges"]),
        },
    }
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def published_folder(
    default_metadata: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return published(default_metadata, tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def hugging_face(published_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(published_folder)


BATCHES = given(batch=st.lists(texts, min_size=20, max_size=20))


@pytest.mark.torch
@settings(max_examples=30)
@BATCHES
def test_hundreds_of_strings_encode_as_hugging_face_does(
    default_tokenizer: Tokenizer, hugging_face: Any, batch: list[str]
) -> None:
    agree(default_tokenizer, hugging_face, batch)


@pytest.mark.torch
@pytest.mark.soak
@settings(max_examples=2_000)
@BATCHES
def test_forty_thousand_strings_encode_as_hugging_face_does(
    default_tokenizer: Tokenizer, hugging_face: Any, batch: list[str]
) -> None:
    agree(default_tokenizer, hugging_face, batch)


def agree(default_tokenizer: Tokenizer, hugging_face: Any, batch: list[str]) -> None:
    for text in batch:
        special = default_tokenizer.encode(text, special=True)
        assert special == hugging_face.encode(text, add_special_tokens=False)
        assert default_tokenizer.decode(special, skip_special=False) == hugging_face.decode(special)
        plain = default_tokenizer.encode(text)
        assert default_tokenizer.decode(plain) == writable(text)
        assert not any(default_tokenizer.is_control(i) for i in plain)


@pytest.mark.torch
@pytest.mark.soak
def test_transformers_own_gguf_conversion_agrees(
    default_tokenizer: Tokenizer, default_model: Path
) -> None:
    """A second, independent reader of the same file. It omits the rule for digits, so the texts
    here have none."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)
    rng = random.Random(3)
    for _ in range(1000):
        text = "".join(
            rng.choices([w for w in WORDS if not any(map(str.isnumeric, w))], k=rng.randint(0, 12))
        )
        assert default_tokenizer.encode(text, special=True) == theirs.encode(
            text, add_special_tokens=False
        )


def textbook(metadata: dict[str, Any]) -> Any:
    """Byte-level BPE as in the paper: while any pair is in the merge list, merge the one of
    lowest rank."""
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
    ids = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
    letters = {b: c for c, b in BYTE_ALPHABET.items()}

    def word(text: str) -> list[int]:
        parts = [letters[b] for b in text.encode("utf-8")]
        while len(parts) > 1:
            rank, at = min(
                (ranks.get((a, b), 1 << 30), i)
                for i, (a, b) in enumerate(itertools.pairwise(parts))
            )
            if rank == 1 << 30:
                break
            pair = parts[at], parts[at + 1]
            merged, i = [], 0
            while i < len(parts):
                both = i + 1 < len(parts) and (parts[i], parts[i + 1]) == pair
                merged.append(parts[i] + parts[i + 1] if both else parts[i])
                i += 2 if both else 1
            parts = merged
        return [ids[p] for p in parts]

    def encode(text: str) -> list[int]:
        out: list[int] = []
        for run in regex.split(r"(\p{N})", text):
            for piece in regex.findall(GPT2, run):
                out += word(piece)
        return out

    return encode


def test_the_textbook_algorithm_gives_the_same_ids(
    default_tokenizer: Tokenizer, default_metadata: dict[str, Any]
) -> None:
    encode = textbook(default_metadata)
    rng = random.Random(8)
    for _ in range(150):
        text = "".join(
            rng.choices([*WORDS, "word", " and", " x", "ing", "é"], k=rng.randint(0, 14))
        )
        assert default_tokenizer.encode(text) == encode(text)


def test_a_typed_control_token_stays_text(default_tokenizer: Tokenizer) -> None:
    for text, control in default_tokenizer.control_tokens.items():
        plain = default_tokenizer.encode(f"a {text} b")
        assert control not in plain
        assert default_tokenizer.decode(plain) == f"a {text} b"
        assert control in default_tokenizer.encode(f"a {text} b", special=True)


def test_token_bytes_of_every_id(default_tokenizer: Tokenizer) -> None:
    """Almost every UTF-8 byte has a token; the bytes of an ordinary token are its text in the
    byte alphabet; control tokens are literal."""
    single = {default_tokenizer.token_bytes(i) for i in range(default_tokenizer.vocab_size)}
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that no UTF-8 text has
    assert {b for b in range(256) if bytes([b]) not in single} == never | set(UNWRITABLE)
    back = {b: c for c, b in BYTE_ALPHABET.items()}
    for i in range(default_tokenizer.vocab_size):
        data = default_tokenizer.token_bytes(i)
        spelled = (
            data.decode() if default_tokenizer.is_control(i) else "".join(back[b] for b in data)
        )
        assert spelled == default_tokenizer.token_text(i)


def test_ids_outside_the_vocabulary_are_refused(default_tokenizer: Tokenizer) -> None:
    for bad in (-1, default_tokenizer.vocab_size):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            default_tokenizer.token_bytes(bad)


def test_characters_that_the_vocabulary_cannot_encode_are_reported(
    default_tokenizer: Tokenizer,
) -> None:
    """Every character below U+3000 and some of each plane above: `lost` is what does not
    round-trip."""
    told = 0
    for code in [*range(0x3000), *range(0x10000, 0x110000, 4099)]:
        character = chr(code)
        gone = default_tokenizer.decode(default_tokenizer.encode(character)) != character
        assert default_tokenizer.lost(f"a{character}b{character}") == (character if gone else ""), (
            hex(code)
        )
        told += gone
    assert told > 6
    assert default_tokenizer.lost("a\x06b\x13\x06") == "\x06\x13"
    assert len(default_tokenizer.lost("".join(map(chr, range(0x40000, 0x50000))))) == 16, (
        "named at most, however many there are"
    )


def test_a_lone_surrogate_is_refused_by_name(default_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="U\\+D800"):
        default_tokenizer.encode("abc\ud800")
    with pytest.raises(RequestError, match="not bytes"):
        default_tokenizer.encode(b"abc")  # type: ignore[arg-type]


def test_bos_and_eos_of_the_file(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.bos_id == 1
    assert default_tokenizer.eos_ids == (2, 0)  # declared: <|im_end|>; known end: <|endoftext|>
    # add_bos_token is false
    assert default_tokenizer.encode_prompt("Hello") == default_tokenizer.encode("Hello")
    assert default_tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert default_tokenizer.vocab_size == 49152


def test_the_end_of_an_answer_of_gemma_4_where_the_file_declares_one_token() -> None:
    """llama.cpp ends at these; the published generation_config.json lists them (1, 106 and 50)."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab", "<|tool_response>", "<turn|>"]
    k = "tokenizer.ggml."
    metadata = {k + "model": "gemma4", k + "tokens": tokens, k + "merges": ["a b"]}
    metadata |= {k + "token_type": [3, 3, 3, 3, 1, 1, 1, 4, 3], k + "eos_token_id": 8}
    assert sorted(from_gguf(metadata).eos_ids) == [1, 7, 8]


def test_the_published_directory_gives_the_same_tokenizer(
    default_tokenizer: Tokenizer, published_folder: Path
) -> None:
    theirs = from_directory(published_folder)
    rng = random.Random(5)
    for _ in range(100):
        text = "".join(rng.choices(WORDS, k=8))
        assert theirs.encode(text) == default_tokenizer.encode(text)
        assert theirs.encode(text, special=True) == default_tokenizer.encode(text, special=True)
    assert theirs.eos_ids == default_tokenizer.eos_ids
    assert theirs.control_tokens == default_tokenizer.control_tokens
    assert theirs.special_tokens == default_tokenizer.special_tokens
    assert all(
        theirs.token_bytes(i) == default_tokenizer.token_bytes(i) for i in range(theirs.vocab_size)
    )


def test_a_model_with_more_or_fewer_ids_than_the_tokenizer(
    default_metadata: dict[str, Any],
) -> None:
    tokenizer = from_gguf(default_metadata)
    tokenizer.fit(49160)
    assert tokenizer.vocab_size == 49160
    assert tokenizer.token_bytes(49155) == b""
    assert tokenizer.decode([49155, *tokenizer.encode("Hello")]) == "Hello"
    with pytest.raises(RequestError):
        tokenizer.token_bytes(49160)
    tokenizer.fit(19000)
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    with pytest.raises(RequestError, match="has only 19000"):
        tokenizer.encode("Hello")  # id 19556
    with pytest.raises(RequestError, match="has only 19000"):
        tokenizer.encode_parts([("Hello", None)])


@pytest.mark.parametrize("gap", [False, True])
def test_added_tokens_keep_their_ids_where_control_tokens_are_left_out(
    gap: bool, tmp_path: Path
) -> None:
    """As in Qwen3: control tokens first, then tokens that text may contain. `gap`: some of both are
    in the model's own vocabulary."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Theirs

    inside = ["<|end|>", "<think>"] if gap else []
    vocab = {piece: i for i, piece in enumerate([*BYTE_ALPHABET, *inside])}
    theirs = Theirs(models.BPE(vocab=vocab, merges=[]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    control = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    plain = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    theirs.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    theirs.add_tokens([AddedToken(text, normalized=False) for text in plain])
    theirs.add_special_tokens([AddedToken("<|last|>", normalized=False)])
    theirs.add_tokens([AddedToken("<file>", normalized=False)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    ours = from_directory(tmp_path)
    for text in (*plain, "<file>", "what is <think>?", "<tool_call>a</tool_call><file>"):
        assert ours.encode(text) == theirs.encode(text).ids == ours.encode(text, special=True)
    ids = ours.encode("a <|im_start|> <think>")  # the control token as text
    assert theirs.token_to_id("<|im_start|>") not in ids
    assert ids[-1] == theirs.token_to_id("<think>")
