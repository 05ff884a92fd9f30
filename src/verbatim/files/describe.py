"""Describe a model file without loading it: a path comes in; family, quantisation, context, licence
and size go out. Reads only the header of a GGUF file, or config.json and the headers of the
safetensors files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from verbatim.files.gguf import read_gguf
from verbatim.files.safetensors import read_directory
from verbatim.files.split import with_siblings
from verbatim.formats.tensor import Tensor

# general.file_type -> name, as llama.cpp numbers and names them
# fmt: off
FILE_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k",
    11: "q3_k_s", 12: "q3_k_m", 13: "q3_k_l", 14: "q4_k_s", 15: "q4_k_m", 16: "q5_k_s",
    17: "q5_k_m", 18: "q6_k", 19: "iq2_xxs", 20: "iq2_xs", 21: "q2_k_s", 22: "iq3_xs",
    23: "iq3_xxs", 24: "iq1_s", 25: "iq4_nl", 26: "iq3_s", 27: "iq3_m", 28: "iq2_s", 29: "iq2_m",
    30: "iq4_xs", 31: "iq1_m", 32: "bf16", 36: "tq1_0", 37: "tq2_0", 38: "mxfp4_moe",
}
# fmt: on


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Facts of a model file for `verbatim models`. `types`: number of tensors of each type.
    `template`: whether the file has a chat template."""

    family: str
    quant: str
    context: int | None
    parameters: int
    bytes: int
    licence: str
    vocabulary: int
    template: bool
    types: tuple[tuple[str, int], ...]
    title: str = ""


def describe(path: Path) -> ModelDescription:
    """Raises ModelError for a file that is not a model."""
    return _directory(path) if path.is_dir() else _gguf(path)


def bytes_on_disk(path: Path) -> int:
    """Size of the weight files of a model: a GGUF file with its parts, or the safetensors files."""
    files = path.glob("*.safetensors") if path.is_dir() else with_siblings(path)
    return sum(file.stat().st_size for file in files)


def _gguf(path: Path) -> ModelDescription:
    source = read_gguf(path)
    keys = source.metadata
    family = str(keys.get("general.architecture", ""))
    named = FILE_TYPES.get(keys.get("general.file_type", -1), "")
    main = _main_type(source.tensors)
    return ModelDescription(
        family=family,
        # Tensor types decide; the name of the mixture (q4_k_m) only refines them.
        quant=named if named.startswith(main) else main,
        context=keys.get(f"{family}.context_length"),
        licence=_licence(keys.get("general.license")),
        vocabulary=len(keys.get("tokenizer.ggml.tokens", ())),
        template="tokenizer.chat_template" in keys,
        title=str(keys.get("general.name", "")),
        **_counted(source.tensors),
    )


def _directory(path: Path) -> ModelDescription:
    source = read_directory(path)
    text = source.config.get("text_config")
    config = {**source.config, **(text if isinstance(text, dict) else {})}
    described = path / "tokenizer_config.json"
    template = (path / "chat_template.jinja").exists() or (
        described.exists() and '"chat_template"' in described.read_text("utf-8", "replace")
    )
    return ModelDescription(
        family=str(source.config.get("model_type", "")),
        quant=_main_type(source.tensors),
        context=config.get("max_position_embeddings") or config.get("n_positions"),
        licence="",
        vocabulary=int(config.get("vocab_size") or 0),
        template=template,
        **_counted(source.tensors),
    )


def _counted(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    types = Counter(t.type for t in tensors.values())
    return {
        "parameters": sum(prod(t.shape) for t in tensors.values()),
        "bytes": sum(int(t.data.nbytes) for t in tensors.values()),
        "types": tuple(types.most_common()),
    }


def _main_type(tensors: Mapping[str, Tensor]) -> str:
    """The type that holds most of the weights."""
    weight: Counter[str] = Counter()
    for tensor in tensors.values():
        weight[tensor.type] += prod(tensor.shape)
    return weight.most_common(1)[0][0] if weight else ""


def _licence(value: object) -> str:
    known = {"apache-2.0": "Apache-2.0", "mit": "MIT"}
    return known.get(str(value).lower(), str(value)) if isinstance(value, str) else ""
