"""Real GGUF files: each file in $VERBATIM_TEST_MODELS, on the cpu backend and, up to 1 GB, on the
reference backend.

`VERBATIM_TEST_MODELS=FOLDER make test-models` runs them; `make test` skips them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verbatim import LLM, SamplingParams

pytestmark = pytest.mark.models

FOLDER = os.environ.get("VERBATIM_TEST_MODELS")
MAX_REFERENCE = 10**9  # bytes of a file; the NumPy reference backend is too slow for larger ones
PROMPT = "The capital of France is"
OTHERS = ["1, 2, 3, 4,", "Once upon a time there was", "def add(a, b):"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)


def files() -> list[Any]:
    """The GGUF files as parameters; a split model is listed by its first part."""
    if FOLDER is None:
        return [
            pytest.param(
                None, marks=pytest.mark.skip("VERBATIM_TEST_MODELS is not set"), id="unset"
            )
        ]
    found = sorted(
        path
        for path in Path(FOLDER).rglob("*.gguf")
        if "-of-" not in path.name or "-00001-of-" in path.name
    )
    if not found:
        return [
            pytest.param(None, marks=pytest.mark.skip(f"no .gguf file in {FOLDER}"), id="empty")
        ]
    return [pytest.param(path, id=path.name) for path in found]


@pytest.fixture(scope="module", params=files())
def file(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture(scope="module")
def llm(file: Path) -> Iterator[LLM]:
    with LLM(file, backend="cpu", context=512) as opened:
        yield opened


def test_scoring_the_text_gives_the_logprobs_of_generating_it(llm: LLM) -> None:
    """Decode token by token, then score in one prefill: the log-probabilities have equal bits."""
    completion = llm.generate(PROMPT, GREEDY)
    prompt, done = completion.prompt_ids, completion.choices[0]
    assert len(done.token_ids) == 16
    score = llm.score([*prompt, *done.token_ids])
    assert list(score.token_ids)[len(prompt) :] == list(done.token_ids)
    scored = [entry.logprob for entry in score.logprobs[len(prompt) :] if entry is not None]
    assert scored == [entry.logprob for entry in done.logprobs]


def test_a_prompt_alone_and_in_a_batch_gives_the_same_tokens(llm: LLM) -> None:
    alone = llm.generate(PROMPT, GREEDY).choices[0]
    together = llm.generate([OTHERS[0], PROMPT, *OTHERS[1:]], GREEDY)[1].choices[0]
    assert together.token_ids == alone.token_ids
    assert together.logprobs == alone.logprobs


def test_the_reference_backend_gives_the_cpu_tokens_a_high_probability(
    file: Path, llm: LLM
) -> None:
    """The cpu backend rounds activations to 8 bits, so near ties may differ. The reference must
    give every token of the cpu backend a probability close to that of its own best token."""
    if file.stat().st_size > MAX_REFERENCE:
        pytest.skip(
            f"{file.name} is larger than {MAX_REFERENCE / 1e9:g} GB, "
            "too large for the reference backend"
        )
    completion = llm.generate(PROMPT, GREEDY)
    prompt, tokens = completion.prompt_ids, completion.choices[0].token_ids
    with LLM(file, backend="reference", context=512) as reference:
        assert len(reference.generate(PROMPT, GREEDY).choices[0].token_ids) == 16
        score = reference.score([*prompt, *tokens], top=1)
        for at, entry in enumerate(score.logprobs[len(prompt) :]):
            assert entry is not None
            best = entry.top[0][1]
            assert best - entry.logprob < 1.0, f"token {at}: {entry}"
