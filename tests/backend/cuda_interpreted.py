"""The cuda backend without a GPU, under Triton's interpreter: its kernels are the same text. Small, because the interpreter is slow; where there is a GPU,
the other tests of this folder run on it in full (bfloat16 and recorded graphs only there: the interpreter has neither).

Run by test_cuda.py in a process of its own: Triton decides when it is imported whether it interprets."""

from __future__ import annotations

import numpy as np
import pytest
from plans import BLOCKS, Blocks, run, same, whole

from verbatim.backend import open_backend
from verbatim.backend.protocol import Backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError, ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, StepPlan
from verbatim.model.load import Model
from verbatim.testing_models import FAMILIES, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # the interpreter divides and subtracts infinities aloud

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
    ours, theirs = (np.array(whole(opened(model, kind), tokens, seed=3).logprobs) for kind in ("cuda", "reference"))
    return float(np.abs(ours - theirs).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_references(family: str) -> None:
    assert difference(small(family, type="q8_0"), TOKENS) < 0.02


@pytest.mark.parametrize("family", ["gemma2", "qwen3moe"])
def test_one_text_in_chunks_and_in_company(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits: the whole text at once, then in pieces beside another one. Products are in two pieces each, which few rows add up elsewhere than many."""
    from verbatim.backend.cuda import kernels

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
    from verbatim.backend.cuda import kernels, ops

    monkeypatch.setattr(kernels, "TILE", 16)
    monkeypatch.setattr(kernels, "SPAN", 16)
    tokens, model = np.random.default_rng(2).integers(0, 260, 36).tolist(), small("llama", num_hidden_layers=1)
    assert difference(model, tokens) < 0.02
    backend = opened(model)
    expected = whole(backend, tokens)
    text = Blocks(backend.spec, backend.block_size, 7).text(0, tokens)
    run(backend, [text], [33])
    monkeypatch.setattr(ops, "BUFFER", 1)  # and where attention's rows take turns
    run(backend, [text], [2])
    assert same(expected, text)


def test_draws_are_the_samplers() -> None:
    """A plain argmax never leaves the device; anything else goes through the sampler. Both give what the reference gives for these logits."""
    backend = opened(small("llama"))
    table = ((0, 1),)
    steps = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.0, "banned_token_ids": (7,)},
    ]
    found = []
    for asked in steps:
        spec = DrawSpec(SamplingParams(**asked), 5, 4)  # type: ignore[arg-type]
        plan = StepPlan(0, (SeqStep(0, tuple(TOKENS[:4]), 0, table, draws=1, draw=spec),))
        found.append(backend.execute(plan).sequences[0].drawn[0])
    assert found[0].token == found[1].token
    assert found[0].logprob == 0.0
    assert found[1].logprob < 0.0
    assert len(found[1].top) == 2
    assert found[1].top[0][0] == found[1].token


def test_what_it_does_not_offer_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match="kv_type"):
        open_backend(tiny_model("llama"), EngineConfig(backend="cuda", kv_type="q8"))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendError, match="no NVIDIA GPU"):
        open_backend(tiny_model("llama"), EngineConfig(backend="cuda"))
