"""Compute logits on the reference backend without an engine, with a scattered block table."""

from __future__ import annotations

import numpy as np

from verbatim.backend.reference import ReferenceBackend
from verbatim.backend.reference.ops import ReferenceOps
from verbatim.backend.step_rows import make_batch
from verbatim.base.config import EngineConfig
from verbatim.base.records import SeqStep, StepPlan
from verbatim.model.decoder import forward
from verbatim.model.load import Model


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
