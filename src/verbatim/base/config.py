"""EngineConfig: how an engine is built. Resolved once; an unknown option is an error of Python itself (a frozen dataclass)."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import SupportsIndex

from verbatim.base.errors import ParameterError

BLOCK_SIZE = 16  # positions in one cache block; one vector of scores on every CPU path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every setting of an engine, with its default. Sizes are bytes, lengths tokens."""

    backend: str = "auto"  # auto: cpu where its kernels are built, else reference
    threads: int | None = None  # None: the physical cores this process may use
    context: int | None = None  # None: the model's own limit
    step_tokens: int = 512  # most tokens one step computes: the chunk of a long prompt
    max_running: int = 256  # sequences in one step
    max_waiting: int = 4096  # requests in the queue; one more is refused
    kv_memory: int | None = (
        None  # bytes for keys and values, a draft model's included; None: the rule in schedule/sizing.py
    )
    kv_blocks: int | None = None  # exact number of blocks for each group (tests)
    kv_type: str = "f16"  # f16 | q8 (cpu backend); the reference always keeps f32
    prefix_cache: bool = True
    use_cache: bool = (
        True  # False: recompute everything each step (examples/cache_cost.py shows the price)
    )
    speculate: str = (
        "auto"  # off | ngram | suffix | head[:FILE] | draft:MODEL | auto; see docs/adr/0018
    )
    suffix_tenants: tuple[
        str, ...
    ] = ()  # tenants whose recent answers the suffix proposer may reuse for them; "*": each
    quant: str | None = None  # quantise float weights while loading: q8_0 | q4_0
    check: bool = False  # prove the block accounting after every step

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        for name in ("step_tokens", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise ParameterError(name, f"{getattr(self, name)} is below 1")
        for name in ("threads", "context", "kv_memory", "kv_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ParameterError(name, f"{value} is below 1")
        processors = os.cpu_count() or 1
        most = max(64, 4 * processors)
        if self.threads is not None and self.threads > most:
            here = f"this machine has {processors} processor{'s' if processors > 1 else ''}, and more threads than that only wait"
            raise ParameterError(
                "threads", f"{self.threads} is more than the {most} that are possible; {here}"
            )


# the annotations above -> the type that must come, and its name in an error; what counts as an int (NumPy's do) has __index__
_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "int": (SupportsIndex, "a whole number"),
    "str": (str, "a text"),
    "bool": (bool, "True or False"),
    "tuple[str, ...]": ((tuple, list), "a list of texts"),
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
