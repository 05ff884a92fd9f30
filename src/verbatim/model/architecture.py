"""A config.json or a GGUF header -> ModelSpec.

In: the parsed config of a safetensors directory; or the metadata of a GGUF file and its tensors.
Out: the architecture as data, warnings to show at load, and a GGUF header's pooling of embeddings.
Every key is first checked against the family's table (families/), which also holds the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from verbatim.base.errors import ModelError
from verbatim.model.config_fields import Fields
from verbatim.model.families import ARCHITECTURES, CONFIG_KEYS, FAMILIES, WRAPPERS
from verbatim.model.families.common.family import Config, Family
from verbatim.model.families.common.gguf_fields import GgufFields, Record, Tensors, Values
from verbatim.model.families.common.gguf_rows import GENERAL_KEYS, POOLING, is_metadata
from verbatim.model.families.common.header import config_values
from verbatim.model.families.common.parts import check_spec, unknown_family
from verbatim.model.families.common.rope_record import one_record
from verbatim.model.keys import check_keys, printable
from verbatim.model.layout import GGUF_KEY_NAMES
from verbatim.model.spec import ModelSpec

# model_types that encoder/ loads; a test compares them with its key tables.
ENCODERS = ("bert", "nomic_bert", "roberta", "xlm-roberta")


# ---------------------------------------------------------------------------------- config.json


def spec_from_config(
    config: Mapping[str, object], *, context: int | None = None, file: str = "config.json"
) -> ModelSpec:
    """The architecture of a Hugging Face config, for an engine with `context` positions.

    None: the model's own context."""
    return read_config(config, context=context, file=file)[0]


def read_config(
    config: Mapping[str, object], *, context: int | None = None, file: str = "config.json"
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The architecture, and warnings to show at load."""
    warnings: list[str] = []
    c = _text_model(Fields(config, file, warnings=warnings), context)
    spec = replace(c.family.spec(c), family=c.family.name)
    return check_spec(spec, file), tuple(warnings)


def rope_records(config: Mapping[str, object], file: str) -> tuple[Record, Record]:
    """The rope records of full and of sliding layers that the ModelSpec uses. Not for gpt2."""
    c = _text_model(Fields(config, file), None)
    return (c.family.records or one_record)(c)


def _text_model(fields: Fields, context: int | None) -> Config:
    """The checked config of the language model."""
    kind = fields.string("model_type")
    if kind in WRAPPERS:
        outer = _checked(fields, kind)
        kind, text = _text_config(outer, kind)
        tied = outer.boolean("tie_word_embeddings", True)
        values = {**text, "tie_word_embeddings": tied}
        fields = Fields(values, fields.file, warnings=fields.warnings)
    if kind in ENCODERS:
        raise ModelError(
            f"model_type {kind!r} is an encoder, which generates no text; "
            "`verbatim embed`, `verbatim rerank` and `verbatim serve` run it",
            file=fields.file,
        )
    if kind not in FAMILIES:
        more = f" (of {', '.join(WRAPPERS)} the language model alone)"
        known = {*FAMILIES, *WRAPPERS}
        raise unknown_family("model_type", kind, known, fields.values, fields.file, more)
    checked = check_keys(fields.values, CONFIG_KEYS[kind], what=kind, file=fields.file)
    fields.warnings += checked.warnings
    c = Config(checked, fields.file, FAMILIES[kind], context, fields.warnings)
    c.given = fields.values
    return c


def _text_config(outer: Fields, kind: str) -> tuple[str, Values]:
    """The model_type and the config of a wrapper's language model."""
    wrapper, text = WRAPPERS[kind], outer.mapping("text_config")
    inner = text.get("model_type", wrapper.text[0])
    if inner not in wrapper.text:
        needed = " or ".join(wrapper.text)
        raise ModelError(
            f"text_config.model_type is {inner!r}: {needed} is needed", file=outer.file
        )
    wrapper.refused(Fields(text, outer.file))
    return inner, text


def _checked(fields: Fields, kind: str) -> Fields:
    checked = check_keys(fields.values, CONFIG_KEYS[kind], what=kind, file=fields.file)
    fields.warnings += checked.warnings
    return Fields(checked.values, fields.file, written=checked.written)


# ----------------------------------------------------------------------------------------- GGUF


@dataclass(frozen=True, slots=True)
class Header:
    """The model that a GGUF header describes."""

    spec: ModelSpec
    warnings: tuple[str, ...] = ()  # shown to the user at load
    pooling: str = ""  # how `embed` pools a sequence into one vector; empty: not stated


def spec_from_gguf(
    metadata: Mapping[str, object], tensors: Tensors, *, context: int | None = None, file: str
) -> ModelSpec:
    return read_header(metadata, tensors, context=context, file=file).spec


def read_header(
    metadata: Mapping[str, object], tensors: Tensors, *, context: int | None = None, file: str
) -> Header:
    """Check every metadata key and build the Header."""
    architecture = Fields(metadata, file).string("general.architecture")
    if architecture not in ARCHITECTURES:
        raise unknown_family("architecture", architecture, ARCHITECTURES, metadata, file)
    gguf, family = ARCHITECTURES[architecture]
    prefix = f"{architecture}."
    own = {name: value for name, value in metadata.items() if name in gguf.other}
    rest = {name: value for name, value in metadata.items() if name not in own}
    warnings = _general_warnings(rest, architecture, file)
    checked = check_keys(rest, gguf.keys, what=architecture, file=file, prefix=prefix)
    warnings += checked.warnings
    other = check_keys(own, gguf.other, what=architecture, file=file).values
    checked.values |= {prefix + name: value for name, value in other.items()}
    h = GgufFields(checked, file, prefix, tensors, warnings)
    if gguf.model_type:
        family = FAMILIES[gguf.model_type(h)]
    translated = config_values(h, gguf, _defaults(family))
    c = Config(translated, file, family, context, warnings)
    spec = replace(family.spec(c), family=family.name, norm_offset=0.0)
    spec = check_spec(spec, file, GGUF_KEY_NAMES)
    stated = h.has("pooling_type")
    kind = h.integer("pooling_type", 0, low=0, high=max(POOLING))
    return Header(spec, tuple(warnings), POOLING[kind] if stated else "")


def _general_warnings(metadata: Mapping[str, object], architecture: str, file: str) -> list[str]:
    """Check the keys outside the architecture's namespace."""
    others = {k: v for k, v in metadata.items() if not k.startswith(f"{architecture}.")}
    general = {name: value for name, value in others.items() if name in GENERAL_KEYS}
    check_keys(general, GENERAL_KEYS, what="GGUF files", file=file)
    return [
        f"{printable(name)} is not known and is not a key of {architecture}; ignored"
        for name in others
        if name not in GENERAL_KEYS and not is_metadata(name)
    ]


def _defaults(family: Family) -> Values:
    table = CONFIG_KEYS[family.model_type]
    return {name: key.default for name, key in table.items() if key.default is not None}
