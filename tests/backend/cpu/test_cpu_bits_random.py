"""Random shapes have the same bits on every instruction set: matrices and mixtures of experts.

A file of its own: it needs hypothesis, which `make test-gpu` does without.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_blocks import matmul, random_blocks
from cpu_isas import HAVE as ISAS

from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.load import Model
from verbatim.testing.tiny_models import tiny_model

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_bits import states

pytestmark = pytest.mark.native


@settings(max_examples=40)
@given(data=st.data())
def test_matmuls_of_random_shapes_have_the_same_bits_everywhere(data: st.DataObject) -> None:
    """Every instruction set gives the bits of the scalar kernels, and a row's bits do not depend on
    the other rows."""
    kind = data.draw(st.sampled_from(sorted(BLOCKS)))
    unit = BLOCKS[kind][0]
    k = unit * data.draw(st.integers(1, 400 // unit if unit < 256 else 3))
    n, rows = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weights = random_blocks(kind, random, n, k)
    x = (random.standard_normal((rows, k)) * 10.0 ** random.integers(-3, 4)).astype(np.float32)
    results = {isa: matmul(isa, kind, weights, n, x) for isa in ISAS}
    for isa in ISAS[1:]:
        assert results[isa].tobytes() == results["scalar"].tobytes(), isa
    row = data.draw(st.integers(0, rows - 1))
    alone = matmul(ISAS[-1], kind, weights, n, np.ascontiguousarray(x[row : row + 1]))
    assert alone.tobytes() == results[ISAS[-1]][row].tobytes()


def random_mixture(data: st.DataObject) -> Model:
    """A model of one or two layers whose experts have a random shape. The types of gate, up and
    down may differ, as in real files."""
    kinds = {
        part: data.draw(st.sampled_from(sorted(BLOCKS)), part) for part in ("gate", "up", "down")
    }
    unit = max(32, BLOCKS[kinds["gate"]][0], BLOCKS[kinds["up"]][0])
    hidden = unit * data.draw(st.integers(1, 5 if unit == 32 else 2), "hidden / unit")
    inner_unit = BLOCKS[kinds["down"]][0]
    inner = inner_unit * data.draw(st.integers(1, max(1, 150 // inner_unit)), "inner / unit")
    experts = data.draw(st.integers(1, 9), "experts")
    used = data.draw(st.integers(1, min(experts, 4)), "used")
    config: dict[str, Any] = {
        "num_hidden_layers": data.draw(st.integers(1, 2), "layers"),
        "num_experts_per_tok": used,
    }
    config |= {
        "hidden_size": hidden,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 40,
    }
    if data.draw(st.booleans(), "mixtral"):
        model = tiny_model("mixtral", num_local_experts=experts, intermediate_size=inner, **config)
    else:
        renormalised = data.draw(st.booleans(), "renormalised")
        config |= {
            "num_experts": experts,
            "moe_intermediate_size": inner,
            "norm_topk_prob": renormalised,
        }
        model = tiny_model("qwen3moe", **config)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    for name, tensor in list(model.weights.tensors.items()):
        kind = kinds.get(name.rpartition(".")[2]) if ".moe." in name else None
        if kind is not None:
            blocks = random_blocks(kind, random, tensor.rows, tensor.shape[-1])
            model.weights.tensors[name] = Tensor(name, kind, tensor.shape, blocks)
    return model


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_mixtures_of_random_shapes_have_the_same_bits_everywhere(data: st.DataObject) -> None:
    """An expert gathers the rows that chose it, from none to all. Every instruction set gives the
    bits of the scalar kernels, with any number of threads and in any chunks. Other chunks give an
    expert other rows, which must not change a row's bits."""
    model = random_mixture(data)
    rows = data.draw(st.sampled_from([1, 2, 7, 33, 64, 65, 130]) | st.integers(1, 140), "rows")
    tokens = tuple(data.draw(st.lists(st.integers(0, 39), min_size=rows, max_size=rows), "tokens"))
    cuts = (
        sorted(data.draw(st.sets(st.integers(1, rows - 1), max_size=6), "cuts")) if rows > 1 else []
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERBATIM_ISA", "scalar")
        scalar = states(model, tokens, [])
        for isa in ISAS[1:]:
            patch.setenv("VERBATIM_ISA", isa)
            assert states(model, tokens, []) == scalar, isa
            assert (
                states(model, tokens, cuts, threads=data.draw(st.integers(1, 4), "threads"))
                == scalar
            ), (isa, cuts)
        patch.setenv("VERBATIM_ISA", "scalar")
        assert states(model, tokens, cuts, threads=1) == scalar, cuts
