"""Size of the KV cache: block sizes and free memory in, blocks per cache group out.

The rule, unless kv_memory (bytes) or kv_blocks (blocks per group) is set:

    one    = bytes of one sequence of context length
    memory = min(max_running * one, max(one, available / 4), available / 2)

That is a quarter of the free memory, at least one full context, at most half of the free memory,
and at most what max_running sequences can use. On a GPU it is half of the free memory, which other
programs rarely need. Memory is touched when a block is first written. Groups with a sliding window
get as many blocks as the others, up to max_running windows; fewer where full attention would get
less than one context. Recurrent layers get blocks for one chunk, and one for each 32 of the
others: a sequence holds two, whatever its length. A draft model's cache holds as many tokens and
takes its share of the memory first. If not even one context fits, the engine's context shrinks to
what fits, unless the user set the context: then single requests are refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from verbatim.base.config import STEP_TOKENS, EngineConfig
from verbatim.base.errors import ParameterError
from verbatim.base.records import CacheGroup
from verbatim.base.units import size_text

RECURRENT_SHARE = 32  # blocks of full attention per block of recurrent layers
STACKS = 256 << 20  # bytes: 32 threads with the usual 8 MiB


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Size of the cache and the rule that set it, for display."""

    blocks: tuple[int, ...]  # per group
    block_size: int  # positions in a block
    block_bytes: tuple[int, ...]
    bytes: int
    tokens: int  # positions of the largest group
    context: int  # maximum tokens of one sequence
    rule: str
    shortage: str  # what the cache does not hold of the context, for the log; "": it holds all

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"cache: {self.tokens} tokens in {' + '.join(map(str, self.blocks))} blocks "
            f"of {self.block_size}, "
            f"{self.bytes / 2**20:.0f} MiB ({self.rule}); context {self.context}"
        )


