"""An engine over a tiny model whose draft layer drafts in every step, for tests of its drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from mixed_requests import answer, random_params, random_prompt

from verbatim.backend import open_backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError
from verbatim.engine.calls.llm import LLM
from verbatim.engine.loaded_model import LoadedModel
from verbatim.model.loading.load import Model
from verbatim.speculate.proposer import Draft, SeqView
from verbatim.testing.fakes import ByteTokenizer

# The cpu and cuda backends keep keys and values in 16 bits, and activations in 12 or 16.
TOLERANCE = {"reference": 1e-3, "cpu": 0.15, "cuda": 0.15}


def engine(model: Model, backend: str, mode: str, **options: Any) -> LLM:
    words = ByteTokenizer()
    try:
        target = open_backend(model, EngineConfig(backend=backend, threads=1))
    except BackendError as error:
        if backend == "cuda":
            raise
        pytest.skip(f"the native kernels are not built here: {error}")
    assert model.draft is not None
    layer = target.draft_layer(model.draft) if mode in ("mtp", "head", "auto") else None
    loaded = LoadedModel(target, words, (words.EOS,), name="tiny", digest="tiny", layer=layer)
    llm = LLM.from_loaded(loaded, speculate=mode, check=True, **{"context": 256, **options})
    llm.core.drafting.adaptive = False
    llm.core.drafting.max_drafts = 4
    return llm


def proposals(llm: LLM, mode: str) -> list[tuple[SeqView, Draft]]:
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


def compare_answers(model: Model, backend: str, own: str, count: int) -> None:
    """The same answers without drafts, with those of the layer, and in mode auto: in batches, with
    chunked prefill, prefix hits, preemption, forks, seeds, penalties, grammars and
    log-probabilities."""
    r = random.Random(1)
    prompts = [random_prompt(r) for _ in range(count)]
    params = [random_params(r) for _ in range(count)]
    answers: dict[str, list[Any]] = {}
    for mode in ("off", own, "auto"):
        with engine(model, backend, mode, kv_blocks=9, step_tokens=48) as llm:
            done = [*llm.generate(prompts, params), llm.generate(prompts[0], params[0])]
            answers[mode] = [answer(one) for one in done]
            drafted = sum(one.usage.drafted_tokens for one in done)
            accepted = sum(one.usage.accepted_tokens for one in done)
            assert llm.core.scheduler.preemptions > 0
            if mode != "off":
                assert 0 < accepted < drafted
                layer: Any = llm.core.drafting.own[own]
                assert not layer._positions, "it holds states of sequences that ended"
    assert answers[own] == answers["off"]
    assert answers["auto"] == answers["off"]
