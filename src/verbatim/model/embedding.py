"""EmbeddingSpec: how the hidden states of a text become one embedding, as the model's files say.

In: modules.json, 1_Pooling/config.json, config_sentence_transformers.json and
sentence_bert_config.json of a sentence-transformers directory. Out: an EmbeddingSpec. The files are
untrusted. A module or a pooling mode that is not implemented is an error that names it; a directory
without modules.json states no pooling, and `embed` refuses until the user names one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verbatim.base.errors import ModelError
from verbatim.files.safetensors import read_json
from verbatim.model.config_fields import Fields, short
from verbatim.model.keys import Table, check_keys, followed, must_equal, no_effect

POOLINGS = ("mean", "cls", "last")
MAX_LIST = 1 << 20  # bytes of modules.json
_PREFIX = "sentence_transformers."
_POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_UNSUPPORTED_MODES = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
POOLING_KEYS: Table = {
    **{name: followed(f"{pooling} pooling") for name, pooling in _POOLING_MODES.items()},
    **{name: must_equal(False, note="not implemented") for name in _UNSUPPORTED_MODES},
    "pooling_mode": followed("cls, mean or lasttoken: the newer name of the flags"),
    "word_embedding_dimension": no_effect("the model's own width"),
    "embedding_dimension": no_effect("the model's own width"),
    "include_prompt": must_equal(True, note="the tokens of a prompt are pooled too"),
}


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """`pooling` is mean, cls, last, another name that `embed` refuses, or empty: none stated."""

    pooling: str = ""
    normalise: bool = False  # scale the vector to length 1
    prompts: Mapping[str, str] = field(default_factory=dict)  # text put before an input, by name
    default_prompt: str = ""  # name of the prompt of inputs that name none
    max_tokens: int | None = None  # the longest input that the model's files state


def read_embedding(directory: Path) -> EmbeddingSpec:
    """The settings of a sentence-transformers directory. Without modules.json: none stated."""
    if not (directory / "modules.json").is_file():
        return EmbeddingSpec()
    pooling, normalise = "", False
    for kind, path in _modules(directory / "modules.json"):
        if kind == "Pooling":
            pooling = _pooling(directory / path / "config.json")
        elif kind == "Normalize":
            normalise = True
        elif kind != "Transformer":
            raise ModelError(
                f"the module {kind!r:.60} is not implemented; "
                "known: Transformer, Pooling, Normalize",
                file=str(directory / "modules.json"),
            )
    prompts, default = _prompts(directory / "config_sentence_transformers.json")
    limit = _max_tokens(directory / "sentence_bert_config.json")
    return EmbeddingSpec(pooling, normalise, prompts, default, limit)


def _modules(file: Path) -> list[tuple[str, str]]:
    """(class name, folder) of every module, in order."""
    try:
        raw = file.read_bytes()[: MAX_LIST + 1]
        rows: object = json.loads(raw) if len(raw) <= MAX_LIST else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot be read as JSON: {str(error)[:200]}", file=str(file)) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ModelError("a list of modules is needed", file=str(file))
    found = []
    for row in rows:
        kind, path = row.get("type"), row.get("path")
        if not isinstance(kind, str) or not kind.startswith(_PREFIX):
            raise ModelError(
                f"a module of type {short(kind)} is not one of sentence_transformers",
                file=str(file),
            )
        if not isinstance(path, str) or path.startswith("/") or ".." in path or "\\" in path:
            raise ModelError(
                f"the module path {short(path)} leads out of the model's directory", file=str(file)
            )
        found.append((kind.rsplit(".", 1)[-1], path))
    return found


def _pooling(file: Path) -> str:
    values = read_json(file)
    f = Fields(check_keys(values, POOLING_KEYS, what="Pooling", file=str(file)).values, str(file))
    modes = [mode for name, mode in _POOLING_MODES.items() if f.boolean(name, False)]
    if f.has("pooling_mode"):
        mode = f.string("pooling_mode").removesuffix("token")
        if mode not in POOLINGS or modes not in ([], [mode]):
            raise f.fail("pooling_mode", "cls, mean or lasttoken is needed")
        modes = [mode]
    if len(modes) != 1:
        raise ModelError(
            f"{len(modes)} pooling modes are on ({', '.join(modes) or 'none'}); one is needed",
            file=str(file),
        )
    return modes[0]


def _prompts(file: Path) -> tuple[dict[str, str], str]:
    if not file.is_file():
        return {}, ""
    f = Fields(read_json(file), str(file))
    prompts = f.mapping("prompts")
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise ModelError(f"the prompt {name!r:.60} is not a text", file=str(file))
    default = f.string("default_prompt_name", "")
    if default and default not in prompts:
        raise f.fail("default_prompt_name", f"one of {', '.join(prompts) or 'no prompts'}")
    return prompts, default


def _max_tokens(file: Path) -> int | None:
    if not file.is_file():
        return None
    f = Fields(read_json(file), str(file))
    if f.boolean("do_lower_case", False):
        raise f.fail("do_lower_case", "only false is supported; the tokenizer's own rule decides")
    return f.integer("max_seq_length") if f.has("max_seq_length") else None
