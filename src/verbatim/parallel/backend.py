"""ParallelBackend: the backend of a model that runs on several ranks.

In: a loaded model, its path and an EngineConfig with tensor_parallel above 1. Out: a Backend. Rank
0 is in this process: it sends each plan to the other ranks, computes its part of the step, gathers
the logits and samples. Invariant: the bits, and so the fingerprint, of one process.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from verbatim.backend import may_use_gpu
from verbatim.backend.protocol import BackendInfo
from verbatim.base.config import EngineConfig
from verbatim.base.errors import ModelError
from verbatim.base.records import StepPlan, StepResult
from verbatim.parallel.group import Group
from verbatim.parallel.rank_process import RankFacts, facts, open_rank, split_of

if TYPE_CHECKING:
    from verbatim.model.loading.load import Model


class ParallelBackend:
    launcher = None  # a step ends before the next is planned

    def __init__(self, model: Model, config: EngineConfig) -> None:
        count = config.ranks
        self.spec = split_of(model.spec, config, count).spec  # or an error: it cannot be split
        self.group = group = Group(count, config.rank_address)
        own = _rank_config(config, group.hosts.count(""))
        try:
            stated = (str(model.path.absolute()), asdict(own))
            group.tell(b"open", json.dumps(stated).encode())
            self._backend = open_rank(model, own, group.mesh, count)
            answers = group.answers()
            self._ranks = [
                facts(self._backend, model),
                *(RankFacts(*json.loads(a)) for a in answers),
            ]
            if problem := self._problem():
                group.tell(b"nope", problem.encode())
                raise ModelError(problem, file=str(model.path))
        except BaseException:
            group.close()
            raise
        self.block_size = self._backend.block_size

    def _problem(self) -> str:
        """Why the ranks cannot run one model, empty if they can."""
        own = self._ranks[0].identity
        for rank, found in enumerate(self._ranks):
            name = f"rank {rank}" + (f" on {host}" if (host := self.group.hosts[rank]) else "")
            if found.error:
                return f"{name}: {found.error}"
            if found.identity != own:
                return f"{name} has the model and numerics {found.identity}, and rank 0 has {own}"
        return ""

    @property
    def info(self) -> BackendInfo:
        own, ranks = self._backend.info, self._ranks
        return replace(
            own,
            detail=f"{own.detail}, {len(ranks)} ranks",
            threads=sum(rank.threads for rank in ranks),
            weight_bytes=sum(rank.weight_bytes for rank in ranks),
            kv_token_bytes=sum(rank.kv_token_bytes for rank in ranks),
            expert_bytes=sum(rank.expert_bytes for rank in ranks),
        )

    def draft_layer(self, model: Model) -> None:
        return None

    def available_memory(self) -> int | None:
        """Of several machines, the least."""
        if not any(self.group.hosts):
            return self._backend.available_memory()
        return min(rank.memory for rank in self._ranks)

    def block_bytes(self) -> tuple[int, ...]:
        """Bytes on all ranks of a machine, which share its memory or a GPU's; on the machine with
        most of them."""
        machines: dict[str, list[tuple[int, ...]]] = {}
        for host, rank in zip(self.group.hosts, self._ranks, strict=True):
            machines.setdefault(host, []).append(rank.block_bytes)
        sums = [tuple(map(sum, zip(*ranks, strict=True))) for ranks in machines.values()]
        return tuple(map(max, zip(*sums, strict=True)))

    def allocate(self, blocks: tuple[int, ...]) -> None:
        self.group.tell(b"allo", json.dumps(blocks).encode())
        self._backend.allocate(blocks)

    def read_block(self, group: int, block: int) -> bytes:
        self.group.tell(b"read", json.dumps((group, block)).encode())
        own = self._backend.read_block(group, block)
        return b"".join([own, *self.group.answers()])

    def write_block(self, group: int, block: int, data: bytes) -> None:
        sizes = [rank.block_bytes[group] for rank in self._ranks]
        if len(data) != sum(sizes):
            raise ValueError(f"{len(data)} bytes are not a block of group {group}")
        head = json.dumps((group, block, sizes)).encode()
        body = len(head).to_bytes(4, "little") + head + data
        self.group.tell(b"writ", body)
        self._backend.write_block(group, block, data[: sizes[0]])

    def execute(self, plan: StepPlan) -> StepResult:
        self.group.check()
        try:
            return self._backend.execute(plan)
        except BaseException as error:
            # The native step of the cpu backend is never cut short. An error of another kind than
            # the mesh's comes before or after it, and leaves the ranks in step.
            if isinstance(error, RuntimeError) or self._backend.info.name == "cuda":
                raise self.group.failed(error) from None
            raise

    def close(self) -> None:
        self.group.close()
        self._backend.close()


def _rank_config(config: EngineConfig, here: int) -> EngineConfig:
    """The settings of one rank; `here`: ranks on this machine."""
    from verbatim.backend.cpu.backend import physical_cores

    return replace(
        config,
        backend="cuda" if may_use_gpu(config) else "cpu",
        threads=config.threads or max(1, physical_cores() // here),
        tensor_parallel=1,
        rank_address=None,
        cache_dir=None,
        cache_dir_size=EngineConfig().cache_dir_size,
    )
