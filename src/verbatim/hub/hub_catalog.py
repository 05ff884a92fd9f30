"""Well-known models by short names: each is a repository on the Hugging Face hub, or one GGUF file
of it.

`verbatim pull qwen3:0.6b` resolves to Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf. The names are
Ollama's; every file is of a family that the engine runs. Sizes are those of the files when
hub_catalog.json was written; the list shows them until a model is here. `sampling` holds the
parameters that the model card states, for files that state none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

LATEST_BYTES = 3_000_000_000  # of a name without a size: such a file runs in 8 GB of memory


@dataclass(frozen=True, slots=True)
class HubEntry:
    """One file on the hub, or the safetensors of a repository (no `file`). `size` in bytes."""

    repo: str
    file: str
    size: int
    quant: str
    family: str
    context: int
    licence: str
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.repo}:{self.file}" if self.file else self.repo

    @property
    def facts(self) -> tuple[str, str, int, str]:
        return self.family, self.quant, self.context, self.licence


_FILE = Path(__file__).with_suffix(".json")
HUB_CATALOG = {n: HubEntry(**row) for n, row in json.loads(_FILE.read_text("utf-8")).items()}
# other spellings of catalog names
SYNONYMS = {"smollm2:135m": "smollm2", "smollm2:latest": "smollm2", "phi3:3.8b": "phi3:mini"}


def catalog_name(model: str) -> str:
    """The name in the catalog that `model` means; any other name as it is.

    A name without a size (`qwen3`, `qwen3:latest`), and one without a version (`qwen`), is the
    newest version of it that the catalog has: its largest file up to LATEST_BYTES, else the
    smallest. A path of that name comes first.

    >>> catalog_name("qwen"), catalog_name("mistral"), catalog_name("org/name")
    ('qwen3:4b', 'mistral:7b', 'org/name')
    """
    short = SYNONYMS.get(model, model).removesuffix(":latest")
    if short in HUB_CATALOG or short in SYNONYMS.values():
        return short
    found: dict[str, list[str]] = {}  # version -> names
    for name in HUB_CATALOG:
        base = name.partition(":")[0]
        line = re.sub(r"[\d.]+$", "", base)
        if short in (base, line) and ":" in name:
            found.setdefault(base.removeprefix(line), []).append(name)
    if not found or Path(model).exists():
        return model
    names = found[max(found, key=lambda version: float(version or 0))]
    names.sort(key=lambda name: HUB_CATALOG[name].size)
    return [names[0], *(n for n in names if HUB_CATALOG[n].size <= LATEST_BYTES)][-1]


def suggestion(model: str, local: tuple[str, ...]) -> str:
    """What an unknown name may have meant, as the end of a sentence; empty: nothing is near."""
    known = [*local, *HUB_CATALOG]
    base = model.lower().partition(":")[0]
    sizes = [name for name in known if name.partition(":")[0] == base]
    near = sizes or get_close_matches(model.lower(), [*known, *SYNONYMS], 3, 0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""
