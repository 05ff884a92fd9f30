"""Export a tokenizer.json as GGUF's tokenizer keys.

In: a tokenizer directory. Out: metadata keys. GGUF names a pre-tokenizer instead of describing it,
so the name is found by trial: each known one must split the probe texts as the original does. A
tokenizer that matches none is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from verbatim.base.errors import ModelError
from verbatim.base.json_io import JsonObject
from verbatim.text.gguf_vocab import (
    BYTE,
    CONTROL,
    GEMMA4_MARKERS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from verbatim.text.hf_vocab import read_json
from verbatim.text.pretokenize import SPLIT_RULES, SplitRules
from verbatim.text.tokenizer import Tokenizer, from_gguf
from verbatim.text.vocabulary import end_of_turn

if TYPE_CHECKING:
    from verbatim.text.vocabulary import Vocabulary

K = "tokenizer.ggml."
# Letters with and without case, digits, punctuation, a mark, white space, and the format, private
# and other characters that patterns of punctuation include or not.
_CLASSES = "aB1\u0663!$/'\u0301\u200d\u00a0 \n\r\u00e9\u4e2d\ue000"
PROBES = (
    "Hello, world! It's 3:45 pm; I've 12345 apples, don't you? 'Tis WE'LL they'RE",
    "  leading spaces,   three   between \t\ttabs\n\nnewlines \r\n and trailing   ",
    "x = foo_bar(1, 2.5e-3) # comment\n    return {'a': [1, 2]}\n\n\n\tif y != z:",
    "Grüße, café naïve Ærøskøbing — “quotes” … € £ ¥ §",
    "Русский текст, ελληνικά, עברית, العربية، हिन्दी",
    "中文字符。日本語のテキスト、한국어 문장입니다",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 👍🏽 and a\u0301 combining, \u00a0 nbsp, \u3000 wide space",
    "http://example.com/a?b=c&d=%20 user@host.org C++ $100 100% #tag @me a/b\\c <tag> "
    "|x| ~y~ `z` ^w^",
    "1 12 123 1234 12345 123456 1234567 0.5 1,000,000 ١٢٣ ½",
    "CamelCaseWords HTMLParser iPhone McDonald ALLCAPS lower",
    "\u200dj\U0003031e\u254du\U0006decf\x0c안녕하세요\tif (a != b) { c++; }\r\n0x1F + 1e-9 Hello",
    # Every run of three among the classes of characters that the patterns tell apart.
    "".join(map("".join, product(_CLASSES, repeat=3))),
)


def tokenizer_metadata(
    path: Path, original: Tokenizer, vocab: int, architecture: str, stops: Sequence[int] = ()
) -> JsonObject:
    """Keys for a file whose embedding has `vocab` rows. `stops`: the stop tokens of config.json and
    generation_config.json. Raises ModelError if GGUF cannot express it."""
    data = read_json(path / "tokenizer.json")
    model = data.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, Mapping) else None
        raise ModelError(
            f"its {kind} tokenizer has no GGUF form here; only BPE tokenizers can be written",
            file=str(path),
        )
    inner: Vocabulary = original._vocab
    _check_prompt_tokens(inner, path)
    meta = _tokens(inner, vocab, byte_fallback=bool(model.get("byte_fallback")))
    count = len(meta[f"{K}tokens"])
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    ids = (inner.bos_id, inner.eos_id, inner.unk_id, inner.pad_id)
    for key, value in zip(("bos", "eos", "unknown", "padding"), ids, strict=True):
        if value is not None and value < count:
            meta[f"{K}{key}_token_id"] = value
    meta |= _other_stops(inner, stops, count)
    meta[f"{K}add_bos_token"] = inner.bos_id is not None and tuple(inner.prefix) == (inner.bos_id,)
    meta[f"{K}add_eos_token"] = inner.eos_id is not None and tuple(inner.suffix) == (inner.eos_id,)
    meta["general.architecture"] = architecture
    if not model.get("byte_fallback"):
        return _with_split_rules(meta | {f"{K}model": "gpt2", f"{K}merges": merges}, original, path)
    if architecture == "gemma4":
        meta |= {f"{K}model": "gemma4", f"{K}merges": merges}
        _mark_visible(meta)
    else:
        meta |= {f"{K}model": "llama", f"{K}scores": _scores(meta[f"{K}tokens"], merges)}
    return _checked(meta | {f"{K}add_space_prefix": original.space_prefix}, original, path)


def _with_split_rules(meta: JsonObject, original: Tokenizer, path: Path) -> JsonObject:
    """With the name of a pre-tokenizer that splits as the original does."""
    names: dict[SplitRules, str] = {}  # many names stand for the same rules: try the first
    for name, rules in SPLIT_RULES.items():
        names.setdefault(rules, name)
    for name in names.values():
        candidate = {**meta, f"{K}pre": name}
        if _difference(from_gguf(candidate), original) is None:
            return _checked(candidate, original, path)
    raise ModelError(
        "GGUF has no name for its pre-tokenizer; keep the safetensors directory", file=str(path)
    )


def _other_stops(inner: Vocabulary, stops: Sequence[int], count: int) -> dict[str, object]:
    """Keys of the stop tokens besides eos. llama.cpp reads one end of turn and one end of message,
    and finds well-known tokens by their names, so these come last. Ollama and our reader know a
    list for more."""
    named = set(end_of_turn(inner.control))
    others = [i for i in (*inner.eos_ids, *stops) if i != inner.eos_id and i < count]
    others = sorted(dict.fromkeys(others), key=lambda i: i in named)
    keys: JsonObject = dict(zip((f"{K}eot_token_id", f"{K}eom_token_id"), others, strict=False))
    if len(others) > 2:
        keys[f"{K}eos_token_ids"] = [*([] if inner.eos_id is None else [inner.eos_id]), *others]
    return keys


def _check_prompt_tokens(inner: Vocabulary, path: Path) -> None:
    """GGUF can add one token before a prompt, bos, and one after it, eos."""
    for where, added, single in (
        ("start", tuple(inner.prefix), inner.bos_id),
        ("end", tuple(inner.suffix), inner.eos_id),
    ):
        if added not in ((), (single,)):
            names = "".join(inner.tokens[i] for i in added)
            raise ModelError(
                f"its prompts {where} with {names}, and GGUF can add only one token there; keep "
                "the safetensors directory",
                file=str(path),
            )


def _tokens(inner: Vocabulary, vocab: int, *, byte_fallback: bool) -> JsonObject:
    tokens: list[str] = []
    types: list[int] = []
    controls = set(inner.control.values())
    # Control tokens that the model has no row for (a pad_token of the config alone) are left out:
    # llama.cpp refuses a file with more tokens than rows.
    ordinary = max((i for i in range(len(inner.tokens)) if i not in controls), default=-1)
    for i in range(max(vocab, ordinary + 1)):
        text = inner.tokens[i] if i < len(inner.tokens) else ""
        if not text:
            tokens.append(f"[PAD{i}]")
            types.append(UNUSED)
            continue
        tokens.append(text)
        if byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types.append(BYTE)
        elif byte_fallback and i == inner.unk_id:
            types.append(UNKNOWN)
        elif i in controls:
            types.append(CONTROL)
        else:
            types.append(USER_DEFINED if i in inner.added else NORMAL)
    return {f"{K}tokens": tokens, f"{K}token_type": types}


def _mark_visible(meta: JsonObject) -> None:
    """Give Gemma 4's markers the type that llama.cpp's chat parser needs. Our reader makes them
    control tokens again."""
    types = meta[f"{K}token_type"]
    for i, text in enumerate(meta[f"{K}tokens"]):
        if types[i] == CONTROL and text in GEMMA4_MARKERS:
            types[i] = USER_DEFINED


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece merges the pair with the highest score first; a merge's negated rank is such
    a score."""
    rank: dict[str, int] = {}
    for i, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), i)
    return [-float(rank[text]) if text in rank else -1e6 for text in tokens]


def _checked(meta: dict[str, object], original: Tokenizer, path: Path) -> dict[str, object]:
    inner = original._vocab
    added = [i for i in sorted(inner.added) if not original.is_control(i)][:300]
    within = "".join(f"a {inner.tokens[i]} b{inner.tokens[i]}" for i in added)
    bad = _difference(from_gguf(meta), original, within)
    if bad is not None:
        raise ModelError(
            f"GGUF cannot express its tokenizer: {bad[:40]!r} would be split differently;"
            " keep the safetensors directory",
            file=str(path),
        )
    return meta


def _difference(candidate: Tokenizer, original: Tokenizer, *more: str) -> str | None:
    """The first probe text that the two tokenize differently."""
    for text in (*PROBES, *more):
        encoded, expected = ((t.encode(text), t.encode_prompt(text)) for t in (candidate, original))
        if encoded != expected:
            return text
    return None
