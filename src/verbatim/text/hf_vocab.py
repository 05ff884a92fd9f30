"""A model directory's tokenizer. In: tokenizer.json, with tokenizer_config.json and special_tokens_map.json. Out: a Vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from verbatim.base.errors import ModelError
from verbatim.text.spm import piece_bytes
from verbatim.text.vocabulary import END_OF_TURN, SPACE, Vocabulary, byte_level_bytes

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MAX_JSON = 256 * 2**20
MAX_STEPS, MAX_GROWTH, MAX_AROUND = 64, 64, 16
_REQUIRED: Any = object()


def read_json(path: Path, missing: Any = _REQUIRED) -> dict[str, Any]:
    """A JSON object; `missing` is returned where there is no such file."""
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


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot be read as JSON: {str(error)[:200]}", file=str(path)) from None
    if not isinstance(value, dict):
        raise ModelError(f"is a JSON {type(value).__name__}, not an object", file=str(path))
    return value


def special_texts(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … as the configuration names them; an entry is text or {"content": text}."""
    named = {
        **read_json(folder / "special_tokens_map.json", missing={}),
        **{k: v for k, v in config.items() if v is not None},
    }
    found: dict[str, str] = {}
    for name in NAMED:
        value = named.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise ModelError(
                f"{name} is {type(value).__name__}, not text",
                file=str(folder / "tokenizer_config.json"),
            )
        found[name] = value
    return found


def read_vocabulary(folder: Path) -> Vocabulary:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            "there is no tokenizer.json; only directories with one are supported", file=str(folder)
        )
    config = read_json(folder / "tokenizer_config.json", missing={})
    data = read_bytes(path)
    spec = parse_json(data, path)
    try:
        check_parts(spec)
        return _vocabulary(folder, spec, Encoder.from_buffer(data), config)
    except ModelError as error:
        raise error if error.file else ModelError(error.message, file=str(path)) from None
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except (
        BaseException
    ) as error:  # the library reports some broken files as a Rust panic, which is no Exception
        raise ModelError(
            f"the tokenizer cannot be built: {str(error)[:200]}", file=str(path)
        ) from error


def check_parts(spec: Mapping[str, Any]) -> None:
    """What the library would accept and we must not: other kinds of model, randomness, and steps that blow a text up."""
    model = spec.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if kind not in ("BPE", "Unigram"):
        raise ModelError(
            f"the tokenizer's model is {str(kind)[:40]!r}; known here are BPE and Unigram"
        )
    assert isinstance(model, dict)
    if model.get("dropout"):
        raise ModelError(
            "the tokenizer has merge dropout, so the same text would not give the same tokens; remove it"
        )
    steps = [*_steps(spec.get("normalizer")), *_steps(spec.get("pre_tokenizer"))]
    growth = 1.0
    for step in steps:
        growth *= _growth(step)
    if len(steps) > MAX_STEPS or growth > MAX_GROWTH:
        raise ModelError(
            f"the tokenizer's {len(steps)} steps could make a text {growth:.0f} times longer; at most {MAX_GROWTH}"
        )


