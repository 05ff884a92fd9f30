"""The reference backend's canary rejects plans that read KV cache blocks of another sequence.

Each test plants a scheduler bug, which the canary must detect.
"""

from __future__ import annotations

import numpy as np
import pytest
from plans import BLOCKS, Blocks, ScoredSeq, make_plan, run

from verbatim.backend.reference import CacheFault, ReferenceBackend
from verbatim.base.config import EngineConfig
from verbatim.testing.tiny_models import tiny_model


def opened(family: str) -> ReferenceBackend:
    backend = ReferenceBackend(tiny_model(family), EngineConfig(check=True), block_size=4)
    backend.allocate((BLOCKS,) * len(backend.spec.groups))
    return backend


def crowd(backend: ReferenceBackend, seed: int) -> tuple[list[ScoredSeq], np.random.Generator]:
    """Three sequences with half of their tokens computed."""
    random = np.random.default_rng(seed)
    blocks = Blocks(backend.spec, backend.block_size, seed)
    seqs = [blocks.allocate(i, random.integers(0, 260, 40).tolist()) for i in range(3)]
    for _ in range(4):
        run(backend, seqs, random.integers(3, 6, 3).tolist())
    return seqs, random


def wrong_block(seqs: list[ScoredSeq], group: int, random: np.random.Generator) -> None:
    """A table has another sequence's block at one visible place."""
    place = seqs[0].done // 4 - 1
    seqs[0].tables[group][place] = seqs[1].tables[group][place]


def swapped_order(seqs: list[ScoredSeq], group: int, random: np.random.Generator) -> None:
    table, place = seqs[0].tables[group], seqs[0].done // 4 - 1
    table[place], table[place - 1] = table[place - 1], table[place]


def whole_table_of_another(seqs: list[ScoredSeq], group: int, random: np.random.Generator) -> None:
    length = min(seqs[0].done, seqs[1].done)
    seqs[0].tables[group][: length // 4 + 1] = seqs[1].tables[group][: length // 4 + 1]


def never_written(seqs: list[ScoredSeq], group: int, random: np.random.Generator) -> None:
    used = {b for t in seqs for b in t.tables[group]}
    seqs[0].tables[group][seqs[0].done // 4 - 1] = next(b for b in range(BLOCKS) if b not in used)


def written_by_another(seqs: list[ScoredSeq], group: int, random: np.random.Generator) -> None:
    """Sequence 1 writes its next tokens to a block that sequence 0 still reads."""
    seqs[1].tables[group][seqs[1].done // 4] = seqs[0].tables[group][seqs[0].done // 4 - 1]


def released_too_early(seqs: list[ScoredSeq], group: int, random: np.random.Generator) -> None:
    seqs[0].tables[group][seqs[0].done // 4 - 1] = -1


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
def test_the_canary_detects_planted_faults(family: str, fault: object) -> None:
    """5 seeds per fault, in every cache group: 90 faults."""
    backend = opened(family)
    for seed in range(5):
        for group in range(len(backend.spec.groups)):
            seqs, random = crowd(backend, seed)
            fault(seqs, group, random)  # type: ignore[operator]
            with pytest.raises(CacheFault, match="sequence"):
                backend.execute(make_plan(backend.spec, 4, seqs, [2, 2, 2]))
            assert backend._canary is not None
            backend._canary.seq_stamps.clear()


def test_a_prefix_hit_is_no_fault() -> None:
    """A sequence starts after blocks that another sequence with the same tokens has written."""
    backend = opened("gemma3")
    seqs, random = crowd(backend, 1)
    blocks = Blocks(backend.spec, 4, 77)
    seq = blocks.allocate(9, seqs[0].tokens[:12] + random.integers(0, 260, 9).tolist())
    for group, table in enumerate(seq.tables):
        taken = {b for t in seqs for b in t.tables[group]}
        fresh = [b for b in range(BLOCKS) if b not in taken]
        table[:] = seqs[0].tables[group][:3] + fresh[: len(table) - 3]
    seq.done = 12
    run(backend, [seq, seqs[1]], [5, 2])
    run(backend, [seq, seqs[0]], [3, 2])


def test_a_preempted_sequence_may_be_computed_again() -> None:
    backend = opened("llama")
    seqs, _ = crowd(backend, 2)
    seqs[0].done = 0
    run(backend, seqs, [6, 2, 2])
    assert seqs[0].done == 6
