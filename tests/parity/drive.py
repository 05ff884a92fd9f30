"""Compute without an engine, with scattered block tables: logits on the reference backend, scores
and greedy tokens on another. `exported` writes a model as `convert` does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from verbatim.backend import open_backend
from verbatim.backend.reference import ReferenceBackend
from verbatim.backend.reference.ops import ReferenceOps
from verbatim.backend.step_rows import make_batch
from verbatim.base.config import EngineConfig
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, StepPlan
from verbatim.convert.export_model import check_round_trip, model_metadata, model_tensors
from verbatim.files.gguf_write import write_gguf
from verbatim.model.decoder import forward
from verbatim.model.loading.load import Model


class Driver:
    """One sequence. `feed` returns the logits of every token. KV blocks are in random order."""

    def __init__(self, model: Model, block_size: int = 4, positions: int = 160) -> None:
        self.backend = ReferenceBackend(model, EngineConfig(check=True), block_size=block_size)
        blocks = -(-positions // block_size)
        groups = len(model.spec.groups)
        self.backend.allocate((blocks,) * groups)
        random = np.random.default_rng(1)
        self.tables = tuple(
            tuple(int(b) for b in random.permutation(blocks)) for _ in range(groups)
        )
        self.length = 0

    def feed(self, tokens: list[int]) -> np.ndarray:
        """[len(tokens), vocab] logits."""
        step = SeqStep(1, tuple(tokens), self.length, self.tables, targets=tuple(tokens))
        plan = StepPlan(0, (step,))
        backend = self.backend
        assert backend._caches is not None
        assert backend._canary is not None
        backend._canary.step(plan)
        batch = make_batch(plan, len(backend._caches))
        with np.errstate(over="ignore"):
            _, logits = forward(
                backend.spec, ReferenceOps(backend.spec, backend._weights, backend._caches, batch)
            )
        self.length += len(tokens)
        return logits


def score_and_draw(
    model: Model, tokens: list[int], draws: int, backend_name: str = "cpu"
) -> tuple[np.ndarray, list[int]]:
    """In one step: the log-probability of every token but the first, and the
    greedy tokens at the last `draws` positions before the last token."""
    backend = open_backend(model, EngineConfig(backend=backend_name))
    blocks = -(-len(tokens) // backend.block_size)
    groups = len(model.spec.groups)
    backend.allocate((blocks,) * groups)
    table = tuple(int(b) for b in np.random.default_rng(1).permutation(blocks))
    draw = DrawSpec(SamplingParams(temperature=0), key=1, prompt_len=1)
    step = SeqStep(
        *(1, tuple(tokens[:-1]), 0, (table,) * groups), draws, draw, targets=tuple(tokens[1:])
    )
    found = backend.execute(StepPlan(0, (step,))).sequences[0]
    backend.close()
    scores = np.array([scored.logprob for scored in found.scored])
    return scores, [drawn.token for drawn in found.drawn]


def exported(model: Model, path: Path) -> Path:
    """The GGUF file that `convert` writes, without a tokenizer."""
    metadata, extra = model_metadata(model, "tiny")
    tensors = {t.name: t for t in (*extra, *model_tensors(model))}
    check_round_trip(model, metadata, tensors)
    write_gguf(path, metadata, tensors.values())
    return path
