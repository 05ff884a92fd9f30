"""Read a model's chat templates from its files.

In: the metadata of a GGUF file, or a model directory. Out: a ChatTemplate, or None without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verbatim.base.errors import ModelError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.text.templates.chat_template import ChatTemplate
from verbatim.text.tokenizer import Tokenizer


def template_from_gguf(
    metadata: Mapping[str, object], tokenizer: Tokenizer | None = None, *, file: str | None = None
) -> ChatTemplate | None:
    """The chat template in a GGUF file's metadata, or None. Further ones are
    `tokenizer.chat_template.NAME`."""
    key = "tokenizer.chat_template"
    source = metadata.get(key)
    named = {k[len(key) + 1 :]: v for k, v in metadata.items() if k.startswith(key + ".")}
    if source is None:
        source = named.get("default")
    if source is None:
        return None
    special = _special_of(metadata) if tokenizer is None else tokenizer.special_tokens
    return _new_template(source, named, special, file)


def template_from_directory(
    path: str | Path, tokenizer: Tokenizer | None = None
) -> ChatTemplate | None:
    """The chat template of a model directory, or None: chat_template.jinja (and
    additional_chat_templates/), chat_template.json, or the `chat_template` of
    tokenizer_config.json, which may be a list of named ones."""
    from verbatim.text.hf_vocab import read_json, special_texts

    folder = Path(path)
    config = read_json(folder / "tokenizer_config.json", missing={})
    special = special_texts(folder, config) if tokenizer is None else tokenizer.special_tokens
    main = folder / "chat_template.jinja"
    if main.is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return _new_template(
            _read_source(main), {m.stem: _read_source(m) for m in more}, special, str(main)
        )
    found, file = config.get("chat_template"), folder / "tokenizer_config.json"
    if found is None and (folder / "chat_template.json").is_file():
        file = folder / "chat_template.json"
        found = read_json(file).get("chat_template")
    if found is None:
        return None
    named: JsonObject = {}
    if isinstance(found, list):
        entries = [e if isinstance(e, dict) and "template" in e else {} for e in found]
        if not all(isinstance(e.get("name"), str) for e in entries):
            raise ModelError(
                "chat_template is a list whose entries are not all {name, template}", file=str(file)
            )
        named = {e["name"]: e["template"] for e in found}
        if "default" not in named:
            raise ModelError(
                f"chat_template has no 'default' among {', '.join(sorted(named))}", file=str(file)
            )
        found = named.pop("default")
    return _new_template(found, named, special, str(file))


def _new_template(
    source: Any, named: JsonMapping, special: Mapping[str, str], file: str | None
) -> ChatTemplate:
    bos, eos = special.get("bos_token", ""), special.get("eos_token", "")
    return ChatTemplate(source, bos, eos, special_tokens=special, named=named, file=file)


def _special_of(metadata: Mapping[str, object]) -> dict[str, str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    found: dict[str, str] = {}
    for name, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        at = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if (
            isinstance(tokens, Sequence)
            and isinstance(at, int)
            and 0 <= at < len(tokens)
            and isinstance(tokens[at], str)
        ):
            found[name] = tokens[at]
    return found


def _read_source(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template cannot be read: {error}", file=str(path)) from None
