"""Tokenizer of a model directory. In: tokenizer.json, tokenizer_config.json,
special_tokens_map.json. Out: a Vocabulary. The files are untrusted."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from verbatim.base.errors import ModelError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.text import hf_special
from verbatim.text.spm import piece_bytes
from verbatim.text.vocabulary import SPACE, PairTemplate, Vocabulary, byte_level_bytes, end_of_turn

MAX_JSON = 256 * 2**20  # bytes; the largest tokenizer.json in use has some 35 MB
MAX_STEPS = 64  # normalizer and pre-tokenizer together
MAX_GROWTH = 64  # factor by which those steps may lengthen a text
MAX_ADDED_TOKENS = 16  # tokens that the post-processor may add to a prompt
_REQUIRED: Any = object()
_SECRET = secrets.token_hex(16)  # in the names of tokens that no text contains


def read_json(path: Path, missing: Any = _REQUIRED) -> JsonObject:
    """Read a JSON object; returns `missing`, if given, when there is no such file."""
    if missing is not _REQUIRED and not path.is_file():
        return dict(missing)
    return parse_json(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ModelError(f"is {size} bytes long; at most {MAX_JSON} are read", file=str(path))
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot be read: {error}", file=str(path)) from None


def parse_json(data: bytes, path: Path) -> JsonObject:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot be read as JSON: {str(error)[:200]}", file=str(path)) from None
    if not isinstance(value, dict):
        raise ModelError(f"is a JSON {type(value).__name__}, not an object", file=str(path))
    return value


def special_texts(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Text of bos_token, eos_token, … in the configuration: a string or {"content": string}."""
    special_map = read_json(folder / "special_tokens_map.json", missing={})
    try:
        named = hf_special.named_tokens(hf_special.merged(config, special_map))
    except ModelError as error:
        raise ModelError(error.message, file=str(folder / "tokenizer_config.json")) from None
    return {name: token.content for name, token in named.items()}


def read_vocabulary(folder: Path) -> Vocabulary:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            "there is no tokenizer.json; only directories with one are supported", file=str(folder)
        )
    config = hf_special.merged(
        read_json(folder / "tokenizer_config.json", missing={}),
        read_json(folder / "special_tokens_map.json", missing={}),
    )
    data = read_bytes(path)
    spec = parse_json(data, path)
    try:
        check_parts(spec)
        encoder = Encoder.from_buffer(data)
        named = _follow_config(encoder, config, folder)
        return _vocabulary(spec, encoder, config, named)
    except ModelError as error:
        raise error if error.file else ModelError(error.message, file=str(path)) from None
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a broken file may cause a Rust panic: no Exception
        raise ModelError(
            f"the tokenizer cannot be built: {str(error)[:200]}", file=str(path)
        ) from error


def _follow_config(encoder: object, config: Mapping[str, object], folder: Path) -> dict[str, str]:
    """Apply tokenizer_config.json to the encoder. Returns the text of each named token."""
    try:
        named = hf_special.named_tokens(config)
        hf_special.apply_settings(encoder, config)
        hf_special.add_tokens(encoder, named, config)
    except ModelError as error:
        raise ModelError(error.message, file=str(folder / "tokenizer_config.json")) from None
    return {name: token.content for name, token in named.items()}


def check_parts(spec: Mapping[str, object]) -> None:
    """Reject what the library would accept: other models, randomness, steps that inflate a text,
    decoders whose text is not the concatenation of the tokens' bytes."""
    model = spec.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if kind not in ("BPE", "Unigram", "WordPiece"):
        raise ModelError(
            f"the tokenizer's model is {str(kind)[:40]!r}; known here are BPE, Unigram and "
            "WordPiece"
        )
    assert isinstance(model, dict)
    if model.get("dropout"):
        raise ModelError(
            "the tokenizer has merge dropout, "
            "so the same text would not give the same tokens; remove it"
        )
    steps = [*_steps(spec.get("normalizer")), *_steps(spec.get("pre_tokenizer"))]
    growth = 1.0
    for step in steps:
        growth *= _growth(step)
    if len(steps) > MAX_STEPS or growth > MAX_GROWTH:
        raise ModelError(
            f"the tokenizer's {len(steps)} steps could make a text {growth:.0f} times longer; "
            f"at most {MAX_GROWTH}"
        )
    _check_decoder(spec)


