"""Random config mutations: logits within 1e-4 of transformers, or an error naming a changed key."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from judge import judge, names_key
from mutations import (
    BASE,
    ENCODERS,
    FAMILIES,
    NESTED,
    NEWER_FAMILIES,
    WRAPPERS,
    Mutation,
    mutations,
)

from rope_examples import rope_records
from verbatim.model.families.common.rope_keys import ROPE_KEYS

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence transformers and PyTorch, which warn of many of these configs."""
    import transformers

    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.utils.logging.set_verbosity(before)


def check(family: str, count: int, directory: Path) -> Counter[str]:
    """Judge mutations until `count` are compared; those that transformers rejects do not count."""
    found: Counter[str] = Counter()
    wrong: list[str] = []
    for mutation in mutations(family, 4 * count):
        outcome = judge(mutation, directory)
        found[outcome.kind] += 1
        if outcome.kind in ("different", "unnamed"):
            wrong.append(
                f"{family} {mutation.number} {outcome.kind}: {outcome.detail} "
                f"{mutation.keys} {mutation.config}"
            )
        if found["equal"] + found["refused"] + len(wrong) == count:
            break
    assert not wrong, "\n".join(wrong)
    assert found["equal"] + found["refused"] == count
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_six_mutated_configs_match_transformers_or_name_the_key(
    family: str, tmp_path: Path
) -> None:
    found = check(family, 6, tmp_path / "model")
    assert found["equal"] >= 2


@pytest.mark.parametrize("family", NEWER_FAMILIES)
def test_three_mutated_configs_of_newer_families_match_transformers_or_name_the_key(
    family: str, tmp_path: Path
) -> None:
    check(family, 3, tmp_path / "model")


@pytest.mark.parametrize("family", [*WRAPPERS, *ENCODERS])
def test_three_mutated_configs_of_wrappers_and_encoders_match_transformers_or_name_the_key(
    family: str, tmp_path: Path
) -> None:
    check(family, 3, tmp_path / "model")


@pytest.mark.parametrize("family", ["olmo3", "ministral3", "gpt_oss"])
def test_a_null_theta_takes_the_theta_of_the_rope_record_as_in_transformers(
    family: str, tmp_path: Path
) -> None:
    record = {**BASE[family].get("rope_parameters", {"rope_type": "default"}), "rope_theta": 77.0}
    if family in NESTED:
        record = {"full_attention": record, "sliding_attention": record}
    config = {**BASE[family], "rope_theta": None, "rope_parameters": record}
    outcome = judge(Mutation(family, 0, config, ("rope_theta",)), tmp_path / "model")
    assert outcome.kind == "equal", outcome.detail


@pytest.mark.parametrize(
    ("kind", "key"),
    [(kind, name) for kind, table in ROPE_KEYS.items() for name in table if table[name].nullable],
)
def test_a_null_in_a_rope_record_means_what_it_does_in_transformers(
    kind: str, key: str, tmp_path: Path
) -> None:
    """tests/model/test_model_keys.py: null is refused in the other keys."""
    config = {**BASE["llama"], "rope_parameters": {**rope_records(8)[kind], key: None}}
    outcome = judge(Mutation("llama", 1, config, (key,)), tmp_path / "model")
    assert outcome.kind == "equal", outcome.detail


def test_a_short_key_is_not_named_by_a_longer_word() -> None:
    assert names_key("config.json: rope_scaling.type is 3", "type")
    assert not names_key("config.json: rope_type is 3", "type")
    assert not names_key("config.json: head_dim is 7", "head")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", [*FAMILIES, *NEWER_FAMILIES, *WRAPPERS, *ENCODERS])
def test_two_hundred_mutated_configs_match_transformers_or_name_the_key(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = check(family, 200, tmp_path / "model")
    assert found["equal"] >= 80
    assert found["refused"] >= 20
    with capsys.disabled():
        print(f"\n{family}: {dict(found)}")
