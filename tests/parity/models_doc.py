"""docs/model-parity.md, the parity table, from the test cases; `make docs` puts it into the site.

The cells come from parity_table.py. test_models_doc.py checks that every family has its tests and
that every test named in a cell exists.
"""

from __future__ import annotations

from collections.abc import Mapping

from checkpoints import CASES
from parity_case import Case
from parity_table import (
    BACKENDS,
    INTERPRETER,
    KINDS,
    STATES,
    Cell,
    all_cells,
    checkpoint_cell,
    counts,
    family_cell,
    format_cells,
    types_of_kind,
    weight_type_cell,
)
from registry_cases import kind_of

from verbatim.files.gguf_types import OTHER_TYPES, TYPES
from verbatim.model.families import FAMILIES, WRAPPERS

# transformers' class -> model_type, and published models of the family.
MODELS: dict[str, tuple[str, str]] = {
    kind_of(name): (name, family.models)
    for name, family in FAMILIES.items()
    if not family.body  # docs/diffusion.md
}
_INTRO = """\
# Models

A cell **passes** by a test, or is **refused by name** by a test that reads the name in the error.
The tests are listed at the end.

- **reference**: logits of tiny random checkpoints with those of transformers: within 1e-4 at every
  position, and 32 greedy tokens are equal; no greedy step is a near tie. A GGUF file is written
  under llama.cpp's architecture and tensor names, by code of the tests or by `verbatim convert`.
  Weights of other types have the bits of the gguf package.
- **cpu**: the same files; log-probabilities with those of transformers, mean difference below
  0.003 (keys and values are float16), and each greedy token has a logit within 0.01 of the largest.
  Other weight types: log-probabilities with those of the reference, for weights made in memory.
- **cuda**: the same files; log-probabilities with those of transformers, mean difference below 0.02
  (weights and activations are float16), and each greedy token has a logit within 0.02 of the
  largest. Weight types: log-probabilities with those of the reference, for weights made in memory.
  `make test-gpu` runs these tests on a GPU. *(i)*: `make test` runs this weight type under Triton's
  interpreter, too, with fewer layers and 9 tokens.

The bounds of cpu and cuda hold for these checkpoints, not for every legal one: where the router of
a mixture is close to a tie, keys and values in float16 choose another expert. A tied mixture with
other random weights differs by 0.0056 on average on cpu, another one by 0.12. transformers with
float16 keys and values differs by as much
(`{ROUNDED}`).

On cpu and cuda the bits are also equal alone, in chunks and in a batch, and after generating and
scoring again. A `config.json` may change any key: it is followed, checked or refused by name
([config-keys.md](config-keys.md)), which random mutations of every family's config test.
Multi-modal models, of which the language model is used:
{wrappers}.

"""
# the test that compares with float16 keys and values in transformers
ROUNDED = "tests/parity/test_families.py::test_a_mixture_beyond_the_bound"
_FAMILIES = """
## Families

The number is that of checkpoints: each has other head counts, biases, windows or rope scalings.
*All* is f32, f16 and bf16 for safetensors; for GGUF also q8_0, q4_0, q4_1, q5_0 and q5_1.

"""
_REFUSED = """
## Checkpoints that GGUF cannot express

`verbatim convert` refuses them; the error names this key.

"""
_TYPES = """
## Weight types of GGUF

Reference: the bits of the gguf package (q8_k: of its definition). cpu and cuda: a llama model with
matrices of this type agrees with the reference. `make test-gpu` runs the cuda column. A tensor of a
refused type is refused by the reader: the error names tensor and type.

"""
_FORMATS = """
## Formats of safetensors

Every weight has the bits of the format's own dequantiser (AutoAWQ, auto-round, transformers,
compressed-tensors). The weights are floats or blocks before a backend gets them, so one column is
enough. A refused format is refused by its `quantization_config`.

"""
_TESTS = """
## Tests of the cells

"""


