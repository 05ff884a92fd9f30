"""Memory of the CPU backend: what it holds at rest, and that steps leave nothing behind."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from verbatim.base.config import EngineConfig
from verbatim.base.records import SeqStep, StepPlan
from verbatim.testing_models import tiny_model

cpu = pytest.importorskip("verbatim.backend.cpu.backend")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

HOLDS = """
import os
from verbatim import LLM, SamplingParams
from verbatim.weights.catalog import resolve
size = os.path.getsize(resolve("smollm2"))
with LLM("smollm2", kv_memory=64 << 20, threads=2) as llm:
    llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    pages = int(open("/proc/self/statm").read().split()[1])
print(pages * os.sysconf("SC_PAGE_SIZE") - size - (64 << 20))
"""


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_default_model_is_held_once() -> None:
    """Resident: the file, the cache, and at most 150 MB for Python, NumPy, the tokenizer and scratch. A second copy of the weights would show."""
    done = subprocess.run([sys.executable, "-c", HOLDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 150_000_000


PR_SET_THP_DISABLE = 41  # prctl


@pytest.fixture
def small_pages() -> Iterator[None]:
    """Keep the kernel from merging pages into huge ones beside the test: that grows the resident size by itself."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    yield
    prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)


def steps_leave_nothing(count: int) -> None:
    """Steps of every size, growing and shrinking, on one backend: after the first round memory stays where it is."""
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
def test_steps_leave_nothing() -> None:
    steps_leave_nothing(3_000)


@pytest.mark.soak
@pytest.mark.usefixtures("small_pages")
def test_a_hundred_thousand_steps_leave_nothing() -> None:
    steps_leave_nothing(100_000)
