"""A rank other than 0: the process `python -m verbatim.parallel.rank_process RANK FD,FD,…` that
group.py starts, or `verbatim rank`, which joins a group by its address.

Frames of rank 0 come in over the socket to it; the rank loads its part of a model, takes part in
the steps, and answers where an answer is due. It ends when the socket closes, so it never outlives
rank 0. In a step it talks to the other ranks through the native mesh alone. A rank that has joined
opens the file that its own command line names, whatever rank 0 says.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from verbatim.backend.ranks import STEP, Mesh, Ranks, frame, native_mesh, read_plan
from verbatim.base.config import EngineConfig
from verbatim.base.json_io import JsonMapping
from verbatim.formats.tensor import Tensor
from verbatim.model.layer_split import LayerSplit
from verbatim.model.row_split import Split
from verbatim.model.spec import ModelSpec
from verbatim.parallel.rendezvous import RefusedError, join, read_exactly, shared_secret
from verbatim.schedule.sizing import available_memory

if TYPE_CHECKING:
    from verbatim.backend.cpu.backend import CpuBackend
    from verbatim.backend.cuda.backend import CudaBackend
    from verbatim.model.loading.load import Model

    RankBackend: TypeAlias = CpuBackend | CudaBackend

log = logging.getLogger("verbatim.parallel")


def open_rank(model: Model, config: EngineConfig, mesh: Mesh, count: int) -> RankBackend:
    """The backend of one rank, with its part of the model."""
    ranks = Ranks(split_of(model.spec, config, count), mesh)
    if config.backend == "cuda":
        from verbatim.backend.cuda.rank_backend import CudaRank

        return CudaRank(part_of(model, ranks), config, ranks)
    from verbatim.backend import unpacked
    from verbatim.backend.cpu.backend import CpuBackend

    part = part_of(unpacked(model), ranks)
    backend = CpuBackend(part, config, ranks=ranks)
    part.weights.tensors.clear()  # packed; the rows of experts were copies
    return backend


def split_of(spec: ModelSpec, config: EngineConfig, ranks: int) -> Split | LayerSplit:
    return (LayerSplit if config.pipeline_parallel > 1 else Split)(spec, ranks)


def load_part(path: Path, config: EngineConfig, rank: int, ranks: int, gpu: bool) -> Model:
    """The rank's part of every weight; all of it with adapters, whose files may repeat weights."""
    from verbatim.model.loading.load import load_model

    def part(spec: ModelSpec) -> Callable[[str, Tensor], Tensor]:
        return partial(split_of(spec, config, ranks).cut, rank=rank)

    cut = None if config.adapters or ranks == 1 else part
    return load_model(path, context=config.context, quant=config.quant, gpu=gpu, part=cut)


def part_of(model: Model, ranks: Ranks) -> Model:
    """What the rank has of a model, which may have been loaded as its part."""
    split, rank = ranks.split, ranks.rank
    tensors = split.part(model.weights.tensors, rank)
    return replace(
        model,
        spec=split.local(rank),
        weights=replace(model.weights, tensors=tensors),
        adapters=tuple(split.cut_adapter(adapter, rank) for adapter in model.adapters),
        draft=None,
    )


class RankFacts(NamedTuple):
    """Figures of one rank."""

    threads: int
    weight_bytes: int
    kv_token_bytes: int
    expert_bytes: int
    block_bytes: tuple[int, ...]
    memory: int = 0  # bytes that are free for the KV cache
    identity: str = ""  # equal on all ranks: digest of the whole model, backend and numerics
    error: str = ""  # why it could not load its part


def facts(backend: RankBackend, model: Model) -> RankFacts:
    info, free = backend.info, backend.available_memory()
    sizes = (info.weight_bytes, info.kv_token_bytes, info.expert_bytes)
    identity = f"{model.weights.digest[:16]} {info.name} {info.numerics}"
    memory = available_memory() if free is None else free
    return RankFacts(info.threads, *sizes, backend.block_bytes(), memory, identity)


