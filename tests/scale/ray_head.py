"""A Ray of one node on loopback, with more CPUs than the machine has: prints its address, and ends
when its stdin closes. It tries longer than the command does: tests also run on busy machines."""

from __future__ import annotations

import os
import sys

from verbatim.scale.ray_start import LOCAL_RAY, start_local

os.environ.update(LOCAL_RAY)

import ray

start_local(12, num_cpus=int(sys.argv[1]), object_store_memory=100 << 20)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
