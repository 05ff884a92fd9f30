"""Rows of logits -> draws, by the native twin of sampling/pipeline.py. What it does not do (explain, beams) goes to the pipeline itself.

In: the engine's logits and one Row each. Out: one Drawn each, with the bits of the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verbatim.base.errors import BackendError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Drawn, DrawSpec
from verbatim.sampling.pipeline import Row, sample_rows

# fmt: off
_SAME = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "repetition_penalty",
    "frequency_penalty", "presence_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_range", "no_repeat_ngram", "min_tokens",
)
# fmt: on
_KEPT = 512  # requests whose native parameters are kept


class NativeSampler:
    """One for a backend: draws from the logits of the native engine's last step."""

    def __init__(self, native: Any, engine: Any) -> None:
        self._native = native
        self._engine = engine
        self._made: dict[tuple[int, tuple[int, ...], int], tuple[DrawSpec, Any]] = {}

    def draw(self, rows: Sequence[Row]) -> list[Drawn]:
        """Row i is drawn from row i of the engine's logits. A row that the pipeline must draw does not slow its neighbours' kernels."""
        asked = [
            None if row.spec.beam or row.spec.params.explain else self.native_row(row)
            for row in rows
        ]
        apart = [i for i, one in enumerate(asked) if one is None] if None in asked else []
        if len(apart) == len(rows):
            return sample_rows(self._engine.logits(), rows)
        try:
            found = self._engine.sample(asked)
        except ValueError as error:
            raise BackendError(str(error)) from None
        for i in apart:
            found[i] = sample_rows(self._engine.logits()[i : i + 1], [rows[i]])[0]
        return [Drawn(*one) for one in found]

    def native_row(self, row: Row) -> tuple[Any, ...]:
        spec, position, history, mask = row
        return self._params(spec), spec.key, position, spec.prompt_len, history, mask

    def _params(self, spec: DrawSpec) -> Any:
        """Made once a request. The key is the identity of what the spec holds on to, which the kept spec keeps alive."""
        key = (id(spec.params), spec.withheld, id(spec.breakers))
        kept = self._made.get(key)
        if kept is None:
            if len(self._made) >= _KEPT:
                self._made.clear()
            kept = self._made[key] = (spec, self._make(spec.params, spec))
        return kept[1]

    def _make(self, p: SamplingParams, spec: DrawSpec) -> Any:
        out = self._native.SampleParams()
        for name in _SAME:
            setattr(out, name, getattr(p, name))
        out.logprobs = p.logprobs or 0
        out.report = p.wants_logprob
        out.processed = p.logprobs_mode == "processed"
        out.logit_bias = list(p.logit_bias)
        out.restricted = p.allowed_token_ids is not None
        out.allowed_token_ids = list(p.allowed_token_ids or ())
        out.banned_token_ids = list(p.banned_token_ids)
        out.withheld = list(spec.withheld)
        out.breaker_ids = sorted({run[0] for run in spec.breakers if len(run) == 1})
        out.breaker_runs = [list(run) for run in spec.breakers if len(run) > 1]
        return out
