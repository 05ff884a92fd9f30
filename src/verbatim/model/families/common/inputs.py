"""The inputs of a family's functions: Config and GgufFields.

A family's `spec` reads a Config: a config.json, or a GGUF header under the names of a config.json.
What only a GGUF file says (its tensors tell which biases it has) is a fact of the Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import ModelError
from verbatim.formats.tensor import Tensor
from verbatim.model.config_fields import Fields
from verbatim.model.keys import Checked

if TYPE_CHECKING:
    from verbatim.model.families.common.family import Family

Values = dict[str, Any]  # values of a config.json or of a GGUF header
Record = Values  # a rope record: rope_type and that type's numbers
Tensors = Mapping[str, Tensor]
_FACT = "gguf."  # before the names of facts; check_keys() has removed such a key of a config.json
MAX_LAYERS = 4096  # far above any real model; bounds the work on a hostile config


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
        return self.values.get(_FACT + name, default)


def facts(**values: Any) -> Values:
    return {_FACT + name: value for name, value in values.items()}


class GgufFields(Fields):
    """The ARCH.* keys of a GGUF header, and the file's tensors."""

    def __init__(
        self, checked: Checked, file: str, prefix: str, tensors: Tensors, warnings: list[str]
    ) -> None:
        super().__init__(checked.values, file, prefix, warnings)
        self.tensors = tensors

    @property
    def vocab(self) -> int:
        embed = self.tensors.get("token_embd.weight")
        if embed is None or len(embed.shape) != 2:
            raise ModelError("tensor token_embd.weight is missing or not a matrix", file=self.file)
        return embed.shape[0]

    def scale(self, key: str, absent: float) -> float:
        """A factor; in GGUF 0 means that it is absent."""
        return absent if self.raw(key, 0) == 0 else self.number(key)

    @property
    def layers(self) -> int:
        """Layers without those that draft tokens."""
        count = self.integer("block_count", high=MAX_LAYERS)
        if not self.raw("nextn_predict_layers", 0):
            return count
        return count - self.integer("nextn_predict_layers", low=0, high=count - 1)
