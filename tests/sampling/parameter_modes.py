"""Every parameter in every mode: honoured with the same result, or refused with an error that
names it. mode_table() makes the table of docs/sampling.md.

Engine and sampler are real; the model is the fake of verbatim.testing (logits from a hash of all
tokens so far, a canary in every cache slot).
"""

from __future__ import annotations

import contextlib
from typing import Any

from filter_values import STRONG
from verbatim.base.errors import RequestError
from verbatim.base.params import STRUCTURE, SamplingParams
from verbatim.base.records import Completion
from verbatim.engine.calls.llm import LLM
from verbatim.model.spec import DiffusionSpec
from verbatim.testing.fakes import fake_parts, fake_spec

PROMPT = "the cat sat on the mat and the cat sat on the "
BASE: dict[str, Any] = {"max_tokens": 10, "seed": 5, "temperature": 0.9}

LETTERS = [chr(c) for c in range(97, 123)]
# Per parameter a value with a visible effect, and the parameters it depends on.
VALUES: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 5},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(32, 127))},
    "stop": {"stop": LETTERS},
    "stop_token_ids": {"stop_token_ids": list(range(40))},
    "include_stop": {"include_stop": True, "stop": LETTERS},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {257: 30.0}},
    "skip_special": {"skip_special": False, "logit_bias": {258: 12.0}},
    "on_loop": {"on_loop": "stop", "allowed_token_ids": [97], "max_tokens": 80},
    "logit_bias": {"logit_bias": {97: 9.0}},
    "allowed_token_ids": {"allowed_token_ids": [97, 98, 99, 32, 257]},
    "banned_token_ids": {"banned_token_ids": list(range(60, 200))},
    "repetition_penalty": {"repetition_penalty": 5.0, "allowed_token_ids": list(range(97, 117))},
    "frequency_penalty": {"frequency_penalty": 2.0, "allowed_token_ids": list(range(97, 103))},
    "presence_penalty": {"presence_penalty": 2.0, "allowed_token_ids": list(range(97, 103))},
    "penalty_range": {
        "penalty_range": 2,
        "repetition_penalty": 5.0,
        "allowed_token_ids": list(range(97, 117)),
    },
    "dry_multiplier": {
        "dry_multiplier": 20.0,
        "dry_allowed_length": 1,
        "allowed_token_ids": [97, 98, 99],
    },
    "dry_base": {
        "dry_base": 8.0,
        "dry_multiplier": 0.5,
        "dry_allowed_length": 1,
        "allowed_token_ids": [97, 98],
        "max_tokens": 30,
    },
    "dry_allowed_length": {
        "dry_allowed_length": 1,
        "dry_multiplier": 20.0,
        "allowed_token_ids": [97, 98, 99],
    },
    "dry_range": {
        "dry_range": 3,
        "dry_multiplier": 20.0,
        "dry_allowed_length": 1,
        "allowed_token_ids": [97, 98, 99],
    },
    "dry_breakers": {
        "dry_breakers": ["b"],
        "dry_multiplier": 20.0,
        "dry_allowed_length": 1,
        "allowed_token_ids": [97, 98, 99],
    },
    "no_repeat_ngram": {
        "no_repeat_ngram": 2,
        "allowed_token_ids": [32, 97, 99, 116, 104, 101, 100],
    },
    "temperature": {"temperature": 2.5},
    **STRONG,
    "xtc_probability": {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    "xtc_threshold": {"xtc_threshold": 0.001, "xtc_probability": 1.0},
    "seed": {"seed": 6},
    "n": {"n": 2},
    "best_of": {"best_of": 5},
    "num_beams": {"num_beams": 3},
    "num_return_sequences": {"num_return_sequences": 2, "num_beams": 3},
    "length_penalty": {"length_penalty": 3.0, "num_beams": 3},
    "early_stopping": {"early_stopping": True, "num_beams": 3, "logit_bias": {257: 7.0}},
    "num_beam_groups": {"num_beam_groups": 2, "num_beams": 4},
    "diversity_penalty": {
        "diversity_penalty": 9.0,
        "num_beam_groups": 2,
        "num_beams": 4,
        "num_return_sequences": 4,
    },
    "json_schema": {"json_schema": {"enum": ["alpha", "beta"]}},
    "regex": {"regex": "[xyz]{4,9}"},
    "grammar": {"grammar": 'start: "<" /[a-f]{2,5}/ ">"'},
    "choice": {"choice": ["left", "right"]},
    "output_prefix": {
        "output_prefix": 9,
        "frequency_penalty": 2.0,
        "allowed_token_ids": list(range(97, 103)),
    },
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "logprobs_mode": {"logprobs_mode": "processed", "logprobs": 2, "logit_bias": {97: 9.0}},
    "explain": {"explain": 2},
    "receipt": {"receipt": True},
    "speculate": {"speculate": "ngram"},
    "priority": {"priority": -3},
    "cache_salt": {"cache_salt": "x"},
}
# These do not change the tokens.
QUIET = {"speculate", "priority", "cache_salt", "receipt"}

