"""Open a draft head: its config.json says of which kind it is.

In: a directory and the spec of the model that it drafts for. Out: a DraftHead. A further kind is a
row of KINDS and a module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from verbatim.base.errors import ModelError
from verbatim.files.safetensors import SafetensorsDir, read_directory
from verbatim.model.loading.assistant import MODEL_TYPE, open_assistant
from verbatim.model.loading.dflash import KEY, open_dflash
from verbatim.model.loading.draft_head import DraftHead
from verbatim.model.loading.eagle3 import open_eagle3
from verbatim.model.spec import ModelSpec

Found = Callable[[Mapping[str, object]], bool]
KINDS: dict[str, tuple[Found, Callable[[SafetensorsDir, ModelSpec], DraftHead]]] = {
    "speculators_model_type": (lambda c: "speculators_model_type" in c, open_eagle3),
    f"model_type {MODEL_TYPE}": (lambda c: c.get("model_type") == MODEL_TYPE, open_assistant),
    KEY: (lambda c: KEY in c, open_dflash),
}


def open_head(path: str | Path, target: ModelSpec) -> DraftHead:
    """Read the head's config and tensor names, and check that it fits the model."""
    source = read_directory(path)
    for found, opened in KINDS.values():
        if found(source.config):
            return opened(source, target)
    raise ModelError(
        f"not a draft head that is known: no {', no '.join(KINDS)}",
        file=str(Path(path) / "config.json"),
    )
