"""Random mutations of tiny configs: each gives transformers' logits within 1e-4, or an error that names a key that was changed."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutations import FAMILIES, judge, mutations

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers and PyTorch warn of many of these configs; that is no fault of ours."""
    import transformers

    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.utils.logging.set_verbosity(before)


def check(family: str, count: int, directory: Path) -> Counter[str]:
    """Judge mutations until `count` of them could be compared; those that transformers itself refuses are not among them."""
    found: Counter[str] = Counter()
    wrong: list[str] = []
    for mutation in mutations(family, 4 * count):
        outcome = judge(mutation, directory)
        found[outcome.kind] += 1
        if outcome.kind in ("different", "unnamed"):
            wrong.append(
                f"{family} {mutation.number} {outcome.kind}: {outcome.detail} {mutation.keys} {mutation.config}"
            )
        if found["equal"] + found["refused"] + len(wrong) == count:
            break
    assert not wrong, "\n".join(wrong)
    assert found["equal"] + found["refused"] == count
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_mutations(family: str, tmp_path: Path) -> None:
    found = check(family, 6, tmp_path / "model")
    assert found["equal"] >= 2


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_hundred_mutations(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = check(family, 200, tmp_path / "model")
    assert found["equal"] >= 80
    assert found["refused"] >= 20
    with capsys.disabled():
        print(f"\n{family}: {dict(found)}")
