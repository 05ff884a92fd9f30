"""Well-known models by short names: each is a repository on the Hugging Face hub, or one GGUF file
of it.

`verbatim pull qwen3:0.6b` resolves to Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf. The names are
Ollama's; every file is of a family that the engine runs. Sizes are those of the files when this
table was written; the list shows them until a model is here. `sampling` holds the parameters that
the model card states, for files that state none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

APACHE, MIT, GEMMA = "Apache-2.0", "MIT", "Gemma terms"
QWEN3 = (("temperature", 0.6), ("top_p", 0.95), ("top_k", 20.0))
QWEN25 = (("temperature", 0.7), ("top_p", 0.8), ("top_k", 20.0), ("repetition_penalty", 1.05))
LLAMA3 = (("temperature", 0.6), ("top_p", 0.9))
GEMMA3 = (("temperature", 1.0), ("top_p", 0.95), ("top_k", 64.0))
SMOLLM2 = (("temperature", 0.2), ("top_p", 0.9))
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
    sampling: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.repo}:{self.file}" if self.file else self.repo


HUB_CATALOG: dict[str, HubEntry] = {
    "smollm2:360m": HubEntry(
        "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF", "smollm2-360m-instruct-q8_0.gguf",
        386_000_000, "q8_0", "llama", 8192, APACHE, SMOLLM2,
    ),
    "smollm2:1.7b": HubEntry(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", "smollm2-1.7b-instruct-q4_k_m.gguf",
        1_060_000_000, "q4_k_m", "llama", 8192, APACHE, SMOLLM2,
    ),
    "qwen3:0.6b": HubEntry(
        "Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf",
        639_446_688, "q8_0", "qwen3", 40_960, APACHE, QWEN3,
    ),
    "qwen3:1.7b": HubEntry(
        "Qwen/Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q8_0.gguf",
        1_830_000_000, "q8_0", "qwen3", 40_960, APACHE, QWEN3,
    ),
    "qwen3:4b": HubEntry(
        "Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf",
        2_497_280_256, "q4_k_m", "qwen3", 40_960, APACHE, QWEN3,
    ),
    "qwen3:8b": HubEntry(
        "Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf",
        5_030_000_000, "q4_k_m", "qwen3", 40_960, APACHE, QWEN3,
    ),
    "qwen2.5:0.5b": HubEntry(
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF", "qwen2.5-0.5b-instruct-q4_k_m.gguf",
        491_000_000, "q4_k_m", "qwen2", 32_768, APACHE, QWEN25,
    ),
    "qwen2.5:1.5b": HubEntry(
        "Qwen/Qwen2.5-1.5B-Instruct-GGUF", "qwen2.5-1.5b-instruct-q4_k_m.gguf",
        1_120_000_000, "q4_k_m", "qwen2", 32_768, APACHE, QWEN25,
    ),
    "llama3.2:1b": HubEntry(
        "bartowski/Llama-3.2-1B-Instruct-GGUF", "Llama-3.2-1B-Instruct-Q4_K_M.gguf",
        807_694_464, "q4_k_m", "llama", 131_072, "Llama 3.2 licence", LLAMA3,
    ),
    "llama3.2:3b": HubEntry(
        "bartowski/Llama-3.2-3B-Instruct-GGUF", "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        2_020_000_000, "q4_k_m", "llama", 131_072, "Llama 3.2 licence", LLAMA3,
    ),
    "gemma3:1b": HubEntry(
        "ggml-org/gemma-3-1b-it-GGUF", "gemma-3-1b-it-Q4_K_M.gguf",
        806_000_000, "q4_k_m", "gemma3", 32_768, GEMMA, GEMMA3,
    ),
    "gemma3:4b": HubEntry(
        "ggml-org/gemma-3-4b-it-GGUF", "gemma-3-4b-it-Q4_K_M.gguf",
        2_490_000_000, "q4_k_m", "gemma3", 131_072, GEMMA, GEMMA3,
    ),
    "mistral:7b": HubEntry(
        "bartowski/Mistral-7B-Instruct-v0.3-GGUF", "Mistral-7B-Instruct-v0.3-Q4_K_M.gguf",
        4_370_000_000, "q4_k_m", "llama", 32_768, APACHE,
    ),
    "phi3:mini": HubEntry(
        "microsoft/Phi-3-mini-4k-instruct-gguf", "Phi-3-mini-4k-instruct-q4.gguf",
        2_390_000_000, "q4_k_m", "phi3", 4096, MIT,
    ),
    # one for `embed`, one for `rerank`
    "all-minilm": HubEntry(
        "sentence-transformers/all-MiniLM-L6-v2", "", 90_870_000, "f32", "bert", 256, APACHE,
    ),
    "ms-marco-minilm": HubEntry(
        "cross-encoder/ms-marco-MiniLM-L6-v2", "", 90_870_000, "f32", "bert", 512, APACHE,
    ),
}  # fmt: skip
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
