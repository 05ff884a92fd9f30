"""What the tests of draft heads share: random weights that survive quantisation, checkpoints, and
the drafts of a run beside those that are expected."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from draft_engine import TOLERANCE, engine, proposals

from verbatim.base.params import SamplingParams
from verbatim.model.loading.heads import open_head
from verbatim.model.loading.load import Model, load_model
from verbatim.sampling.draw import gumbel
from verbatim.speculate.proposer import Draft

torch = pytest.importorskip("torch")


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


class Drafted(NamedTuple):
    tokens: list[int]  # that the draft follows
    draft: Draft
    noise: list[Any]  # one per draft, over the vocabulary; zeros where the request is greedy


def drafts_of(model: Model, backend: str) -> list[Drafted]:
    """The drafts of two sequences: while some are rejected, after prompts in chunks."""
    prompts = [[97 + (7 * i) % 11 for i in range(21)], [99 + (5 * i) % 13 for i in range(14)]]
    params = [SamplingParams(temperature=t, seed=5, max_tokens=8, ignore_eos=True) for t in (0, 1)]
    with engine(model, backend, "head", step_tokens=16, kv_blocks=12) as llm:
        made = proposals(llm, "head")
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
