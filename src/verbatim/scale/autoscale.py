"""How many replicas a service needs: queue length and cache pressure in, a number out.

    by queue   open requests / target_requests
    by cache   one more replica while the KV caches are more than CACHE_FULL in use and requests
               wait; none fewer while they are more than CACHE_EASY in use

Ray applies the bounds and the delays of RayOptions. The numbers are means over Ray's 30 seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

CACHE_FULL = 0.9  # share of the blocks in use from which a queue means that blocks are missing
CACHE_EASY = 0.5  # share below which the others can take over the requests of one replica


def wanted_replicas(
    current: int, open_requests: float, target: float, usage: Sequence[float], waiting: float
) -> int:
    """The number of replicas that the load needs. `usage`: share of the KV cache blocks in use, per
    replica. `waiting`: requests without a running sequence, in all replicas."""
    wanted = math.ceil(open_requests / target)
    mean = sum(usage) / len(usage) if usage else 0.0
    if waiting and mean > CACHE_FULL:
        wanted = max(wanted, current + 1)
    elif mean > CACHE_EASY:
        wanted = max(wanted, current)
    return max(wanted, 1)


def policy(context: Any) -> tuple[int, dict[str, object]]:
    """The AutoscalingPolicy of Ray Serve; `context` is its AutoscalingContext."""
    metrics = context.aggregated_metrics or {}
    wanted = wanted_replicas(
        context.current_num_replicas,
        sum(metrics["open"].values()) if metrics.get("open") else context.total_num_requests,
        context.config.get_target_ongoing_requests(),
        list(metrics.get("kv_cache_usage", {}).values()),
        sum(metrics.get("waiting", {}).values()),
    )
    return wanted, {}
