"""A Ray of one node on loopback, with more CPUs than the machine has: prints its address, and ends
when its stdin closes."""

from __future__ import annotations

import os
import sys

from verbatim.scale.deploy import LOCAL_RAY

os.environ.update(LOCAL_RAY)

import ray

ray.init(
    address="local",
    namespace="serve",
    num_cpus=int(sys.argv[1]),
    include_dashboard=False,
    object_store_memory=100 << 20,
    log_to_driver=False,
)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
