"""Beyond one machine: replicas on Ray Serve and batches on Ray Data, with the same tokens.

    verbatim serve --ray --replicas 3        the HTTP server, over three engines on Ray
    verbatim.scale.deployment("smollm2")     the same as an application of a Ray Serve config
    verbatim.scale.Generate                  a callable class for ray.data.Dataset.map_batches

Ray is imported only when one of these is used. The HTTP application runs once, in the gateway; a
replica is an engine with its supervisor. Limits, API keys and stored answers therefore hold over
all replicas, and an answer depends neither on the replica nor on how many there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verbatim.scale.application import deployment
    from verbatim.scale.batch.batch_actor import Generate

__all__ = ["Generate", "deployment"]


def __getattr__(name: str) -> Any:
    if name == "deployment":
        from verbatim.scale.application import deployment

        return deployment
    if name == "Generate":
        from verbatim.scale.batch.batch_actor import Generate

        return Generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
