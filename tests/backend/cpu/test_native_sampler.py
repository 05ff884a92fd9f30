"""The native sampler against sampling/pipeline.py, which is its specification.

Token, log-probability and alternatives are equal to the bit, on every instruction set.
"""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cpu_isas import every_isa

from filter_values import STRONG, WEAK, random_value
from verbatim.base.errors import ParameterError
from verbatim.base.params import FIELDS, FILTERS, SamplingParams
from verbatim.base.records import DrawSpec
from verbatim.sampling.logprobs import score_targets
from verbatim.sampling.pipeline import Row, sample_rows

native = pytest.importorskip("verbatim.backend.cpu._native")
pytestmark = pytest.mark.native


def random_row(r: random.Random, vocab: int) -> Row | None:
    def maybe(chance: float, value: Any, default: Any) -> Any:
        return value if r.random() < chance else default

    ids = [r.randrange(vocab) for _ in range(4)]
    filters: Any = {name: random_value(name, r.random()) for name in FILTERS if r.random() < 0.35}
    if "top_k" in filters:
        filters["top_k"] = r.choice((r.randrange(1, 200), r.randrange(1, vocab + 2)))
    try:
        params = SamplingParams(
            temperature=r.choice((0.0, 1e-300, 1e-30, 1e-3, 0.3, 1.0, 1.0, 1.5, 9.0, 100.0)),
            **filters,
            xtc_threshold=r.uniform(0, 0.3),
            repetition_penalty=maybe(0.3, r.uniform(0.7, 1.5), 1.0),
            frequency_penalty=maybe(0.3, r.uniform(-2, 2), 0.0),
            presence_penalty=maybe(0.3, r.uniform(-2, 2), 0.0),
            dry_multiplier=maybe(0.3, r.uniform(0.1, 2), 0.0),
            dry_allowed_length=r.randrange(1, 4),
            dry_range=maybe(0.3, r.randrange(1, 20), 0),
            no_repeat_ngram=maybe(0.3, r.randrange(1, 4), 0),
            logit_bias=maybe(0.3, {i: r.uniform(-5, 5) for i in ids}, ()),
            allowed_token_ids=maybe(0.1, [r.randrange(vocab) for _ in range(9)], None),
            banned_token_ids=maybe(0.2, ids[:2], ()),
            min_tokens=maybe(0.3, 50, 0),
            logprobs=maybe(0.5, r.randrange(0, 8), None),
            best_of=maybe(0.2, 2, None),
            logprobs_mode=maybe(0.5, "processed", "raw"),
        )
    except ParameterError:  # every allowed id happened to be banned
        return None
    history = tuple(r.randrange(min(vocab, 6)) for _ in range(r.randrange(40)))
    mask = maybe(
        0.2, bytes(r.randrange(256) for _ in range(r.choice(((vocab + 7) // 8, vocab // 16)))), None
    )
    spec = DrawSpec(
        params,
        r.getrandbits(64),
        r.randrange(len(history) + 1),
        history,
        withheld=tuple(ids[:1]),
        breakers=((1,), (2, 3)),
    )
    return Row(spec, len(history), history if params.needs_history else (), mask)


def random_logits(r: random.Random, rows: int, vocab: int) -> np.ndarray:
    logits = np.random.default_rng(r.getrandbits(32)).standard_normal((rows, vocab))
    logits *= r.choice((0.0, 1e-20, 0.1, 1.0, 3.0, 10.0, 1e4, 5e37))
    if r.random() < 0.3:
        # relative to this outlier, small logits round to the same distance
        logits[:, r.randrange(vocab)] += 10.0
    if r.random() < 0.3:
        logits = np.round(logits)  # many ties
    if r.random() < 0.2:
        logits[:, np.random.default_rng(r.getrandbits(32)).random(vocab) < r.random()] = -np.inf
        logits[:, r.randrange(vocab)] = 0.0
    return logits.astype(np.float32)


def random_case(r: random.Random) -> tuple[np.ndarray, list[Row]]:
    vocab = r.choice((1, 2, 7, 33, 63, 64, 65, 100, 1000, 1024, 5000))
    rows = [row for row in (random_row(r, vocab) for _ in range(6)) if row is not None]
    return random_logits(r, len(rows), vocab), rows


def native_draws(isa: str, logits: np.ndarray, rows: list[Row], threads: int = 1) -> list[Any]:
    """Draws twice: the sampler finds the largest logits itself, or gets them from the caller, as it
    does from the engine's output matmul."""
    from verbatim.backend.cpu.sampler import NativeSampler

    sampler = NativeSampler(native, None)
    native_rows = [sampler.native_row(row) for row in rows]
    drawn = list(native.RowSampler(isa, threads).draw(logits, native_rows))
    assert list(native.RowSampler(isa, threads).draw(logits, native_rows, True)) == drawn
    return drawn


def expected_draws(logits: np.ndarray, rows: list[Row]) -> list[Any]:
    return [(d.token, d.logprob, d.top) for d in sample_rows(logits, rows)]


# The specification is slow, so its draws are computed once and compared with every instruction set.
Case = tuple[np.ndarray, list[Row], list[Any]]


@cache
def specified_cases() -> list[Case]:
    r = random.Random(11)
    cases = [random_case(r) for _ in range(400)]
    return [(logits, rows, expected_draws(logits, rows)) for logits, rows in cases]


@pytest.mark.parametrize("isa", every_isa())
def test_draws_have_the_same_bits_as_the_specification(isa: str) -> None:
    for number, (logits, rows, expected) in enumerate(specified_cases()):
        assert native_draws(isa, logits, rows, threads=1 + number % 2) == expected, rows


def one_stage(r: random.Random) -> dict[str, Any]:
    return r.choice((
        *({name: random_value(name, r.random())} for name in FILTERS),
        {"xtc_probability": 1.0, "xtc_threshold": r.uniform(0.0, 0.05)},
        {"repetition_penalty": r.uniform(0.7, 1.5)}, {"frequency_penalty": r.uniform(-2, 2)},
        {"presence_penalty": r.uniform(-2, 2)},
        {
            "dry_multiplier": 1.0, "dry_allowed_length": r.randrange(1, 4),
            "dry_range": r.choice((0, 12)),
        },
        {"no_repeat_ngram": r.randrange(1, 4)},
    ))  # fmt: skip


def stages_alone(r: random.Random, count: int) -> tuple[np.ndarray, list[Row]]:
    """Rows of 70 ids with one sampling stage each; logprobs=70 reports the whole distribution."""
    rows = []
    for _ in range(count):
        params = SamplingParams(
            **one_stage(r), logprobs=70, logprobs_mode="processed", temperature=r.choice((1.0, 0.7))
        )
        history = tuple(r.randrange(6) for _ in range(40))
        spec = DrawSpec(params, r.getrandbits(64), r.randrange(40), breakers=((1,), (2, 3)))
        rows.append(Row(spec, 40, history if params.needs_history else ()))
    return np.random.default_rng(r.getrandbits(32)).normal(size=(count, 70)).astype(
        np.float32
    ), rows


@cache
def specified_stages() -> Case:
    logits, rows = stages_alone(random.Random(12), 1500)
    return logits, rows, expected_draws(logits, rows)


@pytest.mark.parametrize("isa", every_isa())
def test_each_sampling_stage_alone_gives_the_same_distribution(isa: str) -> None:
    logits, rows, expected = specified_stages()
    assert native_draws(isa, logits, rows) == expected


@cache
def specified_winners(temperature: float) -> list[Case]:
    r = np.random.default_rng(5)
    params = SamplingParams(temperature=temperature, repetition_penalty=1.2)
    history = tuple(range(0, 900, 7))
    cases: list[Case] = []
    for spread in (0.0, 1.0, 4.0):
        logits = np.repeat((r.standard_normal((1, 1000)) * spread).astype(np.float32), 200, axis=0)
        rows = [Row(DrawSpec(params, 2**64 - 1 - i, 0), 2**33 + i, history) for i in range(200)]
        cases.append((logits, rows, [d.token for d in sample_rows(logits, rows)]))
    return cases


@pytest.mark.parametrize("temperature", [0.7, 1.0, 30.0])
@pytest.mark.parametrize("isa", every_isa())
def test_ids_that_the_draw_skips_could_not_win(isa: str, temperature: float) -> None:
    """The draw computes the noise of few ids. Over many positions, with peaked and flat rows, its
    winner is the winner over all ids."""
    for logits, rows, expected in specified_winners(temperature):
        assert [t for t, _, _ in native_draws(isa, logits, rows)] == expected


LARGE: list[dict[str, Any]] = [
    {"temperature": 0.8}, {"top_p": 0.9}, {"top_p": 0.9999, "temperature": 100.0},
    {"typical_p": 0.9, "temperature": 0.6}, {"min_p": 0.05},
    {
        "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
    },
    {"top_k": 60_000, "typical_p": 0.5}, *STRONG.values(), WEAK,
    {"xtc_probability": 1.0, "logprobs": 3}, {"logprobs": 1000},
    {"logprobs": 5, "logprobs_mode": "processed", "temperature": 2.0},
    {"temperature": 0.0, "logprobs": 2},
]  # fmt: skip


@cache
def specified_large() -> list[Case]:
    r = np.random.default_rng(3)
    cases: list[Case] = []
    for scale in (0.5, 3.0):
        logits = (r.standard_normal((len(LARGE), 150_001)) * scale).astype(np.float32)
        history = tuple(r.integers(0, 150_001, 2000).tolist())
        rows = []
        for i, settings in enumerate(LARGE):
            params = SamplingParams(**settings)
            rows.append(
                Row(DrawSpec(params, i, 900), 2000, history if params.needs_history else ())
            )
        cases.append((logits, rows, expected_draws(logits, rows)))
    return cases


@pytest.mark.parametrize("isa", every_isa())
def test_draws_have_the_same_bits_on_a_large_vocabulary(isa: str) -> None:
    """150,001 ids: many chunks, full buckets, lists of tens of thousands."""
    for logits, rows, expected in specified_large():
        assert native_draws(isa, logits, rows, threads=2) == expected


def test_log_probabilities_are_computed_only_if_requested() -> None:
    """The kernel and the specification compute the normaliser only for logprobs or best_of."""
    logits = np.random.default_rng(0).standard_normal((1, 100)).astype(np.float32)
    for settings, wanted in (
        ({}, False),
        ({"logprobs": 0}, True),
        ({"best_of": 2}, True),
        ({"n": 2}, False),
    ):
        row = Row(DrawSpec(SamplingParams(**settings), 1, 0), 0)
        for drawn in (native_draws("", logits, [row])[0], sample_rows(logits, [row])[0]):
            assert (drawn[1] < 0.0) == wanted, settings


@pytest.mark.parametrize("isa", every_isa())
def test_scored_rows_equal_those_of_the_specification_bit_for_bit(isa: str) -> None:
    r = random.Random(7)
    for _ in range(60):
        vocab = r.choice((1, 2, 63, 64, 65, 1000, 5000))
        logits = random_logits(r, 3, vocab)
        targets = [r.randrange(vocab) for _ in range(3)]
        top = r.choice((0, 1, 5, 70))
        wanted = [(s.token, s.logprob, s.top) for s in score_targets(logits, targets, top)]
        rows = [(target, top) for target in targets]
        for with_maxes in (False, True):
            found = native.RowSampler(isa, 2).draw(logits, rows, with_maxes)
            assert list(found) == wanted
    with pytest.raises(ValueError, match="vocabulary"):
        native.RowSampler(isa, 1).draw(np.zeros((1, 8), np.float32), [(8, 0)])


def test_only_explained_and_beam_rows_fall_back_to_the_pipeline() -> None:
    from verbatim.backend.cpu.sampler import NativeSampler

    logits = np.random.default_rng(1).normal(size=(4, 90)).astype(np.float32)
    seen: list[Any] = []

    class Engine:
        def logits(self) -> np.ndarray:
            return logits

        def sample(self, rows: list[Any], first: int) -> list[Any]:
            seen.append([row is not None for row in rows])
            return list(native.RowSampler("", 2).draw(logits, rows))

    plain, explained = SamplingParams(logprobs=2), SamplingParams(explain=3, top_k=9)
    specs = [
        DrawSpec(plain, 1, 0),
        DrawSpec(explained, 2, 0),
        DrawSpec(SamplingParams(num_beams=4), 3, 0, beam=8),
        DrawSpec(plain, 4, 0),
    ]
    rows = [Row(spec, i) for i, spec in enumerate(specs)]
    sampler = NativeSampler(native, Engine())
    assert sampler.draw(rows) == sample_rows(logits, rows)
    assert seen == [[True, False, False, True]]


def test_a_row_that_is_not_finite_is_an_error_and_a_fully_masked_row_draws_minus_one() -> None:
    from verbatim.backend.cpu.sampler import NativeSampler

    native_rows = [NativeSampler(native, None).native_row(Row(DrawSpec(SamplingParams(), 1, 0), 0))]
    for isa, bad, at, given_maxima in product(
        native.isas(), (np.nan, np.inf), (17, 70, 131), (False, True)
    ):
        logits = np.zeros((1, 133), np.float32)
        logits[0, at] = bad
        with pytest.raises(ValueError, match="finite"):
            native.RowSampler(isa, 1).draw(logits, native_rows, given_maxima)
    masked = Row(DrawSpec(SamplingParams(), 1, 0), 0, mask=bytes(5))
    assert native_draws("scalar", np.zeros((1, 40), np.float32), [masked])[0][0] == -1


def test_the_kernel_accepts_the_ends_of_every_parameter_range() -> None:
    """A value that SamplingParams allows and the kernel cannot hold would end the engine."""
    from verbatim.backend.cpu.sampler import NativeSampler

    logits = np.random.default_rng(2).normal(size=(1, 50)).astype(np.float32)
    for name in NativeSampler(native, None).same:
        for end in (FIELDS[name].low, FIELDS[name].high):
            if end is not None:
                params = SamplingParams.from_mapping(
                    {name: end, **({"dry_multiplier": 1.0} if name.startswith("dry_") else {})}
                )
                row = Row(
                    DrawSpec(params, 1, 0),
                    9,
                    (1, 2, 3, 1, 2, 3, 1, 2, 3) if params.needs_history else (),
                )
                assert native_draws("", logits, [row]) == expected_draws(logits, [row]), (name, end)


def test_ids_outside_the_vocabulary_never_reach_a_kernel() -> None:
    for params in (
        {"logit_bias": {40: 1.0}},
        {"banned_token_ids": (40,)},
        {"allowed_token_ids": (3, 99)},
    ):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            native_draws(
                "scalar",
                np.zeros((1, 40), np.float32),
                [Row(DrawSpec(SamplingParams(**params), 1, 0), 0)],
            )
    penalised = Row(DrawSpec(SamplingParams(repetition_penalty=1.1), 1, 0, (77,)), 1, (77,))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        native_draws("scalar", np.zeros((1, 40), np.float32), [penalised])


# ---- other machines, sanitizers

SOURCES = Path(__file__).parents[3] / "src" / "verbatim" / "backend" / "cpu"
EXACT = [
    "-std=c++20",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-DVB_NS=one_set",
    *(f"-I{SOURCES / part}" for part in ("kernels", "sampler")),
]


def serialise(logits: np.ndarray, row: Row) -> bytes:
    """One row in the format that sampler_main.cpp reads."""
    p, spec = row.spec.params, row.spec

    def array(kind: str, values: Any) -> bytes:
        return struct.pack("<q", len(values)) + np.asarray(values, kind).tobytes()

    floats = (
        p.temperature, *(getattr(p, name) for name in FILTERS if name != "top_k"),
        p.xtc_threshold, p.repetition_penalty, p.frequency_penalty, p.presence_penalty,
        p.dry_multiplier, p.dry_base,
    )  # fmt: skip
    processed, restricted = p.logprobs_mode == "processed", p.allowed_token_ids is not None
    integers = (
        p.top_k, p.dry_allowed_length, p.dry_range, p.no_repeat_ngram, p.min_tokens,
        p.logprobs or 0,
    )  # fmt: skip
    out = struct.pack("<12d9q", *floats, *integers, p.wants_logprob, processed, restricted)
    bias = dict(p.logit_bias)
    out += array("<i4", list(bias)) + array("<f8", list(bias.values()))
    singles = sorted(b[0] for b in spec.breakers if len(b) == 1)
    for ids in (p.allowed_token_ids or (), p.banned_token_ids, spec.withheld, singles):
        out += array("<i4", ids)
    runs = [b for b in spec.breakers if len(b) > 1]
    out += struct.pack("<q", len(runs)) + b"".join(array("<i4", run) for run in runs)
    out += struct.pack("<Qqq", spec.key, row.position, spec.prompt_len) + array("<i4", row.history)
    return (
        out
        + struct.pack("<q", row.mask is not None)
        + array("u1", list(row.mask or b""))
        + array("<f4", logits)
    )


def line(token: int, logprob: float, top: Any) -> str:
    numbers = [str(token), struct.pack(">d", logprob).hex()]
    return " ".join(
        numbers + [text for i, value in top for text in (str(i), struct.pack(">d", value).hex())]
    )


def check_program(command: list[Any], cases: int, seed: int) -> None:
    r = random.Random(seed)
    batches = [*(random_case(r) for _ in range(cases)), stages_alone(r, cases)]
    pairs = [(logits[i], row) for logits, rows in batches for i, row in enumerate(rows)]
    expected = [
        line(d.token, d.logprob, d.top)
        for d in (sample_rows(x[None], [row])[0] for x, row in pairs)
    ]
    given = struct.pack("<q", len(pairs)) + b"".join(serialise(x, row) for x, row in pairs)
    done = subprocess.run(command, input=given, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert done.stdout.decode().splitlines() == expected


def build(compiler: str, flags: list[str], folder: Path) -> Path:
    program = folder / "draw"
    files = [SOURCES / "sampler" / "sampler.cpp", Path(__file__).with_name("sampler_main.cpp")]
    subprocess.run([compiler, *EXACT, *flags, *files, "-o", program], check=True)
    return program


@pytest.mark.qemu
@pytest.mark.soak
@pytest.mark.parametrize(
    "flags", [[], ["-march=armv8.2-a+dotprod+fp16"], ["-march=armv8.2-a+dotprod+fp16+i8mm"]]
)
def test_draws_have_the_same_bits_on_arm(flags: list[str], tmp_path: Path) -> None:
    compiler, qemu = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if compiler is None or qemu is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user-static")
    check_program(
        [qemu, "-cpu", "max", build(compiler, ["-O3", "-static", *flags], tmp_path)],
        cases=150,
        seed=21,
    )


@pytest.mark.soak
@pytest.mark.parametrize("isa", every_isa())
def test_the_sampler_does_not_access_memory_out_of_bounds(isa: str, tmp_path: Path) -> None:
    """Address and undefined-behaviour sanitizers over random rows."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    wide = [
        "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq",
        "-mavx512vnni",
    ]  # fmt: skip
    arm = "-march=armv8.2-a+dotprod+fp16"
    sets = {
        "scalar": [],
        "avx2": wide[:3],
        "avx512": wide,
        "amx": wide,
        "neon": [arm],
        "i8mm": [f"{arm}+i8mm"],
    }
    flags = [
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
        *sets[isa],
    ]
    check_program([build(compiler, flags, tmp_path)], cases=300, seed=22)


def test_a_parameter_without_a_native_kernel_is_sampled_by_the_pipeline() -> None:
    """A new parameter that the native SampleParams does not have must not be ignored."""
    from verbatim.backend.cpu.sampler import NativeSampler

    sampler = NativeSampler(native, None)
    # penalty_range is rare (Ollama's repeat_last_n); explain needs every stage in Python
    only = [name for name, _ in sampler.pipeline_only]
    assert only == ["penalty_range", "explain"], "add a native kernel"
    assert not sampler.needs_pipeline(SamplingParams(min_p=0.2))
    assert sampler.needs_pipeline(SamplingParams(explain=1))
    known = {name: None for name in dir(native.SampleParams) if name != "min_p"}
    older = SimpleNamespace(SampleParams=SimpleNamespace(**known))
    logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    row = Row(DrawSpec(SamplingParams(min_p=0.9), 1, 0), 0)

    class Engine:
        """A native engine that must not be asked to sample."""

        def logits(self) -> np.ndarray:
            return logits

    assert NativeSampler(older, Engine()).draw([row])[0].token == 0
