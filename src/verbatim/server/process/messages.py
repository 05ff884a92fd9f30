"""The messages between the HTTP process and the engine process: one frozen dataclass each.

    to the engine     Start, Generate, Tokenize, Detokenize, Inspect, Abort, Close
    from the engine   Loading, Ready, Failed, Heartbeat, Accepted, Deltas,
                      Generated, Tokenized, Detokenized, Inspected, Refused

A message holds numbers, text, bytes, lists and maps only; message_codec.py encodes it for the
socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from verbatim.base.json_io import JsonObject
from verbatim.base.records import Timings, Usage
from verbatim.server.problem import Problem

Conversation = list[JsonObject]
NOT_LOADED = 3  # exit code of an engine process that has sent Failed


# ------------------------------------------------------------------------------------ to the engine


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: which model to load, and how."""

    model: str
    revision: str | None
    offline: bool
    engine: JsonObject  # fields of EngineConfig that differ from their defaults
    test_engine: str  # options of verbatim.testing.fakes.server_parts; empty: load the model
    served_name: str  # the model's name in receipts
    cache_share: float  # share of the KV cache that one tenant's requests may claim
    prefix_key: bytes = b""  # key of the prefix cache's block hashes; empty: random
    verbose: bool = False  # log the progress of prefills


@dataclass(frozen=True, slots=True)
class Generate:
    """Run one prompt, or one conversation through the chat template. `params` are the fields of
    SamplingParams that differ from their defaults."""

    request_id: str
    tenant: str
    params: JsonObject
    stream: bool  # send Deltas; otherwise only Generated
    prompt: str | list[int] | None = None  # None: `messages` holds the conversation
    messages: Conversation | None = None
    template: JsonObject | None = None  # options of the chat template (tools, ...)
    reasoning: bool = False  # `prompt` is a rendered conversation with a reasoning model
    parse_special: bool = False  # the text of a control token in the prompt becomes that token
    echo: bool = False  # Accepted carries the prompt's text
    num_ctx: int | None = None  # Ollama: maximum tokens of prompt and output together
    open_end: bool = False  # Ollama: no max_tokens was set, so num_ctx may shorten the output
    embedding: bool = False  # Generated carries the embedding of the prompt (engine/embed_input.py)
    document: str | None = None  # with embedding: the second text of a pair, for its relevance
    prompt_name: str | None = None  # with embedding: the model's prompt to put before the text
    truncate: bool = False  # with embedding: cut a text that is longer than the context
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
    template: JsonObject | None = None
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
    """A read-only question of the Lens (process/lens_queries.py): it computes no token."""

    request_id: str
    tenant: str
    what: str  # facts, vocab, step, engine or prefix
    arguments: JsonObject = field(default_factory=dict)


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
    adapters: dict[str, str] = field(default_factory=dict)  # LoRA adapter -> its fingerprint
    task: str = "generate"  # or embed, rerank: an encoder
    reasoning: bool = False  # the chat template marks reasoning (text/reasoning)
    template_reasoning: bool = False  # the chat template reads the reasoning of earlier turns
    # template variables that switch thinking, see api/common/reasoning_variables.py
    reasoning_switches: list[str] = field(default_factory=list)
    slots: int = 0  # sequences that run at once
    device: str = ""  # the backend: cpu, cuda, reference
    numerics: str = ""  # its numerics version
    family: str = ""  # ModelSpec.family
    # sizes of ModelSpec, by the names of GGUF headers (block_count, ...)
    sizes: dict[str, int] = field(default_factory=dict)
    template: str = ""  # source of the chat template; empty: none
    # text of each special token, by the names of chat templates (bos_token, ...)
    special_tokens: dict[str, str] = field(default_factory=dict)
    # fields of engine.loaded_model.ModelFile
    file: JsonObject = field(default_factory=dict)
    # sampling parameters that the model states, and where (base.defaults.ModelDefaults)
    sampling: JsonObject = field(default_factory=dict)
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

    stats: JsonObject
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
    code: str = ""  # reason "error": the error code, where no parameter is at fault


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
    choice: int  # index of the choice
    text: str
    token_ids: Sequence[int]
    finish: WireFinish | None
    logprobs: Sequence[WireLogprob]
    explain: Sequence[JsonObject]
    reasoning: str = ""
    reasoning_tokens: int = 0  # share of token_ids


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
    explain: Sequence[JsonObject]
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
    receipt: JsonObject | None
    embedding: list[float] | None
    # base.defaults.report, if the client asked for it
    params: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The end of a Tokenize."""

    request_id: str
    token_ids: list[int]
    raw: list[bytes]  # the bytes of each token
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True)
class Detokenized:
    """The end of a Detokenize, or of a Tokenize with render=True."""

    request_id: str
    text: str
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Inspected:
    """The end of an Inspect."""

    request_id: str
    data: JsonObject


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
