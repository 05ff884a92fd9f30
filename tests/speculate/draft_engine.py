"""What the tests of draft layers and heads share: an engine with one, the drafts that it makes, and
the requests that must not notice it."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from mixed_requests import answer, random_params, random_prompt

from verbatim.backend import open_backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError
from verbatim.base.params import SamplingParams
from verbatim.engine.calls.llm import LLM
from verbatim.engine.loaded_model import LoadedModel
from verbatim.model.loading.heads import open_head
from verbatim.model.loading.load import Model, load_model
from verbatim.sampling.draw import gumbel
from verbatim.speculate.proposer import Draft, SeqView
from verbatim.testing.fakes import ByteTokenizer

torch = pytest.importorskip("torch")
# The cpu backend keeps keys and values in 16 bits and activations in 12.
TOLERANCE = {"reference": 1e-3, "cpu": 0.15}


def exact(r: np.random.Generator, *shape: int, bits: int = 4) -> Any:
    """Random values that q4_0 (or q8_0, `bits` 8) holds exactly: every block of 32 has its largest
    step of one size."""
    most, size = (-8, 2.0**-5) if bits == 4 else (127, 2.0**-9)
    steps = r.integers(1 - abs(most), abs(most), shape)
    if len(shape) == 2:
        steps.reshape(-1, 32)[:, 0] = most
    return torch.tensor(steps * size, dtype=torch.float32)


def save_head(folder: Path, config: dict[str, Any], state: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_head(target: Path, head: Path) -> Model:
    model = load_model(target)
    found = open_head(head, model.spec)
    return dataclasses.replace(model, draft=found.load(model), captured=found.captured)


def engine(model: Model, backend: str, mode: str, **options: Any) -> LLM:
    words = ByteTokenizer()
    try:
        target = open_backend(model, EngineConfig(backend=backend, threads=1))
    except BackendError as error:
        pytest.skip(f"the native kernels are not built here: {error}")
    assert model.draft is not None
    layer = target.draft_layer(model.draft) if mode not in ("off", "suffix") else None
    loaded = LoadedModel(target, words, (words.EOS,), name="tiny", digest="tiny", layer=layer)
    llm = LLM.from_loaded(loaded, speculate=mode, check=True, **{"context": 256, **options})
    llm.core.drafting.adaptive = False
    llm.core.drafting.max_drafts = 4
    return llm


def proposals(llm: LLM, mode: str = "head") -> list[tuple[SeqView, Draft]]:
    """All drafts that the engine's draft layer makes from now on, with copies of the tokens."""
    layer: Any = llm.core.drafting.own[mode]
    made: list[tuple[SeqView, Draft]] = []
    propose = layer.propose

    def watched(views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        copies = {view.seq_id: view._replace(tokens=list(view.tokens)) for view in views}
        found: dict[int, Draft] = propose(views, limit, floor)
        made.extend((copies[seq_id], draft) for seq_id, draft in found.items())
        return found

    layer.propose = watched
    return made


class Drafted(NamedTuple):
    tokens: list[int]  # that the draft follows
    draft: Draft
    noise: list[Any]  # of each draft, over the vocabulary; zeros where the request is greedy


def drafts_of(model: Model, backend: str) -> list[Drafted]:
    """The drafts of two sequences: while some are rejected, after prompts in chunks."""
    prompts = [[97 + (7 * i) % 11 for i in range(21)], [99 + (5 * i) % 13 for i in range(14)]]
    params = [SamplingParams(temperature=t, seed=5, max_tokens=8, ignore_eos=True) for t in (0, 1)]
    with engine(model, backend, "head", step_tokens=16, kv_blocks=12) as llm:
        made = proposals(llm)
        llm.generate(prompts, params)
    assert len(made) >= 6
    found, ids = [], np.arange(model.spec.vocab)
    for view, draft in made:
        at = [len(view.tokens) + depth for depth in range(len(draft.tokens))]
        noise = [gumbel(view.key, position, ids) * view.params.temperature for position in at]
        found.append(Drafted(list(view.tokens), draft, [torch.tensor(one) for one in noise]))
    return found


def check_draft(made: Drafted, expected: Sequence[Any], backend: str, *, chain: bool) -> None:
    """Whether the tokens are the best of the expected logits with their noise, and as likely as
    the draft says. `chain`: of a near tie, what follows another token is not compared."""
    odds, alike = 1.0, True  # odds: that this draft and those before it are accepted
    for logits, noise, token, stated in zip(
        expected, made.noise, made.draft.tokens, made.draft.probs, strict=True
    ):
        scores, live = logits + noise, logits[logits > -1e29]
        assert scores[token] >= scores.max() - TOLERANCE[backend] * (live.max() - live.min())
        alike &= token == int(scores.argmax())
        if chain and not alike:
            return
        odds *= float(logits.softmax(-1)[token])
        assert not alike or abs(stated - odds) <= 2 * TOLERANCE[backend] * odds


def check_answers(model: Model, backend: str, mode: str = "head", count: int = 32) -> None:
    """Batches, chunked prefill, prefix hits, preemption, forks, seeds, penalties, grammars and
    log-probabilities: the draft layer changes no answer, although it agrees often."""
    r = random.Random(1)
    prompts = [random_prompt(r) for _ in range(count)]
    params = [random_params(r) for _ in range(count)]
    answers: dict[str, list[Any]] = {}
    for each in ("off", mode, "auto"):
        with engine(model, backend, each, kv_blocks=9, step_tokens=48) as llm:
            done = [*llm.generate(prompts, params), llm.generate(prompts[0], params[0])]
            answers[each] = [answer(one) for one in done]
            drafted = sum(one.usage.drafted_tokens for one in done)
            accepted = sum(one.usage.accepted_tokens for one in done)
            assert llm.core.scheduler.preemptions > 0
            if each != "off":
                assert 0 < accepted < drafted
                layer: Any = llm.core.drafting.own[mode]
                held = [v for v in vars(layer).values() if isinstance(v, dict)]
                assert held
                assert not any(held), "it holds states of ended sequences"
    assert answers[mode] == answers["off"]
    assert answers["auto"] == answers["off"]
