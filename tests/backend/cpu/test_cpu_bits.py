"""The same bits on every instruction set and with any number of threads.

Every instruction set of ARM and x86 must reproduce digests.json. versions.json holds one hash of
all digests per NUMERICS_VERSION, so a digest cannot change without a new version, nor a version
without new digests. To record both:
    python tests/backend/cpu/test_cpu_bits.py
It rejects a changed digest while NUMERICS_VERSION stays the same; new digests may be added at any
time. Both files edited together fail too: every state of digests.json in git's history is compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_isas import HAVE as ISAS
from cpu_isas import every_isa
from model_file import write_model

from parity_types import NEWER_FAMILIES, RECURRENT_FAMILIES
from verbatim.base.config import EngineConfig
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, StepPlan
from verbatim.model.loading.load import Model, load_model
from verbatim.testing.tiny_models import tiny_model

cpu = pytest.importorskip("verbatim.backend.cpu.backend")
pytestmark = pytest.mark.native

FILE = Path(__file__).parent / "digests.json"
VERSIONS = Path(__file__).parent / "versions.json"
SOURCES = Path(__file__).parents[3] / "src" / "verbatim" / "backend" / "cpu"
INCLUDES = [f"-I{SOURCES / part}" for part in ("kernels", "sampler")]
PROMPT = (1, 2683, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198)


def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def hash_of(digests: dict[str, Any]) -> str:
    """One hash of all committed digests. It excludes the version, so that a version without a new
    digest repeats the hash."""
    values = {key: value for key, value in digests.items() if key != "numerics"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def mismatch(code: str, digests: dict[str, Any], versions: dict[str, str]) -> str | None:
    """The reason why NUMERICS_VERSION (`code`), digests.json and versions.json are inconsistent;
    None if they are consistent."""
    if digests["numerics"] != code:
        return f"the code is {code}, digests.json is {digests['numerics']}"
    if code not in versions:
        return f"versions.json has no entry for {code}"
    if hash_of(digests) != versions[code]:
        return f"a digest was changed, and the version is still {code}"
    if repeats := [
        version
        for version, value in versions.items()
        if value == versions[code] and version != code
    ]:
        return f"{code} has the same digests as {repeats[0]}"
    return None


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The digests of `before` that `now` lacks or changes under the same version."""
    if before["numerics"] != now["numerics"]:
        return []
    old, new = ({**digests, **digests["kernels"]} for digests in (before, now))
    return [key for key in old if key != "kernels" and new.get(key) != old[key]]


def history() -> dict[str, dict[str, Any]]:
    """Every committed state of digests.json by its commit. A shallow clone has fewer."""
    git = ["git", "-C", str(FILE.parent)]
    log = subprocess.run(
        [*git, "log", "--format=%h", "--", FILE.name], capture_output=True, text=True
    )
    return {
        commit: json.loads(subprocess.check_output([*git, "show", f"{commit}:./{FILE.name}"]))
        for commit in log.stdout.split()
    }


def test_no_digest_ever_changed_under_its_version() -> None:
    if shutil.which("git") is None or not (states := history()):
        pytest.skip("needs a git clone: it compares the digests with their history")
    found = {commit: changed(before, committed()) for commit, before in states.items()}
    assert not any(found.values()), f"{found}: bump NUMERICS_VERSION, then record the digests"


def test_a_digest_and_its_hash_edited_together_are_a_change() -> None:
    digests = committed()
    for kernel in digests["kernels"]:
        others = {name: value for name, value in digests["kernels"].items() if name != kernel}
        for kernels in (others, others | {kernel: "0" * 16}):
            edited = digests | {"kernels": kernels}
            versions = {cpu.NUMERICS_VERSION: hash_of(edited)}
            assert mismatch(cpu.NUMERICS_VERSION, edited, versions) is None
            assert changed(digests, edited) == [kernel]
    assert changed(digests, digests | {"tokens": []}) == ["tokens"]
    added = digests | {"kernels": digests["kernels"] | {"new": "0" * 16}}
    assert changed(digests, added) == []
    assert changed(digests, digests | {"numerics": "cpu-999", "tokens": []}) == []


