"""Special tokens and settings of tokenizer_config.json and special_tokens_map.json.

In: these files as parsed JSON, and the encoder of tokenizer.json. Out: the named tokens, and the
encoder with the tokens and settings that only these files have, as transformers applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, normalizers

from verbatim.base.errors import ModelError
from verbatim.base.json_io import JsonMapping

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
# Settings of BertTokenizer, and the fields of its normalizer.
_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# Classes whose add_prefix_space replaces that of tokenizer.json.
_PREFIX_SPACE = ("GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer", "RobertaTokenizer")


def merged(config: Mapping[str, object], special_map: Mapping[str, object]) -> Mapping[str, object]:
    """special_tokens_map.json counts only beside a tokenizer_config.json without
    added_tokens_decoder, and wins there."""
    return config if "added_tokens_decoder" in config else {**config, **special_map}


def named_tokens(config: Mapping[str, object]) -> dict[str, AddedToken]:
    """The tokens with a name: bos_token, …, any other key that ends in `_token`, and the entries of
    an `extra_special_tokens` object."""
    extra = config.get("extra_special_tokens")
    found: dict[str, AddedToken] = {}
    for name, value in {**config, **(extra if isinstance(extra, Mapping) else {})}.items():
        own = isinstance(extra, Mapping) and name in extra
        if value is None or not (own or name.endswith("_token")):
            continue
        token = _token(value)
        if token is not None:
            found[name] = token
        elif own or name in NAMED:
            raise ModelError(f"{name} is {type(value).__name__}, not text")
    return found


def add_tokens(encoder: Any, named: Mapping[str, AddedToken], config: JsonMapping) -> None:
    """Add the tokens that tokenizer.json does not have, in the order of transformers. A token of
    added_tokens_decoder with other flags replaces that of tokenizer.json."""
    known: dict[int, AddedToken] = encoder.get_added_tokens_decoder()
    declared = _declared(config)
    new = [t for id, t in declared.items() if id not in known or _state(known[id]) != _state(t)]
    texts = {t.content for t in (*known.values(), *new)}
    vocabulary_pad = named.get("pad_token")
    if vocabulary_pad is not None and encoder.token_to_id(vocabulary_pad.content) is not None:
        # Some files pad with an ordinary token ("!"), which must stay text.
        texts.add(vocabulary_pad.content)
    for token in (*named.values(), *_extra(config)):
        if token.content and token.content not in texts:
            new.append(AddedToken(token.content, **_state(token)[1], special=True))
            texts.add(token.content)
    if new:
        encoder.add_tokens(new)
    for id, token in declared.items():
        if encoder.token_to_id(token.content) != id:
            raise ModelError(
                f"added_tokens_decoder gives the token {token.content!r:.40} the id {id}, and "
                f"with tokenizer.json its id is {encoder.token_to_id(token.content)}; write "
                "tokenizer.json again with this token, or remove it from added_tokens_decoder"
            )


def apply_settings(encoder: Any, config: JsonMapping) -> None:
    """Follow the settings of tokenizer_config.json that change the tokens of a text."""
    if config.get("split_special_tokens"):
        raise ModelError(
            "split_special_tokens is true: the control tokens of a chat template would be split "
            "into text; remove it"
        )
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if kind == "BertTokenizer" and isinstance(encoder.normalizer, normalizers.BertNormalizer):
        changes = {field: config[key] for key, field in _BERT.items() if key in config}
        for field, value in changes.items():
            if not (isinstance(value, bool) or (field == "strip_accents" and value is None)):
                key = next(key for key, name in _BERT.items() if name == field)
                raise ModelError(f"{key} is {value!r:.40}: true or false is needed")
        normalizer = encoder.normalizer
        for field, value in changes.items():
            setattr(normalizer, field, value)
        encoder.normalizer = normalizer
    space = config.get("add_prefix_space")
    before = encoder.pre_tokenizer
    if kind in _PREFIX_SPACE and space is not None and hasattr(before, "add_prefix_space"):
        before.add_prefix_space = bool(space)
        encoder.pre_tokenizer = before


def _token(value: object) -> AddedToken | None:
    """A token from a text or an object {content, lstrip, …}; None for anything else."""
    if isinstance(value, str):
        return AddedToken(value, normalized=False, special=True)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        return None
    flags = {name: value.get(name) is True for name in (*_FLAGS, "special")}
    return AddedToken(value["content"], **flags)


def _state(token: AddedToken) -> tuple[str, dict[str, bool], bool]:
    return token.content, {name: getattr(token, name) for name in _FLAGS}, token.special


def _declared(config: Mapping[str, object]) -> dict[int, AddedToken]:
    """added_tokens_decoder, in the order of the ids."""
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, Mapping):
        raise ModelError(f"added_tokens_decoder is {type(decoder).__name__}, not an object")
    found: dict[int, AddedToken] = {}
    for id, value in decoder.items():
        token = _token(value) if isinstance(value, Mapping) else None
        if not id.isdecimal() or token is None:
            raise ModelError(f"added_tokens_decoder[{id!r:.40}] is no id with a token's content")
        found[int(id)] = token
    return dict(sorted(found.items()))


def _extra(config: Mapping[str, object]) -> list[AddedToken]:
    """The tokens of extra_special_tokens, or of its older name additional_special_tokens."""
    key = "extra_special_tokens"
    if key not in config:
        key = "additional_special_tokens"
    values = config.get(key) or []
    if isinstance(values, Mapping):
        return []  # they have names
    tokens = [_token(value) for value in values] if isinstance(values, list) else [None]
    if None in tokens:
        raise ModelError(f"{key} is not a list of tokens")
    return [token for token in tokens if token is not None]
