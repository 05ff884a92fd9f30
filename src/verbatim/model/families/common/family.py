"""The records of which a family's file consists: Family, Gguf, RopeRules (Names is in tensors.py);
the Config that its `spec` reads; and the configs of the tests' tiny models.

A Config is a config.json, or a GGUF header under the names of a config.json. What only a GGUF file
says (its tensors tell which biases it has) is a fact of the Config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verbatim.model.config_fields import Fields
from verbatim.model.families.common.gguf_fields import FACT
from verbatim.model.families.common.gguf_fields import GgufFields as GgufFields
from verbatim.model.families.common.gguf_fields import Record as Record
from verbatim.model.families.common.gguf_fields import Values as Values
from verbatim.model.families.common.gguf_fields import facts as facts
from verbatim.model.families.common.gguf_rows import GGUF_ROTARY
from verbatim.model.families.common.tensors import GGUF_NAMES, LLAMA_NAMES, DraftNames, Names
from verbatim.model.keys import Checked, Table
from verbatim.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class RopeRules:
    """How the family's rope records differ from llama's."""

    partial: bool = False  # heads may be rotated in part
    only_longrope: bool = False  # no scaling but longrope, which has older names (phi3)
    theta: str = "rope_theta"  # the config's key of theta
    fraction: str = "partial_rotary_factor"  # the config's key of the rotated fraction
    keys: Table = field(default_factory=dict)  # further keys of its records
    absent: Record | None = None  # the record of a config that has none


@dataclass(frozen=True, slots=True)
class Gguf:
    """An architecture of llama.cpp: its header, and its tensor names."""

    architecture: str
    keys: Table = field(default_factory=lambda: GGUF_ROTARY)
    names: Names = GGUF_NAMES
    other: Table = field(default_factory=dict)  # keys outside the architecture's namespace
    # Config values that the header implies beyond its renamed keys; see header.py.
    implied: Callable[[GgufFields], Values] = lambda h: {}
    # The model_type, where several have one architecture.
    model_type: Callable[[GgufFields], str] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """All that the engine knows of a model_type."""

    model_type: str
    keys: Table
    spec: Callable[[Config], ModelSpec]
    models: str  # published models, for the documentation
    names: Names = LLAMA_NAMES
    name: str = ""  # ModelSpec.family, where it is not the model_type
    # The model_type with the same layers and keys in transformers, where that lacks this family.
    body: str = ""
    rope: RopeRules = RopeRules()
    # The rope records of full and of sliding layers, where they are not one.
    records: Callable[[Config], tuple[Record, Record]] | None = None
    gguf: Gguf | None = None
    architecture: str = ""  # GGUF architecture of another family that models are written as
    exported: Callable[[ModelSpec], Values] = lambda spec: {}  # GGUF keys that it needs
    drafts: DraftNames | None = None  # names of a layer that drafts tokens, which files may have
    key_names: Mapping[str, str] = field(default_factory=dict)  # see model/layout.py
    tiny: Mapping[str, Values] = field(default_factory=dict)  # the tests' tiny models; {}: tiny()

    def __post_init__(self) -> None:
        if not self.tiny:
            object.__setattr__(self, "tiny", {self.model_type: tiny()})
        if not self.name:
            object.__setattr__(self, "name", self.model_type)

    @property
    def gguf_architecture(self) -> str:
        return self.architecture or (self.gguf.architecture if self.gguf else "")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multi-modal model, of which only the language model is used."""

    model_type: str
    keys: Table
    text: tuple[str, ...]  # model_types of text_config; the first where it has none
    refused: Callable[[Fields], None] = lambda text: None  # raises ModelError


class Config(Fields):
    """A config.json, or a GGUF header under its names, with the family's defaults."""

    def __init__(
        self, checked: Checked, file: str, family: Family, context: int | None, warnings: list[str]
    ) -> None:
        super().__init__(checked.values, file, warnings=warnings, written=checked.written)
        self.family = family
        self.context = context  # positions that the engine asks for; None: the model's own
        self.given: Mapping[str, object] = {}  # the values of a config.json, without defaults

    def fact(self, name: str, default: object = None) -> Any:
        """What only a GGUF file says; for a config.json the default."""
        return self.values.get(FACT + name, default)


# What the tests' tiny configs start from.
_TINY: Values = {
    "vocab_size": 260,  # verbatim.testing.fakes.ByteTokenizer's ids
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def tiny(**changes: Any) -> Values:
    """A tiny config; None removes a key."""
    return {key: value for key, value in {**_TINY, **changes}.items() if value is not None}
