"""How large the cache is: the model's block sizes and the memory at hand come in, a number of blocks for each group goes out.

The rule, unless kv_memory (bytes) or kv_blocks (blocks of each group) says otherwise:

    one    = bytes of one sequence as long as the context
    memory = min(max_running * one, max(one, available / 4), available / 2)

A quarter of what is free, at least one full context, never more than half of what is free, never more than could be used
at once. Memory is only touched when a block is first written. Groups with a sliding window get as many blocks as the
others, up to max_running windows; where that would leave less than one context to full attention, they get fewer.

A draft model's cache holds as many tokens, and takes its share of that memory first.

If not even one context fits, the engine's context is what fits (unless the context was asked for: then single requests
are refused).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError
from verbatim.base.records import CacheGroup


@dataclass(frozen=True, slots=True)
class CachePlan:
    """For printing: what the cache is and why."""

    blocks: tuple[int, ...]  # a group
    block_size: int  # positions in a block
    block_bytes: tuple[int, ...]
    bytes: int
    tokens: int  # positions that full attention (or the only window) can hold
    context: int  # most tokens of one sequence in this engine
    rule: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"cache: {self.tokens} tokens in {' + '.join(map(str, self.blocks))} blocks of {self.block_size}, "
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
) -> CachePlan:
    """`fixed`: the context was asked for and is not to be reduced. `share`: of the memory, what is left to this cache by a draft model's."""
    full = -(-context // block_size)
    windows = [
        full
        if g.window is None
        else min(full, -(-(g.window + config.step_tokens) // block_size) + 1)
        for g in groups
    ]
    one = sum(n * b for n, b in zip(windows, block_bytes, strict=True))
    if config.kv_blocks is not None:
        blocks, rule = tuple(config.kv_blocks for _ in groups), f"kv_blocks {config.kv_blocks}"
    else:
        free = int(share * (available_memory() if available is None else available))
        if config.kv_memory:
            memory, rule = int(share * config.kv_memory), f"kv_memory {config.kv_memory}"
        else:
            memory = min(config.max_running * one, max(one, free // 4), free // 2)
            rule = _reason(memory, config.max_running * one, one, free)
        rule += f", {1 - share:.0%} for the draft model" if share < 1 else ""
        blocks = _split(
            memory, windows, block_bytes, [g.window for g in groups], full, config.max_running
        )
    if min(blocks) < 1:
        raise ParameterError(
            "kv_memory",
            f"does not hold one block of {sum(block_bytes)} bytes; the context needs {one} bytes",
        )
    least = [
        full if g.window is None else -(-(g.window - 1) // block_size) + 1 for g in groups
    ]  # a window's, one token at a time
    holds = min(context if n >= m else n * block_size for n, m in zip(blocks, least, strict=True))
    tokens = max(n for n in blocks) * block_size
    size = sum(n * b for n, b in zip(blocks, block_bytes, strict=True))
    return CachePlan(
        blocks,
        block_size,
        tuple(block_bytes),
        size,
        tokens,
        context if fixed else min(context, holds + 1),
        rule,
    )


def _reason(memory: int, most: int, one: int, free: int) -> str:
    if memory == most:
        return "max_running full contexts"
    if memory == free // 2:
        return "half of available memory"
    return "one full context" if memory == one else "a quarter of available memory"


def _split(
    memory: int,
    windows: Sequence[int],
    block_bytes: Sequence[int],
    limits: Sequence[int | None],
    full: int,
    running: int,
) -> tuple[int, ...]:
    """The most blocks within `memory`, alike for all groups; windows shrink first where one full context would not fit."""
    for shrink in (1, 2, 4, 8, 16, 32, 64):
        low, high = 0, memory // max(min(block_bytes), 1) + 1
        while low < high:  # the largest n whose groups fit
            n = (low + high + 1) // 2
            if (
                sum(
                    c * b
                    for c, b in zip(
                        _counts(n, shrink, windows, limits, running), block_bytes, strict=True
                    )
                )
                <= memory
            ):
                low = n
            else:
                high = n - 1
        if low >= full or None not in limits or all(w is None for w in limits):
            break
    return tuple(_counts(low, shrink, windows, limits, running))


def _counts(
    n: int, shrink: int, windows: Sequence[int], limits: Sequence[int | None], running: int
) -> list[int]:
    return [
        n if limit is None else min(max(n // shrink, min(need, n)), need * running)
        for need, limit in zip(windows, limits, strict=True)
    ]


def available_memory() -> int:
    """Bytes this process may still use: the machine's, or its control group's if that is less."""
    free = _meminfo()
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        most = _number(limit)
        if most is not None:
            free = min(free, max(most - (_number(used) or 0), 0))
    return free


def _meminfo() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        )  # no better answer here: half of what is built in
    except (ValueError, OSError):
        return 4 * 2**30


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
