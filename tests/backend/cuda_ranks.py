"""The cuda backend over ranks has the bits of one process. test_cuda.py runs this file under
Triton's interpreter; on a GPU the ranks share it.

The ranks are threads. The interpreter runs one kernel at a time, so only one rank computes; it
leaves the others the turn where it waits for their pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cuda_kernels import small, split_small_sums
from plans import BLOCKS, Blocks, ScoredSeq, run, same_bits
from test_ranks import sockets

from parity_types import interpreted_type
from verbatim.backend import gpu_weights
from verbatim.backend.cuda.backend import CudaBackend
from verbatim.backend.ranks import native_mesh
from verbatim.base.config import EngineConfig
from verbatim.model.loading.load import Model
from verbatim.parallel.rank_process import RankProcess, open_rank

CONFIG = EngineConfig(backend="cuda")
TOKENS = np.random.default_rng(1).integers(0, 260, 20).tolist()
# Dense and quantised matrices, experts with and without biases, both recurrent layers, a head size
# of its own per layer, a norm over all heads.
FAMILIES = ("llama", "gpt2", "qwen3moe", "gpt_oss", "lfm2", "qwen35", "gemma4", "olmo2")
TURN = threading.Lock()
pytestmark = pytest.mark.filterwarnings("ignore")  # NumPy's, from the interpreter


class TurnMesh:
    """A mesh whose gather leaves the turn to the other ranks."""

    def __init__(self, mesh: Any) -> None:
        self.mesh, self.rank, self.broadcast = mesh, mesh.rank, mesh.broadcast

    def gather(self, piece: np.ndarray, sizes: Sequence[int]) -> bytes:
        TURN.release()
        try:
            return bytes(self.mesh.gather(piece, sizes))
        finally:
            TURN.acquire()


class TurnRank(RankProcess):
    """A rank that computes while it has the turn."""

    def _do(self, kind: bytes, body: bytes) -> None:
        with TURN:
            super()._do(kind, body)


def results(backend: CudaBackend) -> list[ScoredSeq]:
    backend.allocate((BLOCKS,) * len(backend.spec.groups))
    blocks = Blocks(backend.spec, backend.block_size, 3)
    seqs = [blocks.allocate(i, TOKENS[: 20 - 9 * i]) for i in range(2)]
    run(backend, seqs, [17, 4])
    run(backend, seqs, [1, 6])
    backend.close()
    return seqs


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_have_the_bits_of_one_process(family: str) -> None:
    check(small(family, type=interpreted_type(family)))


def test_a_rank_adds_in_the_order_of_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """o and down have 96 rows for 64 inputs, so their sums are not split; those of a matrix with
    the 48 rows of a rank would be."""
    split_small_sums(monkeypatch)
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
    model = small("llama", num_hidden_layers=1, **sizes)
    assert [gpu_weights.split_k(rows, 64)[0] for rows in (96, 48)] == [1, 2]
    check(model)


def check(model: Model) -> None:
    whole = results(CudaBackend(model, CONFIG))
    with ThreadPoolExecutor(2) as pool, sockets(2) as fds, TURN:
        other = TurnRank(1, fds[1])
        other._mesh = TurnMesh(other._mesh)
        other.open(model, CONFIG)
        other.backend.allocate((BLOCKS,) * len(model.spec.groups))
        pool.submit(other.run)
        mesh: Any = TurnMesh(native_mesh(0, fds[0]))
        found = results(open_rank(model, CONFIG, mesh, 2))  # type: ignore[arg-type]
    assert all(map(same_bits, found, whole))
