"""The messages between the HTTP process and the engine process, and their msgpack encoding.

One frozen dataclass per message. On the wire a message is an array: the class name, then the values
of the fields in order; a nested record is an array of its values. Both processes run the same
installation, so the positions need no version.

    to the engine     Start, Generate, Tokenize, Detokenize, Inspect, Abort, Close
    from the engine   Loading, Ready, Failed, Heartbeat, Accepted, Deltas,
                      Generated, Tokenized, Detokenized, Inspected, Refused

decode_*() checks the name, the number of fields and the type of each field, and raises WireError
for anything else. A message holds numbers, text, bytes, lists and maps only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgpack

from verbatim.base.records import Timings, Usage
from verbatim.server.api.api_errors import Problem

Conversation = list[dict[str, Any]]


class WireError(Exception):
    """A message that this version does not define: a bug in one of the two processes."""


# ------------------------------------------------------------------------------------ to the engine


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: which model to load, and how."""

    model: str
    revision: str | None
    offline: bool
    engine: dict[str, Any]  # fields of EngineConfig that differ from their defaults
    test_engine: str  # tests only: options of verbatim.testing.server_parts; empty: load the model
    served_name: str  # the model's name in receipts
    cache_share: float  # share of the KV cache that one tenant's requests may claim
    prefix_key: bytes = b""  # key of the prefix cache's block hashes; empty: random


@dataclass(frozen=True, slots=True)
class Generate:
    """Run one prompt, or one conversation through the chat template. `params` are the fields of
    SamplingParams that differ from their defaults."""

    request_id: str
    tenant: str
    params: dict[str, Any]
    stream: bool  # send Deltas; otherwise only Generated
    prompt: str | list[int] | None = None  # None: `messages` holds the conversation
    messages: Conversation | None = None
    template: dict[str, Any] | None = None  # options of the chat template (tools, ...)
    parse_special: bool = False  # the text of a control token in the prompt becomes that token
    echo: bool = False  # Accepted carries the prompt's text
    num_ctx: int | None = None  # Ollama: maximum tokens of prompt and output together
    open_end: bool = (
        False  # Ollama: the client set no max_tokens, so num_ctx may shorten the output
    )
    embedding: bool = False  # Generated carries the mean hidden state of the prompt
    explain_rows: bool = False  # explanations carry their rows of logits
    # where parameters came from that the client did not give (base/defaults.py)
    origins: dict[str, str] = field(default_factory=dict)
    report_params: bool = False  # Generated carries the parameters in force and their origins


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Encode a text, or a conversation through the chat template, to token ids. With `render` the
    result is Detokenized: the conversation as a text."""

    request_id: str
    tenant: str
    text: str | None = None  # None: `messages` holds the conversation
    messages: Conversation | None = None
    template: dict[str, Any] | None = None
    add_special: bool = True  # put the tokens around the text that a prompt gets (BOS, EOS)
    parse_special: bool = False
    render: bool = False


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Decode token ids to text, control tokens included."""

    request_id: str
    tenant: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Inspect:
    """A read-only question of the Lens (process/inspector.py): it computes no token."""

    request_id: str
    tenant: str
    what: str  # facts, vocab, step, engine or prefix
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a request. Unknown and finished requests are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Close:
    """End the engine process."""


# ---------------------------------------------------------------------------------- from the engine