def test_digests_and_version_are_consistent() -> None:
    assert mismatch(cpu.NUMERICS_VERSION, committed(), json.loads(VERSIONS.read_text())) is None


def test_neither_digests_nor_version_can_change_alone() -> None:
    code, digests, versions = cpu.NUMERICS_VERSION, committed(), json.loads(VERSIONS.read_text())
    for kernel in digests["kernels"]:
        edited = digests | {"kernels": digests["kernels"] | {kernel: "0" * 16}}
        assert (
            mismatch(code, edited, versions)
            == f"a digest was changed, and the version is still {code}"
        )
    assert mismatch(code, digests | {"logits_200": "0" * 64}, versions) is not None
    bumped = digests | {"numerics": "cpu-999"}
    assert mismatch("cpu-999", digests, versions) == f"the code is cpu-999, digests.json is {code}"
    assert mismatch("cpu-999", bumped, versions) == "versions.json has no entry for cpu-999"
    repeated = versions | {"cpu-999": hash_of(bumped)}
    assert mismatch("cpu-999", bumped, repeated) == f"cpu-999 has the same digests as {code}"


@pytest.mark.parametrize("isa", every_isa())
def test_every_kernel_reproduces_its_digest(isa: str) -> None:
    assert dict(cpu.native.digests(isa, 2)) == committed()["kernels"]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_number_of_threads_does_not_change_the_bits(threads: int) -> None:
    assert dict(cpu.native.digests(ISAS[-1], threads)) == committed()["kernels"]


def test_chunked_prefill_does_not_change_the_bits() -> None:
    kernels = committed()["kernels"]
    assert kernels["model q4_1"] == kernels["model q4_1 other pieces"]


def states(model: Model, tokens: tuple[int, ...], cuts: list[int], threads: int = 2) -> bytes:
    """The final state of every token and the logits of the last one. The prefill is chunked at the
    positions `cuts`."""
    backend = cpu.CpuBackend(model, EngineConfig(threads=threads))
    groups, blocks = len(model.spec.groups), len(tokens) // 16 + 1
    backend.allocate((blocks,) * groups)
    table = (tuple(range(blocks)),) * groups
    draw = DrawSpec(SamplingParams(temperature=0.0), 0, len(tokens))
    result = b""
    for i, (start, end) in enumerate(pairwise([0, *cuts, len(tokens)])):
        last = end == len(tokens)
        step = SeqStep(
            0,
            tokens[start:end],
            start,
            table,
            draws=int(last),
            draw=draw if last else None,
            hidden=True,
        )
        hidden = backend.execute(StepPlan(i, (step,))).sequences[0].hidden
        assert np.isfinite(hidden).all()
        result += hidden.tobytes()
    result += backend._engine.logits().tobytes()
    backend.close()
    return result