def _check_decoder(spec: Mapping[str, object]) -> None:
    """`token_bytes` decodes one token at a time: byte-level, as SentencePiece or as WordPiece."""
    decoders = _steps(spec.get("decoder"))
    kinds = [d.get("type") for d in decoders]
    byte_level = "ByteLevel" in _types(spec.get("pre_tokenizer")) or "ByteLevel" in kinds
    for decoder, kind in zip(decoders, kinds, strict=True):
        ok = (
            kind == "Fuse"
            or (kind == "ByteLevel" and byte_level)
            or (kind == "WordPiece" and _wordpiece_prefix(spec) == decoder.get("prefix"))
            or (not byte_level and _is_sentencepiece(decoder))
        )
        if not ok:
            raise ModelError(
                f"the tokenizer's decoder {str(kind)[:40]!r} is not supported here with these "
                "settings; known are ByteLevel (with a ByteLevel pre-tokenizer), WordPiece, and "
                "the steps of SentencePiece (Metaspace, Replace, ByteFallback, Fuse, Strip)"
            )


def _is_sentencepiece(decoder: Mapping[str, object]) -> bool:
    kind = decoder.get("type")
    if kind == "Metaspace":
        return decoder.get("replacement") == SPACE
    if kind == "Replace":
        return (decoder.get("pattern"), decoder.get("content")) == ({"String": SPACE}, " ")
    if kind == "Strip":
        return decoder.get("content") == " " and decoder.get("stop") == 0
    return kind == "ByteFallback"


def _steps(part: object) -> list[JsonObject]:
    """A normalizer, pre-tokenizer or decoder as a flat list of its steps."""
    if isinstance(part, list):
        return [step for item in part for step in _steps(item)]
    if not isinstance(part, dict):
        return []
    inner = [part.get(name) for name in ("normalizers", "pretokenizers", "decoders")]
    return _steps(inner) or [part]


def _growth(step: Mapping[str, object]) -> float:
    """The largest factor by which a step can lengthen a text."""
    if step.get("type") == "ByteLevel":
        return 2.0  # a byte above 127 becomes a two-byte character
    if step.get("type") == "BertNormalizer":
        return 3.0  # a space on each side of a CJK character, and decomposed accents
    if step.get("type") == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")))
    if step.get("type") != "Replace":
        return 1.0
    pattern, content = step.get("pattern"), str(step.get("content", ""))
    text = pattern.get("String") if isinstance(pattern, dict) else None
    length = len(text) if isinstance(text, str) else 1
    return max(1.0, len(content.encode("utf-8", "replace")) / max(1, length))


def _vocabulary(
    spec: JsonObject, special: Any, config: JsonMapping, texts: Mapping[str, str]
) -> Vocabulary:
    special.no_truncation()
    special.no_padding()
    added: dict[int, AddedToken] = dict(special.get_added_tokens_decoder())
    control = {t.content: i for i, t in added.items() if t.special and t.content}
    ids = {name: special.token_to_id(text) for name, text in texts.items()}
    tokens = _tokens(special)  # also bounds the ids
    plain = _without_control(special, added)
    byte_level = "ByteLevel" in _types([spec.get("decoder"), spec.get("pre_tokenizer")])
    prefix, suffix = _prefix_and_suffix(special, spec, config, ids)
    continued_by = _wordpiece_prefix(spec)
    outside = [i for i in (*prefix, *suffix) if i >= len(tokens)]
    if outside:
        raise ModelError(
            f"the post-processor adds the token id {outside[0]}, "
            f"outside the vocabulary of {len(tokens)}"
        )
    eos = ids.get("eos_token")
    ends = [eos, *end_of_turn(control)]
    return Vocabulary(
        tokens=tokens,
        plain=plain,
        special=special,
        to_bytes=byte_level_bytes if byte_level else _bytes_of(continued_by),
        control=control,
        added=added,
        bos_id=ids.get("bos_token"),
        eos_id=eos,
        unk_id=ids.get("unk_token"),
        pad_id=ids.get("pad_token"),
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        prefix=prefix,
        suffix=suffix,
        byte_level=byte_level,
        space_prefix=not byte_level and (continued_by is not None or _adds_space(spec)),
        pair=_pair_template(special),
        continued=_continuation_encoder(plain, spec),
        extra=texts,
    )