def plan_cache(
    groups: Sequence[CacheGroup],
    block_bytes: Sequence[int],
    *,
    block_size: int,
    context: int,
    fixed: bool,
    config: EngineConfig,
    available: int | None = None,
    share: float = 1.0,
    on_gpu: bool = False,
) -> CachePlan:
    """Divide the memory by the rule above. `fixed`: the user set the context, so it is not reduced.
    `share`: fraction of the memory for this cache; a draft model's cache gets the rest. `on_gpu`:
    the memory is that of a GPU."""
    full = -(-context // block_size)
    step_tokens = config.step_tokens or STEP_TOKENS

    def needed(window: int | None, chunk: int) -> int:
        return full if window is None else min(full, -(-(window + chunk) // block_size) + 1)

    # Of a large step's chunk only the usual size is needed: the scheduler makes chunks smaller
    # where blocks are scarce.
    windows = [needed(g.window, min(step_tokens, STEP_TOKENS)) for g in groups]
    one = sum(n * b for n, b in zip(windows, block_bytes, strict=True))
    if config.kv_blocks is not None:
        blocks, rule = tuple(config.kv_blocks for _ in groups), f"kv_blocks {config.kv_blocks}"
    else:
        free = int(share * (available_memory() if available is None else available))
        if config.kv_memory:
            memory = int(share * config.kv_memory)
            rule = f"kv_memory {size_text(config.kv_memory)}"
        else:
            memory = min(
                config.max_running * one, max(one, free // (2 if on_gpu else 4)), free // 2
            )
            rule = _reason(memory, config.max_running * one, one, free)
        rule += f", {1 - share:.0%} for the draft model" if share < 1 else ""
        # Sequences share the tokens of a step, so a large chunk counts once.
        most = [
            None
            if g.window is None
            else (config.max_running - 1) * usual + needed(g.window, step_tokens)
            for g, usual in zip(groups, windows, strict=True)
        ]
        recurrent = [g.kind != "attention" for g in groups]
        blocks = _split(memory, windows, block_bytes, most, full, recurrent)
    if min(blocks) < 1:
        raise ParameterError(
            "kv_memory",
            f"{size_text(memory)} does not hold one block of "
            f"{size_text(sum(block_bytes))}; a context of {context} tokens needs {size_text(one)}",
        )
    # Blocks that one full-length sequence needs while it decodes one token per step.
    least = [full if g.window is None else -(-(g.window - 1) // block_size) + 1 for g in groups]
    holds = min(context if n >= m else n * block_size for n, m in zip(blocks, least, strict=True))
    room = min(context, holds + 1)  # the last token needs no place in the cache
    tokens = max(n for n in blocks) * block_size
    size = sum(n * b for n, b in zip(blocks, block_bytes, strict=True))
    return CachePlan(
        blocks,
        block_size,
        tuple(block_bytes),
        size,
        tokens,
        context if fixed else room,
        rule,
        f"the KV cache ({rule}) holds {room} tokens of one sequence, and the context is {context}; "
        "longer requests are refused: raise kv_memory or lower context"
        if room < context
        else "",
    )


def _reason(memory: int, max_running_bytes: int, one: int, free: int) -> str:
    if memory == max_running_bytes:
        return "max_running full contexts"
    if memory == free // 2:
        return "half of available memory"
    return "one full context" if memory == one else "a quarter of available memory"


def _split(
    memory: int,
    windows: Sequence[int],
    block_bytes: Sequence[int],
    most: Sequence[int | None],
    full: int,
    recurrent: Sequence[bool],
) -> tuple[int, ...]:
    """The largest equal block count per group within `memory`. Windowed groups get at most `most`
    blocks, and shrink first where one full context would not fit. If there is full attention,
    recurrent groups have their share from the start."""
    if None not in most:
        recurrent = [False] * len(most)
    for shrink in (1, 2, 4, 8, 16, 32, 64):
        low, high = 0, memory // max(min(block_bytes), 1) + 1
        while low < high:  # bisect for the largest n that fits
            n = (low + high + 1) // 2
            counts = _counts(n, shrink, windows, most, recurrent)
            if sum(c * b for c, b in zip(counts, block_bytes, strict=True)) <= memory:
                low = n
            else:
                high = n - 1
        if low >= full or None not in most or all(limit is None for limit in most):
            break
    return tuple(_counts(low, shrink, windows, most, recurrent))


def _counts(
    n: int,
    shrink: int,
    windows: Sequence[int],
    most: Sequence[int | None],
    recurrent: Sequence[bool],
) -> list[int]:
    counts = []
    for need, limit, is_recurrent in zip(windows, most, recurrent, strict=True):
        if limit is None:
            counts.append(n)
        elif is_recurrent:
            counts.append(min(n, need + n // RECURRENT_SHARE, limit))
        else:
            counts.append(min(max(n // shrink, min(need, n)), limit))
    return counts


def available_memory() -> int:
    """Bytes this process may still allocate: the least of the machine's free memory and of what the
    limits of its cgroups and its own limits (ulimit -v and -d) leave."""
    rooms = [max(limit - used, 0) for limit, used in cgroup_memory(_read("/proc/self/cgroup"))]
    with contextlib.suppress(ImportError):  # Windows
        import resource

        limits = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}
        soft = {name: resource.getrlimit(which)[0] for name, which in limits.items()}
        rooms += process_memory(_read("/proc/self/status"), soft)
    return min(_meminfo(), *rooms)


def memory_limit() -> int:
    """Bytes that all processes together may allocate: the machine's memory, or the limit of a
    cgroup if that is less. A very large number where neither is known."""
    limits = [limit for limit, _ in cgroup_memory(_read("/proc/self/cgroup"))]
    with contextlib.suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=1 << 62)


def cgroup_memory(membership: str, mount: Path = Path("/sys/fs/cgroup")) -> list[tuple[int, int]]:
    """(limit, bytes used) of the process's cgroup and of those above it that have a limit.
    `membership`: /proc/self/cgroup. A container sees its own cgroup as the root, whatever its path
    on the host."""
    found = []
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, limit, used = mount, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, used = (mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = root / path.lstrip("/")
        for group in [own, *own.parents]:
            if group.is_relative_to(root) and (_read(group / limit).strip().isdigit()):
                found.append((int(_read(group / limit)), int(_read(group / used) or 0)))
    return found


def process_memory(status: str, limits: Mapping[str, int]) -> list[int]:
    """Bytes that this process may still allocate under its limits, less the stacks of threads that
    start later. `status`: /proc/self/status; `limits`: bytes by the name of its line, -1: none."""
    lines = (line.split() for line in status.splitlines())
    used = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
    return [
        max(limit - used[name] - STACKS, 0)
        for name, limit in limits.items()
        if limit >= 0 and name in used
    ]


def _meminfo() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        # Without /proc the free memory is unknown: assume half of the installed memory.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError):
        return 4 * 2**30


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
