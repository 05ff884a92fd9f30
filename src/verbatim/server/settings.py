"""The server's settings: each with its default, its flag and the error that enforces it.

The flags of `verbatim serve` come in; one frozen Settings record goes out. It is resolved once at
start-up. The HTTP process reads it; the engine process gets its part in the Start message.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any

from verbatim.base.config import split_adapter
from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonMapping
from verbatim.base.setting_rules import check_range, host_and_port, rules_of, setting
from verbatim.server.http.api_keys import ApiKeys

MIB = 1 << 20
# Threads of the HTTP process and of the engine process for work that would block its event loop,
# such as tokenising. asyncio's default is one per CPU and four more.
EXECUTOR_THREADS = 4


def limit(default: float, help: str, error: str) -> Any:
    """A limit on clients, with the error that enforces it."""
    return setting(default, help, error=error, low=0, metavar="N")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on clients. Each field is a flag of `verbatim serve` (underscores become dashes) and
    is named by the error that it causes. Sizes in bytes, times in seconds."""

    max_header_bytes: int = limit(64 * 1024, "request line and headers together", "431")
    max_body_bytes: int = limit(8 * MIB, "request body", "413 body_too_large")
    max_json_depth: int = limit(64, "nesting of the JSON body", "400 json_too_deep")
    max_json_values: int = limit(
        65_536,
        "values in the JSON body, plus one per token of the longest context",
        "400 json_too_large",
    )
    max_prompts: int = limit(128, "prompts in one request", "400 on prompt or input")
    max_messages: int = limit(4096, "messages in one conversation", "400 on messages")
    max_width: int = limit(
        64, "the largest of n, best_of and num_beams, times the prompts of one request", "400 on n"
    )
    max_logprobs: int = limit(20, "alternatives reported per token", "400 on logprobs")
    max_stop: int = limit(16, "stop strings", "400 on stop")
    max_bias: int = limit(1024, "entries of logit_bias or a list of token ids", "400 on the field")
    max_schema_bytes: int = limit(1 << 20, "a schema, regex or grammar", "400 on the field")
    max_tools: int = limit(128, "tools in one request", "400 on tools")
    max_output_tokens: int = limit(
        0, "output tokens of one request; 0: up to the context", "400 on max_tokens"
    )
    max_queue: int = limit(
        512, "open requests, waiting and running; beyond it a key has its share", "429 overloaded"
    )
    max_per_key: int = limit(0, "open requests of one key; 0: no limit", "429 key_overloaded")
    max_cache_share: float = limit(
        1.0, "share of the KV cache that one key's running requests may claim", "requests wait"
    )
    max_connections: int = limit(
        20_000, "open connections; capped by the limit on open files", "503 unavailable"
    )
    max_stream_bytes: int = limit(
        4 * MIB, "unread output of a slow client", "error event slow_reader, or connection closed"
    )
    max_unfinished_bytes: int = limit(
        256 * MIB,
        "bodies that are still arriving, all together, each as 64 KiB at least",
        "429 overloaded",
    )
    max_store_bytes: int = limit(
        64 * MIB, "stored answers, all together", "the oldest of the key with most are evicted"
    )
    max_file_bytes: int = limit(64 * MIB, "an uploaded file", "413 body_too_large")
    max_files: int = limit(200, "files of one key at an upload, outputs included", "400 on file")
    max_batches: int = limit(
        100, "batches of one key; a finished one gives way", "400 on input_file_id"
    )
    idle_seconds: float = limit(75.0, "time a connection may stay idle", "connection closed")
    header_seconds: float = limit(
        20.0, "time for the headers to arrive, from their first byte", "connection closed"
    )
    body_seconds: float = limit(60.0, "time for the body to arrive", "408")
    min_body_rate: int = limit(
        1024, "bytes per second at which a body arrives, after 10 seconds; 0: any rate", "408"
    )
    request_seconds: float = limit(
        600.0, "time for one whole request", "408 or error event timeout"
    )

    def __post_init__(self) -> None:
        for name, rule in rules_of(Limits).items():
            check_range(name, rule, getattr(self, name))
        if self.max_unfinished_bytes < self.max_body_bytes:
            why = f"is below max_body_bytes, {self.max_body_bytes}; one body must fit"
            raise ParameterError("max_unfinished_bytes", f"{self.max_unfinished_bytes} {why}")
        if not 0 < self.max_cache_share <= 1:
            why = f"{self.max_cache_share} is not above 0 and at most 1"
            raise ParameterError("max_cache_share", why)


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One of several models of a server."""

    name: str  # for clients
    model: str  # a path, a catalog name or org/name on the hub
    engine: JsonMapping = field(default_factory=dict)  # settings of this model only
    pinned: bool = False  # loaded at the start, never unloaded


@dataclass(frozen=True, slots=True)
class Settings:
    model: str = "smollm2"
    served_names: tuple[str, ...] = ()  # model names for clients; empty: the model's own
    engine: JsonMapping = field(default_factory=dict)  # fields of EngineConfig
    models: tuple[NamedModel, ...] = ()  # several models; empty: `model` alone
    revision: str | None = None
    offline: bool = False
    host: str = setting(
        "127.0.0.1",
        "address to listen on; beyond loopback a key is needed",
        metavar="TEXT",
        common=True,
    )
    port: int = setting(8000, "port to listen on; 0: any", common=True)
    metrics_address: str | None = setting(
        None, "second address, for /metrics alone, which needs no key there", metavar="HOST:PORT"
    )
    max_loaded_models: int = setting(
        0,
        "of several models: maximum number loaded at once; 0: as many as fit in memory",
        low=0,
        metavar="N",
    )
    model_idle_seconds: float = setting(
        0.0, "of several models: unload one after this time without a request; 0: never", low=0
    )
    keys: tuple[str, ...] = ()  # lines of http/api_keys.py
    api_key_file: str | None = setting(
        None,
        "API keys, one per line: KEY [name=NAME] [max_open=N] [requests_per_minute=N]"
        " [tokens_per_minute=N]; SIGHUP reads it again; VERBATIM_API_KEY adds keys",
        metavar="FILE",
        common=True,
    )
    # loopback and --host are always allowed
    allowed_hosts: tuple[str, ...] = setting(
        (), "further name accepted in the Host header", flag="--allow-host"
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "origin allowed to call from a browser; default: none",
        flag="--cors-origin",
        metavar="ORIGIN",
    )
    tls_cert: str | None = setting(None, "certificate chain (PEM)", metavar="FILE")
    tls_key: str | None = setting(None, "its private key (PEM)", metavar="FILE")
    load_wait_seconds: float = setting(
        60.0, "time a request waits while the model is loaded for the first time, then 503", low=0
    )
    drain_seconds: float = setting(30.0, "time for running requests to finish after SIGTERM", low=0)
    keepalive_seconds: float = setting(
        15.0, "silence of a stream after which it sends a keep-alive comment", low=0
    )
    engine_silence_seconds: float = setting(
        60.0, "time without heartbeat or progress until the engine is killed", low=0
    )
    backoff_seconds: float = setting(
        0.5, "wait before a dead engine is restarted; doubles each time", low=0
    )
    backoff_limit: float = setting(30.0, "maximum wait before a restart", low=0)
    store_items: int = setting(
        1000, "stored answers of all keys, for previous_response_id; 0 keeps none", low=0
    )
    state_dir: str | None = setting(
        None,
        "private directory that keeps stored answers, files and batches; default: answers in memory"
        " until the server ends, no files and no batches",
        metavar="DIR",
    )
    default_seed: int | None = setting(
        None,
        "seed of requests that give none, for clients that cannot; default: a random one for each",
        low=0,
        common=True,
    )
    log_format: str = setting(
        "text", "format of the log on stderr: text or json", choices=("text", "json")
    )
    log_prompts: bool = setting(
        False, "write request bodies to the log; without it no prompt text is ever logged"
    )
    verbose: bool = setting(
        False, "also log the progress of long prefills", short="-v", common=True
    )
    test_engine: str = ""  # tests only: options of verbatim.testing.fakes.server_parts
    # Key of the prefix cache's block hashes; empty: random. The replicas of one service share it.
    prefix_key: bytes = b""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.keys:
            remedy = "set a key (--api-key-file or VERBATIM_API_KEY) or use 127.0.0.1"
            why = f"{self.host} is reachable from other machines; {remedy}"
            raise ParameterError("host", why)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ParameterError("tls_cert", "--tls-cert and --tls-key belong together")
        ApiKeys(self.keys)
        for name, rule in rules_of(Settings).items():
            check_range(name, rule, getattr(self, name))
        if self.models and self.engine.get("adapters"):
            why = "belong to one model; write --model-setting NAME.adapters=NAME=PATH"
            raise ParameterError("adapters", why)
        pinned = sum(named.pinned for named in self.models)
        most = self.max_loaded_models
        if 0 < most <= pinned and (pinned > most or pinned < len(self.models)):
            why = f"{pinned} models are pinned, and at most {most} may be loaded"
            raise ParameterError("max_loaded_models", f"{why}; raise it, or pin fewer")
        if not 0 <= self.port < 65536:
            raise ParameterError("port", f"{self.port} is not a port (0 to 65535)")
        if self.metrics_address is not None:
            host_and_port("metrics_address", self.metrics_address)
        if twice := set(self.adapter_names) & set(self.base_names):
            why = f"{twice.pop()!r} is also the name of the model; choose another"
            raise ParameterError("adapters", why)

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
