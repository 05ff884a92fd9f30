"""The cells of the parity table: what the tests compare, and what is refused by name.

A cell of the first table is (model_type, file kind, backend, weight type), of the second
(checkpoint, file kind, backend), of the third (weight type, backend). Each that passes or is
refused names its test; test_models_doc.py checks that the test exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from checkpoints import CASES
from parity_case import Case

from parity_types import (
    FLOATS,
    INTERPRETED,
    PACKED_FORMATS,
    PLAIN,
    REFUSED_FORMATS,
    WIDE,
    WIDE_QUANTISED,
    interpreted_type,
)
from verbatim.files.gguf_types import OTHER_TYPES, TYPES
from verbatim.testing.tiny_models import TINY_CONFIGS

BACKENDS = ("reference", "cpu", "cuda")
KINDS = ("safetensors", "GGUF")
STATES = ("passes", "refused by name")
_FAMILIES = "tests/parity/test_families.py::"
_AGREES = "tests/backend/test_backend_agrees.py::"
_PACKED = "tests/formats/test_packed_checkpoint.py::"
_REFERENCE = {
    "safetensors": _FAMILIES + "test_logits_of_safetensors_equal_those_of_transformers",
    "GGUF": _FAMILIES + "test_logits_of_gguf_equal_those_of_transformers",
}
_CPU = _FAMILIES + "test_the_cpu_backend_gives_the_logprobs_of_transformers"
_CUDA = _FAMILIES + "test_the_cuda_backend_gives_the_logprobs_of_transformers"
_REFUSED = _FAMILIES + "test_convert_refuses_by_name_what_gguf_cannot_express"
_TYPES = _AGREES + "test_every_family_and_weight_type_agrees_with_the_reference"
_VALUES = _AGREES + "test_the_reference_computes_with_the_values_of_every_weight_type"
_WIDE = _AGREES + "test_types_with_wide_blocks_a_table_or_codebook_agree_with_the_reference"
_WIDE_QUANTISED = _AGREES + "test_types_with_blocks_of_256_weights_agree_with_the_reference"
_BITS = "tests/formats/test_quant.py::test_dequantisation_has_the_bits_of_the_gguf_package"
_Q8_K = "tests/formats/test_quant.py::test_q8_k_is_dequantised_by_its_definition"
_OTHER = "tests/files/test_gguf.py::test_a_tensor_of_another_type_is_refused_by_name"
INTERPRETER = "tests/backend/cuda_kernels.py::test_every_family_agrees_with_the_reference"


@dataclass(frozen=True)
class Cell:
    state: str  # one of STATES
    test: str = ""
    key: str = ""  # what the error names
    interpreted: bool = False  # on cuda: `make test` runs it under Triton's interpreter, too


def passes(test: str, *, interpreted: bool = False) -> Cell:
    return Cell(STATES[0], test, interpreted=interpreted)


def refused(test: str, key: str) -> Cell:
    return Cell(STATES[1], test, key)


def types_of_kind(kind: str) -> tuple[str, ...]:
    """The weight types that files of a kind hold and that every family is tested with."""
    return FLOATS if kind == "safetensors" else PLAIN


def family_cell(model_type: str, kind: str, backend: str, type: str) -> Cell:
    """On the reference and the cpu, float32 weights come from files; the other types and cuda take
    the records that both readers make."""
    if backend == "reference":
        return passes(_REFERENCE[kind] if type == "f32" else _VALUES)
    if backend == "cpu" and type == "f32":
        return passes(_CPU)
    tiny = [name for name, config in TINY_CONFIGS.items() if config["model_type"] == model_type]
    interpreted = backend == "cuda" and any(
        name in INTERPRETED and type == interpreted_type(name) for name in tiny
    )
    return passes(_TYPES, interpreted=interpreted)


def checkpoint_cell(case: Case, kind: str, backend: str) -> Cell:
    if kind == "GGUF" and case.refused:
        return refused(_REFUSED, case.refused)
    return passes({"reference": _REFERENCE[kind], "cpu": _CPU, "cuda": _CUDA}[backend])


def weight_type_cell(type: str, backend: str) -> Cell:
    """One weight type, in a llama model at least."""
    if type in OTHER_TYPES.values():
        return refused(_OTHER, type)
    if backend == "reference":
        return passes(_BITS if type != "q8_k" else _Q8_K)
    if type in PLAIN:
        return passes(_TYPES)
    if type in WIDE_QUANTISED:
        return passes(_WIDE_QUANTISED)
    assert type in WIDE
    return passes(_WIDE)


def format_cells() -> dict[str, Cell]:
    """Quantised safetensors, on every backend: they are unpacked while they are loaded."""
    found = {name: passes(_PACKED + test) for name, test in PACKED_FORMATS.items()}
    for config, key in REFUSED_FORMATS:
        name = ", ".join(f"`{k}: {v}`" for k, v in config.items()) or "no `quant_method`"
        found[name] = refused(_PACKED + "test_other_formats_are_refused_by_name", key)
    return found


def model_types() -> list[str]:
    return list(dict.fromkeys(config["model_type"] for config in TINY_CONFIGS.values()))


def all_cells(backend: str) -> dict[str, list[Cell]]:
    """Table -> its cells on one backend."""
    return {
        "family × file kind × weight type": [
            family_cell(model_type, kind, backend, type)
            for model_type in model_types()
            for kind in KINDS
            for type in types_of_kind(kind)
        ],
        "checkpoint × file kind": [
            checkpoint_cell(case, kind, backend) for case in CASES for kind in KINDS
        ],
        "weight type of GGUF": [
            weight_type_cell(type, backend) for type in (*TYPES.values(), *OTHER_TYPES.values())
        ],
        "format of safetensors, before any backend": list(format_cells().values()),
    }


def counts(cells: Iterable[Cell]) -> list[int]:
    """How many are in each of STATES."""
    found = Counter(cell.state for cell in cells)
    return [found[state] for state in STATES]
