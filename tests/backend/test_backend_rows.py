"""Promise 1 at its root: what a backend computes for a sequence does not depend on what else is in the step, to the last bit.

Every comparison here is of bits: log-probabilities, final hidden states and drawn tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plans import Blocks, Open, Text, run, same, whole

from verbatim.base.errors import BackendError, ModelError
from verbatim.base.records import SeqStep, StepPlan
from verbatim.testing_models import FAMILIES, tiny_model
from verbatim.weights.quantise import quantise
from verbatim.weights.tensor import Tensor

LENGTH = 50


def tokens_of(seed: int, count: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(0, 260, count).tolist()


@pytest.mark.parametrize("type", ["f32", "q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_text_alone_in_chunks_and_in_a_crowd(family: str, type: str, open_tiny: Open) -> None:
    """Alone in one step; alone in random chunks; among up to six others that come and go, with blocks behind windows released."""
    backend = open_tiny(tiny_model(family, type=type))
    tokens = tokens_of(1)
    expected = whole(backend, tokens)
    assert len(set(expected.logprobs)) > 40
    random = np.random.default_rng(5)
    alone = Blocks(backend.spec, backend.block_size, 9).text(0, tokens)
    while not alone.over:
        run(backend, [alone], [int(random.integers(1, 9))])
    assert same(expected, alone)

    blocks = Blocks(backend.spec, backend.block_size, 11)
    subject, others = blocks.text(0, tokens), []
    for number in range(1, 500):
        if len(others) < 6 and random.random() < 0.6:
            others.append(blocks.text(number, tokens_of(number, int(random.integers(3, 40)))))
        chosen = [t for t in others if random.random() < 0.7]
        order: list[Text] = [subject, *chosen]
        random.shuffle(order)  # type: ignore[arg-type]
        run(backend, order, [int(random.integers(1, 7)) for _ in order], forget=True)
        for gone in [t for t in others if t.over]:
            others.remove(gone)
            blocks.release(gone)
        if subject.over:
            break
    assert same(expected, subject)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_copied_block_holds_the_same_bits(family: str, open_tiny: Open) -> None:
    """A fork: the first blocks are shared, the one being written is copied; both branches then equal their own whole texts."""
    backend = open_tiny(tiny_model(family))
    size = backend.block_size
    stem, left, right = tokens_of(3, size + 5), tokens_of(4, 12), tokens_of(5, 12)
    wholes = [whole(backend, stem + branch, seed=2) for branch in (left, right)]
    blocks = Blocks(backend.spec, size, 3)
    first = blocks.text(0, stem + left)
    run(backend, [first], [len(stem)])
    second = blocks.text(1, stem + right)
    copies = []
    for group, (mine, theirs) in enumerate(zip(second.tables, first.tables, strict=True)):
        copies.append((group, theirs[1], mine[1]))  # block 1 is half full: copied
        mine[0] = theirs[0]  # block 0 is full: shared
    backend.execute(StepPlan(0, (), tuple(copies)))
    second.done = len(stem)
    run(backend, [first, second], [99, 99])
    assert first.logprobs[len(stem) :] == wholes[0].logprobs[len(stem) :]
    assert second.logprobs == wholes[1].logprobs[len(stem) :]


def test_drafts_draw_at_every_position_what_single_steps_draw(open_tiny: Open) -> None:
    """draws = 4: four tokens at once, each drawn as if the step had ended there."""
    from plans import params

    backend = open_tiny(tiny_model("llama"))
    tokens = tokens_of(6, 12)
    text = Blocks(backend.spec, backend.block_size, 1).text(0, tokens)
    tables = tuple(tuple(t) for t in text.tables)
    at_once = backend.execute(
        StepPlan(0, (SeqStep(0, tuple(tokens), 0, tables, draws=4, draw=params(text)),))
    )
    singly = []
    for end in range(9, 13):
        start = 0 if end == 9 else end - 1
        step = SeqStep(0, tuple(tokens[start:end]), start, tables, draws=1, draw=params(text))
        singly.append(backend.execute(StepPlan(0, (step,))).sequences[0].drawn[0])
    assert list(at_once.sequences[0].drawn) == singly


def test_rows_that_nobody_asked_for_are_not_returned(open_tiny: Open) -> None:
    backend = open_tiny(tiny_model("llama"))
    tables = ((3, 1),)
    plan = StepPlan(
        7, (SeqStep(5, (9, 8, 7), 0, tables), SeqStep(6, (4, 4), 0, ((2, 0),), targets=(1,)))
    )
    result = backend.execute(plan)
    assert result.step == 7
    assert [(s.seq_id, len(s.drawn), len(s.scored), s.hidden) for s in result.sequences] == [
        (5, 0, 0, None),
        (6, 0, 1, None),
    ]


def test_sizes_add_up(open_tiny: Open) -> None:
    model = tiny_model("gemma3")
    backend = open_tiny(model)
    assert len(backend.block_bytes()) == 2  # full attention, and the window
    assert sum(backend.block_bytes()) == backend.info.kv_token_bytes * backend.block_size
    assert backend.spec is model.spec


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_model_that_computes_nonsense_says_so(value: float, open_tiny: Open) -> None:
    """A broken weight: an error that says what happened, while loading or at the latest here, never a token."""
    model = tiny_model("llama")
    broken = model.weights["layers.1.mlp.down"].to_f32().copy()
    broken[3] = value
    tensors = {
        **model.weights.tensors,
        "layers.1.mlp.down": Tensor(
            "layers.1.mlp.down", "f32", broken.shape, quantise("f32", broken)
        ),
    }
    with pytest.raises(
        (BackendError, ModelError),
        match=r"not finite|layers.1.mlp.down: row 3 .* not a finite number",
    ):
        whole(
            open_tiny(replace(model, weights=replace(model.weights, tensors=tensors))),
            tokens_of(1, 8),
        )
