"""Memory of the CPU backend: its resident size, and that steps do not leak."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verbatim.base.config import EngineConfig
from verbatim.base.records import SeqStep, StepPlan
from verbatim.testing.tiny_models import tiny_model

cpu = pytest.importorskip("verbatim.backend.cpu.backend")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

RESIDENT_BYTES = """
import os
from verbatim import LLM, SamplingParams
from verbatim.hub.catalog import resolve
size = os.path.getsize(resolve("smollm2"))
with LLM("smollm2", backend="cpu", kv_memory=64 << 20, threads=2) as llm:
    llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    pages = int(open("/proc/self/statm").read().split()[1])
print(pages * os.sysconf("SC_PAGE_SIZE") - size - (64 << 20))
"""


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_weights_of_the_default_model_are_in_memory_once(default_model: Path) -> None:
    """Resident: the model file's size, the KV cache, and at most 150 MB for Python, NumPy, the
    tokenizer and scratch memory. A second copy of the weights would exceed that."""
    done = subprocess.run([sys.executable, "-c", RESIDENT_BYTES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 150_000_000


PR_SET_THP_DISABLE = 41  # prctl


@pytest.fixture
def small_pages() -> Iterator[None]:
    """Disable transparent huge pages: merging pages during a test would grow the resident size."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    yield
    prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)


def check_memory_of_steps(count: int) -> None:
    """Run steps of many sizes on one backend; after the first tenth the memory must not grow."""
    backend = cpu.CpuBackend(
        tiny_model("llama", type="q8_0", hidden_size=64, intermediate_size=96),
        EngineConfig(threads=2),
    )
    backend.allocate((64,))
    sizes = (1, 1, 1, 2, 5, 17, 1, 40)
    before = 0
    for i in range(count):
        rows = sizes[i % len(sizes)]
        tokens = tuple((i + j) % 256 for j in range(rows))
        blocks = tuple(range(i % 8, i % 8 + 4))
        backend.execute(StepPlan(i, (SeqStep(i, tokens, 0, (blocks,), targets=tokens[:1]),)))
        if i == count // 10:
            before = resident()
    assert resident() - before < 4 << 20
    backend.close()


@pytest.mark.usefixtures("small_pages")
def test_steps_do_not_leak_memory() -> None:
    check_memory_of_steps(3_000)


@pytest.mark.soak
@pytest.mark.usefixtures("small_pages")
def test_a_hundred_thousand_steps_do_not_leak_memory() -> None:
    check_memory_of_steps(100_000)