@dataclass(frozen=True, slots=True)
class Loading:
    """The model's name is right: the engine process reads its file or downloads it."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the HTTP process must know about the model, which it does not load."""

    name: str
    digest: str
    fingerprint: str
    context: int  # maximum tokens of prompt and output together
    vocab: int
    hidden: int  # size of a hidden state
    has_template: bool
    template_tools: bool  # the chat template accepts `tools`
    template_calls: bool  # the chat template accepts tool calls and tool messages
    tool_format: str  # how this model writes a tool call, see api/tool_format.py
    control: frozenset[int]  # ids of control tokens
    space_prefix: bool  # the tokenizer puts a space before the first word
    longest_token: int  # bytes
    thinks: bool = False  # the chat template marks thoughts (text/thoughts.py)
    # template variables that switch thinking, see api/thinking.py
    thinking_switches: list[str] = field(default_factory=list)
    slots: int = 0  # sequences that run at once
    device: str = ""  # the backend: cpu, cuda, reference
    family: str = ""  # of ModelSpec
    # of ModelSpec, by the names of GGUF headers (block_count, ...)
    sizes: dict[str, int] = field(default_factory=dict)
    template: str = ""  # source of the chat template; empty: none
    # text of each special token, by the names of chat templates (bos_token, ...)
    special_tokens: dict[str, str] = field(default_factory=dict)
    # fields of engine.loaded_model.ModelFile
    file: dict[str, Any] = field(default_factory=dict)
    # sampling parameters that the model states, and where (base.defaults.ModelDefaults)
    sampling: dict[str, Any] = field(default_factory=dict)
    sampling_source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "control", frozenset(self.control))  # a list on the wire


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded; requests are accepted from now on."""

    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Failed:
    """The model could not be loaded; the engine process ends."""

    message: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent every BEAT_SECONDS: shows that the engine's event loop runs, and carries its
    counters."""

    stats: dict[str, Any]
    metrics: str | None = None  # Prometheus text; None: unchanged since the last one


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine has accepted the request. `text` is the prompt's text if `echo` was set."""

    request_id: str
    text: str = ""
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WireFinish:
    """Why a choice ended: base.records.Finish, and what a protocol must know to report it."""

    reason: str
    detail: str
    stop_string: bool = False  # reason "stop": `detail` is one of the request's stop strings
    fields: list[str] = field(default_factory=list)  # reason "error": the parameters at fault


class TopLogprob(NamedTuple):
    """One alternative of a token. A named tuple: there may be 1024 per token."""

    token: int
    logprob: float
    raw: bytes


@dataclass(frozen=True, slots=True)
class WireLogprob:
    """base.records.TokenLogprob with the bytes of each token: OpenAI's answers show them, and the
    HTTP process has no tokenizer. The first token of a prompt has neither `logprob` nor `top`."""

    token: int
    logprob: float | None
    raw: bytes
    top: Sequence[TopLogprob] | None  # the most likely first


class WireDelta(NamedTuple):
    """The new tokens and text of one choice of one request in one step. A named tuple, because each
    process makes one per token: 4 us to encode and decode on a Neoverse-N1, 9 us as a frozen
    dataclass."""

    request_id: str
    choice: int  # its index
    text: str
    token_ids: Sequence[int]
    finish: WireFinish | None
    logprobs: Sequence[WireLogprob]
    explain: Sequence[dict[str, Any]]
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Deltas:
    """The deltas of all streamed requests in one step."""

    items: list[WireDelta]


@dataclass(frozen=True, slots=True)
class WireChoice:
    """One whole choice of an answer: base.records.Choice."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish: WireFinish
    logprobs: Sequence[WireLogprob]
    explain: Sequence[dict[str, Any]]
    score: float | None
    loop: int
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Generated:
    """The end of a Generate: base.records.Completion. No choices: aborted before it started."""

    request_id: str
    choices: list[WireChoice]
    usage: Usage
    timings: Timings
    seed: int
    fingerprint: str
    warnings: Sequence[str]
    prompt_logprobs: list[WireLogprob]
    receipt: dict[str, Any] | None
    embedding: list[float] | None
    # base.defaults.report, if the client asked for it
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The end of a Tokenize."""

    request_id: str
    token_ids: list[int]
    raw: list[bytes]  # the bytes of each token
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True)
class Detokenized:
    """The end of a Detokenize."""

    request_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """The end of an Inspect."""

    request_id: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """The end of a request that failed; the fields are those of a Problem."""

    request_id: str
    code: str
    message: str
    param: str | None
    retry_after: float | None

    @classmethod
    def of(cls, request_id: str, problem: Problem) -> Refused:
        return cls(request_id, problem.code, problem.message, problem.param, problem.retry_after)

    def problem(self) -> Problem:
        return Problem(self.code, self.message, self.param, self.retry_after)


Work = Generate | Tokenize | Detokenize | Inspect
Result = Generated | Tokenized | Detokenized | Inspected
ToEngine = Start | Work | Abort | Close
FromEngine = Loading | Ready | Failed | Heartbeat | Accepted | Deltas | Result | Refused
Message = ToEngine | FromEngine


# -------------------------------------------------------------------------------------- encoding


def encode(message: Message) -> bytes:
    body: bytes = msgpack.packb((type(message).__name__, *_row(message)), default=_row)
    return body


def _row(record: object) -> Any:
    """The values of a record in order. msgpack calls this for types it cannot pack itself."""
    row = _ROWS.get(type(record))
    if row is None:
        raise TypeError(f"{type(record).__name__} is not a record of a message")
    return row(record)


def _getter(kind: Any) -> Callable[[Any], Sequence[Any]]:
    names = [f.name for f in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)  # a tuple
    return lambda record: [getattr(record, name) for name in names]


