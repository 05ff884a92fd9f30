"""KV-cache sizing: the rule, kv_memory and kv_blocks, sliding windows, the context that fits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError
from verbatim.base.records import CacheGroup
from verbatim.schedule.sizing import (
    STACKS,
    CachePlan,
    available_memory,
    cgroup_memory,
    memory_limit,
    plan_cache,
    process_memory,
)

FULL = (CacheGroup(None, (0, 1)),)
MIXED = (CacheGroup(None, (0,)), CacheGroup(64, (1, 2, 3)))
KIB = 1024


def plan(
    groups: tuple[CacheGroup, ...] = FULL,
    block_bytes: tuple[int, ...] = (KIB,),
    *,
    free: int,
    fixed: bool = False,
    on_gpu: bool = False,
    **config: int,
) -> CachePlan:
    # one context is 100 blocks
    return plan_cache(
        groups,
        block_bytes,
        block_size=16,
        context=1600,
        fixed=fixed,
        config=EngineConfig(**config),
        available=free,
        on_gpu=on_gpu,
    )


@pytest.mark.parametrize(
    ("free", "running", "blocks", "rule"),
    [
        (4000 * KIB, 256, 1000, "a quarter of available memory"),
        (4000 * KIB, 4, 400, "max_running full contexts"),
        (320 * KIB, 256, 100, "one full context"),
        (120 * KIB, 256, 60, "half of available memory"),
    ],
)
def test_free_memory_and_max_running_decide_the_number_of_blocks(
    free: int, running: int, blocks: int, rule: str
) -> None:
    made = plan(free=free, max_running=running)
    assert made.blocks == (blocks,)
    assert made.rule == rule
    assert made.bytes == blocks * KIB
    assert rule in str(made)


def test_the_cache_of_a_gpu_takes_half_of_its_free_memory() -> None:
    made = plan(free=4000 * KIB, on_gpu=True)
    assert (made.blocks, made.rule) == ((2000,), "half of available memory")
    assert plan(free=4000 * KIB, max_running=4, on_gpu=True).blocks == (400,)


def test_the_context_shrinks_to_the_cache_unless_the_user_set_it() -> None:
    assert plan(free=120 * KIB).context == 60 * 16 + 1
    assert plan(free=120 * KIB, fixed=True).context == 1600
    assert plan(free=4000 * KIB).context == 1600


@pytest.mark.parametrize("fixed", [False, True])
def test_a_cache_below_the_context_says_what_it_holds(fixed: bool) -> None:
    told = plan(free=0, fixed=fixed, kv_memory=60 * KIB).shortage
    assert "(kv_memory 60 KiB) holds 961 tokens" in told
    assert "the context is 1600" in told
    assert plan(free=0, fixed=fixed, kv_memory=100 * KIB).shortage == ""


def test_kv_memory_and_kv_blocks_override_the_rule() -> None:
    assert plan(free=0, kv_memory=77 * KIB).blocks == (77,)
    assert plan(free=0, kv_blocks=9).blocks == (9,)
    with pytest.raises(ParameterError, match="kv_memory"):
        plan(free=0, kv_memory=100)


def test_a_draft_model_takes_its_share_first() -> None:
    def shared(free: int, **config: int) -> CachePlan:
        return plan_cache(
            FULL,
            (KIB,),
            block_size=16,
            context=1600,
            fixed=False,
            config=EngineConfig(**config),
            available=free,
            share=0.25,
        )

    made = shared(0, kv_memory=80 * KIB)
    assert made.blocks == (20,)
    assert made.rule == "kv_memory 80 KiB, 75% for the draft model"
    assert shared(16000 * KIB).blocks == (1000,)
    assert shared(16000 * KIB).rule == "a quarter of available memory, 75% for the draft model"
    assert shared(0, kv_blocks=9).blocks == (9,)
    with pytest.raises(ParameterError, match="kv_memory"):
        shared(16000 * KIB, kv_memory=3)


def test_windowed_groups_get_at_most_max_running_windows() -> None:
    made = plan(MIXED, (KIB, 3 * KIB), free=10**9, max_running=4, step_tokens=16)
    assert made.blocks[0] == 400
    # A window of 64 and a chunk of 16: 80 positions touch at most 6 blocks.
    assert made.blocks[1] == 4 * 6
    assert made.context == 1600


def test_a_large_chunk_counts_once_and_not_for_every_sequence() -> None:
    """512 tokens after a window of 64 touch at most 37 blocks, 8,192 all 100 of a context; the
    tokens of a step are shared."""
    counts = [
        plan(MIXED, (KIB, 3 * KIB), free=10**9, max_running=4, step_tokens=chunk).blocks[1]
        for chunk in (512, 8192)
    ]
    assert counts == [4 * 37, 3 * 37 + 100]


def test_a_large_step_does_not_take_the_context_of_full_attention() -> None:
    """Where memory is short, a windowed group has blocks for a chunk of the usual size."""
    few, many = (
        plan(MIXED, (KIB, 3 * KIB), free=440 * KIB, on_gpu=True, step_tokens=chunk)
        for chunk in (512, 8192)
    )
    assert few.context == many.context == 1600
    assert few.blocks == many.blocks


def test_recurrent_layers_leave_the_memory_to_full_attention() -> None:
    """Attention of 1 KiB per block beside states of 128 KiB, of which a sequence holds two. Shrunk
    like windows until one context fits, they would leave attention 123 blocks."""
    groups = (CacheGroup(None, (0,)), CacheGroup(2, (1, 2, 3), "state"))
    made = plan(groups, (KIB, 128 * KIB), free=0, kv_memory=8000 * KIB, step_tokens=16)
    attention, states = made.blocks
    assert attention > 1500
    assert states == 3 + attention // 32  # a chunk of 16 tokens touches three


def test_windows_shrink_before_a_full_context_does() -> None:
    made = plan(MIXED, (KIB, 3 * KIB), free=0, kv_memory=130 * KIB, step_tokens=16)
    assert made.blocks[0] >= 100
    assert made.blocks[1] >= 6
    assert made.blocks[0] + 3 * made.blocks[1] <= 130
    assert made.context == 1600


def test_available_memory_is_found_on_this_machine() -> None:
    assert 2**20 < available_memory() <= memory_limit() < 2**50


def test_the_limits_of_this_process_bound_the_available_memory() -> None:
    """ulimit -v and -d: the limit less what the process has mapped."""
    script = (
        "import resource, sys\n"
        "from verbatim.schedule.sizing import available_memory\n"
        "which = getattr(resource, sys.argv[1])\n"
        "resource.setrlimit(which, (3 << 30, resource.getrlimit(which)[1]))\n"
        "print(available_memory())"
    )
    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        done = subprocess.run(
            [sys.executable, "-c", script, name], capture_output=True, text=True, check=True
        )
        assert 0 < int(done.stdout) < 3 << 30, name


def test_a_process_limit_counts_what_is_mapped() -> None:
    status = "Name:\tpython\nVmSize:\t  1000 kB\nVmData:\t 400 kB\n"
    unlimited = {"VmSize": -1, "VmData": -1}
    assert process_memory(status, unlimited) == []
    assert process_memory(status, {**unlimited, "VmSize": STACKS + 3000 * KIB}) == [2000 * KIB]
    assert process_memory(status, {**unlimited, "VmData": 300 * KIB}) == [0]
    assert process_memory("", {"VmSize": 3000 * KIB, "VmData": 1}) == []


@pytest.mark.parametrize("version", [1, 2])
def test_every_cgroup_above_the_process_bounds_the_memory(version: int, tmp_path: Path) -> None:
    """A service's limit is often that of its slice; the root has no limit."""
    root = tmp_path if version == 2 else tmp_path / "memory"
    limit, used = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    for path, values in (("", ("max", 9000)), ("a", (5000, 1000)), ("a/b", ("max", 10))):
        (root / path).mkdir(parents=True, exist_ok=True)
        (root / path / limit).write_text(f"{values[0]}\n")
        (root / path / used).write_text(f"{values[1]}\n")
    line = "0::/a/b" if version == 2 else "4:memory:/a/b"
    assert cgroup_memory(f"1:cpu:/other\n{line}\n", tmp_path) == [(5000, 1000)]
    # a path that this container cannot see: its own cgroup is mounted as the root
    (root / limit).write_text("7000\n")
    assert cgroup_memory(line.replace("/a/b", "/host/c"), tmp_path) == [(7000, 9000)]
