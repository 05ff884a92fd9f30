"""--cache-dir: a prefix hit survives a restart with the same bits, and no file, whatever its state,
changes a token or stops the engine."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_rig import BACKENDS, cpu_available, tiny_parts

from verbatim import LLM, Completion, SamplingParams
from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
PROMPT = [2 + i % 90 for i in range(100)]  # 6 full blocks and 4 tokens
SMALL: dict[str, Any] = {"speculate": "off", "kv_blocks": 40, "context": 160}


def ask(name: str, folder: Path | None, *prompts: list[int], **more: Any) -> list[Completion]:
    """The answers of a new engine, one prompt after the other."""
    if name == "cpu" and not cpu_available():
        pytest.skip("needs the native kernels")
    family = more.pop("family", "llama")
    options = {**SMALL, "check": True, **more}
    loaded = tiny_parts(name, EngineConfig(check=options["check"]), family)
    with LLM.from_loaded(loaded, cache_dir=folder and str(folder), **options) as llm:
        return [llm.generate(prompt, PARAMS) for prompt in prompts]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*/*") if path.is_file())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prefix_hit_survives_a_restart(name: str, family: str, tmp_path: Path) -> None:
    if name == "fake" and family != "llama":
        pytest.skip("the fake backend has one family")
    [plain] = ask(name, None, PROMPT, family=family)
    [first] = ask(name, tmp_path, PROMPT, family=family)
    [second] = ask(name, tmp_path, PROMPT, family=family)
    assert first.token_ids == second.token_ids == plain.token_ids
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 96)


def test_a_shorter_and_a_longer_prompt_hit_what_they_share(tmp_path: Path) -> None:
    prompts = [PROMPT[:50], PROMPT + [7] * 40, [3] * 60]
    plain = ask("reference", None, *prompts)
    ask("reference", tmp_path, PROMPT)
    found = ask("reference", tmp_path, *prompts)
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    assert [c.usage.cached_tokens for c in found] == [48, 96, 0]


def test_an_answer_is_stored_when_it_comes_back_as_a_prompt(tmp_path: Path) -> None:
    with LLM.from_loaded(
        tiny_parts("fake", EngineConfig()), cache_dir=str(tmp_path), **SMALL
    ) as llm:
        answer = llm.generate(PROMPT, SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
        turn = PROMPT + list(answer.token_ids)
        llm.generate(turn, PARAMS)
    [again] = ask("fake", tmp_path, turn)
    assert again.usage.cached_tokens == 128


def test_another_model_backend_or_tenant_finds_nothing(tmp_path: Path) -> None:
    ask("reference", tmp_path, PROMPT)
    for name, family in (("cpu", "llama"), ("reference", "qwen3"), ("fake", "llama")):
        [other] = ask(name, tmp_path, PROMPT, family=family)
        assert other.usage.cached_tokens == 0, (name, family)
    loaded = tiny_parts("reference", EngineConfig(check=True))
    with LLM.from_loaded(loaded, cache_dir=str(tmp_path), check=True, **SMALL) as llm:
        request = llm.core.request(PROMPT, PARAMS, tenant="b")
        llm.core.add(request)
        done = []
        while llm.core.busy:
            done += [out for out in llm.core.step() if isinstance(out, Completion)]
        assert done[0].usage.cached_tokens == 0
        assert llm.generate(PROMPT, PARAMS).usage.cached_tokens == 96


def test_weights_that_differ_between_the_samples_of_the_digest_find_nothing(tmp_path: Path) -> None:
    """The fingerprint covers samples of the weights, the directory their whole files."""
    found = []
    for change in (b"", b"x"):
        (file := tmp_path / "weights").write_bytes(b"the same" + change)
        loaded = tiny_parts("reference", EngineConfig(), "llama")
        loaded = replace(loaded, weight_files=(file,))
        with LLM.from_loaded(loaded, cache_dir=str(tmp_path / "cache"), **SMALL) as llm:
            found.append((llm.fingerprint, llm.generate(PROMPT, PARAMS).usage.cached_tokens))
    (first, hits), (second, others) = found
    assert first == second
    assert (hits, others) == (0, 0)


def _truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _swap(path: Path, rng: random.Random) -> None:
    other = rng.choice([p for p in files(path.parents[2]) if p != path])
    shutil.copyfile(other, path)


def _remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def _directory(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _longer(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(rng.randrange(1, 9)))


@pytest.mark.parametrize("damage", [_truncate, _flip, _swap, _remove, _directory, _longer])
def test_a_damaged_file_is_computed_again(
    damage: Callable[[Path, random.Random], None], tmp_path: Path
) -> None:
    [plain] = ask("reference", tmp_path, PROMPT)
    for seed in range(6):
        rng = random.Random(seed)
        copy = tmp_path / f"copy{seed}"
        shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy*"))
        damage(rng.choice(files(copy)), rng)
        [found] = ask("reference", copy, PROMPT)
        assert found.token_ids == plain.token_ids
        assert found.usage.cached_tokens < 96
        [mended] = ask("reference", copy, PROMPT)
        assert mended.token_ids == plain.token_ids
        if damage is not _directory:
            assert mended.usage.cached_tokens == 96


def test_the_size_is_bounded_and_the_oldest_leave_first(tmp_path: Path) -> None:
    ask("fake", tmp_path, PROMPT)
    limit = sum(path.stat().st_size for path in files(tmp_path))
    ask("fake", tmp_path, [5] * 100, [6] * 100, cache_dir_size=limit)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    [kept] = ask("fake", tmp_path, [6] * 100, cache_dir_size=limit)
    assert kept.usage.cached_tokens > 0
    [gone] = ask("fake", tmp_path, PROMPT, cache_dir_size=limit)
    assert gone.usage.cached_tokens == 0


def test_few_free_blocks_limit_the_hit_and_not_the_answer(tmp_path: Path) -> None:
    [plain] = ask("fake", tmp_path, PROMPT)
    options: dict[str, Any] = {**SMALL, "kv_blocks": 16, "check": True}
    loaded = tiny_parts("fake", EngineConfig(check=True))
    with LLM.from_loaded(loaded, cache_dir=str(tmp_path), **options) as llm:
        stream = llm.stream([9] * 130, SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
        next(stream)
        assert llm.generate(PROMPT, PARAMS).token_ids == plain.token_ids


def test_files_are_private_and_partial_ones_are_removed(tmp_path: Path) -> None:
    ask("fake", tmp_path, PROMPT)
    for path in (*files(tmp_path), tmp_path / "key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    block = files(tmp_path)[0]
    left = block.with_name(f"{block.name}.12345678.partial")
    left.write_bytes(b"x")
    ask("fake", tmp_path, PROMPT)
    assert not left.exists()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """The user may name a directory that has other files, such as a repository."""
    others = [
        *("docs/en/guide.md", "data/v1/download.partial", "objects/ab/" + "c" * 38),
        *("ab/cd/" + "e" * 32 + ".0", "f" * 32 + "/ab/notes.txt", "f" * 32 + "/ab/x.partial"),
    ]
    for name in others:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 5000)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "ab").write_text("a file, not a folder")
    ask("fake", tmp_path, PROMPT, cache_dir_size=8000)
    ask("fake", tmp_path, PROMPT, cache_dir_size=8000)
    assert all((tmp_path / name).read_bytes() == b"x" * 5000 for name in others)


def test_a_size_that_holds_no_block_is_refused_by_name(tmp_path: Path) -> None:
    for options in ({"cache_dir_size": 1}, {"cache_dir_size": 1 << 20, "no_dir": True}):
        folder = None if options.pop("no_dir", False) else tmp_path
        with pytest.raises(ParameterError) as caught:
            ask("fake", folder, PROMPT, **options)
        assert caught.value.param == "cache_dir_size"
    with pytest.raises(ParameterError, match="cache_dir"):
        EngineConfig(cache_dir="")


def test_a_lost_key_hides_the_old_blocks(tmp_path: Path) -> None:
    ask("fake", tmp_path, PROMPT)
    (tmp_path / "key").write_bytes(b"short")
    [miss] = ask("fake", tmp_path, PROMPT)
    [hit] = ask("fake", tmp_path, PROMPT)
    assert (miss.usage.cached_tokens, hit.usage.cached_tokens) == (0, 96)


def test_a_full_disk_stops_storing_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verbatim.engine.loading import disk_cache

    def full(self: Any, name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_cache.DiskCache, "_write", full)
    [done] = ask("fake", tmp_path, PROMPT)
    assert len(done.token_ids) == 12
    assert not files(tmp_path)


def test_a_directory_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ParameterError, match="cache_dir: cannot use") as caught:
        ask("fake", tmp_path / "file", PROMPT)
    assert caught.value.param == "cache_dir"
    with pytest.raises(ParameterError, match="prefix cache"):
        ask("fake", tmp_path, PROMPT, prefix_cache=False)


CHILD = """
import random, sys
sys.path.insert(0, sys.argv[1])
from engine_rig import tiny_parts
from verbatim import LLM, SamplingParams
from verbatim.base.config import EngineConfig
options = dict(speculate="off", kv_blocks=40, context=160, cache_dir=sys.argv[2])
llm = LLM.from_loaded(tiny_parts("fake", EngineConfig()), **options)
rng = random.Random(int(sys.argv[3]))
while True:
    start = rng.randrange(8)
    llm.generate([2 + (i + start) % 90 for i in range(100)], SamplingParams(max_tokens=2))
    print("one", flush=True)
    if rng.random() < 0.2:
        for path in sorted(__import__("pathlib").Path(sys.argv[2]).glob("*/*/*"))[::3]:
            path.unlink(missing_ok=True)
"""


def _kill(folder: Path, times: int) -> None:
    prompts = [[2 + (i + start) % 90 for i in range(100)] for start in range(8)]
    plain = [c.token_ids for c in ask("fake", None, *prompts)]
    hits = 0
    for seed in range(times):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(folder), str(seed)],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        for _ in range(random.Random(seed).randrange(1, 12)):
            assert child.stdout.readline() == b"one\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        found = ask("fake", folder, *prompts)
        assert [c.token_ids for c in found] == plain
        hits += sum(c.usage.cached_tokens for c in found)
    assert hits > 0


def test_a_killed_engine_leaves_no_wrong_block(tmp_path: Path) -> None:
    _kill(tmp_path, 3)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_an_engine_killed_200_times_leaves_no_wrong_block(tmp_path: Path) -> None:
    _kill(tmp_path, 200)
