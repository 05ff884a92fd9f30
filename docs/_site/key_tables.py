"""docs/config-keys.md from the key tables of the families; `make docs` puts it into the site."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verbatim.encoder.encoder_gguf import GGUF_ENCODER_KEYS
from verbatim.encoder.encoder_keys import ENCODER_KEYS
from verbatim.model.embedding import POOLING_KEYS
from verbatim.model.families import CONFIG_KEYS, FAMILIES, GGUF_KEYS
from verbatim.model.families.common.gguf_rows import GENERAL_KEYS, NAMESPACES
from verbatim.model.families.common.rope_keys import ROPE_KEYS
from verbatim.model.families.common.rows import COMMON_KEYS
from verbatim.model.keys import Key, Table

_INTRO = """\
# Config keys

Every key of a `config.json` and of a GGUF header has one of three treatments:

- **followed**: read into the model's architecture (or its stop tokens). An absent key has the
  default in the table, which is that of transformers' config class.
- **must equal**: only the listed values are supported. Any other value is an error that names the
  key.
- **no effect**: cannot change logits (training, metadata, generation defaults, kernel choice).

A key in no table is unknown. It is ignored with a warning if its value means off (null, false, 0,
an empty string, list or object) or if its name starts with an underscore. Any other value is an
error, because the key may change logits: remove the key from the file if it has no effect on the
model.

null is a value, not the absence of a key. A key with a default refuses null, unless its row below
says what null means: transformers would not use the default there either. In a rope record every
followed key does.

Warnings are printed by the command line, logged as `verbatim.engine` by the library and the server,
and kept in `LLM.warnings`.

Two rules involve more than one key:

- **Rope scalings that depend on a length** (`longrope`, `dynamic`). transformers uses the current
  length of the sequence, so the angles of cached keys change while the sequence grows, and the
  output depends on how it was computed. Verbatim uses the engine's context, which is fixed at load:
  `long_factor` for every sequence if the context is above the original length, else `short_factor`
  (`--context N` or `LLM(context=N)` chooses). A warning at load says so.
- **A tied head.** If `tie_word_embeddings` is true and the file has a head that differs from the
  embedding, the file's head is used, with a warning, as in transformers.
"""


def _value(value: Any) -> str:
    return (
        "null" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    )


def _values(key: Key) -> str:
    if key.treatment == "must equal":
        return " or ".join(_value(v) for v in key.values) or "null"
    return _value(key.default) if key.treatment == "followed" and key.default is not None else ""


def _table(rows: Iterable[tuple[str, Key]], first: str = "key") -> list[str]:
    lines = [f"| {first} | treatment | value or default | how |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {key.treatment} | {_values(key)} | {key.note} |" for name, key in rows]
    return [*lines, ""]


def _family_rows(table: Table, common: Table) -> list[tuple[str, Key]]:
    return sorted((name, key) for name, key in table.items() if common.get(name) != key)


def document() -> str:
    lines = [
        _INTRO,
        "## config.json: keys of every family",
        "",
        *_table(sorted(COMMON_KEYS.items())),
    ]
    for family, table in CONFIG_KEYS.items():
        lines += [f"## config.json: {family}", "", *_table(_family_rows(table, COMMON_KEYS))]
    for family, table in ENCODER_KEYS.items():
        lines += [f"## config.json: {family}", "", *_table(_family_rows(table, COMMON_KEYS))]
    lines += [
        "## Sentence-transformers: 1_Pooling/config.json",
        "",
        *_table(sorted(POOLING_KEYS.items())),
    ]
    lines += [
        "## Rope records",
        "",
        "`rope_parameters`, or `rope_scaling` if present: an object of a `rope_type` and that",
        "type's keys. A key of another type has no effect; a warning names it.",
        "",
    ]
    for kind, table in ROPE_KEYS.items():
        lines += [f"### {kind}", "", *_table(sorted(table.items()))]
    for name, family in FAMILIES.items():
        if keys := family.rope.keys:
            lines += [f"### Further keys of {name}", "", *_table(sorted(keys.items()))]
    partial = [f"- `{name}`" for name, one in FAMILIES.items() if one.rope.partial]
    lines += ["### Families that rotate heads in part", "", *partial, ""]
    lines += [
        "## GGUF: keys outside the architecture's namespace",
        "",
        *_table(sorted(GENERAL_KEYS.items())),
    ]
    lines += [f"- `{space}*`: {use}" for space, use in NAMESPACES.items()]
    lines += [
        "",
        "Unknown keys of these and of other namespaces cannot change logits; a warning names them.",
        "",
    ]
    for architecture, table in {**GGUF_KEYS, **GGUF_ENCODER_KEYS}.items():
        lines += [
            f"## GGUF: {architecture}",
            "",
            *_table(sorted(table.items()), f"key (`{architecture}.` before it)"),
        ]
    return "\n".join(lines).rstrip() + "\n"