# -------------------------------------------------------------------------------------- decoding


class _Rule(NamedTuple):
    """How one field is decoded: the types that msgpack may give, and what a list is made into."""

    types: frozenset[type]
    make: Callable[[list[Any]], Any] | None = None
    record: bool = False  # the list holds the values of a record


def decode_to_engine(body: bytes) -> ToEngine:
    return _decode(body, _TO_ENGINE)  # type: ignore[no-any-return]


def decode_from_engine(body: bytes) -> FromEngine:
    return _decode(body, _FROM_ENGINE)  # type: ignore[no-any-return]


def _decode(body: bytes, known: dict[str, Callable[[list[Any]], Any]]) -> Any:
    try:
        row = msgpack.unpackb(body, strict_map_key=False)
    except Exception as error:  # msgpack has several, and ValueError, and UnicodeDecodeError
        raise WireError(f"a message is not msgpack: {error!r}") from error
    if type(row) is not list or not row or type(row[0]) is not str:
        raise WireError("a message is not an array that begins with a name")
    decoder = known.get(row[0])
    if decoder is None:
        raise WireError(f"no such message here: {row[0]!r}")
    del row[0]
    return decoder(row)


def _decoder(kind: Any) -> Callable[[list[Any]], Any]:
    """A function from the values of a record to the record, each checked against its annotation."""
    hints = get_type_hints(kind)
    rules = [_rule(annotation) for annotation in hints.values()]
    makers = [
        (at, rule.make, rule.record) for at, rule in enumerate(rules) if rule.make is not None
    ]
    make_record = getattr(kind, "_make", None) or (lambda row: kind(*row))
    valid: set[tuple[type, ...]] = set()  # row types that passed check(): one lookup per record

    def check(types: tuple[type, ...]) -> None:
        if len(types) != len(rules):
            raise WireError(f"{kind.__name__} has {len(rules)} fields; received {len(types)}")
        for name, found, rule in zip(hints, types, rules, strict=True):
            if found not in rule.types:
                raise WireError(f"{kind.__name__}.{name} cannot be a {found.__name__}")
        valid.add(types)

    def decode(row: list[Any]) -> Any:
        types = tuple(map(type, row))
        if types not in valid:
            check(types)
        for at, make, record in makers:
            if types[at] is list and (row[at] or record):  # nothing to do for an empty list
                row[at] = make(row[at])
        return make_record(row)

    return decode


_NUMBER = frozenset((float, int))
_PLAIN: dict[Any, frozenset[type]] = {
    Any: frozenset((int, float, bool, str, bytes, list, dict, NoneType)),
    float: _NUMBER,
    **{kind: frozenset((kind,)) for kind in (int, bool, str, bytes, NoneType)},
}


def _rule(annotation: Any) -> _Rule:
    if annotation in _PLAIN:
        return _Rule(_PLAIN[annotation])
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        rules = [_rule(option) for option in inner]
        lists = [rule[1:] for rule in rules if rule.make is not None]
        assert len(lists) <= 1, f"two kinds of list in {annotation}"
        return _Rule(frozenset().union(*(rule.types for rule in rules)), *sum(lists, ()))
    if origin is dict:
        return _Rule(frozenset((dict,)))
    if origin in (list, Sequence, frozenset):
        return _Rule(frozenset((list,)), _list_of(_rule(inner[0]), inner[0]))
    assert is_dataclass(annotation) or issubclass(annotation, tuple), f"{annotation} has no code"
    return _Rule(frozenset((list,)), _decoder(annotation), record=True)


def _list_of(rule: _Rule, annotation: Any) -> Callable[[list[Any]], list[Any]]:
    types, make, _ = rule

    def check(values: list[Any]) -> list[Any]:
        for value in values:
            if type(value) not in types:
                raise WireError(f"a list of {annotation} holds a {type(value).__name__}")
        return values if make is None else [make(value) for value in values]

    return check


def _names(union: Any) -> dict[str, Callable[[list[Any]], Any]]:
    return {kind.__name__: _decoder(kind) for kind in get_args(union)}


_NESTED = (WireFinish, WireLogprob, WireChoice, ModelFacts, Usage, Timings)
_ROWS: dict[type, Callable[[Any], Any]] = {
    **{kind: _getter(kind) for kind in (*get_args(Message), *_NESTED)},
    frozenset: list,
}
_TO_ENGINE = _names(ToEngine)
_FROM_ENGINE = _names(FromEngine)
