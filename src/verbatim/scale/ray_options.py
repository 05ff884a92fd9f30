"""The options of `verbatim serve --ray` and `verbatim batch --ray`, checked before Ray starts.

In: text from the command line. Out: RayOptions. No import of Ray here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec

from verbatim.base.errors import BackendError, ParameterError

LOCAL = "local"  # start a Ray of this machine's own, on loopback
_REPLICAS = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_ADDRESS = re.compile(r"(ray://)?[^\s:/]+:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Replicas:
    """Between `least` and `most` replicas; equal: a fixed number."""

    least: int
    most: int

    @property
    def fixed(self) -> bool:
        return self.least == self.most

    def __str__(self) -> str:
        return str(self.most) if self.fixed else f"{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class RayOptions:
    address: str = LOCAL
    replicas: Replicas = Replicas(1, 1)
    # Requests per replica, running and waiting, that autoscaling aims at.
    target_requests: int = 16
    # Time that more, or fewer, replicas must be wanted before Ray starts or stops any.
    upscale_seconds: float = 30.0
    downscale_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.target_requests < 1:
            raise ParameterError("target_requests", f"{self.target_requests} is below 1")


def parse_replicas(text: str | int) -> Replicas:
    """A number of replicas, or MIN-MAX for autoscaling.

    >>> parse_replicas("2-8")
    Replicas(least=2, most=8)
    """
    match = _REPLICAS.fullmatch(str(text))
    if match is None:
        raise ParameterError("replicas", f"{text!r:.40} is not a number such as 3, or 2-8")
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most:
        raise ParameterError("replicas", f"{text!r:.40}: at least 1, and MIN not above MAX")
    return Replicas(least, most)


def parse_address(text: str) -> str:
    """`local`, `auto` (the running cluster of this machine), HOST:PORT or ray://HOST:PORT."""
    if text in (LOCAL, "auto") or _ADDRESS.fullmatch(text):
        return text
    raise ParameterError(
        "ray",
        f"{text!r:.60} is not local, auto, HOST:PORT or ray://HOST:PORT; if it is the model, put "
        "it before --ray",
    )


def require_ray() -> None:
    if find_spec("ray") is None:
        why = "--ray needs Ray; install the extra 'ray': pip install '.[ray]' in the checkout"
        raise BackendError(why)