NEIGHBOURS = [
    {"temperature": 0.0},
    {"top_p": 0.5, "n": 2, "max_tokens": 4},
    {"repetition_penalty": 1.3, "logprobs": 2},
    {"num_beams": 2, "seed": None, "temperature": 1.0},
    {"regex": "[a-m]{3,30}"},
    {"min_p": 0.2, "dry_multiplier": 0.8, "xtc_probability": 0.5},
]


def engine(**options: Any) -> LLM:
    return LLM.from_loaded(
        fake_parts(canary=True), **{"kv_blocks": 200, "speculate": "off", **options}
    )


def params_of(values: dict[str, Any]) -> SamplingParams:
    wanted = {**BASE, **values}
    if wanted.get("num_beams", 1) > 1:  # beam search has no draw
        wanted = {
            k: v for k, v in wanted.items() if k not in ("seed", "temperature") or k in values
        }
    return SamplingParams.from_mapping(wanted)


def seen(done: Completion, index: int | None = None) -> tuple[Any, ...]:
    """All that a client observes, except timings and request ids. `index`: one choice only."""
    choices = done.choices if index is None else done.choices[index : index + 1]
    own = tuple(
        (c.text, c.token_ids, c.finish, c.logprobs, repr(c.explain), c.score, c.loop)
        for c in choices
    )
    return own, done.prompt_logprobs


class Engines:
    """One engine per mode, shared by the whole table."""

    def __init__(self) -> None:
        self.plain = engine()
        self.chunked = engine(step_tokens=5)
        self.tight = engine(kv_blocks=9, step_tokens=24, check=True)
        self.drafting = engine(speculate="ngram")
        self.preemptions = 0
        self._single: dict[str, Any] = {}
        self._batches: dict[LLM, dict[str, Any]] = {}  # by engine and repr() of the parameters

    def single(self, p: SamplingParams) -> Any:
        """The answer alone; computed once per value of the parameters."""
        if repr(p) not in self._single:
            self._single[repr(p)] = seen(self.plain.generate(PROMPT, p))
        return self._single[repr(p)]

    def batch(self, p: SamplingParams, llm: LLM | None = None) -> Any:
        """The answer that together() found."""
        return self._batches[llm or self.plain][repr(p)]

    def together(self, llm: LLM, params: list[SamplingParams]) -> None:
        """Compute the answers of `params` in one batch, between requests with other prompts. All of
        the table are neighbours of each other; the tight engine preempts some of them."""
        neighbours = [params_of({"max_tokens": 10, **values}) for values in NEIGHBOURS]
        around = [f"neighbour {i}, not of interest here" for i in range(3)]
        done = llm.generate(
            [*around, *[PROMPT] * len(params), "x", "yy", "zzz"],
            [*neighbours[:3], *params, *neighbours[3:]],
        )
        self.preemptions += sum(d.timings.preemptions for d in done)
        answers = [seen(one) for one in done[3:-3]]
        found = self._batches.setdefault(llm, {})
        found.update({repr(p): one for p, one in zip(params, answers, strict=True)})

    def streamed(self, p: SamplingParams) -> Any:
        stream = self.plain.stream(PROMPT, p)
        parts = list(stream)
        done = stream.completion
        assert done is not None
        if p.best_of is not None:  # the choices are known only at the end
            assert not parts
            return seen(done)
        for choice in done.choices:
            deltas = [d for d in parts if d.index == choice.index]
            assert "".join(d.text for d in deltas) == choice.text
            assert tuple(t for d in deltas for t in d.token_ids) == choice.token_ids
        return seen(done)

    def run(self, mode: str, p: SamplingParams) -> Any:
        if mode == "chunked":
            return seen(self.chunked.generate(PROMPT, p))
        if mode == "preempted":
            return self.batch(p, self.tight)
        if mode == "speculation":
            return seen(
                self.drafting.generate(PROMPT, p.with_(speculate=None) if p.num_beams == 1 else p)
            )
        return {"single": self.single, "batch": self.batch, "streamed": self.streamed}[mode](p)