def _tokens(encoder: Any) -> list[str]:
    by_id = {i: text for text, i in encoder.get_vocab(with_added_tokens=True).items()}
    if not by_id or max(by_id) >= 2 * len(by_id) + 1024:
        raise ModelError(
            f"the vocabulary has {len(by_id)} tokens but ids up to {max(by_id, default=0)}"
        )
    return [by_id.get(i, "") for i in range(max(by_id) + 1)]


def _without_control(
    special: Any, added: Mapping[int, AddedToken], pre_tokenizer: Any = None
) -> Any:
    """An encoder over the same model (shared, not copied) without the control tokens.

    The library gives added tokens that the model does not have the ids behind it, in order. So the
    id of each control token, and each id that no token has, gets a token that no text contains."""
    plain = Encoder(special.model)
    if special.normalizer is not None:
        plain.normalizer = special.normalizer
    if pre_tokenizer is not None or special.pre_tokenizer is not None:
        plain.pre_tokenizer = pre_tokenizer or special.pre_tokenizer
    tokens, following = [], special.get_vocab_size(with_added_tokens=False)
    for id in sorted(added):
        token = added[id]
        in_model = special.model.token_to_id(token.content) == id
        if not in_model:
            tokens += [_no_text(missing) for missing in range(following, id)]
            following = max(following, id + 1)
        if not token.special:
            tokens.append(token)
        elif not in_model:
            tokens.append(_no_text(id))
    plain.add_tokens(tokens)
    for id, token in added.items():
        if not token.special and plain.token_to_id(token.content) != id:
            raise ModelError(f"the added token {token.content!r:.40} cannot have the id {id}")
    return plain


def _no_text(id: int) -> AddedToken:
    """A token that no text contains, because its name is random."""
    return AddedToken(f"{_SECRET}{id}", normalized=False)


def _continuation_encoder(plain: Any, spec: JsonMapping) -> Any:
    """Encoder for text after the start of a prompt, if it differs: Metaspace with prepend_scheme
    "first" adds its space only at the very beginning."""
    from tokenizers import pre_tokenizers

    metaspace = _metaspace(spec)
    if metaspace.get("prepend_scheme") != "first":
        return None
    never = pre_tokenizers.Metaspace(
        replacement=metaspace.get("replacement", SPACE),
        prepend_scheme="never",
        split=metaspace.get("split", True),
    )
    return _without_control(plain, plain.get_added_tokens_decoder(), never)


