"""SentencePiece vocabularies in GGUF metadata, against the sentencepiece library on models
trained here."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest

from verbatim.base.errors import ModelError
from verbatim.text.decode import TextDecoder
from verbatim.text.spm import merges_from_scores
from verbatim.text.tokenizer import Tokenizer, from_gguf

sentencepiece = pytest.importorskip("sentencepiece")

CORPUS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "then", "the"),
    *("other", "fox", "sleeps", "while", "nothing", "much", "happens", "banana", "bandana"),
    *("ananas", "aaa", "aaaa", "abab", "babab", "Über", "größer", "naïve", "café", "東京", "大阪"),
    *("東京都", "привет", "мир", "123", "1234", "56", "def", "function(value):", "return", "value"),
    *("+", "1", "#", "comment\n"),
]


def trained(*, prefix: bool, defined: tuple[str, ...] = (), size: int = 420, seed: int = 1) -> Any:
    rng = random.Random(seed)
    lines = [" ".join(rng.choices(CORPUS, k=12)) for _ in range(400)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        user_defined_symbols=list(defined),
        control_symbols=["<|turn|>"],
        minloglevel=9,
        num_threads=1,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(sp: Any, *, prefix: bool) -> dict[str, Any]:
    """What a converter writes into a GGUF file. User-defined pieces have plain spaces."""
    kinds, tokens = [], []
    for i in range(len(sp)):
        kind = (
            2
            if sp.is_unknown(i)
            else 3
            if sp.is_control(i)
            else 6
            if sp.is_byte(i)
            else 5
            if sp.is_unused(i)
            else 1
        )
        text = sp.id_to_piece(i)
        if kind == 1 and sp.get_score(i) == 0.0 and text in DEFINED:
            kind = 4
        kinds.append(kind)
        tokens.append(text)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [sp.get_score(i) for i in range(len(sp))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": sp.bos_id(),
        "tokenizer.ggml.eos_token_id": sp.eos_id(),
        "tokenizer.ggml.unknown_token_id": sp.unk_id(),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


DEFINED = ("<table>", "\u2581\u2581", "\n\n")


def strings(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    letters = "abn the fox Üé東京都 привет123\n\t🤯\u0301"
    out = []
    for _ in range(count):
        if rng.random() < 0.5:
            out.append("".join(rng.choices(letters, k=rng.randint(1, 30))))
        else:
            out.append(" ".join(rng.choices(CORPUS, k=rng.randint(1, 6))))
    return [text for text in out if text]


@pytest.mark.parametrize("prefix", [True, False], ids=["llama", "gemma"])
def test_ids_equal_sentencepiece(prefix: bool) -> None:
    sp = trained(prefix=prefix)
    tokenizer = from_gguf(metadata_of(sp, prefix=prefix))
    different = []
    texts = strings(5000, seed=4)
    for text in texts:
        ours = tokenizer.encode(text)
        if ours != sp.encode(text):
            different.append(text)
        assert tokenizer.decode(ours) == text
    assert not different, f"{len(different)} of {len(texts)}: {different[:3]}"


def test_user_defined_pieces_are_found_first() -> None:
    sp = trained(prefix=False, defined=DEFINED)
    meta = metadata_of(sp, prefix=False)
    assert meta["tokenizer.ggml.token_type"].count(4) == len(DEFINED)
    spelled = {
        **meta,
        "tokenizer.ggml.tokens": [
            _plain_spaces(t, k)
            for t, k in zip(
                meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"], strict=True
            )
        ],
    }
    for each in (
        meta,
        spelled,
    ):  # older files spell the spaces of user-defined pieces, newer ones write them
        tokenizer = from_gguf(each)
        for text in ["a  b", "x<table>y", "a\n\nb", "  the  fox\n\n<table>"]:
            assert tokenizer.encode(text) == sp.encode(text), text
            assert tokenizer.decode(tokenizer.encode(text)) == text


def _plain_spaces(text: str, kind: int) -> str:
    return text.replace("\u2581", " ") if kind == 4 else text


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    return from_gguf(metadata_of(trained(prefix=True), prefix=True))


def test_typed_control_and_byte_tokens_stay_text(llama: Tokenizer) -> None:
    for text in ["<s>", "</s>", "<unk>", "<|turn|>", "a</s>b", "<0x41>"]:
        ids = llama.encode(text)
        assert not any(llama.is_control(i) for i in ids)
        assert llama.decode(ids) == text
    assert llama.control_tokens["</s>"] in llama.encode("a</s>", special=True)


def test_a_control_token_that_merging_could_reach_is_split() -> None:
    """Code vocabularies have the pieces "</" and "s>"; merging them would give the end of
    sequence."""
    meta = metadata_of(trained(prefix=True), prefix=True)
    tokens, scores, kinds = (
        list(meta[f"tokenizer.ggml.{k}"]) for k in ("tokens", "scores", "token_type")
    )
    for text in ("</", "s>", "<", "/", ">"):
        if text not in tokens:
            tokens.append(text)
            scores.append(-1.0)
            kinds.append(1)
    meta |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
    }
    tokenizer = from_gguf(meta)
    ids = tokenizer.encode("a</s>b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a</s>b"


def test_bytes_of_pieces_and_the_space_rule(llama: Tokenizer) -> None:
    ids = llama.encode("the fox 🤯")
    assert b"".join(map(llama.token_bytes, ids)) == " the fox 🤯".encode()
    assert llama.token_bytes(llama.find("<0x0A>")) == b"\n"  # type: ignore[arg-type]
    assert llama.decode(ids) == "the fox 🤯"  # a text from its beginning: the added space is gone
    continued = TextDecoder(llama)
    # a continuation keeps its space
    assert "".join(map(continued.push, ids)) + continued.flush() == " the fox 🤯"
    start = TextDecoder(llama, start=True)
    assert "".join(map(start.push, [llama.bos_id, *ids])) == "the fox 🤯"  # type: ignore[list-item]


def test_beginning_of_sequence_is_added_once(llama: Tokenizer) -> None:
    assert llama.encode_prompt("the fox") == [llama.bos_id, *llama.encode("the fox")]
    assert llama.encode_prompt("<s>the", special=True)[:1] == [llama.bos_id]
    assert llama.encode_prompt("<s>the", special=True).count(llama.bos_id) == 1  # type: ignore[arg-type]
    assert llama.encode_prompt("<s>the").count(llama.bos_id) == 1  # type: ignore[arg-type]  # typed: text
    without = from_gguf(
        metadata_of(trained(prefix=True), prefix=True) | {"tokenizer.ggml.add_bos_token": False}
    )
    assert without.encode_prompt("the fox") == without.encode("the fox")


def test_scores_must_fit_the_vocabulary() -> None:
    meta = metadata_of(trained(prefix=True), prefix=True)
    with pytest.raises(ModelError, match="scores has 5 entries"):
        from_gguf(meta | {"tokenizer.ggml.scores": [0.0] * 5})
    with pytest.raises(ModelError, match="not a number"):
        from_gguf(
            meta | {"tokenizer.ggml.scores": [float("nan")] * len(meta["tokenizer.ggml.tokens"])}
        )


@pytest.mark.torch
def test_merges_equal_those_that_transformers_derives() -> None:
    """Also where many pieces have the same score."""
    from transformers.convert_slow_tokenizer import generate_merges

    rng = random.Random(9)
    pieces = list(
        dict.fromkeys("".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(400))
    )
    ids = {piece: i for i, piece in enumerate(pieces)}
    for levels in (3, 10**6):
        scores = [-float(rng.randrange(levels)) for _ in pieces]
        theirs = generate_merges(ids, dict(zip(pieces, scores, strict=True)))
        assert sorted(merges_from_scores(pieces, ids, scores)) == sorted(theirs)
        ranks = [
            (scores[ids[a + b]], len(a), len(b)) for a, b in merges_from_scores(pieces, ids, scores)
        ]
        assert ranks == [(scores[ids[a + b]], len(a), len(b)) for a, b in theirs]


def test_pieces_of_absurd_length_are_refused() -> None:
    pieces = [f"{i:04d}" * 1000 for i in range(100)]
    with pytest.raises(ModelError, match="too long"):
        merges_from_scores(pieces, {p: i for i, p in enumerate(pieces)}, [0.0] * 100)
