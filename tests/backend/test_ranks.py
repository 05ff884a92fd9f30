"""A model over 2, 3 and 4 ranks has the bits of one process.

The ranks are threads with sockets between them; tests/parallel runs them as processes. One process
itself is compared with the reference in test_backend_agrees.py.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_blocks import random_blocks
from plans import BLOCKS, Blocks, ScoredSeq, run, same_bits

from parity_types import PLAIN, WIDE, WIDE_QUANTISED
from verbatim.backend.cpu.backend import CpuBackend
from verbatim.backend.ranks import native_mesh
from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError
from verbatim.formats.tensor import Tensor
from verbatim.model.layer_split import LayerSplit
from verbatim.model.layout import is_quantisable, layout
from verbatim.model.loading.load import Model
from verbatim.model.row_split import Split
from verbatim.parallel.rank_process import RankProcess, open_rank
from verbatim.testing.tiny_models import FAMILIES, TINY_CONFIGS, tiny_adapter, tiny_model

TP, PP = "tensor_parallel", "pipeline_parallel"
TOKENS = np.random.default_rng(1).integers(0, 260, 40).tolist()


@contextmanager
def sockets(ranks: int) -> Iterator[list[list[int]]]:
    """fds[r][s]: the socket of rank r to rank s."""
    fds = [[-1] * ranks for _ in range(ranks)]
    with ExitStack() as stack:
        for a in range(ranks):
            for b in range(a):
                pair = [stack.enter_context(end) for end in socket.socketpair()]
                fds[a][b], fds[b][a] = (end.fileno() for end in pair)
        yield fds


def results(backend: CpuBackend) -> list[ScoredSeq]:
    """Three sequences, in chunks and together, with an adapter each if the model has some."""
    backend.allocate((BLOCKS,) * len(backend.spec.groups))
    blocks = Blocks(backend.spec, backend.block_size, 3)
    seqs = [blocks.allocate(i, TOKENS[: 40 - 9 * i]) for i in range(3)]
    for i, seq in enumerate(seqs):
        seq.adapter = i - 1 if backend._model.adapters else -1
    run(backend, seqs, [17, 1, 5])
    run(backend, seqs, [3, 20, 1])
    run(backend, seqs[:1], [40])
    backend.close()
    return seqs


def check(model: Model, counts: tuple[int, ...] = (2, 4), kind: str = TP, **more: object) -> None:
    """Compare log-probabilities, draws and final states of rank 0 with those of one process."""
    settings: dict[str, Any] = {"threads": 1, "backend": "cpu", **more}
    whole = results(CpuBackend(model, EngineConfig(**settings)))
    for count in counts:
        config = EngineConfig(**settings, **{kind: count})
        with ThreadPoolExecutor(count) as pool, sockets(count) as fds:
            for rank in range(1, count):
                other = RankProcess(rank, fds[rank])
                other.open(model, config)
                other.backend.allocate((BLOCKS,) * len(model.spec.groups))
                pool.submit(other.run)
            found = results(open_rank(model, config, native_mesh(0, fds[0]), count))
        assert all(map(same_bits, found, whole)), f"{count} ranks"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_bits_of_one_process(family: str) -> None:
    check(tiny_model(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_bits_of_one_process_by_layers(family: str) -> None:
    """With three times the layers, so that both ranks have some of each kind."""
    config = TINY_CONFIGS[family]
    lists = {"layer_types": 3 * config["layer_types"]} if "layer_types" in config else {}
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    model = tiny_model(family, **{layers: 3 * config.get(layers, 3), **lists})
    if model.spec.layer_input:
        with pytest.raises(ParameterError, match="this model's layers have inputs of their own"):
            LayerSplit(model.spec, 2)
    else:
        check(model, (2,), PP)


def test_layers_are_shared_by_weight_and_by_name() -> None:
    """Rank 0 has the head, which is as large as three layers here, and the last layers."""
    model = tiny_model("llama", num_hidden_layers=9, vocab_size=600, tie_word_embeddings=False)
    split = LayerSplit(model.spec, 3)
    assert [split.layers(rank) for rank in range(3)] == [(8, 9), (0, 4), (4, 8)]
    assert set(split.part(model.weights.tensors, 2)) == {
        name for name in layout(split.local(2)) if name.startswith("layers.")
    }
    check(model, (3, 4), PP, kv_type="q8", threads=2)
    adapters = (tiny_adapter(model.spec, "a0", seed=0), tiny_adapter(model.spec, "a1", seed=1))
    check(replace(model, adapters=adapters), (3,), PP)
    with pytest.raises(ParameterError, match="pipeline_parallel: 9 layers are too few for 9 ranks"):
        LayerSplit(model.spec, 9)


@pytest.mark.parametrize("type", sorted({*PLAIN, *WIDE_QUANTISED, *WIDE}))
def test_every_weight_type_has_the_bits_of_one_process(type: str) -> None:
    """Matrices of random blocks with rows of 256 values; 3 ranks cut no matrix evenly."""
    model = tiny_model("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    random = np.random.default_rng(3)
    for name, tensor in list(model.weights.tensors.items()):
        if is_quantisable(name):
            blocks = random_blocks(type, random, tensor.rows, tensor.shape[-1], 0.003)
            model.weights.tensors[name] = Tensor(name, type, tensor.shape, blocks)
    check(model, (3,))


@pytest.mark.parametrize("kv_type", ["q8", "fp8"])
def test_eight_bit_caches_and_several_threads(kv_type: str) -> None:
    check(tiny_model("gemma3", type="q8_0"), kv_type=kv_type, threads=2)


def test_adapters_have_the_bits_of_one_process() -> None:
    model = tiny_model("qwen2moe")
    adapters = tuple(tiny_adapter(model.spec, f"a{i}", seed=i) for i in range(2))
    check(replace(model, adapters=adapters))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),
    [
        (8, 4, 2, (4, 4)),
        (9, 3, 2, (3, 6)),  # uneven: whole KV heads
        (8, 2, 4, (2, 2, 2, 2)),  # two ranks have each KV head
        (9, 3, 4, None),  # whole on every rank
        (6, 2, 4, None),
    ],
)
def test_attention_is_cut_by_heads_where_they_divide(
    heads: int, kv_heads: int, ranks: int, expected: tuple[int, ...] | None
) -> None:
    model = tiny_model(
        "llama", head_dim=16, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    assert Split(model.spec, ranks).heads == expected
    check(model, (ranks,))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rows_of_all_ranks_are_the_matrix(family: str) -> None:
    """No row is missing; only KV heads are on several ranks; what is not cut is small or read by
    row, which the last line states."""
    spec = tiny_model(family).spec
    split = Split(spec, 2)
    whole = set()
    for name, shape in layout(spec).items():
        parts = [split.rows(name, rank) for rank in range(2)]
        if None in parts:
            assert parts == [None, None]
            part = name.split(".", 2)[2] if name.startswith("layers.") else name
            whole.add(part if len(shape) > 1 else "vector")
            continue
        (first, middle), (start, last) = parts
        assert (first, last) == (0, shape[-1] if len(shape) < 2 or ".bias" in name else shape[-2])
        assert middle == start or ".attn.k" in name or ".attn.v" in name
    attention = {"attn.q", "attn.k", "attn.v"} if split.heads is None else set()
    small = {"moe.router", "shared.scale", "conv.kernel", "delta.kernel", "delta.a", "delta.b"}
    by_row = {"positions", "layer_inputs.embed", "layer_inputs.project"}
    assert whole <= {"vector", "input.gate", "input.project"} | attention | small | by_row
