"""Generate, then score in one prefill: equal log-probabilities, with and without a KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parity_types import FIRST_FAMILIES, NEWER_FAMILIES, RECURRENT_FAMILIES
from verbatim import LLM, SamplingParams
from verbatim.backend import gpu, open_backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError
from verbatim.engine.loaded_model import LoadedModel
from verbatim.testing.fakes import ByteTokenizer
from verbatim.testing.tiny_models import tiny_model

BACKENDS = ["reference", "cpu", *(["cuda"] if gpu.present() else [])]
PROMPTS = ["The needle is ", "q", "Three short prompts, of different lengths, that share a step. "]
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=3, logprobs=2, ignore_eos=True)


def opened(family: str, **options: Any) -> LLM:
    model = tiny_model(family)
    try:
        backend = open_backend(model, EngineConfig(check=True, **options))
    except BackendError as error:
        if options.get("backend") == "cuda":  # there is a GPU, so the backend must work
            raise
        pytest.skip(str(error))
    loaded = LoadedModel(backend, ByteTokenizer(), (), name=family, digest=model.weights.digest)
    return LLM.from_loaded(loaded, check=True, kv_blocks=64, **options)


# The newer families on the fastest backend only: test_backend_rows.py compares their bits on all.
@pytest.mark.parametrize(
    ("family", "backend"),
    [(family, backend) for family in FIRST_FAMILIES for backend in BACKENDS]
    + [(family, BACKENDS[-1]) for family in (*NEWER_FAMILIES, *RECURRENT_FAMILIES)],
)
def test_generating_and_scoring_give_equal_logprobs(family: str, backend: str) -> None:
    """Three sequences decoded in one batch, against one prefill per sequence: equal bits."""
    with opened(family, backend=backend, prefix_cache=False) as llm:
        for done in llm.generate(PROMPTS, PARAMS):
            count = len(done.prompt_ids)
            score = llm.score([*done.prompt_ids, *done.token_ids])
            assert len(done.token_ids) == 24
            scored = [entry.logprob for entry in score.logprobs[count:] if entry is not None]
            assert [entry.logprob for entry in done.logprobs] == scored
            assert np.std(scored) > 0.3, "flat logits would hide errors"


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        # the reference takes ten times as long
        pytest.param(family, b, marks=[pytest.mark.soak] if b == "reference" and i % 3 else [])
        for i, family in enumerate(FIRST_FAMILIES)
        for b in BACKENDS
    ],
)
def test_the_output_is_the_same_without_a_kv_cache(family: str, backend: str) -> None:
    outputs = []
    for use_cache in (True, False):
        with opened(family, backend=backend, use_cache=use_cache) as llm:
            done = llm.generate(PROMPTS, PARAMS)
            outputs.append([(d.token_ids, d.text, [e.logprob for e in d.logprobs]) for d in done])
    assert outputs[0] == outputs[1]