@pytest.mark.parametrize("family", [*NEWER_FAMILIES, *RECURRENT_FAMILIES])
def test_newer_families_have_the_same_bits_everywhere(family: str) -> None:
    """Attention sinks, scales, norms over all heads, sigmoid routers: every instruction set gives
    the bits of the scalar kernels, with any number of threads and in any chunks."""
    model = tiny_model(family, type="q8_0")
    tokens = tuple(np.random.default_rng(2).integers(0, 260, 70).tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERBATIM_ISA", "scalar")
        scalar = states(model, tokens, [])
        patch.setenv("VERBATIM_ISA", ISAS[-1])
        assert states(model, tokens, []) == scalar
        assert states(model, tokens, [1, 20, 37], threads=3) == scalar


# ---- the default model


TYPES = {"int8": "", "int12": "int12_"}  # of activations -> prefix of the digests' names


def generate(
    path: Path,
    count: int,
    activations: str,
    threads: int | None = None,
    known: tuple[int, ...] = (),
) -> tuple[list[int], str]:
    """Greedy tokens, and a digest of all logits. The first step has the prompt and the `known`
    tokens after it, and draws after each: the bits of single steps."""
    config = EngineConfig(threads=threads, activations=activations)
    backend = cpu.CpuBackend(load_model(path), config)
    backend.allocate((32,))
    digest = hashlib.sha256()
    tokens: list[int] = []
    now, start = (*PROMPT, *known), 0
    spec = DrawSpec(SamplingParams(temperature=0.0), 0, len(PROMPT))
    while len(tokens) < count:
        draws = 1 if start else len(known) + 1
        step = SeqStep(0, now, start, (tuple(range(32)),), draws=draws, draw=spec)
        drawn = backend.execute(StepPlan(start, (step,))).sequences[0].drawn
        tokens += [one.token for one in drawn]
        digest.update(backend._engine.logits().tobytes())
        start += len(now)
        now = (tokens[-1],)
    backend.close()
    return tokens, digest.hexdigest()


def recorded(activations: str, count: int) -> tuple[list[int], str]:
    """What generate() returned when the digests were recorded, for 8 or 200 tokens."""
    digests, prefix = committed(), TYPES[activations]
    return digests[f"{prefix}tokens"][:count], digests[f"{prefix}logits_{count}"]


@pytest.mark.model
@pytest.mark.parametrize("activations", TYPES)
@pytest.mark.parametrize("isa", every_isa(without=("scalar",)))
def test_the_default_model_reproduces_its_tokens_and_logits(
    isa: str, activations: str, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best instruction set decodes all 200. The others decode the last eight, and compute the
    positions before them in one step."""
    monkeypatch.setenv("VERBATIM_ISA", isa)
    expected = recorded(activations, 200)
    known = () if isa == ISAS[-1] else tuple(expected[0][:191])
    assert generate(default_model, 200, activations, known=known) == expected


@pytest.mark.model
@pytest.mark.parametrize(
    ("isa", "threads", "activations"),
    [  # the digests of the scalar kernels hold for both types; here they compute a whole model
        pytest.param(isa, threads, kind, marks=[] if kind == tested else pytest.mark.soak)
        for isa, threads, tested in (
            ("scalar", 2, "int12"),
            (ISAS[-1], 1, "int8"),
            (ISAS[-1], 7, "int12"),
        )
        for kind in TYPES
    ],
)
def test_the_default_model_has_the_same_bits_scalar_and_with_any_threads(
    isa: str, threads: int, activations: str, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERBATIM_ISA", isa)
    assert generate(default_model, 8, activations, threads) == recorded(activations, 8)


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("activations", TYPES)
def test_the_default_model_has_the_same_200_tokens_with_scalar_kernels(
    activations: str, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERBATIM_ISA", "scalar")
    assert generate(default_model, 200, activations) == recorded(activations, 200)


def test_an_unknown_instruction_set_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="nonesuch is not available on this machine; it has: scalar"
    ):
        cpu.native.digests("nonesuch")


# ---- other machines, sanitizers

EXACT = ["-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# kernels.cpp is compiled once per instruction set, and digest_main.cpp is a program of MAINS.
PORTABLE = sorted(
    path.stem
    for path in (SOURCES / "kernels").glob("*.cpp")
    if path.stem not in ("kernels", "digest_main")
)
MAINS = {
    "digest": SOURCES / "kernels" / "digest_main.cpp",
    "model": Path(__file__).with_name("model_main.cpp"),
}
ARM_SETS = {
    "scalar": ["-DVB_ISA_SCALAR"],
    "neon": ["-DVB_ISA_NEON", "-march=armv8.2-a+dotprod+fp16"],
    "i8mm": ["-DVB_ISA_I8MM", "-march=armv8.2-a+dotprod+fp16+i8mm"],
}
AVX512 = [
    f"-m{f}"
    for f in ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")
]
X86_SETS = {
    "scalar": ["-DVB_ISA_SCALAR"],
    "avx2": ["-DVB_ISA_AVX2", "-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-DVB_ISA_AVX512", *AVX512],
    "amx": ["-DVB_ISA_AMX", *AVX512, "-mamx-tile", "-mamx-int8"],
}


def build(compiler: str, sets: dict[str, list[str]], flags: list[str], folder: Path) -> None:
    """Compile the programs of MAINS, which need no Python, from the kernels' sources."""
    have = [f"-DVB_HAVE_{isa.upper()}" for isa in sets]
    jobs = [(SOURCES / "kernels" / f"{name}.cpp", have, name) for name in PORTABLE]
    for isa, own in sets.items():
        macros = [f"-DVB_NS=verbatim_{isa}", f'-DVB_NAME="{isa}"', f"-DVB_GETTER=kernels_{isa}"]
        jobs += [
            (SOURCES / name / f"{name}.cpp", [*macros, *own], f"{name}.{isa}")
            for name in ("kernels", "sampler")
        ]
    command = [compiler, *EXACT, *INCLUDES, *flags]
    for source, own, target in jobs:
        subprocess.run([*command, *own, "-c", source, "-o", folder / f"{target}.o"], check=True)
    for name, main in MAINS.items():
        subprocess.run(
            [*command, main, *sorted(folder.glob("*.o")), "-o", folder / name, "-lpthread"],
            check=True,
        )


def check_output(out: str, isas: set[str]) -> None:
    rows = [line.split("\t") for line in out.splitlines()]
    assert {isa for isa, _, _ in rows} == isas
    for isa in isas:
        assert {name: value for i, name, value in rows if i == isa} == committed()["kernels"], isa


class Emulator:
    """Runs cross-compiled 64-bit ARM programs under qemu.

    The CPU `max` has every instruction set, neoverse-n1 no i8mm, cortex-a72 no dot products."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        compiler, qemu = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
        if compiler is None or qemu is None:
            pytest.skip("needs g++-aarch64-linux-gnu and qemu-user-static")
        self.qemu, self.folder = qemu, folder
        build(compiler, ARM_SETS, flags, folder)

    def run(self, chip: str, program: str, *arguments: object, code: int = 0) -> tuple[bytes, str]:
        command = [
            self.qemu,
            "-L",
            "/usr/aarch64-linux-gnu",
            "-cpu",
            chip,
            self.folder / program,
            *map(str, arguments),
        ]
        done = subprocess.run(command, capture_output=True)
        assert done.returncode == code, done.stderr.decode()[-4000:]
        return done.stdout, done.stderr.decode()


def test_the_emulated_programs_fit_the_engine(tmp_path: Path) -> None:
    """They run only under `make soak`: here the model is written, and the programs are parsed."""
    write_model(tiny_model("llama"), PROMPT, 1, tmp_path / "model")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    parse = [compiler, *EXACT, *INCLUDES, "-fsyntax-only"]
    subprocess.run([*parse, *MAINS.values()], check=True)


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("arm"), ["-O2", "-static"])


@pytest.mark.qemu
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_arm_gives_the_same_bits(arm: Emulator) -> None:
    """Every kernel and the small models: scalar, NEON and i8mm."""
    out, _ = arm.run("max", "digest")
    check_output(out.decode(), set(ARM_SETS))


@pytest.mark.qemu
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_arm_selects_the_best_instruction_set_of_the_cpu(arm: Emulator) -> None:
    """It rejects a set that the CPU lacks, before an illegal instruction could end the process."""
    for chip, isa in (("max", "i8mm"), ("neoverse-n1", "neon")):
        check_output(arm.run(chip, "digest", "auto")[0].decode(), {isa})
    rejected = (
        ("neoverse-n1", "i8mm", "scalar, neon"),
        ("cortex-a72", "neon", "scalar"),
        ("max", "i9mm", "scalar, neon, i8mm"),
    )
    for chip, isa, has in rejected:
        _, error = arm.run(chip, "digest", isa, code=2)
        assert error == f"instruction set {isa} is not available on this machine; it has: {has}\n"


@pytest.mark.qemu
@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("activations", TYPES)
@pytest.mark.parametrize(
    ("chip", "isa"), [("max", "i8mm"), ("neoverse-n1", "neon"), ("cortex-a72", "scalar")]
)
def test_the_default_model_has_the_same_bits_on_arm(
    chip: str, isa: str, activations: str, arm: Emulator, default_model: Path, tmp_path: Path
) -> None:
    """The committed tokens and logits, with the instruction set that each CPU selects."""
    model = load_model(default_model)
    tokens, digest = recorded(activations, 200)
    write_model(model, PROMPT, len(tokens), tmp_path / "model", fine=activations == "int12")
    logits, chosen = arm.run(chip, "model", tmp_path / "model")
    assert chosen == f"{isa}\n"
    assert (
        np.frombuffer(logits, np.float32).reshape(-1, model.spec.vocab).argmax(axis=1).tolist()
        == tokens
    )
    assert hashlib.sha256(logits).hexdigest() == digest


@pytest.fixture(scope="module")
def sanitized_thread_pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program of the thread pool, with the thread sanitizer."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = tmp_path_factory.mktemp("pool") / "thread_pool"
    source = Path(__file__).with_name("thread_pool_main.cpp")
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    built = subprocess.run(
        [compiler, *flags, *INCLUDES, source, "-o", program], capture_output=True, text=True
    )
    if "cannot find" in built.stderr:
        pytest.skip("this compiler comes without the thread sanitizer's library")
    assert built.returncode == 0, built.stderr[-4000:]
    return program


@pytest.mark.parametrize(
    ("threads", "rounds"),
    [(4, 10), *[pytest.param(*more, marks=pytest.mark.soak) for more in ((2, 100), (9, 1000))]],
)
def test_the_thread_pool_runs_every_work_item_once_without_data_races(
    threads: int, rounds: int, sanitized_thread_pool: Path
) -> None:
    """The thread sanitizer checks the memory model of C++, so the result also holds for CPUs that
    reorder memory more than this one. It orders events by synchronisation and not by time, so few
    rounds find a missing one."""
    command = [sanitized_thread_pool, str(threads), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_kernel_accesses_memory_out_of_bounds(tmp_path: Path) -> None:
    """Address and undefined-behaviour sanitizers over every kernel and the small models, on all
    instruction sets of this machine."""
    compiler = shutil.which("g++")
    sets = X86_SETS if platform.machine() in ("x86_64", "AMD64") else ARM_SETS
    if compiler is None:
        pytest.skip("needs g++")
    build(compiler, sets, SANITIZERS, tmp_path)
    done = subprocess.run([tmp_path / "digest"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    check_output(done.stdout, set(ISAS))


@pytest.mark.qemu
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_kernel_accesses_memory_out_of_bounds_on_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # leak detection needs ptrace, which the emulator lacks
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    emulator = Emulator(tmp_path, SANITIZERS)
    for isa in ("neon", "i8mm"):
        check_output(emulator.run("max", "digest", isa)[0].decode(), {isa})


def record(found: dict[str, Any]) -> None:
    """Write digests.json and versions.json. Exits if a recorded digest of the same version would
    change."""
    before, versions = committed(), json.loads(VERSIONS.read_text())
    if names := changed(before, found):
        raise SystemExit(
            f"{', '.join(names)}: not the recorded digests. Bump NUMERICS_VERSION first."
        )
    versions[found["numerics"]] = hash_of(found)
    if why := mismatch(found["numerics"], found, versions):
        raise SystemExit(why)
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    VERSIONS.write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    from verbatim.hub import catalog

    path = catalog.resolve(catalog.DEFAULT)
    kernels = dict(cpu.native.digests(os.environ.get("VERBATIM_ISA", ISAS[-1]), 2))
    found = {"numerics": cpu.NUMERICS_VERSION, "kernels": kernels}
    for activations, prefix in TYPES.items():
        found[f"{prefix}tokens"], found[f"{prefix}logits_200"] = generate(path, 200, activations)
        found[f"{prefix}logits_8"] = generate(path, 8, activations)[1]
    record(found)
