"""EngineConfig: the settings of an engine, checked once when the record is made. An unknown setting
is a TypeError, since the record is a frozen dataclass.

Each setting is declared once, as a field of EngineConfig with its default, help and range. SETTINGS
is the table of these rules; the checks, the signature and docstring of LLM and AsyncEngine, the
command line's flags, the server's defaults and the table in the documentation are made from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from verbatim.base.errors import ParameterError
from verbatim.base.setting_rules import (
    check_range,
    check_type,
    host_and_port,
    parse_size,
    rules_of,
    setting,
    types_of,
)

SPECULATE = ("off", "ngram", "suffix", "mtp", "head", "draft", "self", "auto")
STEP_TOKENS = 512  # default of step_tokens on a CPU: a step takes a fraction of a second
STEP_MS = 100  # default of step_ms on a CPU: ten tokens per second in a stream beside a prefill
# on a GPU with memory for their activations; larger steps leave it idle less often
GPU_STEP_TOKENS = 8192
BLOCK_SIZE = 16  # positions per KV block; one vector of attention scores on every CPU path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every setting of an engine, with its default. Sizes are in bytes, lengths in tokens.

    The fields are the keyword arguments of LLM and AsyncEngine. A size may be text, as on the
    command line; adapters may be a mapping from name to path.

    >>> EngineConfig(kv_memory="512M").kv_memory
    536870912
    """

    backend: str = setting(
        "auto",
        "auto, cpu, cuda or reference; auto: cuda where a GPU can run the model, else cpu",
        choices=("auto", "cpu", "cuda", "reference"),
        common=True,
    )
    threads: int | None = setting(
        None, "threads of the CPU backend; default: the physical cores", low=1, common=True
    )
    tensor_parallel: int = setting(  # docs/adr/0033
        1,
        "processes that share the model, each with a part of every matrix and threads of its own;"
        " the output is that of one process",
        low=1,
        encoders=False,
    )
    pipeline_parallel: int = setting(
        1,
        "processes that share the model, each with some of its layers: for slow networks; needs"
        " the backend cpu; the output is that of one process",
        low=1,
        encoders=False,
    )
    rank_address: str | None = setting(
        None,
        "address of this machine, HOST:PORT, where the other processes of the model join:"
        " `verbatim rank`, on any machine that has the model; default: all are on this machine",
        metavar="HOST:PORT",
        encoders=False,
    )
    context: int | None = setting(
        None,
        "maximum tokens of prompt and output; default: the model's own limit",
        low=1,
        common=True,
    )
    step_tokens: int | None = setting(  # None: STEP_TOKENS, or up to GPU_STEP_TOKENS
        None,
        "maximum tokens computed in one step; default: 512, on a GPU up to 8,192",
        low=1,
        encoders=False,
    )
    step_ms: int | None = setting(  # None: STEP_MS, on a GPU no limit
        None,
        "maximum milliseconds of a step that prefills beside other sequences; default: 100, on a"
        " GPU no limit",
        low=1,
        encoders=False,
    )
    max_running: int = setting(256, "maximum sequences in one step", low=1, encoders=False)
    max_waiting: int = setting(
        4096, "maximum requests in the engine's queue; a server's --max-queue comes first", low=1
    )
    kv_memory: int | None = setting(  # a draft model's included; None: schedule/sizing.py
        None,
        "memory for the KV cache, such as 512M or 2G; default: a quarter of the free memory, half"
        " of a GPU's",
        low=1,
        size=True,
        encoders=False,
    )
    kv_blocks: int | None = setting(  # per group
        None, "exact number of KV cache blocks (tests)", low=1, hidden=True, encoders=False
    )
    kv_type: str = setting(  # f16 is float32 on the reference backend (ADR 24)
        "f16",
        "element type of the KV cache: f16, q8 or fp8; doctor MODEL measures what the 8-bit types"
        " cost",
        choices=("f16", "q8", "fp8"),
        encoders=False,
    )
    activations: str = setting(  # docs/adr/0029
        "auto",
        "integers of the activations in the matrix products of the cpu backend: int8 or int12;"
        " auto: int12 for a model below a billion parameters, whose answers int8 would change",
        choices=("auto", "int8", "int12"),
        encoders=False,
    )
    prefix_cache: bool = setting(
        True, "reuse the KV cache of a shared prompt prefix", encoders=False
    )
    cache_dir: str | None = setting(
        None,
        "directory that keeps the KV cache of prompts, so that a prefix hit survives a restart",
        encoders=False,
    )
    cache_dir_size: int = setting(
        8 << 30,
        "maximum size of --cache-dir, such as 512M or 8G; each engine counts what it found at its"
        " start and what it wrote",
        low=1,
        size=True,
    )
    use_cache: bool = setting(
        True,
        "use a KV cache; without it every step recomputes the whole sequence, and --speculate auto"
        " drafts nothing",
        encoders=False,
    )
    speculate: str = setting(  # docs/adr/0018
        "auto",
        "speculative decoding: off, ngram, suffix, mtp, head:PATH, draft:MODEL or auto;"
        " changes the speed, never the output",
        encoders=False,
    )
    suffix_tenants: tuple[str, ...] = setting(
        (),
        "tenant whose recent outputs --speculate suffix (and auto) may use for its drafts; *: every"
        " tenant, at most 256",
    )
    quant: str | None = setting(
        None,
        "quantise float weights while loading: q8_0 or q4_0; packed: compute AWQ, GPTQ and "
        "compressed-tensors in blocks",
        choices=("q8_0", "q4_0", "packed"),
        encoders=False,
    )
    defaults: str = setting(  # base/defaults.py
        "model",
        "sampling parameters that are not given: model (what the model states, else the"
        " protocol's), protocol, or greedy (temperature 0)",
        choices=("model", "protocol", "greedy"),
    )
    pooling: str | None = setting(
        None,
        "how a text's hidden states become one embedding: mean, cls or last; default: as the"
        " model's files say",
        choices=("mean", "cls", "last"),
    )
    check: bool = setting(False, "verify the KV block accounting after every step", hidden=True)
    warm_up: bool = setting(
        False,
        "on a GPU: compile the kernels before the first request, not during it; `verbatim serve`"
        " does unless --no-warm-up is given",
        served=True,
    )
    adapters: tuple[str, ...] = setting(  # NAME=PATH
        (),
        "load a LoRA adapter, a PEFT directory or a GGUF file",
        flag="--adapter",
        metavar="NAME=PATH",
        encoders=False,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapters", _adapters(self.adapters))
        folder: object = self.cache_dir
        if isinstance(folder, os.PathLike):
            object.__setattr__(self, "cache_dir", os.fspath(folder))
        for name, rule in SETTINGS.items():
            value: object = getattr(self, name)
            if rule.size and isinstance(value, str):
                object.__setattr__(self, name, parse_size(name, value))
        for name, annotation in TYPES.items():
            check_type(name, annotation, getattr(self, name))
        for name, rule in SETTINGS.items():
            check_range(name, rule, getattr(self, name))
        self._check_together()

    def _check_together(self) -> None:
        """Rules of one setting's text, and between settings."""
        if self.cache_dir == "":
            raise ParameterError("cache_dir", "is empty; give the path of a directory")
        if self.cache_dir is None and self.cache_dir_size != SETTINGS["cache_dir_size"].default:
            raise ParameterError(
                "cache_dir_size", "has an effect only with cache_dir; give that, too"
            )
        if self.cache_dir is not None and not (self.prefix_cache and self.use_cache):
            raise ParameterError(
                "cache_dir", "needs the prefix cache, which is switched off; leave one out"
            )
        if self.activations != "auto" and self.backend not in ("auto", "cpu"):
            raise ParameterError(
                "activations",
                f"has an effect on the cpu backend only, and backend is {self.backend}",
            )
        self._check_ranks()
        mode, colon, _ = self.speculate.partition(":")
        if self.ranks > 1 and mode in ("head", "mtp"):
            raise ParameterError(
                "speculate", f"{mode!r} needs the whole model in one process; leave one out"
            )
        if mode not in SPECULATE or (colon and mode not in ("head", "draft")):
            raise ParameterError(
                "speculate",
                f"{self.speculate!r} is not one of "
                "off, ngram, suffix, mtp, head:PATH, draft:MODEL, auto",
            )
        _check_threads(self.threads)

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        return max(self.tensor_parallel, self.pipeline_parallel)

    def _check_ranks(self) -> None:
        if self.tensor_parallel > 1 and self.backend == "reference":
            raise ParameterError(
                "tensor_parallel", "needs the backend cpu or cuda, and backend is reference"
            )
        if self.pipeline_parallel > 1 and self.backend != "cpu":
            raise ParameterError("pipeline_parallel", "needs backend cpu; set that, too")
        if min(self.tensor_parallel, self.pipeline_parallel) > 1:
            raise ParameterError(
                "pipeline_parallel",
                "a model is split by rows or by layers: give this or tensor_parallel",
            )
        if self.rank_address is not None:
            host_and_port("rank_address", self.rank_address)
            if self.ranks == 1:
                raise ParameterError("rank_address", "needs tensor_parallel or pipeline_parallel")
            if self.adapters:  # their files are this machine's
                raise ParameterError("adapters", "do not run with rank_address; leave one out")


class EngineOptions(TypedDict, total=False):
    """The settings as keyword arguments, for type checkers: EngineConfig's fields, with the types
    that are accepted for each. A test compares the two."""

    backend: str
    threads: int | None
    tensor_parallel: int
    pipeline_parallel: int
    rank_address: str | None
    context: int | None
    step_tokens: int | None
    step_ms: int | None
    max_running: int
    max_waiting: int
    kv_memory: int | str | None
    kv_blocks: int | None
    kv_type: str
    activations: str
    prefix_cache: bool
    cache_dir: str | os.PathLike[str] | None
    cache_dir_size: int | str
    use_cache: bool
    speculate: str
    suffix_tenants: tuple[str, ...]
    quant: str | None
    defaults: str
    pooling: str | None
    check: bool
    warm_up: bool
    adapters: Mapping[str, str] | Sequence[str]


SETTINGS = rules_of(EngineConfig)
TYPES = types_of(EngineConfig)
CHOICES = {name: rule.choices for name, rule in SETTINGS.items() if rule.choices}


def served(given: Mapping[str, object]) -> dict[str, object]:
    """The settings of a server's engine: its own defaults, and those that are given.

    >>> served({"context": 512})
    {'warm_up': True, 'context': 512}
    """
    own = {name: rule.served for name, rule in SETTINGS.items() if rule.served is not None}
    return {**own, **given}


def split_adapter(entry: str) -> tuple[str, str]:
    """(name, path) of NAME=PATH. A path alone is named by its last part.

    >>> split_adapter("sql=adapters/sql-r16")
    ('sql', 'adapters/sql-r16')
    >>> split_adapter("adapters/sql.gguf")
    ('sql', 'adapters/sql.gguf')
    """
    name, equals, path = entry.partition("=")
    if not equals:
        name, path = os.path.basename(entry.rstrip("/")).removesuffix(".gguf"), entry
    if not path or not _ADAPTER_NAME.fullmatch(name):
        raise ParameterError(
            "adapters",
            f"{entry!r:.80} is not NAME=PATH; a name has letters, digits and . _ - : / only",
        )
    return name, path


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,119}")


def _adapters(given: object) -> object:
    """The setting as a tuple of NAME=PATH. Another type is left to the type check."""
    if isinstance(given, Mapping):
        given = [f"{name}={os.fspath(path)}" for name, path in given.items()]
    if not isinstance(given, (list, tuple)) or not all(isinstance(g, str) for g in given):
        return given
    names: set[str] = set()
    for entry in given:
        name, _ = split_adapter(entry)
        if name in names:
            raise ParameterError("adapters", f"the name {name!r} is given twice")
        names.add(name)
    return tuple(given)


def _check_threads(threads: int | None) -> None:
    processors = os.cpu_count() or 1
    most = max(64, 4 * processors)
    if threads is not None and threads > most:
        plural = "s" if processors > 1 else ""
        raise ParameterError(
            "threads",
            f"{threads} is more than the {most} that are possible; this machine "
            f"has {processors} processor{plural}, and more threads than that only wait",
        )
