"""A sequence's results do not depend on the other sequences of the batch, to the last bit.

Every test compares the bits of log-probabilities, final hidden states and drawn tokens.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from plans import MARKS, NAMES, Blocks, Open, ScoredSeq, run, run_alone, run_prompts, same_bits

from parity_types import FIRST_FAMILIES, NEWER_FAMILIES, RECURRENT_FAMILIES
from verbatim.base.config import CHOICES
from verbatim.base.errors import ModelError
from verbatim.base.records import BROKEN, SeqStep, StepPlan
from verbatim.formats.conversion import quantise
from verbatim.formats.tensor import Tensor
from verbatim.testing.tiny_models import tiny_model

LENGTH = 50


def tokens_of(seed: int, count: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(0, 260, count).tolist()


@pytest.mark.parametrize(
    ("family", "type", "open_tiny"),
    [
        pytest.param(family, type, backend, marks=MARKS.get(backend, ()))
        for family in (*FIRST_FAMILIES, *NEWER_FAMILIES, *RECURRENT_FAMILIES)
        for type in ("f32", "q8_0")
        for backend in NAMES
        # the reference computes both types in float32, newer families share the matrix products
        if type == "q8_0" or (family in FIRST_FAMILIES and backend != "reference")
    ],
    indirect=["open_tiny"],
)
def test_a_sequence_has_the_same_bits_alone_in_chunks_and_in_a_batch(
    family: str, type: str, open_tiny: Open
) -> None:
    """Alone in one step; as a prompt of which one row is needed; alone in random chunks; in a batch
    with up to six others that arrive and finish, with blocks released once they leave a window."""
    backend = open_tiny(tiny_model(family, type=type))
    tokens = tokens_of(1)
    expected = run_alone(backend, tokens)
    assert len(set(expected.logprobs)) > 40
    assert run_prompts(backend, tokens) == [expected.drawn]
    random = np.random.default_rng(5)
    alone = Blocks(backend.spec, backend.block_size, 9).allocate(0, tokens)
    while not alone.finished:
        run(backend, [alone], [int(random.integers(1, 9))])
    assert same_bits(expected, alone)

    blocks = Blocks(backend.spec, backend.block_size, 11)
    subject, others = blocks.allocate(0, tokens), []
    for number in range(1, 500):
        if len(others) < 6 and random.random() < 0.6:
            others.append(blocks.allocate(number, tokens_of(number, int(random.integers(3, 40)))))
        chosen = [t for t in others if random.random() < 0.7]
        order: list[ScoredSeq] = [subject, *chosen]
        random.shuffle(order)  # type: ignore[arg-type]
        run(backend, order, [int(random.integers(1, 7)) for _ in order], release=True)
        for gone in [t for t in others if t.finished]:
            others.remove(gone)
            blocks.release(gone)
        if subject.finished:
            break
    assert same_bits(expected, subject)


@pytest.mark.parametrize("kv_type", CHOICES["kv_type"])
def test_heads_of_128_have_the_same_bits_as_prompt_and_in_single_steps(
    kv_type: str, open_tiny: Open
) -> None:
    """300 positions are three spans of attention. On a GPU the rows of a prompt are in large tiles
    and those of single steps in small ones, which multiply by other instructions."""
    backend = open_tiny(tiny_model("qwen3", head_dim=128), kv_type=kv_type)
    tokens = tokens_of(7, 300)
    expected = run_alone(backend, tokens)
    blocks = Blocks(backend.spec, backend.block_size, 4)
    seq, other = blocks.allocate(0, tokens), blocks.allocate(1, tokens[::-1])
    run(backend, [other, seq], [90, 7])
    for _ in range(12):
        run(backend, [seq, other], [1, 1])
    for count in (2, 101, 1, 40, 3, 99):
        run(backend, [other, seq], [1, count])
    while not seq.finished:
        run(backend, [seq], [5])
    assert same_bits(expected, seq)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_copied_block_holds_the_same_bits(family: str, open_tiny: Open) -> None:
    """A fork shares full blocks and copies the block being written. Both branches then equal the
    same sequences computed alone."""
    backend = open_tiny(tiny_model(family))
    size = backend.block_size
    prefix, left, right = tokens_of(3, size + 5), tokens_of(4, 12), tokens_of(5, 12)
    alone = [run_alone(backend, prefix + branch, seed=2) for branch in (left, right)]
    blocks = Blocks(backend.spec, size, 3)
    first = blocks.allocate(0, prefix + left)
    run(backend, [first], [len(prefix)])
    second = blocks.allocate(1, prefix + right)
    copies = []
    for group, (mine, theirs) in enumerate(zip(second.tables, first.tables, strict=True)):
        copies.append((group, theirs[1], mine[1]))  # block 1 is half full: copied
        mine[0] = theirs[0]  # block 0 is full: shared
    backend.execute(StepPlan(0, (), tuple(copies)))
    second.done = len(prefix)
    run(backend, [first, second], [99, 99])
    assert first.logprobs[len(prefix) :] == alone[0].logprobs[len(prefix) :]
    assert second.logprobs == alone[1].logprobs[len(prefix) :]


def test_a_step_with_drafts_draws_the_tokens_of_single_steps(open_tiny: Open) -> None:
    """draws = 4: four tokens in one step, each drawn as if the step ended there."""
    from plans import params

    backend = open_tiny(tiny_model("llama"))
    tokens = tokens_of(6, 12)
    seq = Blocks(backend.spec, backend.block_size, 1).allocate(0, tokens)
    tables = tuple(tuple(t) for t in seq.tables)
    at_once = backend.execute(
        StepPlan(0, (SeqStep(0, tuple(tokens), 0, tables, draws=4, draw=params(seq)),))
    )
    singly = []
    for end in range(9, 13):
        start = 0 if end == 9 else end - 1
        step = SeqStep(0, tuple(tokens[start:end]), start, tables, draws=1, draw=params(seq))
        singly.append(backend.execute(StepPlan(0, (step,))).sequences[0].drawn[0])
    assert list(at_once.sequences[0].drawn) == singly


def test_only_requested_results_are_returned(open_tiny: Open) -> None:
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


def test_block_bytes_add_up_to_the_kv_bytes_per_token(open_tiny: Open) -> None:
    model = tiny_model("gemma3")
    backend = open_tiny(model)
    assert len(backend.block_bytes()) == 2  # a group of full attention and one with a window
    assert sum(backend.block_bytes()) == backend.info.kv_token_bytes * backend.block_size
    assert backend.spec is model.spec


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_weight_that_is_not_finite_is_an_error_and_never_a_token(
    value: float, open_tiny: Open
) -> None:
    """The error comes while loading, or at the latest as a draw without a token."""
    model = tiny_model("llama")
    broken = model.weights["layers.1.mlp.down"].to_f32().copy()
    broken[3] = value
    tensors = {
        **model.weights.tensors,
        "layers.1.mlp.down": Tensor(
            "layers.1.mlp.down", "f32", broken.shape, quantise("f32", broken)
        ),
    }
    broken_model = replace(model, weights=replace(model.weights, tensors=tensors))
    try:
        found = str(run_alone(open_tiny(broken_model), tokens_of(1, 8)).drawn)
    except ModelError as error:
        found = error.message
    at_load = r"layers.1.mlp.down: row 3 .* not a finite number"
    assert re.search(rf"{at_load}|^\[\({BROKEN}, 0\.0\)\]$", found), found
