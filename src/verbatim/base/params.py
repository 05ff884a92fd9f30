"""SamplingParams: every parameter of a request, checked when the object is made.

Each parameter is declared once, as a field of SamplingParams with its kind, default, help and
range. FIELDS is the table of these rules; validation, the command line's flags, the server's fields
and the table in the documentation are all made from it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from verbatim.base.errors import ParameterError, UnknownParameterError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.migration_hints import hints
from verbatim.base.param_checks import MAX_LOGPROBS, MOST, Field, Kind, checked


def declared(kind: Kind, default: object, help: str, **rule: Any) -> Any:
    """A field of SamplingParams with its rule. Returns Any, so that the field keeps its
    annotation."""
    return field(default=default, metadata={"rule": Field(kind, default, help, **rule)})


STRUCTURE = ("json_schema", "regex", "grammar", "choice")
# A keyword that the server writes into a JSON schema: this part must have a document, also where it
# is one of several alternatives, and warnings about it give its place.
SCHEMA_PART = "x-verbatim-part"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What to generate and how to sample. Immutable; `with_(...)` returns a changed copy.

    A sampling parameter that is not given takes the model's own default where the model states one
    (base/defaults.py); `Completion.params` holds the values in force and `origins` their sources.
    Every field is documented in docs/sampling.md. An unknown name, and a value outside its range,
    raise an error that names the parameter. `json_schema` also takes a pydantic model, a TypedDict
    or a dataclass.

    >>> params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64, stop="\\n\\n")
    >>> params.with_(temperature=0).greedy
    True
    """

    # length and stopping
    max_tokens: int | None = declared(
        "int", None, "maximum output tokens; missing: up to the context's end",
        low=0, high=MOST, common=True,
    )  # fmt: skip
    min_tokens: int = declared(
        "int", 0, "no end-of-sequence or stop before this many tokens", low=0, high=MOST
    )
    stop: str | Sequence[str] = declared(
        "strings", (), "strings that end the answer; they are not part of it"
    )
    stop_token_ids: Sequence[int] = declared("ids", (), "token ids that end the answer")
    include_stop: bool = declared("bool", False, "keep the stop string in the text")
    ignore_eos: bool = declared("bool", False, "do not end at the model's end-of-sequence tokens")
    thinking_budget: int | None = declared(
        "int", None, "maximum tokens of reasoning, which is then closed", low=1, high=MOST
    )
    skip_special: bool = declared("bool", True, "leave control tokens out of the text")
    on_loop: str = declared(
        "choice",
        "report",
        "what to do when the output repeats itself; missing: stop without max_tokens, else report",
        choices=("report", "stop"),
    )
    # the distribution, in the order in which it is applied
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = declared(
        "bias", (), "token id -> number added to its logit", low=-100, high=100
    )
    allowed_token_ids: Sequence[int] | None = declared("ids", None, "only these may be sampled")
    banned_token_ids: Sequence[int] = declared("ids", (), "these are never sampled")
    # low: a smaller divisor makes logits infinite, and their differences NaN
    repetition_penalty: float = declared(
        "float", 1.0,
        "divides the positive and multiplies the negative logits of tokens that occurred",
        low=1e-6, high=10, history=True, slider=(0.5, 2, 0.01),
    )  # fmt: skip
    frequency_penalty: float = declared(
        "float", 0.0, "subtracted once for each time the token was generated",
        low=-2, high=2, history=True, slider=(-2, 2, 0.05),
    )  # fmt: skip
    presence_penalty: float = declared(
        "float", 0.0, "subtracted once if the token was generated",
        low=-2, high=2, history=True, slider=(-2, 2, 0.05),
    )  # fmt: skip
    penalty_range: int = declared(
        "int", 0, "the three penalties look back this many tokens; 0 is all", low=0, high=MOST
    )
    dry_multiplier: float = declared(
        "float",
        0.0,
        "DRY: strength of the penalty on continuing a repeat; 0 is off",
        low=0,
        high=100,
        history=True,
    )
    dry_base: float = declared(
        "float", 1.75, "DRY: growth for each further token of the repeat", low=1, high=8
    )
    dry_allowed_length: int = declared(
        "int", 2, "DRY: repeats up to this length are not penalised", low=1, high=1000
    )
    dry_range: int = declared(
        "int", 0, "DRY: look back this many tokens; 0 is all", low=0, high=MOST
    )
    dry_breakers: str | Sequence[str] = declared(
        "strings", ("\n", ":", '"', "*"), "DRY: a repeat never reaches across these strings"
    )
    no_repeat_ngram: int = declared(
        "int",
        0,
        "no run of this many tokens appears twice; 0 is off",
        low=0,
        high=1000,
        history=True,
    )
    temperature: float = declared(
        "float", 1.0, "0: always the most likely token; 1: the model's own distribution",
        low=0, high=100, slider=(0, 2, 0.05), common=True,
    )  # fmt: skip
    top_k: int = declared(
        "int", 0, "keep the k most likely tokens; 0 is off",
        low=0, high=MOST, filter=True, slider=(0, 256, 1), trials=(2, 40, 300),
    )  # fmt: skip
    top_p: float = declared(
        "float", 1.0, "keep the fewest tokens with this total probability",
        above=0, high=1, filter=True, slider=(0.01, 1, 0.01), trials=(0.2, 0.5, 0.9), common=True,
    )  # fmt: skip
    min_p: float = declared(
        "float", 0.0, "keep tokens with at least this share of the best token's probability",
        low=0, high=1, filter=True, slider=(0, 0.5, 0.005), trials=(0.7, 0.1, 0.01),
    )  # fmt: skip
    typical_p: float = declared(
        "float", 1.0, "keep the most typical tokens with this total probability",
        above=0, high=1, filter=True, slider=(0.01, 1, 0.01), trials=(0.1, 0.5, 0.95),
    )  # fmt: skip
    top_n_sigma: float = declared(
        "float", 0.0, "keep logits within n standard deviations of the best; 0 is off",
        low=0, high=1000, filter=True, slider=(0, 5, 0.05), trials=(0.1, 1.0, 2.0),
    )  # fmt: skip
    xtc_probability: float = declared(
        "float", 0.0, "XTC: chance to remove the top choices; 0 is off",
        low=0, high=1, filter=True, slider=(0, 1, 0.05), trials=(1.0, 0.5, 0.2),
    )  # fmt: skip
    xtc_threshold: float = declared(
        "float", 0.1, "XTC: a top choice is one at least this likely",
        low=0, high=1, slider=(0, 0.5, 0.01),
    )  # fmt: skip
    seed: int | None = declared(
        "int",
        None,
        "makes sampling repeatable; missing: one is chosen and reported",
        low=0,
        high=2**63 - 1,
        common=True,
    )
    # diffusion models (docs/diffusion.md); missing: the model's own
    denoising_steps: int | None = declared(
        "int", None, "diffusion: steps per block; missing: one per position", low=1, high=MOST
    )
    block_length: int | None = declared(
        "int", None, "diffusion: positions of a block; missing: the model's own", low=1, high=MOST
    )
    remasking: str | None = declared(
        "choice",
        None,
        "diffusion: which tokens of a step stay; missing: the model's own",
        choices=(
            *("low_confidence_static", "low_confidence_dynamic", "entropy_bounded"),
            *("random", "sequential"),
        ),
    )
    confidence_threshold: float | None = declared(
        "float",
        None,
        "diffusion: probability from which low_confidence_dynamic keeps a token; missing: 0.85",
        above=0,
        high=1,
    )
    entropy_threshold: float | None = declared(
        "float",
        None,
        "diffusion: sum of entropies that entropy_bounded keeps, in nats; missing: 0.35",
        above=0,
        high=1000,
    )
    # how many answers
    n: int = declared("int", 1, "answers to return", low=1, high=1024)
    best_of: int | None = declared(
        "int",
        None,
        "generate this many, return the n with the best mean log-probability",
        low=1,
        high=1024,
    )
    num_beams: int = declared(
        "int", 1, "beam search with this many beams; 1 is off", low=1, high=256
    )
    num_return_sequences: int | None = declared(
        "int", None, "beams to return (beam search only)", low=1, high=256
    )
    length_penalty: float = declared(
        "float", 1.0, "beam search: score is divided by length to this power", low=-10, high=10
    )
    early_stopping: bool | str = declared(
        "choice", False, "beam search: when to stop", choices=(True, False, "never")
    )
    num_beam_groups: int = declared(
        "int", 1, "beam search: groups that avoid each other's tokens", low=1, high=256
    )
    diversity_penalty: float = declared(
        "float",
        0.0,
        "beam search: subtracted for each earlier group's use of the token",
        low=0,
        high=100,
    )
    # structured output
    json_schema: str | JsonMapping | type | bool | None = declared(  # noqa: RUF009
        "schema", None, "the answer is JSON valid under this schema", common=True
    )
    regex: str | None = declared("str", None, "the answer matches this regular expression")
    grammar: str | None = declared(
        "str", None, "the answer is in the language of this Lark grammar"
    )
    choice: Sequence[str] | None = declared("strings", None, "the answer is one of these strings")
    output_prefix: int = declared(
        "int",
        0,
        "the prompt's last tokens that count as output: structure, penalties, min_tokens",
        low=0,
        high=MOST,
    )
    # reports
    logprobs: int | None = declared(
        "int",
        None,
        "report each token's log-probability and this many alternatives",
        low=0,
        high=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = declared(
        "int", None, "the same for the prompt's tokens", low=0, high=MAX_LOGPROBS
    )
    logprobs_mode: str = declared(
        "choice",
        "raw",
        "the model's distribution, or the one that is sampled",
        choices=("raw", "processed"),
    )
    explain: int = declared(
        "int", 0, "explain each token with this many top candidates", low=0, high=MAX_LOGPROBS
    )
    receipt: bool = declared("bool", False, "return all that is needed to replay the answer")
    # how the engine runs the request
    speculate: str | None = declared(
        "str",
        None,
        "off, ngram, suffix, mtp, head, draft, self or auto; missing: the engine's setting",
    )
    priority: int = declared("int", 0, "smaller numbers run first", low=-(2**31), high=2**31 - 1)
    adapter: str = declared("str", "", "name of a loaded LoRA adapter; empty: the base model")
    cache_salt: str = declared("str", "", "requests share cached prefixes only under the same salt")
    # (name, origin) of each parameter in DEFAULTED that was given: "request". base/defaults.py adds
    # the others: "model: generation_config.json", "protocol: ollama", ...
    origins: tuple[tuple[str, str], ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        for name, rule in FIELDS.items():
            object.__setattr__(self, name, checked(name, rule, getattr(self, name)))
        self._check_together()

    def _check_together(self) -> None:
        """Rules between parameters. Contradictions raise; risky combinations only warn
        (sampling/warnings.py)."""
        named = [f for f in STRUCTURE if getattr(self, f) is not None]
        if len(named) > 1:
            raise ParameterError(
                named[1],
                f"cannot be combined with {named[0]}: an answer has one structure; leave one out",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens + self.output_prefix:
            raise ParameterError(
                "min_tokens", f"{self.min_tokens} is more than max_tokens ({self.max_tokens})"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise ParameterError("best_of", f"{self.best_of} is less than n ({self.n})")
        if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= set(
            self.banned_token_ids
        ):
            raise ParameterError(
                "allowed_token_ids",
                "every allowed id is banned too; allow one that is not in banned_token_ids",
            )
        if self.num_beams > 1:
            self._check_beams()
        else:
            for name in (
                *("num_return_sequences", "length_penalty", "early_stopping"),
                *("num_beam_groups", "diversity_penalty"),
            ):
                if getattr(self, name) != FIELDS[name].default:
                    raise ParameterError(
                        name, "belongs to beam search; set num_beams above 1, or leave it out"
                    )

    def _check_beams(self) -> None:
        """Beam search finds the most likely sequences, so parameters of a random draw are
        refused."""
        for name in BEAM_REFUSES:
            value, default = getattr(self, name), FIELDS[name].default
            if value != default and value not in BEAM_AGREES.get(name, ()):
                raise ParameterError(
                    name,
                    f"cannot be combined with beam search (num_beams={self.num_beams}); "
                    "leave one out",
                )
        if (self.num_return_sequences or 1) > self.num_beams:
            raise ParameterError(
                "num_return_sequences",
                f"{self.num_return_sequences} is more than num_beams ({self.num_beams})",
            )
        if self.num_beams % self.num_beam_groups:
            raise ParameterError(
                "num_beam_groups",
                f"{self.num_beam_groups} does not divide num_beams ({self.num_beams})",
            )
        if self.diversity_penalty and self.num_beam_groups == 1:
            raise ParameterError(
                "diversity_penalty", "has no effect with one group; set num_beam_groups above 1"
            )

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with these parameters changed. The others keep their values and origins."""
        known = self._known
        kept = {
            name: getattr(self, name)
            for name, rule in FIELDS.items()
            if name in known or getattr(self, name) != rule.default
        }
        made = SamplingParams(**{**kept, **changes})
        origins = {**dict(made.origins), **{n: o for n, o in self.origins if n not in changes}}
        object.__setattr__(made, "origins", tuple(sorted(origins.items())))
        return made

    def with_origins(
        self, origins: Mapping[str, str], checked: Mapping[str, object] | None = None
    ) -> SamplingParams:
        """A copy that names where these parameters came from. `checked`: new values that are valid
        already, so that a request costs no second validation of every field."""
        made = object.__new__(SamplingParams)
        values = checked or {}
        for name in FIELDS:
            object.__setattr__(made, name, values.get(name, getattr(self, name)))
        merged = {**dict(self.origins), **origins}
        object.__setattr__(made, "origins", tuple(sorted(merged.items())))
        return made

    @property
    def _known(self) -> set[str]:
        return {name for name, _ in self.origins}

    @classmethod
    def from_mapping(cls, values: JsonMapping) -> SamplingParams:
        """From JSON or flags. An unknown name raises UnknownParameterError."""
        return cls(**values)

    def __repr__(self) -> str:
        """What was given or differs from its default, and what the model will supply.

        >>> SamplingParams(max_tokens=8, top_p=1.0)
        SamplingParams(max_tokens=8, temperature=<model's>, top_k=<model's>, top_p=1.0)
        """
        given = self.to_mapping()
        known = given.keys() | dict(self.origins).keys()
        open_ = set() if self.num_beams > 1 else set(SUPPLIED) - known
        shown = {
            name: "<model's>" if name in open_ else repr(getattr(self, name)) for name in FIELDS
        }
        text = ", ".join(f"{n}={v}" for n, v in shown.items() if n in given or n in open_)
        return f"SamplingParams({text})"

    def to_mapping(self) -> JsonObject:
        """The parameters that were given or differ from their defaults, as JSON-ready values."""
        out: JsonObject = {}
        known = self._known
        for name, rule in FIELDS.items():
            value = getattr(self, name)
            if value != rule.default or name in known:
                out[name] = (
                    dict(value)
                    if name == "logit_bias"
                    else list(value)
                    if isinstance(value, tuple)
                    else value
                )
        return out

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        return any(getattr(self, name) != default for name, default in _HISTORY)

    @property
    def wants_logprob(self) -> bool:
        """Whether log-probabilities of drawn tokens are needed; otherwise none is computed."""
        return self.logprobs is not None or self.best_of is not None

    @property
    def structured(self) -> bool:
        return any(getattr(self, f) is not None for f in STRUCTURE)

    @property
    def width(self) -> int:
        """Sequences of this request that run at the same time."""
        return self.num_beams if self.num_beams > 1 else (self.best_of or self.n)


FIELDS: dict[str, Field] = {
    f.name: f.metadata["rule"] for f in fields(SamplingParams) if "rule" in f.metadata
}

# Parameters that enable a filter, in the order of sampling/processors.py.
FILTERS = tuple(name for name, rule in FIELDS.items() if rule.filter)
# Parameters that the model or the protocol supplies where a request is silent (base/defaults.py).
# fmt: off
DEFAULTED = (
    "temperature", *FILTERS, "xtc_threshold", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "no_repeat_ngram", "on_loop",
)
# Those of them that most models state; repr() names them where the model will supply them.
SUPPLIED = ("temperature", "top_k", "top_p")
# Parameters that beam search refuses, because it draws nothing.
BEAM_REFUSES = (
    "temperature", *FILTERS, "seed", "n", "best_of", "speculate", "on_loop", *STRUCTURE,
    "output_prefix", "thinking_budget",
)
# Parameters of diffusion models; all others refuse them.
DIFFUSION = (
    "denoising_steps", "block_length", "remasking", "confidence_threshold", "entropy_threshold",
)
# fmt: on
# Values that beam search implies: no randomness or the model's own distribution; no drafts.
BEAM_AGREES: dict[str, tuple[object, ...]] = {"temperature": (0.0, 1.0), "speculate": ("off",)}
# Built once, because it is read for every row of every step.
_HISTORY = tuple((name, rule.default) for name, rule in FIELDS.items() if rule.history)


_generated_init = SamplingParams.__init__


@functools.wraps(_generated_init)
def _checked_init(self: SamplingParams, *args: Any, **values: Any) -> None:
    """Raise for an unknown name with a suggestion, which Python's own TypeError does not make."""
    for name in values:
        if name not in FIELDS:
            raise UnknownParameterError(name, FIELDS, hints("parameters").get(name, ""))
    _generated_init(self, *args, **values)
    given = {*values, *tuple(FIELDS)[: len(args)]}
    origins = tuple((name, "request") for name in sorted(DEFAULTED) if name in given)
    object.__setattr__(self, "origins", origins)


SamplingParams.__init__ = _checked_init  # type: ignore[method-assign]
