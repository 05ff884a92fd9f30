"""LoRA adapters on the cpu backend: near the reference for every kind of operation, and in a batch,
in chunks, the bits of each alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plans import Blocks, Open, run, run_alone, run_prompts, same_bits

from verbatim.backend.reference import ReferenceBackend
from verbatim.testing.tiny_models import tiny_adapter, tiny_model

TOKENS = np.random.default_rng(2).integers(0, 260, 24).tolist()
# biases; no gate and layer norms; one norm over all heads; a scaled residual; parallel blocks; a
# mixture with a shared MLP; keys of other layers, and inputs per layer; values that are keys; a
# gate of the attention's output
FAMILIES = ["qwen2", "gpt2", "olmo2", "granite", "cohere", "glm4_moe", "gemma4", "gemma4moe"]
FAMILIES += ["qwen35"]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_agree_with_the_reference_and_keep_their_bits(
    family: str, open_tiny: Open
) -> None:
    # 8-bit activations move the routing of gemma4moe's experts by more than the tolerance
    model = tiny_model(family, type="f32" if family == "gemma4moe" else "q8_0")
    found = tuple(tiny_adapter(model.spec, str(n), seed=n, rank=3 + 14 * n) for n in range(2))
    model = replace(model, adapters=found)
    backend = open_tiny(model)
    reference = ReferenceBackend(model)
    reference.allocate((96,) * len(model.spec.groups))
    alone = [run_alone(backend, TOKENS, adapter=n, number=n + 1) for n in (-1, 0, 1)]
    for n, seq in zip((-1, 0, 1), alone, strict=True):
        theirs = run_alone(reference, TOKENS, adapter=n)
        assert np.abs(np.array(seq.logprobs) - np.array(theirs.logprobs)).mean() < 0.05
    for one, other in ((0, 1), (1, 2)):
        apart = np.abs(np.array(alone[one].logprobs) - np.array(alone[other].logprobs))
        assert apart.mean() > 0.25, "the adapter matters"
    blocks = Blocks(backend.spec, backend.block_size, 5)
    together = [blocks.allocate(n + 1, TOKENS) for n in (-1, 0, 1)]
    for n, seq in zip((-1, 0, 1), together, strict=True):
        seq.adapter = n
    run(backend, together, [3, 1, 12])
    while left := [seq for seq in together if not seq.finished]:
        run(backend, left, [5] * len(left))
    for one_seq, other_seq in zip(alone, together, strict=True):
        assert same_bits(one_seq, other_seq)
    assert run_prompts(backend, TOKENS, (-1, 0, 1), 0) == [seq.drawn for seq in alone]