COMBINED: dict[str, dict[str, Any]] = {
    "n>1": {"n": 3},
    "beam": {"num_beams": 3},
    "grammar": {"regex": "[a-z ]{6,60}"},
}
SAME = ("batch", "streamed", "chunked", "preempted", "speculation")


def combined(extra: dict[str, Any]) -> list[SamplingParams]:
    """Every value of the table with `extra`, except those that are refused (see cell())."""
    found = []
    for values in VALUES.values():
        with contextlib.suppress(RequestError):
            found.append(params_of({**extra, **values}))
    return found


def cell(engines: Engines, name: str, mode: str, alone: Any) -> str:
    """ "same" (as alone), "honoured" (has its effect, alone and in a batch) or "refused" (and
    named); else what is wrong."""
    values = VALUES[name]
    if mode in SAME:
        outcome = "at the end" if (name, mode) == ("best_of", "streamed") else "same"
        return outcome if engines.run(mode, params_of(values)) == alone else "WRONG: differs"
    extra = COMBINED[mode]
    if name in extra:
        return "is it"
    try:
        with_it = params_of({**extra, **values})
    except RequestError as error:
        named = error.param in (*values, *extra, *STRUCTURE)
        return "refused" if named else f"WRONG: refused for {error.param}"
    together = engines.single(with_it)
    if engines.batch(with_it) != together:
        return "WRONG: differs in a batch"
    if mode == "n>1" and name != "best_of" and together[0][0] != alone[0][0]:
        return "WRONG: the first of n choices differs from the single choice"
    rest = {k: v for k, v in values.items() if k != name}
    if (
        name not in QUIET
        and name not in SUBTLE
        and together == engines.single(params_of({**extra, **rest}))
    ):
        return "WRONG: no effect"
    return "honoured"


FINE = {"num_beams", "early_stopping", "length_penalty"}  # these may leave the best beam unchanged
SUBTLE = FINE | {
    "dry_breakers", "dry_range", "dry_base", "include_stop", "min_tokens", "ignore_eos", "on_loop",
    "skip_special",
}  # fmt: skip


