"""What a replica needs and whether a node has it, decided before anything is scheduled.

In: the model's footprint, the engine's settings, the nodes of the cluster. Out: ReplicaNeeds, which
go to Ray as num_cpus, num_gpus and memory, and the settings that make the engine keep to them:
threads, kv_memory and the backend. Every replica gets the same settings, so that all have one
context and one fingerprint.

A replica with several ranks (tensor_parallel) is one actor, whose engine starts them on its own
node: it asks for the CPUs and GPUs of all of them.

The rule: the replicas are spread evenly over the nodes with CPUs (or GPUs) for them, and those of
one node share its CPUs and memory evenly. With a GPU for each replica they run on GPUs, one for
each rank, else all on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.base.config import BLOCK_SIZE, EngineConfig
from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonMapping
from verbatim.base.units import size_text
from verbatim.diagnose.footprint import Footprint
from verbatim.scale.ray_options import Replicas

# Two Python processes with tokenizer and buffers: 190 MiB resident for the default model, measured.
PROCESS_BYTES = 400 << 20
GPU_CPUS = 2  # CPUs of a replica on a GPU: the step thread, and HTTP or tokenisation beside it


@dataclass(frozen=True, slots=True)
class Node:
    cpus: float
    gpus: float
    memory: int  # bytes

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPUs" if self.gpus else ""
        return f"{self.cpus:g} CPUs{gpus}, {size_text(self.memory)}"


@dataclass(frozen=True, slots=True)
class ReplicaNeeds:
    cpus: int
    gpus: int
    memory: int  # bytes: weights, KV cache and processes
    weights: int
    cache: int  # bytes of KV cache
    settings: JsonMapping  # fields of EngineConfig that keep the engine within these numbers

    def fits(self, node: Node) -> bool:
        return self.cpus <= node.cpus and self.gpus <= node.gpus and self.memory <= node.memory

    def count_on(self, node: Node) -> int:
        """Replicas that the node can hold."""
        counts = [node.cpus // self.cpus, node.memory // max(self.memory, 1)]
        counts += [node.gpus // self.gpus] if self.gpus else []
        return int(min(counts))

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPU" if self.gpus else ""
        parts = f"weights {size_text(self.weights)}, KV cache {size_text(self.cache)}"
        parts += f", processes {size_text(self.memory - self.weights - self.cache)}"
        return f"{self.cpus} CPUs{gpus} and {size_text(self.memory)} ({parts})"

    def actor_options(self) -> dict[str, object]:
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "memory": self.memory}


def state_needs(
    footprint: Footprint | None, engine: JsonMapping, nodes: Sequence[Node], replicas: Replicas
) -> ReplicaNeeds:
    """The needs of one replica. `footprint` is None for the fake engines of tests. Raises a
    ParameterError with the numbers if no node can hold a replica, or all nodes together cannot hold
    `replicas`."""
    if not nodes:
        raise ParameterError("ray", "the cluster has no node that is alive")
    config = EngineConfig(**engine)
    if config.rank_address is not None:
        raise ParameterError("rank_address", "the ranks of a replica are on one node; leave it out")
    ranks = config.ranks
    gpus = ranks if _wants_gpu(config.backend, nodes, replicas, ranks) else 0
    # A head node often offers no CPUs, so that nothing runs on it.
    users = [node for node in nodes if (node.gpus if gpus else node.cpus) >= 1] or nodes
    largest = max(users, key=lambda node: (node.gpus if gpus else 0, node.memory, node.cpus))
    per_node = -(-replicas.most // len(users))
    if gpus:
        threads = config.threads or max(min(ranks * GPU_CPUS, int(largest.cpus)) // ranks, 1)
    else:
        threads = config.threads or max(int(largest.cpus) // per_node // ranks, 1)
    cpus, processes = threads * ranks, PROCESS_BYTES * ranks
    weights = 0 if footprint is None else int(footprint.weight_bytes)
    room = largest.memory // per_node - weights - processes
    cache = 0 if footprint is None or gpus else _cache_bytes(footprint, config, room)
    settings: dict[str, object] = {"backend": "cuda"} if gpus else {"threads": threads}
    if cache and config.kv_blocks is None:
        settings["kv_memory"] = cache
    memory = weights + cache + processes
    needs = ReplicaNeeds(cpus, gpus, memory, weights, cache, settings)
    check_needs(needs, nodes, replicas)
    return needs


def check_needs(needs: ReplicaNeeds, nodes: Sequence[Node], replicas: Replicas) -> None:
    if not any(needs.fits(node) for node in nodes):
        largest = max(nodes, key=lambda node: (node.memory, node.cpus))
        raise ParameterError(
            "replicas",
            f"one replica needs {needs}, and no node has that: the largest has {largest}; use a "
            "smaller model, --context, --kv-memory or --threads, or a larger node",
        )
    room = sum(needs.count_on(node) for node in nodes)
    if room < replicas.least:
        raise ParameterError(
            "replicas",
            f"{replicas.least} replicas need {needs} each, and the {len(nodes)} nodes have room "
            f"for {room}; ask for fewer, or give each less (--threads, --kv-memory)",
        )


def _wants_gpu(backend: str, nodes: Sequence[Node], replicas: Replicas, ranks: int) -> bool:
    """Whether every rank of every replica gets a GPU; those of a replica are on one node."""
    count = sum(int(node.gpus) // ranks for node in nodes)
    if backend == "cuda" and count < replicas.least:
        why = f"cuda needs a GPU per replica: {replicas.least}, and the cluster has {count}"
        raise ParameterError("backend", why)
    return backend == "cuda" or (backend == "auto" and count >= replicas.most)


def _cache_bytes(footprint: Footprint, config: EngineConfig, room: int) -> int:
    """The rule of schedule/sizing.py on this replica's share of the node."""
    if config.kv_memory is not None:
        return config.kv_memory
    context = config.context or footprint.context
    if config.kv_blocks is not None:
        return int(footprint.kv_bytes(config.kv_blocks * BLOCK_SIZE))
    one = int(footprint.kv_bytes(-(-context // BLOCK_SIZE) * BLOCK_SIZE))
    wanted = min(config.max_running * one, max(one, room // 4))
    # A given context is not reduced: then the need for one whole context is stated.
    least = one if config.context is not None else int(footprint.kv_bytes(BLOCK_SIZE))
    return max(min(wanted, room // 2), least)
