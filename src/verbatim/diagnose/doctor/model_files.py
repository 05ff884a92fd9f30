"""The files of a model as `verbatim doctor` reads them: each statement with the file that makes it.

In: a GGUF file or a safetensors directory. Out: ModelFiles. Unlike the loader this does not stop at
the first fault: a part that cannot be read is listed in `errors`, and the checks that need it are
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.base.errors import VerbatimError
from verbatim.base.json_io import JsonMapping
from verbatim.encoder.encoder_load import encoder_type, load_encoder
from verbatim.encoder.encoder_spec import EncoderModel
from verbatim.files.gguf import read_gguf
from verbatim.files.safetensors import read_json
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.load import Model, load_model
from verbatim.text import hf_vocab
from verbatim.text.hf_special import NAMED
from verbatim.text.hf_vocab import special_texts
from verbatim.text.templates.chat_template import ChatTemplate
from verbatim.text.templates.template_files import template_from_directory, template_from_gguf
from verbatim.text.tokenizer import Tokenizer, from_directory, from_gguf

K = "tokenizer.ggml."
_GGUF_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "cls", "mask")
_ENDS = ("eos", "eot", "eom")


@dataclass(frozen=True)
class ModelFiles:
    path: Path
    kind: str  # gguf | safetensors
    config: JsonMapping  # config.json, or the metadata of a GGUF file
    generation: JsonMapping  # generation_config.json, or general.sampling.* of a GGUF file
    eos: dict[str, tuple[int, ...]]  # where -> the end-of-sequence ids stated there
    specials: dict[str, int]  # where -> a special token id stated there
    pad: int | None
    templates: dict[str, str]  # where -> template source
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    encoder: bool  # the files are those of an encoder (BERT and its kin), readable or not
    model: Model | EncoderModel | None
    tensors: Mapping[str, Tensor] = field(repr=False)
    errors: dict[str, str]  # part -> why it cannot be read
    # where -> the id of a token that a tokenizer file adds
    added: dict[str, int] = field(default_factory=dict)
    # name -> special token text that no token has
    unknown_texts: dict[str, str] = field(default_factory=dict)
    max_length: int | None = None  # model_max_length of tokenizer_config.json


def read_files(path: Path) -> ModelFiles:
    return _directory(path) if path.is_dir() else _gguf(path)


def _try(errors: dict[str, str], part: str, read: Callable[[], object]) -> Any:
    try:
        return read()
    except VerbatimError as error:
        errors[part] = error.message
        return None


def _load(errors: dict[str, str], path: Path) -> tuple[bool, Model | EncoderModel | None]:
    """Whether the model is an encoder, and the model."""
    # a config.json that cannot be read is already among the errors
    encoder = _try({}, "config.json", lambda: encoder_type(path)) is not None
    load: Callable[[Path], object] = load_encoder if encoder else load_model
    return encoder, _try(errors, "weights", lambda: load(path))


def _directory(path: Path) -> ModelFiles:
    errors: dict[str, str] = {}

    def optional(name: str) -> dict[str, object]:
        file = path / name
        return (_try(errors, name, lambda: read_json(file)) or {}) if file.is_file() else {}

    config = _try(errors, "config.json", lambda: read_json(path / "config.json")) or {}
    generation, words = optional("generation_config.json"), optional("tokenizer_config.json")
    tokenizer = _try(errors, "tokenizer", lambda: from_directory(path))
    template = _try(errors, "chat template", lambda: template_from_directory(path))
    encoder, model = _load(errors, path)
    texts = _try(errors, "tokenizer_config.json", lambda: special_texts(path, words)) or {}
    # an unreadable tokenizer.json is already among the errors
    vocabulary = _try({}, "tokenizer", lambda: hf_vocab.read_json(path / "tokenizer.json", {}))
    specials = _ids_of("config.json", config, NAMED)
    specials |= _ids_of("generation_config.json", generation, NAMED)
    unknown: dict[str, str] = {}
    if tokenizer is not None:
        for name, text in texts.items():
            found = tokenizer.find(text)
            if found is None:
                unknown[name] = text
            else:
                specials[f"{name} of tokenizer_config.json"] = found
    eos = {
        where.partition(" of ")[2]: tuple(i for w, i in specials.items() if _same_end(w, where))
        for where in specials
        if where.startswith("eos_token")
    }
    length = words.get("model_max_length")
    return ModelFiles(
        path=path,
        kind="safetensors",
        config=config,
        generation=generation,
        eos=eos,
        specials=specials,
        added=_added_tokens(vocabulary or {}, words),
        unknown_texts=unknown,
        pad=next((i for w, i in specials.items() if w.startswith("pad_token")), None),
        max_length=int(length) if isinstance(length, (int, float)) and length < 1e9 else None,
        templates=_templates(path, words),
        tokenizer=tokenizer,
        template=template,
        encoder=encoder,
        model=model,
        tensors=model.source.tensors if model is not None else {},
        errors=errors,
    )


def _same_end(a: str, b: str) -> bool:
    return a.startswith("eos_token") and a.partition(" of ")[2] == b.partition(" of ")[2]


def _ids_of(file: str, values: Mapping[str, object], names: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        value = values.get(f"{name}_id")
        for at, i in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(i, int) and not isinstance(i, bool):
                found[f"{name}_id{f'[{at}]' if isinstance(value, list) else ''} of {file}"] = i
    return found


def _added_tokens(tokenizer: Mapping[str, object], words: Mapping[str, object]) -> dict[str, int]:
    """The added tokens of tokenizer.json and of tokenizer_config.json, which a reader resolves by
    their ids."""
    found: dict[str, int] = {}
    entries = tokenizer.get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), int):
            found[f"the added token {entry.get('content')!r} of tokenizer.json"] = entry["id"]
    decoder = words.get("added_tokens_decoder")
    for token, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        if token.isdecimal() and isinstance(entry, Mapping):
            text = entry.get("content")
            found[f"the added token {text!r} of tokenizer_config.json"] = int(token)
    return found


def _templates(path: Path, words: Mapping[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    jinja, other = path / "chat_template.jinja", path / "chat_template.json"
    if jinja.is_file():
        found[jinja.name] = jinja.read_text("utf-8", errors="replace")
    value = words.get("chat_template")
    if isinstance(value, list):
        value = next((e.get("template") for e in value if e.get("name") == "default"), None)
    if isinstance(value, str):
        found["tokenizer_config.json"] = value
    if other.is_file():
        try:
            value = read_json(other).get("chat_template")
        except VerbatimError:
            value = None
        if isinstance(value, str):
            found[other.name] = value
    return found


def _gguf(path: Path) -> ModelFiles:
    errors: dict[str, str] = {}
    source = read_gguf(path)  # without a header there is nothing to check: the error goes up
    meta = source.metadata
    found = {key: meta.get(key) for key in (f"{K}{name}_token_id" for name in _GGUF_IDS)}
    none = (-1, 0xFFFFFFFF)  # how some writers say that there is no such token
    specials = {k: i for k, i in found.items() if isinstance(i, int) and i not in none}
    ends = tuple(specials[k] for name in _ENDS if (k := f"{K}{name}_token_id") in specials)
    key = "tokenizer.chat_template"
    tokenizer = _try(errors, "tokenizer", lambda: from_gguf(meta, file=str(path)))
    template = _try(errors, "chat template", lambda: template_from_gguf(meta, file=str(path)))
    encoder, model = _load(errors, path)
    return ModelFiles(
        path=path,
        kind="gguf",
        config=meta,
        generation={
            _SAMPLING.get(name, name): value
            for long, value in meta.items()
            if (name := long.removeprefix("general.sampling.")) != long
        },
        eos={"the GGUF header": ends} if ends else {},
        specials=specials,
        pad=specials.get(f"{K}padding_token_id"),
        templates={k: meta[k] for k in (key, f"{key}.default") if isinstance(meta.get(k), str)},
        tokenizer=tokenizer,
        template=template,
        encoder=encoder,
        model=model,
        tensors=source.tensors,
        errors=errors,
    )


# llama.cpp's names of sampling settings in a GGUF header -> transformers' names.
_SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
