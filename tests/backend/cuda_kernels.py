"""The cuda backend's kernels, on a GPU or under Triton's interpreter: the same source runs on both.

test_cuda.py runs this file with the interpreter, in a process of its own, because Triton decides when it is
imported whether it interprets. `make test-gpu` runs it on the card. The fixture `device` says where tensors
belong; no test makes one elsewhere and hands it to a kernel. Models are small, because the interpreter is
slow. On a GPU the other tests of this folder run too (bfloat16 and recorded graphs only there: the
interpreter has neither)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from plans import BLOCKS, Blocks, run, same, whole

from verbatim.backend import gpu, open_backend
from verbatim.backend.cuda import backend as cuda_backend
from verbatim.backend.cuda import gpu_sampler, jit, kernels
from verbatim.backend.cuda.backend import Sheet, _sampler
from verbatim.backend.cuda.device import kernel_ran
from verbatim.backend.cuda.gpu_sampler import Answer, Screen
from verbatim.backend.cuda.kernels import Runs
from verbatim.backend.cuda.overlap import Ahead, Begun, goes_on
from verbatim.backend.protocol import Backend
from verbatim.backend.step_rows import make_batch
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError, ParameterError
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.base.records import Completion, Drawn, DrawSpec, SeqStep, StepPlan, StepResult
from verbatim.engine.llm import LLM
from verbatim.engine.loaded_model import LoadedModel
from verbatim.model.load import Model
from verbatim.sampling.draw import gumbel
from verbatim.sampling.numerics import log
from verbatim.sampling.pipeline import Row
from verbatim.testing import ByteTokenizer, FakeBackend, fake_spec
from verbatim.testing_models import FAMILIES, tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # the interpreter divides and subtracts infinities aloud


@triton.jit
def summed(limit, out):
    total = 0
    for i in range(tl.load(limit)):
        total += i
    tl.store(out, total)


def interpreter_fault() -> str:
    """Why Triton's interpreter cannot run our kernels with this NumPy, or "" where it can.

    Triton 3.6 calls int() on an array of one element to find the end of a loop, which NumPy 2.4 refuses.
    Later releases of Triton do not."""
    limit, out = torch.tensor([4], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    try:
        summed[(1,)](limit, out)
    except Exception as error:
        if "only 0-dimensional arrays can be converted" not in str(error):
            raise
        versions = f"Triton {triton.__version__} cannot loop up to a loaded number with NumPy {np.__version__}"
        return f"the interpreter of {versions}; the same tests run compiled on a GPU, or with a newer Triton"
    assert out.tolist() == [6]
    return ""


if os.environ.get("TRITON_INTERPRET") == "1" and (fault := interpreter_fault()):
    pytest.skip(fault, allow_module_level=True)

SMALL: dict[str, dict[str, object]] = {
    "gpt2": {"n_layer": 1},
    "gemma3": {"num_hidden_layers": 3, "sliding_window": 5, "sliding_window_pattern": 3},
}
WINDOWS = {"num_hidden_layers": 2, "sliding_window": 5}
TOKENS = np.random.default_rng(1).integers(0, 260, 9).tolist()


def small(family: str, **changes: object) -> Model:
    plain = WINDOWS if family in ("mistral", "gemma2") else {"num_hidden_layers": 1}
    return tiny_model(family, **{**SMALL.get(family, plain), **changes})  # type: ignore[arg-type]


def opened(model: Model, kind: str = "cuda") -> Backend:
    backend = open_backend(model, EngineConfig(backend=kind))
    backend.allocate((BLOCKS,) * len(backend.spec.groups))
    return backend


def difference(model: Model, tokens: list[int]) -> float:
    ours, theirs = (
        np.array(whole(opened(model, kind), tokens, seed=3).logprobs)
        for kind in ("cuda", "reference")
    )
    return float(np.abs(ours - theirs).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_references(family: str) -> None:
    assert difference(small(family, type="q8_0"), TOKENS) < 0.02


@pytest.mark.parametrize("family", ["gemma2", "qwen3moe"])
def test_one_text_in_chunks_and_in_company(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits: the whole text at once, then in pieces beside another one. Products are in two pieces each, which few rows add up elsewhere than many."""
    monkeypatch.setattr(kernels, "BK", 16)
    monkeypatch.setattr(kernels, "FEW", 4)
    model = small(family, hidden_size=64)
    assert kernels.parts_of(64, 64)[0] == 2
    assert difference(model, TOKENS) < 0.02
    backend = opened(model)
    expected = whole(backend, TOKENS)
    blocks = Blocks(backend.spec, backend.block_size, 5)
    text, other = blocks.text(0, TOKENS), blocks.text(1, TOKENS[::-1])
    run(backend, [other, text], [8, 1])
    run(backend, [text], [3])
    while not text.over:
        run(backend, [text], [20])
    assert same(expected, text)


