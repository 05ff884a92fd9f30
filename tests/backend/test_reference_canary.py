"""The canary of the reference backend: plans that read what is not theirs are refused. Faults are planted, and each must be noticed."""

from __future__ import annotations

import numpy as np
import pytest
from plans import BLOCKS, Blocks, Text, advance, run

from verbatim.backend.reference import CacheFault, ReferenceBackend
from verbatim.base.config import EngineConfig
from verbatim.testing_models import tiny_model


def opened(family: str) -> ReferenceBackend:
    backend = ReferenceBackend(tiny_model(family), EngineConfig(check=True), block_size=4)
    backend.allocate((BLOCKS,) * len(backend.spec.groups))
    return backend


def crowd(backend: ReferenceBackend, seed: int) -> tuple[list[Text], np.random.Generator]:
    """Three sequences half way through their texts."""
    random = np.random.default_rng(seed)
    blocks = Blocks(backend.spec, backend.block_size, seed)
    texts = [blocks.text(i, random.integers(0, 260, 40).tolist()) for i in range(3)]
    for _ in range(4):
        run(backend, texts, random.integers(3, 6, 3).tolist())
    return texts, random


def wrong_block(texts: list[Text], group: int, random: np.random.Generator) -> None:
    """A table names another sequence's block at one place that is still visible."""
    place = texts[0].done // 4 - 1
    texts[0].tables[group][place] = texts[1].tables[group][place]


def swapped_order(texts: list[Text], group: int, random: np.random.Generator) -> None:
    table, place = texts[0].tables[group], texts[0].done // 4 - 1
    table[place], table[place - 1] = table[place - 1], table[place]


def whole_table_of_another(texts: list[Text], group: int, random: np.random.Generator) -> None:
    length = min(texts[0].done, texts[1].done)
    texts[0].tables[group][: length // 4 + 1] = texts[1].tables[group][: length // 4 + 1]


def never_written(texts: list[Text], group: int, random: np.random.Generator) -> None:
    used = {b for t in texts for b in t.tables[group]}
    texts[0].tables[group][texts[0].done // 4 - 1] = next(b for b in range(BLOCKS) if b not in used)


def written_by_another(texts: list[Text], group: int, random: np.random.Generator) -> None:
    """Sequence 1 is given, for the tokens it computes next, a block that sequence 0 still reads."""
    texts[1].tables[group][texts[1].done // 4] = texts[0].tables[group][texts[0].done // 4 - 1]


def released_too_early(texts: list[Text], group: int, random: np.random.Generator) -> None:
    texts[0].tables[group][texts[0].done // 4 - 1] = -1


FAULTS = [
    wrong_block,
    swapped_order,
    whole_table_of_another,
    never_written,
    written_by_another,
    released_too_early,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_planted_faults_are_caught(family: str, fault: object) -> None:
    """10 seeds each, in every cache group: 180 faults, none may pass."""
    backend = opened(family)
    for seed in range(10):
        for group in range(len(backend.spec.groups)):
            texts, random = crowd(backend, seed)
            fault(texts, group, random)  # type: ignore[operator]
            with pytest.raises(CacheFault, match="sequence"):
                backend.execute(advance(backend.spec, 4, texts, [2, 2, 2]))
            assert backend._canary is not None
            backend._canary.seq_stamps.clear()


def test_sharing_what_is_equal_is_no_fault() -> None:
    """A prefix hit: a sequence starts behind blocks that another one with the same tokens has written."""
    backend = opened("gemma3")
    texts, random = crowd(backend, 1)
    blocks = Blocks(backend.spec, 4, 77)
    text = blocks.text(9, texts[0].tokens[:12] + random.integers(0, 260, 9).tolist())
    for group, table in enumerate(text.tables):
        taken = {b for t in texts for b in t.tables[group]}
        fresh = [b for b in range(BLOCKS) if b not in taken]
        table[:] = texts[0].tables[group][:3] + fresh[: len(table) - 3]
    text.done = 12
    run(backend, [text, texts[1]], [5, 2])
    run(backend, [text, texts[0]], [3, 2])


def test_a_preempted_sequence_may_begin_again() -> None:
    backend = opened("llama")
    texts, _ = crowd(backend, 2)
    texts[0].done = 0
    run(backend, texts, [6, 2, 2])
    assert texts[0].done == 6
