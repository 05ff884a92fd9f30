"""The server's settings: each with its default, its flag and the error that enforces it.

The flags of `verbatim serve` come in; one frozen Settings record goes out. It is resolved once at
start-up. The HTTP process reads it; the engine process gets its part in the Start message.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from verbatim.base.config import split_adapter
from verbatim.base.errors import ParameterError

MIB = 1 << 20
# Threads of the HTTP process and of the engine process for work that would block its event loop,
# such as tokenising. asyncio's default is one per CPU and four more.
EXECUTOR_THREADS = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on clients. Each field is a flag of `verbatim serve` (underscores become dashes) and
    is named by the error that it causes. Sizes in bytes, times in seconds."""

    max_header_bytes: int = field(
        default=64 * 1024, metadata={"help": "request line and headers together", "error": "431"}
    )
    max_body_bytes: int = field(
        default=8 * MIB, metadata={"help": "request body", "error": "413 body_too_large"}
    )
    max_json_depth: int = field(
        default=64, metadata={"help": "nesting of the JSON body", "error": "400 json_too_deep"}
    )
    max_json_values: int = field(
        default=65_536,
        metadata={
            "help": "values in the JSON body, plus one per token of the longest context",
            "error": "400 json_too_large",
        },
    )
    max_prompts: int = field(
        default=128, metadata={"help": "prompts in one request", "error": "400 on prompt or input"}
    )
    max_messages: int = field(
        default=4096, metadata={"help": "messages in one conversation", "error": "400 on messages"}
    )
    max_width: int = field(
        default=64,
        metadata={
            "help": "the largest of n, best_of and num_beams, times the prompts of one request",
            "error": "400 on n",
        },
    )
    max_logprobs: int = field(
        default=20,
        metadata={"help": "alternatives reported per token", "error": "400 on logprobs"},
    )
    max_stop: int = field(default=16, metadata={"help": "stop strings", "error": "400 on stop"})
    max_bias: int = field(
        default=1024,
        metadata={
            "help": "entries of logit_bias or a list of token ids",
            "error": "400 on the field",
        },
    )
    max_schema_bytes: int = field(
        default=1 << 20,
        metadata={"help": "a schema, regex or grammar", "error": "400 on the field"},
    )
    max_tools: int = field(
        default=128, metadata={"help": "tools in one request", "error": "400 on tools"}
    )
    max_output_tokens: int = field(
        default=0,
        metadata={
            "help": "output tokens of one request; 0: up to the context",
            "error": "400 on max_tokens",
        },
    )
    max_queue: int = field(
        default=512,
        metadata={
            "help": "open requests, waiting and running; beyond it a key has its share",
            "error": "429 overloaded",
        },
    )
    max_per_key: int = field(
        default=0,
        metadata={"help": "open requests of one key; 0: no limit", "error": "429 key_overloaded"},
    )
    max_cache_share: float = field(
        default=1.0,
        metadata={
            "help": "share of the KV cache that one key's running requests may claim",
            "error": "requests wait",
        },
    )
    max_connections: int = field(
        default=20_000,
        metadata={
            "help": "open connections; capped by the limit on open files",
            "error": "503 unavailable",
        },
    )
    max_stream_bytes: int = field(
        default=4 * MIB,
        metadata={
            "help": "unread output of a slow client",
            "error": "error event slow_reader, or connection closed",
        },
    )
    max_unfinished_bytes: int = field(
        default=256 * MIB,
        metadata={
            "help": "bodies that are still arriving, all together, each as 64 KiB at least",
            "error": "429 overloaded",
        },
    )
    max_store_bytes: int = field(
        default=64 * MIB,
        metadata={
            "help": "stored answers, all together",
            "error": "the oldest are evicted",
        },
    )
    idle_seconds: float = field(
        default=75.0,
        metadata={
            "help": "time a connection may stay idle",
            "error": "connection closed",
        },
    )
    header_seconds: float = field(
        default=20.0,
        metadata={
            "help": "time for the headers to arrive, from their first byte",
            "error": "connection closed",
        },
    )
    body_seconds: float = field(
        default=60.0, metadata={"help": "time for the body to arrive", "error": "408"}
    )
    min_body_rate: int = field(
        default=1024,
        metadata={
            "help": "bytes per second at which a body arrives, after 10 seconds; 0: any rate",
            "error": "408",
        },
    )
    request_seconds: float = field(
        default=600.0,
        metadata={"help": "time for one whole request", "error": "408 or error event timeout"},
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not value >= 0:
                raise ParameterError(f.name, f"{value} is below 0")
        if self.max_unfinished_bytes < self.max_body_bytes:
            raise ParameterError(
                "max_unfinished_bytes",
                f"{self.max_unfinished_bytes} is below max_body_bytes, {self.max_body_bytes}; one "
                "body must fit",
            )
        if not 0 < self.max_cache_share <= 1:
            raise ParameterError(
                "max_cache_share", f"{self.max_cache_share} is not above 0 and at most 1"
            )


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One of several models of a server."""

    name: str  # for clients
    model: str  # a path, a catalog name or org/name on the hub
    engine: Mapping[str, Any] = field(default_factory=dict)  # settings of this model only
    pinned: bool = False  # loaded at the start, never unloaded


@dataclass(frozen=True, slots=True)
class Settings:
    model: str = "smollm2"
    served_names: tuple[str, ...] = ()  # model names for clients; empty: the model's own
    engine: Mapping[str, Any] = field(default_factory=dict)  # fields of EngineConfig
    models: tuple[NamedModel, ...] = ()  # several models; empty: `model` alone
    max_loaded_models: int = 0  # 0: as many as fit in memory
    model_idle_seconds: float = 0.0  # unload a model that was not used for so long; 0: never
    revision: str | None = None
    offline: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    # Further names accepted in the Host header. Loopback and --host are always allowed.
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    drain_seconds: float = 30.0  # from SIGTERM until running requests fail
    keepalive_seconds: float = 15.0  # silence of a stream before it sends a comment line
    # Watchdog: the engine is killed after this long without a heartbeat, or without a step although
    # it has work.
    engine_silence_seconds: float = 60.0
    backoff_seconds: float = 0.5  # before the first restart; doubles up to backoff_limit
    backoff_limit: float = 30.0  # seconds
    store_items: int = 1000  # answers kept in memory; 0 rejects store: true
    log_format: str = "text"  # text | json
    log_prompts: bool = False
    verbose: bool = False  # log the progress of prefills
    test_engine: str = ""  # tests only: options of verbatim.testing.fakes.server_parts
    # Key of the prefix cache's block hashes; empty: random. The replicas of one service share it.
    prefix_key: bytes = b""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.keys:
            raise ParameterError(
                "host",
                f"{self.host} is reachable from other machines; set a key (--api-key-file or"
                " VERBATIM_API_KEY) or use 127.0.0.1",
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ParameterError("tls_cert", "--tls-cert and --tls-key belong together")
        if any(
            len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key
            for key in self.keys
        ):
            raise ParameterError(
                "api_key_file",
                "a key, also that of VERBATIM_API_KEY, needs at least 8 printable ASCII characters"
                " without spaces",
            )
        for name in ("max_loaded_models", "model_idle_seconds"):
            if getattr(self, name) < 0:
                raise ParameterError(name, f"{getattr(self, name)} is below 0")
        if self.models and self.engine.get("adapters"):
            raise ParameterError(
                "adapters", "belong to one model; write --model-setting NAME.adapters=NAME=PATH"
            )
        pinned = sum(named.pinned for named in self.models)
        most = self.max_loaded_models
        if 0 < most <= pinned and (pinned > most or pinned < len(self.models)):
            raise ParameterError(
                "max_loaded_models",
                f"{pinned} models are pinned, and at most {most} may be loaded; raise it, or pin"
                " fewer",
            )
        if not 0 <= self.port < 65536:
            raise ParameterError("port", f"{self.port} is not a port (0 to 65535)")
        if twice := set(self.adapter_names) & set(self.base_names):
            raise ParameterError(
                "adapters", f"{twice.pop()!r} is also the name of the model; choose another"
            )

    @property
    def base_names(self) -> tuple[str, ...]:
        return self.served_names or (self.model,)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(split_adapter(entry)[0] for entry in self.engine.get("adapters", ()))

    @property
    def served_name(self) -> str:
        """The model name in receipts: the first name for clients."""
        return self.served_names[0] if self.served_names else self.model


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def limits_table() -> list[tuple[str, str, str, str]]:
    """(flag, default, meaning, error) of every limit, for docs/serving.md."""
    values = asdict(Limits())
    return [
        (
            "--" + f.name.replace("_", "-"),
            f"{values[f.name]:g}" if isinstance(values[f.name], float) else str(values[f.name]),
            f.metadata["help"],
            f.metadata["error"],
        )
        for f in fields(Limits)
    ]
