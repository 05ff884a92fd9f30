"""EngineConfig: the settings of an engine, checked once when the record is made. An unknown setting
is a TypeError, since the record is a frozen dataclass."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import SupportsIndex

from verbatim.base.errors import ParameterError

# Values of the settings that are names.
CHOICES: dict[str, tuple[str, ...]] = {
    "backend": ("auto", "cpu", "cuda", "reference"),
    "kv_type": ("f16", "q8", "fp8"),
    "quant": ("q8_0", "q4_0", "packed"),
    "defaults": ("model", "protocol", "greedy"),
    "pooling": ("mean", "cls", "last"),
}
SIZES = ("kv_memory", "cache_dir_size")  # settings in bytes, also given as text: 512M
CACHE_DIR_SIZE = 8 << 30  # bytes
SPECULATE = ("off", "ngram", "suffix", "head", "draft", "auto")
STEP_TOKENS = 512  # default of step_tokens on a CPU: a step takes a fraction of a second
STEP_MS = 100  # default of step_ms on a CPU: ten tokens per second in a stream beside a prefill
# on a GPU with memory for their activations; larger steps leave it idle less often
GPU_STEP_TOKENS = 8192
BLOCK_SIZE = 16  # positions per KV block; one vector of attention scores on every CPU path


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)


def parse_size(name: str, text: str) -> int:
    """Bytes from 512M, 1.5G, 2GiB or a plain number. K, M, G, T are powers of 1024.

    >>> parse_size("kv_memory", "1.5G")
    1610612736
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ParameterError(name, f"{text!r} is not a size such as 512M or 2G")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every setting of an engine, with its default. Sizes are in bytes, lengths in tokens.

    The fields are the keyword arguments of LLM and AsyncEngine, which document them. A size may be
    text, as on the command line.

    >>> EngineConfig(kv_memory="512M").kv_memory
    536870912
    """

    backend: str = "auto"  # auto: cuda if a GPU can run the model, else cpu, else reference
    threads: int | None = None  # None: the physical cores this process may use
    context: int | None = None  # None: the model's limit
    # maximum tokens per step, the prefill chunk; None: STEP_TOKENS, or GPU_STEP_TOKENS
    step_tokens: int | None = None
    # longest step with a prefill chunk beside other sequences; None: STEP_MS, on a GPU no limit
    step_ms: int | None = None
    max_running: int = 256  # maximum sequences per step
    max_waiting: int = 4096  # maximum requests in the queue; further ones are refused
    # bytes of KV cache, a draft model's included; None: the rule in schedule/sizing.py
    kv_memory: int | None = None
    kv_blocks: int | None = None  # exact number of blocks per group (for tests)
    kv_type: str = "f16"  # f16 | q8 | fp8; f16 is float32 on the reference backend (ADR 24)
    prefix_cache: bool = True
    cache_dir: str | None = None  # directory for the KV blocks of prompts (engine/disk_cache.py)
    cache_dir_size: int = CACHE_DIR_SIZE  # most bytes in cache_dir
    use_cache: bool = True  # False: recompute all tokens in each step (examples/cache_cost.py)
    # off | ngram | suffix | head[:FILE] | draft:MODEL | auto; see docs/adr/0018
    speculate: str = "auto"
    # tenants whose recent outputs the suffix proposer may reuse for them; "*": every tenant
    suffix_tenants: tuple[str, ...] = ()
    quant: str | None = None  # quantise float weights: q8_0 | q4_0; packed: keep integers
    # model | protocol | greedy: sampling parameters that a request does not give (base/defaults.py)
    defaults: str = "model"
    pooling: str | None = None  # of embeddings: mean | cls | last; None: as the model's files say
    check: bool = False  # check the block accounting after every step
    warm_up: bool = False  # compile the GPU kernels before the first request; no effect on a CPU
    # LoRA adapters to load, as NAME=PATH; a mapping from name to path is accepted, too
    adapters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapters", _adapters(self.adapters))
        for name in SIZES:
            size: object = getattr(self, name)
            if isinstance(size, str):
                object.__setattr__(self, name, parse_size(name, size))
        folder: object = self.cache_dir
        if isinstance(folder, os.PathLike):
            object.__setattr__(self, "cache_dir", os.fspath(folder))
        for field in fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        for name in ("max_running", "max_waiting", "cache_dir_size"):
            if getattr(self, name) < 1:
                raise ParameterError(name, f"{getattr(self, name)} is below 1")
        for name in ("threads", "context", "step_tokens", "step_ms", "kv_memory", "kv_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ParameterError(name, f"{value} is below 1")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ParameterError(name, f"{value!r:.60} is not one of {', '.join(choices)}")
        if self.cache_dir == "":
            raise ParameterError("cache_dir", "is empty; give the path of a directory")
        if self.cache_dir is None and self.cache_dir_size != CACHE_DIR_SIZE:
            raise ParameterError(
                "cache_dir_size", "has an effect only with cache_dir; give that, too"
            )
        if self.cache_dir is not None and not (self.prefix_cache and self.use_cache):
            raise ParameterError(
                "cache_dir", "needs the prefix cache, which is switched off; leave one out"
            )
        mode, colon, _ = self.speculate.partition(":")
        if mode not in SPECULATE or (colon and mode not in ("head", "draft")):
            raise ParameterError(
                "speculate",
                f"{self.speculate!r} is not one of "
                "off, ngram, suffix, head, head:FILE, draft:MODEL, auto",
            )
        processors = os.cpu_count() or 1
        max_threads = max(64, 4 * processors)
        if self.threads is not None and self.threads > max_threads:
            plural = "s" if processors > 1 else ""
            raise ParameterError(
                "threads",
                f"{self.threads} is more than the {max_threads} that are possible; this machine "
                f"has {processors} processor{plural}, and more threads than that only wait",
            )


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


# annotation -> (accepted types, name in errors); NumPy integers have __index__
_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "int": (SupportsIndex, "a whole number"),
    "str": (str, "a string"),
    "bool": (bool, "True or False"),
    "tuple[str, ...]": ((tuple, list), "a list of strings"),
}


def _check_type(name: str, annotation: str, value: object) -> None:
    if value is None and annotation.endswith(" | None"):
        return
    types, words = _TYPES[annotation.removesuffix(" | None")]
    wrong = not isinstance(value, types) or (isinstance(value, bool) and types is not bool)
    if wrong or (
        isinstance(value, (tuple, list)) and not all(isinstance(item, str) for item in value)
    ):
        raise ParameterError(name, f"{value!r:.60} is not {words}")