def test_long_texts_are_added_up_span_by_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """With spans of one small tile a text of 36 has three: the reference's numbers, and the same bits row by row."""
    from verbatim.backend.cuda import ops

    monkeypatch.setattr(kernels, "TILE", 16)
    monkeypatch.setattr(kernels, "SPAN", 16)
    tokens, model = (
        np.random.default_rng(2).integers(0, 260, 36).tolist(),
        small("llama", num_hidden_layers=1),
    )
    assert difference(model, tokens) < 0.02
    backend = opened(model)
    expected = whole(backend, tokens)
    text = Blocks(backend.spec, backend.block_size, 7).text(0, tokens)
    run(backend, [text], [33])
    monkeypatch.setattr(ops, "BUFFER", 1)  # and where attention's rows take turns
    run(backend, [text], [2])
    assert same(expected, text)


def test_a_block_behind_the_window_is_not_looked_at() -> None:
    """It was released, and whoever has it now may have written what is no number."""
    backend: Any = opened(small("gemma2"))
    groups = backend.spec.groups
    backend.execute(StepPlan(0, (SeqStep(1, tuple(range(20)), 0, ((3, 4),) * len(groups)),)))
    tables = tuple((-1, 4) if group.window else (3, 4) for group in groups)
    step = SeqStep(1, (9,), 20, tables, 1, DrawSpec(SamplingParams(logprobs=3), 5, 1))
    clean = backend.execute(StepPlan(1, (step,)))
    for group, caches in zip(groups, backend._caches, strict=True):
        for cache in caches if group.window else ():
            cache[:, 0] = cache[:, 3] = torch.nan
    assert backend.execute(StepPlan(1, (step,))) == clean


def test_draws_are_the_samplers() -> None:
    """In one step: draws of which the device sends only the id, and the same ones with log-probabilities, which the sampler draws."""
    backend = opened(small("llama"))
    kinds: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 0.7}]
    params = [SamplingParams(**kind, **more) for kind in kinds for more in ({}, {"logprobs": 2})]  # type: ignore[arg-type]
    steps = [
        SeqStep(i, (9,), 0, ((i,),), draws=1, draw=DrawSpec(p, 5, 1)) for i, p in enumerate(params)
    ]
    drawn = [one.drawn[0] for one in backend.execute(StepPlan(0, tuple(steps))).sequences]
    for plain, told in (drawn[:2], drawn[2:]):
        assert plain == Drawn(told.token, 0.0)
        assert told.logprob < 0.0
        assert len(told.top) == 2
    assert drawn[1].top[0][0] == drawn[1].token