def cases_of(cases: list[Case]) -> Mapping[str, list[Case]]:
    """model_type -> its checkpoints."""
    found: dict[str, list[Case]] = {kind: [] for kind, _ in MODELS.values()}
    for case in cases:
        found[MODELS[case.kind][0]].append(case)
    return found


def gguf_of(model_type: str) -> str:
    """The architecture that `verbatim convert` writes."""
    return FAMILIES[model_type].gguf_architecture


def _rows(*rows: tuple[str, ...]) -> str:
    head, *body = rows
    rule = ("---",) * len(head)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *body))


def _summary() -> str:
    rows = [("cells", "state", *BACKENDS)]
    found = {backend: all_cells(backend) for backend in BACKENDS}
    for table in found[BACKENDS[0]]:
        numbers = [counts(found[backend][table]) for backend in BACKENDS]
        for i, state in enumerate(STATES):
            if any(column[i] for column in numbers):
                rows.append((table, state, *(str(column[i]) for column in numbers)))
    return _rows(*rows)


def _by_type(cells: Mapping[str, Cell]) -> str:
    """The weight types of a cell of the family table."""
    names = [
        f"{type} *(i)*" if cell.interpreted else type
        for type, cell in cells.items()
        if cell.state == "passes"
    ]
    assert len(names) == len(cells)
    marked = [name for name in names if name.endswith("*")]
    return f"all, with {', '.join(marked)}" if marked else "all"


def _files(cases: list[Case], kind: str, backend: str) -> str:
    """How many checkpoints pass and are refused."""
    passing, refused = counts(checkpoint_cell(case, kind, backend) for case in cases)
    return f"{passing}, {refused} refused" if refused else str(passing)


def _family_rows() -> list[tuple[str, ...]]:
    rows = []
    models = dict(MODELS.values())
    for model_type, cases in cases_of(CASES).items():
        for kind in KINDS:
            cells = []
            for backend in BACKENDS:
                text = _by_type(
                    {t: family_cell(model_type, kind, backend, t) for t in types_of_kind(kind)}
                )
                cells.append(f"{_files(cases, kind, backend)}; {text}")
            first = kind == KINDS[0]
            names = sorted({case.gguf or gguf_of(model_type) for case in cases} - {""})
            file = kind if first else f"GGUF `{'`, `'.join(names)}`"
            family = (f"`{model_type}`", models[model_type]) if first else ("", "")
            rows.append((*family, file, *cells))
    return rows


def _state(cell: Cell) -> str:
    return f"{cell.state}: {cell.key}" if cell.key else cell.state


def _test_rows() -> list[tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for backend in BACKENDS:
        for table, cells in all_cells(backend).items():
            for cell in cells:
                if cell.test:
                    names = found.setdefault(cell.test, [])
                    line = f"{backend}: {table}"
                    names += [] if line in names else [line]
    found[INTERPRETER] = ["cuda, marked *(i)*"]
    return [(f"`{test}`", "; ".join(names)) for test, names in found.items()]


def document() -> str:
    refused = [(case, checkpoint_cell(case, "GGUF", "reference")) for case in CASES]
    gguf_types = (*TYPES.values(), *OTHER_TYPES.values())
    return "".join(
        (
            _INTRO.format(wrappers=", ".join(f"`{name}`" for name in WRAPPERS), ROUNDED=ROUNDED),
            _summary(),
            _FAMILIES,
            _rows(("`model_type`", "models", "file", *BACKENDS), *_family_rows()),
            _REFUSED,
            _rows(
                ("checkpoint", "`model_type`", "key"),
                *(
                    (case.name, f"`{MODELS[case.kind][0]}`", f"`{cell.key}`")
                    for case, cell in refused
                    if cell.key
                ),
            ),
            _TYPES,
            _rows(
                ("type", *BACKENDS),
                *(
                    (type, *(_state(weight_type_cell(type, backend)) for backend in BACKENDS))
                    for type in gguf_types
                ),
            ),
            _FORMATS,
            _rows(
                ("format", "state"),
                *((name, _state(cell)) for name, cell in format_cells().items()),
            ),
            _TESTS,
            _rows(("test", "cells"), *_test_rows()),
        )
    )