def _prefix_and_suffix(
    encoder: Any, spec: JsonMapping, config: JsonMapping, ids: Mapping[str, int | None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the file's post-processor adds before and after a text. add_bos_token and
    add_eos_token of the configuration override it."""
    (bare, full), other = (
        [encoder.encode(text, add_special_tokens=added).ids for added in (False, True)]
        for text in ("a", "b")
    )
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    if bare and (at := _place(bare, full)) is not None:
        prefix, suffix = tuple(full[:at]), tuple(full[at + len(bare) :])
    for inner, outer in ((bare, full), other):
        if outer != [*prefix, *inner, *suffix]:
            raise ModelError(
                "the post-processor does more than put the same tokens before and after every "
                "text; only that is supported"
            )
    if len(prefix) + len(suffix) > MAX_ADDED_TOKENS:
        raise ModelError(
            f"the post-processor puts {len(prefix) + len(suffix)} tokens around a prompt; "
            f"at most {MAX_ADDED_TOKENS}"
        )
    return _apply_flag(prefix, config, "bos", ids), _apply_flag(suffix, config, "eos", ids)


def _place(part: list[int], ids: list[int], start: int = 0) -> int | None:
    """Where a part of a list begins."""
    places = range(start, len(ids) - len(part) + 1)
    return next((at for at in places if ids[at : at + len(part)] == part), None)


def _pair_template(encoder: Any) -> PairTemplate | None:
    """What the post-processor puts before, between and after the texts of a pair; None where it
    adds nothing between them."""
    bare = [encoder.encode(text, add_special_tokens=False).ids for text in ("a", "b")]
    full = encoder.encode("a", "b", add_special_tokens=True)
    ids, (a, b) = full.ids, bare
    if not a or not b or (at := _place(a, ids)) is None:
        return None
    end = at + len(a)
    second = _place(b, ids, end)
    if second is None or second == end:
        return None
    rest = second + len(b)
    if at + second - end + len(ids) - rest > MAX_ADDED_TOKENS:
        raise ModelError(f"the post-processor puts more than {MAX_ADDED_TOKENS} tokens in a pair")
    return PairTemplate(
        tuple(ids[:at]), tuple(ids[end:second]), tuple(ids[rest:]), full.type_ids[second] == 1
    )


def _apply_flag(
    added_ids: tuple[int, ...],
    config: Mapping[str, object],
    name: str,
    ids: Mapping[str, int | None],
) -> tuple[int, ...]:
    flag, token = config.get(f"add_{name}_token"), ids.get(f"{name}_token")
    if flag is True and not added_ids and token is not None:
        return (token,)
    if flag is False and added_ids == (token,):
        return ()
    return added_ids


def _types(part: object) -> set[str]:
    """The types of a normalizer, pre-tokenizer or decoder and of all its parts."""
    if isinstance(part, dict):
        own = {part["type"]} if isinstance(part.get("type"), str) else set()
        return own.union(*map(_types, part.values()))
    if isinstance(part, list):
        return set().union(*map(_types, part))
    return set()


def _adds_space(spec: Mapping[str, object]) -> bool:
    if (metaspace := _metaspace(spec)) and metaspace.get("prepend_scheme") != "never":
        return True
    return "Prepend" in _types(spec.get("normalizer"))


def _metaspace(spec: Mapping[str, object]) -> JsonObject:
    """The pre-tokenizer of SentencePiece; empty where the file has another."""
    found = spec.get("pre_tokenizer")
    return found if isinstance(found, dict) and found.get("type") == "Metaspace" else {}


def _wordpiece_prefix(spec: JsonMapping) -> str | None:
    """The mark of a token that continues a word ("##"), in a WordPiece vocabulary."""
    model = spec["model"]
    if model.get("type") != "WordPiece":
        return None
    return str(model.get("continuing_subword_prefix", "##"))


def _bytes_of(continued_by: str | None) -> Callable[[str], bytes]:
    """The function from a token's text to its bytes. In WordPiece a token without the mark `##`
    starts a word, so its bytes begin with a space."""
    if continued_by is None:
        return _sentencepiece_bytes
    mark = continued_by

    def wordpiece_bytes(text: str) -> bytes:
        continues = bool(mark) and text.startswith(mark)
        return (text[len(mark) :] if continues else f" {text}").encode("utf-8", errors="replace")

    return wordpiece_bytes


def _sentencepiece_bytes(text: str) -> bytes:
    return piece_bytes(text, len(text) == 6 and text.startswith("<0x") and text.endswith(">"))
