"""Sample and score rows of logits with the native implementation of sampling/.

In: the engine's logits, and one Row or one target per row of logits. Out: one Drawn or TokenLogprob
per row. Invariant: the same bits as sampling/pipeline.py and sampling/logprobs.py. The
pipeline itself samples rows with beam search, and rows with a parameter that has no native kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verbatim.base.errors import BackendError
from verbatim.base.params import DIFFUSION, FIELDS, STRUCTURE, SamplingParams
from verbatim.base.records import BROKEN, Drawn, DrawSpec, TokenLogprob
from verbatim.sampling.pipeline import Row, sample_rows

# fmt: off
# fields of SamplingParams that _build converts
_CONVERTED = (
    "logprobs", "logprobs_mode", "logit_bias", "allowed_token_ids", "banned_token_ids",
    "dry_breakers", "best_of",
)
# fields that act outside the sampler, or reach it as a row's mask, key, beam or withheld ids
_ELSEWHERE = (
    "max_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos", "skip_special", "on_loop",
    "seed", "n", "num_beams", "num_return_sequences", "length_penalty", "early_stopping",
    "num_beam_groups", "diversity_penalty", "prompt_logprobs", "receipt", "speculate", "priority",
    "adapter", "cache_salt", "thinking_budget", "output_prefix", *DIFFUSION, *STRUCTURE,
)
# fmt: on
_BROKEN_ROW = "not finite"  # part of the native error of a row with NaN or infinity
_MAX_CACHED = 512  # requests whose native parameters are cached; a full cache is cleared


class NativeSampler:
    """Samples from the logits of the native engine's last step (step_rows.LogitRows). One per
    backend."""

    def __init__(self, native: Any, engine: Any) -> None:
        self._native = native
        self._engine = engine
        others = [name for name in FIELDS if name not in {*_CONVERTED, *_ELSEWHERE}]
        # fields that the native SampleParams has under the same name and meaning
        self.same = [name for name in others if hasattr(native.SampleParams, name)]
        # The rest, with the default that leaves it off: rows that set one go to the pipeline, so a
        # new sampling parameter takes effect before it has a native kernel.
        self.pipeline_only = [(n, FIELDS[n].default) for n in others if n not in self.same]
        self._cache: dict[tuple[int, tuple[int, ...], int], tuple[DrawSpec, Any]] = {}

    def needs_pipeline(self, params: SamplingParams) -> bool:
        if params.remasking == "entropy_bounded":  # the entropy has no native kernel
            return True
        return any(getattr(params, name) != default for name, default in self.pipeline_only)

    def draw(self, rows: Sequence[Row], first: int = 0) -> list[Drawn]:
        """Sample rows[i] from row first + i of the engine's logits.

        Rows without a native kernel go to the pipeline; all other rows stay in one native call."""
        native_rows = [
            None if row.spec.beam or self.needs_pipeline(row.spec.params) else self.native_row(row)
            for row in rows
        ]
        fallback = [i for i, row in enumerate(native_rows) if row is None]
        if len(fallback) == len(rows):
            return sample_rows(self._engine.logits()[first : first + len(rows)], rows)
        drawn = self._call(native_rows, first)
        for i in fallback:
            at = first + i
            drawn[i] = sample_rows(self._engine.logits()[at : at + 1], [rows[i]])[0]
        return [Drawn(*fields) for fields in drawn]

    def score(self, targets: Sequence[int], top: int, first: int = 0) -> tuple[TokenLogprob, ...]:
        """Score targets[i] with row first + i of the engine's logits, as score_targets() does."""
        scored = self._call([(target, top) for target in targets], first)
        return tuple(TokenLogprob(*fields) for fields in scored)

    def _call(self, native_rows: list[Any], first: int) -> list[Any]:
        try:
            results: list[Any] = self._engine.sample(native_rows, first)
        except ValueError as error:
            if _BROKEN_ROW not in str(error):
                raise BackendError(str(error)) from None
            if len(native_rows) == 1:
                return [(BROKEN, 0.0, ())]
            # the native call names no row: find the broken ones, each ends its request
            results = []
            for i, row in enumerate(native_rows):
                results += [None] if row is None else self._call([row], first + i)
        return results

    def native_row(self, row: Row) -> tuple[object, ...]:
        spec, position, history, mask = row
        step = spec.step
        return self._params(spec), spec.key, position, spec.prompt_len, history, mask, step

    def _params(self, spec: DrawSpec) -> object:
        """The native parameters, built once per request.

        The cache key holds object ids; the cached spec keeps those objects alive."""
        key = (id(spec.params), spec.withheld, id(spec.breakers))
        cached = self._cache.get(key)
        if cached is None:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            cached = self._cache[key] = (spec, self._build(spec.params, spec))
        return cached[1]

    def _build(self, p: SamplingParams, spec: DrawSpec) -> object:
        out = self._native.SampleParams()
        for name in self.same:
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