def _steps(part: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a flat list of its steps."""
    if isinstance(part, list):
        return [step for item in part for step in _steps(item)]
    if not isinstance(part, dict):
        return []
    inner = [*_steps(part.get("normalizers")), *_steps(part.get("pretokenizers"))]
    return inner or [part]


def _growth(step: Mapping[str, Any]) -> float:
    """How many times longer a step can make a text, at worst."""
    if step.get("type") == "ByteLevel":
        return 2.0  # a byte above 127 becomes a character of two bytes
    if step.get("type") == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")))
    if step.get("type") != "Replace":
        return 1.0
    pattern, content = step.get("pattern"), str(step.get("content", ""))
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return max(
        1.0,
        len(content.encode("utf-8", "replace")) / max(1, len(text) if isinstance(text, str) else 1),
    )


def _vocabulary(
    folder: Path, spec: dict[str, Any], special: Any, config: Mapping[str, Any]
) -> Vocabulary:
    special.no_truncation()
    special.no_padding()
    added: dict[int, AddedToken] = dict(special.get_added_tokens_decoder())
    control = {t.content: i for i, t in added.items() if t.special and t.content}
    texts = special_texts(folder, config)
    ids = {name: special.token_to_id(text) for name, text in texts.items()}
    plain = _without_control(special, [t for t in added.values() if not t.special])
    byte_level = "ByteLevel" in _types(spec.get("decoder")) or "ByteLevel" in _types(
        spec.get("pre_tokenizer")
    )
    prefix, suffix = _around(special, spec, config, ids)
    tokens = _tokens(special)
    outside = [i for i in (*prefix, *suffix) if i >= len(tokens)]
    if outside:
        raise ModelError(
            f"the post-processor adds the token id {outside[0]}, outside the vocabulary of {len(tokens)}"
        )
    eos = ids.get("eos_token")
    ends = [eos, *(control.get(text) for text in END_OF_TURN)]
    return Vocabulary(
        tokens=tokens,
        plain=plain,
        special=special,
        to_bytes=byte_level_bytes if byte_level else _piece,
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
        space_prefix=not byte_level and _puts_space(spec),
        continued=_continued(plain, spec),
        extra=texts,
    )


def _tokens(encoder: Any) -> list[str]:
    by_id = {i: text for text, i in encoder.get_vocab(with_added_tokens=True).items()}
    if not by_id or max(by_id) >= 2 * len(by_id) + 1024:
        raise ModelError(
            f"the vocabulary has {len(by_id)} tokens but ids up to {max(by_id, default=0)}"
        )
    return [by_id.get(i, "") for i in range(max(by_id) + 1)]


def _without_control(special: Any, defined: list[AddedToken], pre_tokenizer: Any = None) -> Any:
    """An encoder over the same model (shared, not copied) that does not know the control tokens."""
    plain = Encoder(special.model)
    if special.normalizer is not None:
        plain.normalizer = special.normalizer
    if pre_tokenizer is not None or special.pre_tokenizer is not None:
        plain.pre_tokenizer = pre_tokenizer or special.pre_tokenizer
    if defined:
        plain.add_tokens(defined)
    return plain


def _continued(plain: Any, spec: Mapping[str, Any]) -> Any:
    """Metaspace with prepend_scheme "first" puts its space only at the very beginning; later pieces need an encoder without it."""
    from tokenizers import pre_tokenizers

    cutter = spec.get("pre_tokenizer")
    if (
        not isinstance(cutter, dict)
        or cutter.get("type") != "Metaspace"
        or cutter.get("prepend_scheme") != "first"
    ):
        return None
    never = pre_tokenizers.Metaspace(
        replacement=cutter.get("replacement", SPACE),
        prepend_scheme="never",
        split=cutter.get("split", True),
    )
    return _without_control(plain, list(plain.get_added_tokens_decoder().values()), never)


def _around(
    encoder: Any, spec: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int | None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the file's post-processor puts around a text; add_bos_token and add_eos_token of the configuration have the last word."""
    bare = encoder.encode("a", add_special_tokens=False).ids
    full = encoder.encode("a", add_special_tokens=True).ids
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    for at in range(len(full) - len(bare) + 1):
        if bare and full[at : at + len(bare)] == bare:
            prefix, suffix = tuple(full[:at]), tuple(full[at + len(bare) :])
            break
    if len(prefix) + len(suffix) > MAX_AROUND:
        raise ModelError(
            f"the post-processor puts {len(prefix) + len(suffix)} tokens around a prompt; at most {MAX_AROUND}"
        )
    return _overruled(prefix, config, "bos", ids), _overruled(suffix, config, "eos", ids)


def _overruled(
    around: tuple[int, ...], config: Mapping[str, Any], name: str, ids: Mapping[str, int | None]
) -> tuple[int, ...]:
    flag, token = config.get(f"add_{name}_token"), ids.get(f"{name}_token")
    if flag is True and not around and token is not None:
        return (token,)
    if flag is False and around == (token,):
        return ()
    return around


def _types(part: Any) -> set[str]:
    """The types of a normalizer, pre-tokenizer or decoder and of everything in it."""
    if isinstance(part, dict):
        own = {part["type"]} if isinstance(part.get("type"), str) else set()
        return own.union(*map(_types, part.values()))
    if isinstance(part, list):
        return set().union(*map(_types, part))
    return set()


def _puts_space(spec: Mapping[str, Any]) -> bool:
    cutter = spec.get("pre_tokenizer")
    if (
        isinstance(cutter, dict)
        and cutter.get("type") == "Metaspace"
        and cutter.get("prepend_scheme", "always") != "never"
    ):
        return True
    return "Prepend" in _types(spec.get("normalizer"))


def _piece(text: str) -> bytes:
    return piece_bytes(text, len(text) == 6 and text.startswith("<0x") and text.endswith(">"))