def mode_table() -> list[list[str]]:
    """Rows of the table; an AssertionError names each wrong cell."""
    engines = Engines()
    engines.together(engines.plain, [params_of(values) for values in VALUES.values()])
    engines.together(engines.tight, [params_of(values) for values in VALUES.values()])
    for extra in COMBINED.values():
        engines.together(engines.plain, combined(extra))
    modes = ("single", "batch", "streamed", *COMBINED, "chunked", "preempted", "speculation")
    rows = [["parameter", *modes]]
    wrong = []
    for name in VALUES:
        alone = engines.single(params_of(VALUES[name]))
        rest = {k: v for k, v in VALUES[name].items() if k != name}
        if name not in QUIET and name not in FINE and alone == engines.single(params_of(rest)):
            wrong.append(f"{name} has no effect")
        rows.append([name, "honoured", *(cell(engines, name, mode, alone) for mode in modes[1:])])
        wrong += [
            f"{name}, {mode}: {found}"
            for mode, found in zip(modes, rows[-1][1:], strict=True)
            if found.startswith("WRONG")
        ]
    assert not wrong, "\n".join(wrong)
    assert engines.preemptions > 20, "the tight engine must preempt"
    for llm in (engines.plain, engines.chunked, engines.tight, engines.drafting):
        llm.check()
        assert llm.stats()["blocks_used"] == 0
        llm.close()
    return rows


# ------------------------------------------------------------------------------ diffusion models

DIFFUSION_VALUES: dict[str, dict[str, Any]] = {
    **VALUES,
    "denoising_steps": {"denoising_steps": 2},
    "block_length": {"block_length": 5},
    "remasking": {"remasking": "random"},
    "confidence_threshold": {"confidence_threshold": 0.01, "remasking": "low_confidence_dynamic"},
    "entropy_threshold": {"entropy_threshold": 20.0, "remasking": "entropy_bounded"},
}
DIFFUSION_MODES: dict[str, tuple[DiffusionSpec, dict[str, Any]]] = {
    "blocks": (DiffusionSpec(mask=259, block=4), {}),
    "sequential": (DiffusionSpec(mask=259, block=4), {"remasking": "sequential"}),
    "full attention": (DiffusionSpec(mask=259, block=6, full=True), {}),
}


def diffusion_table() -> list[list[str]]:
    """Every parameter on diffusion models: honoured, with one answer alone, in a crowd, in small
    steps and after preemption, or refused by name."""
    rows = [["parameter", *DIFFUSION_MODES]]
    cells = {mode: _diffusion_column(*DIFFUSION_MODES[mode]) for mode in DIFFUSION_MODES}
    rows += [[name, *(cells[mode][name] for mode in cells)] for name in DIFFUSION_VALUES]
    wrong = [row for row in rows[1:] if any(cell.startswith("WRONG") for cell in row[1:])]
    assert not wrong, wrong
    return rows


def _diffusion_column(diffusion: DiffusionSpec, extra: dict[str, Any]) -> dict[str, str]:
    def opened(**options: Any) -> LLM:
        parts = fake_parts(canary=True, spec=fake_spec(diffusion=diffusion))
        return LLM.from_loaded(parts, **{"speculate": "off", **options})

    cells, wanted = dict[str, str](), dict[str, SamplingParams]()
    alone, answers = opened(), dict[str, Any]()

    def single(p: SamplingParams) -> Any:
        if repr(p) not in answers:
            answers[repr(p)] = seen(alone.generate(PROMPT, p))
        return answers[repr(p)]

    for name, values in DIFFUSION_VALUES.items():
        try:
            wanted[name] = params_of({**extra, **values})
            found = single(wanted[name])
        except RequestError as error:
            cells[name] = "refused" if error.param in values else f"WRONG: names {error.param}"
            wanted.pop(name, None)
            continue
        rest = {k: v for k, v in values.items() if k != name}
        try:
            without = single(params_of({**extra, **rest}))
        except RequestError:
            without = None
        plain = name in QUIET | SUBTLE or found != without
        cells[name] = "honoured" if plain else "WRONG: no effect"
    small = {"step_tokens": 9 if not diffusion.full else 128, "kv_blocks": 60}
    for llm in (alone, opened(**small)):
        for name, done in zip(wanted, llm.generate([PROMPT] * len(wanted), [*wanted.values()]),
                              strict=True):  # fmt: skip
            if seen(done) != single(wanted[name]):
                cells[name] = "WRONG: differs in a batch"
        llm.check()
        if llm is not alone:
            llm.close()
    alone.close()
    return cells
