"""GgufFields: the header and the tensors of a GGUF file, as a family's `implied` reads them.

In: checked metadata, and the tensors by name. Out: numbers, and the config values and facts that
`implied` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.base.errors import ModelError
from verbatim.formats.tensor import Tensor
from verbatim.model.config_fields import Fields
from verbatim.model.keys import Checked

Values = dict[str, Any]  # values of a config.json or of a GGUF header
Record = Values  # a rope record: rope_type and that type's numbers
Tensors = Mapping[str, Tensor]
FACT = "gguf."  # before the names of facts; check_keys() has removed such a key of a config.json
MAX_LAYERS = 4096  # far above any real model; bounds the work on a hostile config


def facts(**values: Any) -> Values:
    return {FACT + name: value for name, value in values.items()}


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