class RankProcess:
    """The state of a rank: the backend of the model that is open."""

    def __init__(
        self, rank: int, fds: list[int], path: str = "", threads: int | None = None
    ) -> None:
        """`path`: the model's, in place of what rank 0 says; then `threads` are, too."""
        self.rank, self._count, self._mesh = rank, len(fds), native_mesh(rank, fds)
        self._path, self._threads = path, threads
        self._socket = socket.socket(fileno=os.dup(fds[0]))
        self._backend: RankBackend | None = None

    def run(self) -> None:
        """Do what rank 0 says until it closes its socket."""
        with self._socket as end:
            while end.recv(1, socket.MSG_PEEK):
                header = read_exactly(end, 8)
                self._do(header[:4], read_exactly(end, int.from_bytes(header[4:], "little")))

    def _do(self, kind: bytes, body: bytes) -> None:
        if kind == STEP:
            self.backend.execute(read_plan(body))
        elif kind == b"open":
            self._answer(json.dumps(self._open(*json.loads(body))).encode())
        elif kind == b"allo":
            self.backend.allocate(tuple(json.loads(body)))
        elif kind == b"read":
            self._answer(self.backend.read_block(*json.loads(body)))
        elif kind == b"writ":
            self._write(body)
        elif kind == b"nope":
            raise RefusedError(f"rank 0 refuses this group: {body.decode()}")
        else:
            raise ValueError(f"a frame of the unknown kind {kind!r}")

    @property
    def backend(self) -> RankBackend:
        assert self._backend is not None, "rank 0 opens a model first"
        return self._backend

    def open(self, model: Model, config: EngineConfig) -> None:
        self._backend = open_rank(model, config, self._mesh, self._count)

    def _open(self, path: str, settings: JsonMapping) -> RankFacts:
        from verbatim.lora.adapter_load import with_adapters

        path = self._path or path
        try:
            config = EngineConfig(**settings)
            if self._path:
                config = replace(config, threads=self._threads)
            model = load_part(Path(path), config, self.rank, self._count, config.backend == "cuda")
            if config.adapters:
                model = with_adapters(model, config.adapters)
            self.open(model, config)
        except Exception as error:  # rank 0 reports it
            return RankFacts(0, 0, 0, 0, (), error=str(error))
        return facts(self.backend, model)

    def _write(self, body: bytes) -> None:
        """A block of a cache group: the sizes on all ranks, then the bytes of all ranks."""
        head = int.from_bytes(body[:4], "little")
        group, block, sizes = json.loads(body[4 : 4 + head])
        start = 4 + head + sum(sizes[: self.rank])
        self.backend.write_block(group, block, body[start : start + sizes[self.rank]])

    def _answer(self, body: bytes) -> None:
        self._socket.sendall(frame(b"done", body))


def join_group(path: Path, address: str, threads: int | None) -> None:
    """Be a rank of the group at the address until it ends."""
    sockets = join(address, shared_secret())
    rank = sockets.index(None)
    log.info("rank %d of %d of %s", rank, len(sockets), address)
    fds = [-1 if end is None else end.detach() for end in sockets]
    run(RankProcess(rank, fds, str(path), threads))


def run(process: RankProcess) -> int:
    """The exit code."""
    try:
        process.run()
    except (RuntimeError, ConnectionError) as error:  # the mesh: another rank has ended
        log.info("ends: %s", error)
        return 3
    return 0


def main(argv: list[str]) -> int:
    logging.basicConfig(
        level=os.environ.get("VERBATIM_LOG", "INFO"),
        format=f"%(levelname)s rank {argv[1]}: %(message)s",
        stream=sys.stderr,
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the user's Ctrl-C is for rank 0
    return run(RankProcess(int(argv[1]), [int(fd) for fd in argv[2].split(",")]))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
