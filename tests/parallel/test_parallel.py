"""One model over several processes: the answers of one process, and what happens when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eventually import eventually
from verbatim import LLM, SamplingParams
from verbatim.base.errors import BackendError, ParameterError
from verbatim.base.records import Completion

PROMPT = "Once upon a time there was a scheduler that never"
NEEDLES = [
    SamplingParams(max_tokens=24, temperature=t, seed=11, logprobs=2, prompt_logprobs=1)
    for t in (0.0, 1.0)
]
LONG = SamplingParams(max_tokens=6000, temperature=1.0, seed=3, ignore_eos=True)


def ended(pid: int) -> bool:
    """Whether the process has ended; a zombie, whose parent is about to read its code, has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"


def pids(llm: LLM) -> list[int]:
    backend: Any = llm.loaded.backend
    return [process.pid for process in backend.group._processes]


def bits(completions: list[Completion]) -> list[object]:
    return [(c.token_ids, c.choices[0].logprobs, c.prompt_logprobs) for c in completions]


def needles(llm: LLM) -> list[object]:
    """The needles alone and among others, in a cache that preempts them."""
    found = [bits([llm.generate(PROMPT, needle)]) for needle in NEEDLES]
    crowd = [PROMPT, *(f"{PROMPT[: 4 * i]} and {i}" for i in range(6))]
    found += [bits(llm.generate(crowd, needle))[:1] for needle in NEEDLES]
    return found


def test_the_needle_has_the_bits_of_one_process(tiny: Path) -> None:
    found = {}
    for ranks in (1, 2, 4):
        with LLM(
            tiny, threads=1, backend="cpu", tensor_parallel=ranks, kv_blocks=14, step_tokens=40
        ) as llm:
            found[ranks] = (llm.fingerprint, needles(llm))
            processes = pids(llm) if ranks > 1 else []
            stats = llm.stats()
            assert stats["preemptions_total"] > 0
            waits = [stats.get(f'rank_wait_seconds_total{{rank="{r}"}}') for r in range(ranks)]
            assert ranks == 1 or (waits[0] == 0 and all(waits[1:]))
        assert all(map(ended, processes))
    assert found[1][1][:2] == found[1][1][2:]
    assert found[1] == found[2] == found[4]


def test_blocks_of_the_disk_cache_come_from_all_ranks(tiny: Path, tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        with LLM(tiny, threads=1, tensor_parallel=2, cache_dir=tmp_path) as llm:
            texts.append(llm.generate(PROMPT * 4, SamplingParams(max_tokens=8)))
    assert texts[0].usage.cached_tokens == 0 < texts[1].usage.cached_tokens
    assert texts[0].token_ids == texts[1].token_ids


def test_a_killed_rank_ends_requests_by_name_and_all_processes(tiny: Path) -> None:
    with LLM(tiny, threads=1, tensor_parallel=3, speculate="off") as llm:
        processes = pids(llm)
        stream = llm.stream(PROMPT, LONG)
        next(stream)
        os.kill(processes[1], signal.SIGKILL)
        with pytest.raises(BackendError, match=r"rank 2 of 3 has ended .*signal 9"):
            list(stream)
        with pytest.raises(BackendError, match="must be loaded again"):
            llm.generate(PROMPT, NEEDLES[0])
        eventually(lambda: all(map(ended, processes)), "a rank is left")


def test_a_rank_does_not_outlive_a_killed_parent(tiny: Path) -> None:
    """Rank 0 is killed while it steps."""
    script = (
        "import sys\n"
        "from verbatim import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], threads=1, tensor_parallel=3, speculate='off')\n"
        "params = SamplingParams(max_tokens=6000, ignore_eos=True)\n"
        "stream = llm.stream('Once', params)\n"
        "next(stream)\n"
        "print(*[p.pid for p in llm.loaded.backend.group._processes], flush=True)\n"
        "list(stream)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tiny)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        processes = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(processes) == 2
    eventually(lambda: all(map(ended, processes)), "a rank is left")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "reference"}, "tensor_parallel: needs the backend cpu or cuda"),
        ({"speculate": "mtp"}, "speculate: 'mtp' needs the whole model in one process"),
        ({"speculate": "head"}, "speculate: 'head' needs the whole model in one process"),
        ({"pipeline_parallel": 2, "backend": "cpu"}, "pipeline_parallel: a model is split by rows"),
        ({"tensor_parallel": 1, "pipeline_parallel": 2}, "pipeline_parallel: needs backend cpu"),
        ({"tensor_parallel": 65}, "tensor_parallel: 65 is more than the 64 rows"),
        ({"tensor_parallel": 0}, "tensor_parallel: 0 is below 1"),
    ],
)
def test_what_several_ranks_cannot_run_is_refused_by_name(
    tiny: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        LLM(tiny, **{"tensor_parallel": 2, **settings})
