"""Open a draft head: its config.json says of which kind it is.

In: a directory and the spec of the model that it drafts for. Out: a DraftHead.
"""

from __future__ import annotations

from pathlib import Path

from verbatim.base.errors import ModelError
from verbatim.files.safetensors import read_directory
from verbatim.model.loading.assistant import open_assistant
from verbatim.model.loading.dflash import open_dflash
from verbatim.model.loading.draft_head import DraftHead
from verbatim.model.loading.eagle3 import open_eagle3
from verbatim.model.spec import ModelSpec

# A key that only this kind of head has.
KINDS = {
    "speculators_model_type": open_eagle3,
    "backbone_hidden_size": open_assistant,
    "dflash_config": open_dflash,
}


def open_head(path: str | Path, target: ModelSpec) -> DraftHead:
    """Read the head's config and tensor names, and check that it fits the model."""
    source = read_directory(path)
    for key, opened in KINDS.items():
        if key in source.config:
            return opened(source, target)
    file = str(source.path / "config.json")
    raise ModelError(f"not a draft head that is known: no {', no '.join(KINDS)}", file=file)