def test_a_replayed_steps_integers_are_the_plans(device: torch.device) -> None:
    """Sequences come, grow, take turns and go, with drafts: what is sent names each row's token, place and blocks, whatever was there before."""
    random = np.random.default_rng(6)
    sheet = Sheet(16, 2, (77, 88), device)
    tables = {
        i: tuple(tuple(random.integers(0, 60, 64).tolist()) for _ in range(2)) for i in range(12)
    }
    for step in range(40):
        sequences = []
        for i in random.permutation(12)[: random.integers(0, 9)].tolist():
            if random.random() < 0.3:
                tables[i] = tuple(
                    tuple(random.integers(0, 60, random.integers(40, 70)).tolist())
                    for _ in range(2)
                )
            count, start = int(random.integers(1, 3)), int(random.integers(0, 638))
            sequences.append(
                SeqStep(
                    i, tuple(random.integers(0, 260, count).tolist()), start, tables[i], draws=count
                )
            )
        sheet.fill(sequences)
        batch = make_batch(StepPlan(step, tuple(sequences)), 2)
        n, sent = batch.rows, sheet.step
        assert sent.tokens.tolist() == batch.tokens.tolist() + [0] * (16 - n)
        assert sent.positions.tolist() == batch.positions.tolist() + [0] * (16 - n)
        owners = [s for s in sequences for _ in s.tokens]
        for group, idle in enumerate((77, 88)):
            slots, table = sent.slots[group].tolist(), sent.runs[group].table
            assert slots[n:] == [idle * 16] * (16 - n)
            assert table[n:, 0].tolist() == [idle] * (16 - n)
            for row, (owner, position) in enumerate(
                zip(owners, batch.positions.tolist(), strict=True)
            ):
                assert (
                    tuple(table[row].tolist())[: position // 16 + 1]
                    == owner.blocks[group][: position // 16 + 1]
                )
                assert slots[row] == owner.blocks[group][position // 16] * 16 + position % 16


# ---------------------------------------------------------------------------------------------------------- a step ahead


def crowd(r: random.Random) -> list[tuple[int, list[int], SamplingParams]]:
    """Requests and the step before which each arrives: most are drawn on the device, some by the host, some with drafts."""
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.8},
        {"logprobs": 1},
        {"min_tokens": 4},
        {"n": 2},
        {"stop": ["a"]},
        {"speculate": "suffix"},
    ]
    out = []
    for i in range(12):
        more = kinds[i // 2] if i % 2 else {}
        asked = {
            "temperature": r.choice((0.0, 0.8, 1.3)),
            "seed": i,
            "max_tokens": r.randint(2, 26),
            "speculate": "off",
            **more,
        }
        out.append(
            (
                r.choice((0, 0, 9, 30)),
                r.choices(range(200), k=r.choice((2, 15, 17))),
                SamplingParams(**asked),
            )
        )
    return sorted(out, key=lambda one: one[0])


def hashed(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cuda backend whose model is the fake one, with its canary: the interpreter would take minutes for a crowd."""
    backend: Any = open_backend(small("llama"), EngineConfig(backend="cuda"))
    fake = FakeBackend(fake_spec(windows=windows), canary=True)
    execute = backend.execute

    def forward(
        plan: StepPlan, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for i, step in enumerate(plan.sequences):
            known = step if tokens is None else step._replace(tokens=(int(tokens[i]),))
            fake._sequence(known._replace(draws=0))
            rows += [
                fake.logits(fake._read(step, 0, at)[2])
                for at in range(step.end - step.draws, step.end)
            ]
        logits = torch.from_numpy(np.array(rows, np.float32).reshape(-1, fake.spec.vocab))
        return torch.zeros((len(rows), 1), device=backend.device), logits.to(backend.device)

    def copied(plan: StepPlan) -> StepResult:
        for group, source, target in plan.copies:
            fake.slots[group][target] = list(fake.slots[group][source])
        return execute(plan._replace(copies=()))  # type: ignore[no-any-return]

    for name, value in (
        ("_forward", forward),
        ("execute", copied),
        ("allocate", fake.allocate),
        ("spec", fake.spec),
    ):
        monkeypatch.setattr(backend, name, value)
    return backend


def written(backend: Any, r: random.Random) -> list[Any]:
    """What each of them got, beside the others, in a cache that is too small for all; one client leaves."""
    words = ByteTokenizer()
    parts = LoadedModel(backend, words, (words.EOS,), name="tiny", digest="tiny")
    asked, done = crowd(r), {}
    with LLM.from_parts(
        parts, backend="cuda", context=128, kv_blocks=9, step_tokens=24, check=True
    ) as llm:
        core, step = llm.core, 0
        while asked or core.busy:
            while asked and asked[0][0] <= step:
                _, prompt, params = asked.pop(0)
                core.add(core.request(prompt, params, request_id=str(len(asked))))
            if step == 12:
                core.abort(next(iter(core.requests)))
            done |= {
                one.request_id: one.choices for one in core.step() if isinstance(one, Completion)
            }
            step += 1
        assert core.scheduler.preemptions, "the cache was not too small"
    return sorted(done.items())


@pytest.mark.parametrize("windows", [(None,), (None, 20)])
def test_a_step_begun_ahead_changes_nothing(
    windows: tuple[int | None, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (
        device.type == "cpu"
    ):  # fewer programs for the interpreter; compiled, 16 rows would not fit the registers
        monkeypatch.setattr(gpu_sampler, "ROWS", 16)
    monkeypatch.setattr(gpu_sampler, "SLACK", 0.3)  # many draws are left open, and are made again
    plain, ahead = hashed(windows, monkeypatch), hashed(windows, monkeypatch)
    monkeypatch.setattr(plain._ahead, "steady", lambda *_: False)
    taken, begun, answered = 0, 0, ahead._answered

    def counted(plan: StepPlan, before: Any, rows: dict[int, int], **goes_on: bool) -> Any:
        nonlocal taken, begun
        taken, begun = taken + len(rows), begun + len(before.steps)
        return answered(plan, before, rows, **goes_on)

    monkeypatch.setattr(ahead, "_answered", counted)
    assert written(ahead, random.Random(3)) == written(plain, random.Random(3))
    assert 30 < taken < begun, "some rows were asked for, and some in vain"


def test_only_what_was_asked_for_is_taken_of_a_step_ahead() -> None:
    spec, other = (DrawSpec(SamplingParams(), 5, 1) for _ in range(2))
    tables = ((4, 7), (1, 2))
    step = SeqStep(1, (9,), 18, tables, draws=1, draw=spec)
    right = [
        step,
        step._replace(blocks=((4, 7, 3), (1, 2, 6))),
        step._replace(blocks=((4, 7), (-1, 2))),
    ]
    wrong = [
        step._replace(seq_id=2),
        step._replace(tokens=(8,)),
        step._replace(tokens=(9, 8), draws=2),
        step._replace(start=17),
        step._replace(blocks=((4, 8), (1, 2))),
        step._replace(blocks=((4,), (1, 2))),
        step._replace(draw=other),
        step._replace(targets=(3,)),
        step._replace(hidden=True),
        step._replace(draws=0),
    ]
    answer = Answer(torch.zeros(1), torch.zeros(1), None)
    for i, asked in enumerate((*right, *wrong)):
        ahead = Ahead()
        ahead.begun = Begun((step._replace(tokens=(0,)),), [9], answer)
        assert ahead.take(StepPlan(0, (asked,)))[1] == ({1: 0} if i < len(right) else {}), asked
        assert ahead.begun is None
        assert ahead.take(StepPlan(0, (step,))) == (None, {})


def test_the_step_behind_needs_a_place() -> None:
    step = SeqStep(1, (9,), 15, ((4,),), draws=1)
    assert goes_on(step, 99) is None
    assert goes_on(step._replace(blocks=((4, 6),)), 17) == SeqStep(1, (0,), 16, ((4, 6),), draws=1)
    assert goes_on(step._replace(blocks=((4, 6),)), 16) is None, "the model has no such position"


def test_a_mixture_begins_nothing() -> None:
    """Its rows are sorted on the host in every layer: there would be nothing to gain."""
    assert not opened(small("qwen3moe")).overlap
    assert opened(small("llama")).overlap


def test_parts_of_runs_are_runs() -> None:
    first, count = torch.tensor([0, 3, 4, 8]), torch.tensor([3, 1, 4, 2])
    runs = Runs(torch.arange(8).view(4, 2), first, count, torch.tensor([7, 0, 5, 9]), 4)
    for start, end, rows in ((0, 2, (0, 4)), (1, 3, (3, 8)), (2, 9, (4, 10))):
        *found, part = runs.part(start, end)
        assert tuple(found) == rows
        assert part.first_row.tolist() == [row - rows[0] for row in first.tolist()[start:end]]
        assert part.count.tolist() == count.tolist()[start:end]
    alone = Runs(runs.table, torch.arange(4), torch.ones(4), runs.first_position, 1)
    assert alone.part(1, 3)[:2] == (1, 3)
    assert alone.part(3, 9)[:2] == (3, 4)
    assert alone.part(1, 3)[2].first_row.tolist() == [0, 1]


def test_after_a_step_in_vain_none_is_begun_for_a_while() -> None:
    spec = DrawSpec(SamplingParams(), 5, 1)
    ahead, begins = Ahead(), []
    for position in range(30):
        plan = StepPlan(position, (SeqStep(1, (9,), position, ((4, 7),), draws=1, draw=spec),))
        if position == 10:
            ahead.begun = Begun(plan.sequences, [8], Answer(torch.zeros(1), torch.zeros(1), None))
        _, rows = ahead.take(plan)
        begins.append(ahead.steady(plan, len(rows), lambda _: True))
    assert begins == [position not in (0, *range(10, 18)) for position in range(30)]
    other = plan.sequences[0]._replace(start=30, draw=DrawSpec(SamplingParams(), 5, 1))
    assert not ahead.steady(StepPlan(30, (other,)), 0, lambda _: True), (
        "it is drawn in another way, as a draft model's guesses are"
    )
    assert not ahead.steady(StepPlan(30, ()), 0, lambda _: True), "nobody is written on"
    assert not ahead.steady(plan, 0, lambda _: True), "the same step again is not the next one"


# ------------------------------------------------------------------------------------------------------------- the screen

VOCAB = 701  # three chunks of the interpreter's, the last one short


@pytest.fixture
def screened(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Screen:
    if (
        device.type == "cpu"
    ):  # many rows a program: the interpreter pays for programs, not for numbers
        monkeypatch.setattr(gpu_sampler, "ROWS", 1024)
        monkeypatch.setattr(gpu_sampler, "CHUNK", 256)
    return Screen(VOCAB, device)


def asked(random: np.random.Generator, temperatures: np.ndarray) -> list[Row]:
    made = {t: SamplingParams(temperature=float(t)) for t in set(temperatures.tolist())}
    keys, positions = (
        random.integers(0, 2**64, len(temperatures), np.uint64),
        random.integers(0, 2**31, len(temperatures)),
    )
    return [
        Row(DrawSpec(made[t], int(k), 1), int(p))
        for t, k, p in zip(temperatures.tolist(), keys, positions, strict=True)
    ]


@triton.jit
def noises(high, low, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(
        out + i,
        jit.gumbel(
            tl.load(high + i).to(tl.uint32, bitcast=True),
            tl.load(low + i).to(tl.uint32, bitcast=True),
        ),
    )


def test_screen_noise_is_within_its_bound(device: torch.device) -> None:
    """What docs/numerics.md derives, at random bits and at the edges: u next to 0, to 1, and to where the logarithms change their form."""
    random, size = np.random.default_rng(0), 1 << 15
    edges = np.array(
        [
            0,
            1,
            2,
            3,
            0x7FFFFFFF,
            0xB504F333,
            0xFFFFFFFE,
            0xFFFFFFFF,
            0x5E2D58D8,
            *(1 << np.arange(32)),
        ],
        np.uint64,
    )
    near = (edges[:, None] + np.arange(-64, 64).astype(np.uint64)).ravel()
    high = (
        np.concatenate(
            [near, near, near, random.integers(0, 2**32, size - 3 * len(near), np.uint64)]
        )
        & 0xFFFFFFFF
    )
    low = np.where(
        np.arange(len(high)) < len(near), 0, random.integers(0, 2**32, len(high), np.uint64)
    )
    low[len(near) : 2 * len(near)] = 0xFFFFFFFF
    exact = -log(
        -log((((high << np.uint64(32) | low) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)
    )
    given = [
        torch.from_numpy(words.astype(np.uint32).view(np.int32)).to(device) for words in (high, low)
    ]
    out = torch.empty(size, device=device)
    each = size if device.type == "cpu" else 1024
    noises[(size // each,)](*given, out, each)
    assert exact.max() > 36.7
    assert exact.min() < -3.6
    off = np.abs(out.cpu().numpy().astype(np.float64) - exact) * 2**24
    assert (off < 23 + 3 * np.abs(exact)).all()


@triton.jit
def noises_of(words, out, FIRST, N: tl.constexpr):
    at = words + tl.arange(0, 1)[:, None]
    k0, k1 = tl.load(at).to(tl.uint32, bitcast=True), tl.load(at + 1).to(tl.uint32, bitcast=True)
    position = tl.load(at + 2).to(tl.uint32, bitcast=True)
    tl.store(out + tl.arange(0, N)[None, :], jit.noise_of(FIRST, position, k0, k1, N))


@pytest.mark.parametrize(
    ("key", "position", "first"),
    [
        (0xC949274536500FEE, 8937, 0),
        (0x1FFFFFFFE, 2147419381, 151_000),
        (0x1FFFFFFFE, 2147423567, 151_000),
    ],
)
def test_screen_noise_is_the_ids_own(
    key: int, position: int, first: int, device: torch.device
) -> None:
    """Both halves of the noise key, the position, and all bits of every id: at these positions an even or an odd one's u is within 4e-7 of 1, where
    the lowest bits count."""
    words = np.array([key & 0xFFFFFFFF, key >> 32, position], np.uint32).view(np.int32)
    out = torch.empty((1, 1024), device=device)
    noises_of[(1,)](torch.from_numpy(words).to(device), out, first // 2, 1024)
    exact = gumbel(key, position, np.arange(first, first + 1024))
    assert (np.abs(out.cpu().numpy()[0] - exact) * 2**24 < 23 + 3 * np.abs(exact)).all()


def test_screen_draws_what_the_sampler_draws(screened: Screen, device: torch.device) -> None:
    """All sizes of logits and temperatures, ties, ids that cannot be drawn: the sampler's draw or none, and seldom none."""
    random = np.random.default_rng(1)
    count = 3072
    logits = random.standard_normal((count, VOCAB)) * random.choice(
        [0.01, 1.0, 5.0, 30.0, 1e4], (count, 1)
    )
    logits += random.choice([0.0, 0.0, -70.0, 1e4], (count, 1))
    logits[::3] = np.rint(logits[::3])  # ties
    logits[random.random((count, VOCAB)) < random.choice([0.0, 0.1, 0.9], (count, 1))] = -np.inf
    logits[np.arange(count), random.integers(0, VOCAB, count)] = 3.0
    logits[7, :], logits[7, 700] = -np.inf, -2.0
    logits = logits.astype(np.float32)
    rows = asked(random, random.choice([0.0, 1e-20, 1e-3, 0.1, 0.6, 1.0, 1.5, 100.0], count))
    found = screened(torch.from_numpy(logits).to(device), rows)
    drawn = _sampler(EngineConfig(threads=2))(logits, rows)
    assert all(token in (-1, one.token) for token, one in zip(found, drawn, strict=True))
    assert all(token >= 0 for token, row in zip(found, rows, strict=True) if row.spec.params.greedy)
    assert all(one == Drawn(one.token, 0.0) for one in drawn)
    assert screened.rows == count
    assert found.count(-1) == screened.unsure <= 8  # P(more) < 1e-6: 0.75 are expected


def test_screen_leaves_near_ties_open(screened: Screen, device: torch.device) -> None:
    """Two ids whose scores are a chosen hair apart: within the slack it must not decide, past it it must, and rightly."""
    random = np.random.default_rng(2)
    count, ids = 1024, np.arange(VOCAB)
    temperature = random.choice([0.05, 0.6, 1.0, 20.0], count)
    rows = asked(random, temperature)
    logits = np.full((count, VOCAB), -2000.0, np.float32)
    gaps = np.empty(count)
    for i, row in enumerate(rows):
        a, b = random.choice(VOCAB, 2, replace=False)
        noise = gumbel(row.spec.key, row.position, ids)
        hair = 2.0 ** random.uniform(-30.0, -8.0) * random.choice([-1.0, 1.0])
        logits[i, a] = random.choice([0.0, 5.0, -12.0])
        logits[i, b] = logits[i, a] + (noise[a] - noise[b] + hair) * temperature[i]
        scores = (logits[i, [a, b]].astype(np.float64) - logits[i].max()) / temperature[i] + noise[
            [a, b]
        ]
        gaps[i] = abs(scores[0] - scores[1])
    found = np.array(screened(torch.from_numpy(logits).to(device), rows))
    drawn = np.array([one.token for one in _sampler(EngineConfig(threads=2))(logits, rows)])
    assert ((found == -1) | (found == drawn)).all()
    assert (found[gaps < 0.8 * gpu_sampler.SLACK] == -1).all()
    assert (found[gaps > 1.2 * gpu_sampler.SLACK] >= 0).all()
    assert (gaps < 1e-6).sum() > 50


def test_screen_hands_on_what_is_no_number(screened: Screen, device: torch.device) -> None:
    logits = np.zeros((6, VOCAB), np.float32)
    logits[:2, 300], logits[2:4, 650], logits[4:] = np.nan, np.inf, -np.inf
    rows = asked(np.random.default_rng(3), np.array([0.0, 1.0] * 3))
    assert screened(torch.from_numpy(logits).to(device), rows) == [-1] * 6


# What reaches the sampler by another way (a row's mask, key, beam or withheld ids, a plan's targets) or is no matter of drawing at all.
ELSEWHERE = {
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos", "skip_special", "on_loop", "seed", "n",
    "num_beams", "num_return_sequences", "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty", "json_schema",
    "regex", "grammar", "choice", "prompt_logprobs", "logprobs_mode", "receipt", "speculate", "priority", "cache_salt", "dry_base",
    "dry_allowed_length", "dry_range", "dry_breakers", "xtc_threshold",
}  # fmt: skip
REFUSED: dict[str, object] = {
    "logit_bias": {3: 1.0}, "allowed_token_ids": (1, 2), "banned_token_ids": (7,), "repetition_penalty": 1.1, "frequency_penalty": 0.1,
    "presence_penalty": 0.1, "dry_multiplier": 0.8, "no_repeat_ngram": 3, "temperature": 1e-35, "top_k": 5, "top_p": 0.9, "min_p": 0.1,
    "typical_p": 0.9, "top_n_sigma": 1.0, "xtc_probability": 0.5, "best_of": 2, "logprobs": 0, "explain": 1,
}  # fmt: skip


def test_screen_knows_every_parameter() -> None:
    """A new parameter of the sampler must be told apart here and in asked_of, or the device would pass over it."""
    assert ELSEWHERE | set(REFUSED) == set(FIELDS)
    for name, value in REFUSED.items():
        assert gpu_sampler.asked_of(SamplingParams().with_(**{name: value})) == gpu_sampler.HOST, (
            name
        )
    assert gpu_sampler.asked_of(SamplingParams(temperature=0.5)) == (2.0, gpu_sampler.SLACK)
    assert gpu_sampler.asked_of(SamplingParams(temperature=0.0, top_p=0.5)) == gpu_sampler.ARGMAX


def test_rows_are_drawn_where_they_can_be(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argmaxes and plain draws between rows for the host, of which only the latter come whole: as if the sampler drew all."""
    backend: Any = opened(small("llama"))
    kinds = [
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"temperature": 0.7},
        {"logprobs": 2},
        {"temperature": 2.0},
    ]
    specs = [DrawSpec(SamplingParams(**kind), 50 + i, 4) for i, kind in enumerate(kinds)]  # type: ignore[arg-type]
    plain = SamplingParams()
    specs += [
        DrawSpec(plain, 9, 4, withheld=(4,)),
        DrawSpec(plain, 9, 4),
        DrawSpec(plain, 9, 4, beam=2),
        DrawSpec(plain, 9, 4),
    ]
    rows = [Row(spec, 6 + i, mask=b"\x0f" if i == 8 else None) for i, spec in enumerate(specs)]
    logits = torch.from_numpy(
        np.random.default_rng(4).standard_normal((len(rows), backend.spec.vocab)).astype(np.float32)
    )
    asked, here = [], backend._draw_here

    def noted(logits: torch.Tensor, rows: list[Row]) -> list[Drawn]:
        asked.append([row.position - 6 for row in rows])
        return here(logits, rows)  # type: ignore[no-any-return]

    monkeypatch.setattr(backend, "_draw_here", noted)
    assert backend._draw(logits.to(device), rows) == backend._sampler(logits.numpy(), rows)
    assert asked == [[1, 3, 5, 7, 8]]
    logits[2, 3] = torch.nan
    with pytest.raises(BackendError, match="not finite"):
        backend._draw(logits.to(device), rows)


def test_what_it_does_not_offer_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match="kv_type"):
        open_backend(tiny_model("llama"), EngineConfig(backend="cuda", kv_type="q8"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "present", lambda: False)
    with pytest.raises(
        BackendError, match="finds no NVIDIA GPU that PyTorch can use; use the backend cpu"
    ):
        open_backend(tiny_model("llama"), EngineConfig(backend="cuda"))
    monkeypatch.setattr(gpu, "present", lambda: True)
    monkeypatch.setattr(gpu, "missing", lambda: None)

    def too_old() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
        )

    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(
        BackendError, match=r"driver on your system is too old \(found version 11040\)\.$"
    ):
        open_backend(tiny_model("llama"), EngineConfig(backend="cuda"))


# --------------------------------------------------------------------------------------------------- a test kernel


@pytest.fixture
def unproven() -> Iterator[None]:
    """The test kernel's result is kept in the process; here it runs anew."""
    kernel_ran.cache_clear()
    yield
    kernel_ran.cache_clear()


def test_the_test_kernel_runs(unproven: None, device: torch.device) -> None:
    wanted = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    assert kernel_ran().startswith(wanted)


def test_a_test_kernel_with_a_wrong_result_is_noticed(
    unproven: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number in one row of the largest tile is off by one."""
    whole_ = kernels.whole

    def broken(pieces: kernels.Pieces) -> torch.Tensor:
        found = whole_(pieces)
        if len(found) > 1:
            found[200, 100] += 1
        return found

    monkeypatch.setattr(kernels, "whole", broken)
    with pytest.raises(gpu.WrongResult):
        kernel_ran()


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("Failed to find C compiler.\nPlease specify"), "did not run on the GPU: RuntimeError: Failed to find C compiler.$"),
        (torch.OutOfMemoryError("CUDA out of memory"), "the GPU has no free memory"),
    ],
)  # fmt: skip
def test_a_test_kernel_that_does_not_run_says_why(
    error: Exception, wanted: str, unproven: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(kernels, "product", fails)
    with pytest.raises(BackendError, match=wanted):
        kernel_ran()


def test_a_model_that_does_not_fit_is_refused_before_and_while_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, config = small("llama"), EngineConfig(backend="cuda")
    assert cuda_backend.open_checked(model, config).info.name == "cuda"
    needs = r"the model needs 0\.5 GB of GPU memory and \d+\.\d GB are free"

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_backend, "load", full)
    with pytest.raises(BackendError, match=needs):
        cuda_backend.open_checked(model, config)
    monkeypatch.setattr(cuda_backend, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 10**9))
    monkeypatch.setattr(cuda_backend, "load", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(BackendError, match=needs):
        cuda_backend.open_checked(model, config)
