"""A Ray of one node on loopback, with more CPUs than the machine has: prints its address, and ends
when its stdin closes.

Tests also run on busy machines. Ray 2.60's raylet ends when an agent has not written its ports to
files within 15 seconds, and no setting changes that; but it does not wait for ports that it knows.
So its command line, and with it those of its agents, gets a free port for each.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from typing import Any

from verbatim.scale.ray_start import LOCAL_RAY, start_local

os.environ.update(LOCAL_RAY)

import ray
from ray._private import services

# The raylet's name of a port, and that of the agent that listens on it.
PORTS = (
    ("metrics-agent-port", "grpc-port"),
    ("metrics_export_port", "metrics-export-port"),
    ("runtime_env_agent_port", "runtime-env-agent-port"),
    ("dashboard_agent_listen_port", "listen-port"),  # Ray does not tell the raylet
)
start_ray_process = services.start_ray_process


def start_with_ports(command: list[str], kind: str, *args: Any, **options: Any) -> Any:
    if kind == "raylet":
        with_ports = "\n".join([*command, "--dashboard_agent_listen_port=0"])
        for names in PORTS:
            flag = rf"--({'|'.join(names)})=\d+"
            with_ports = re.sub(flag, rf"--\g<1>={free_port()}", with_ports)
        command = with_ports.split("\n")
    return start_ray_process(command, kind, *args, **options)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


services.start_ray_process = start_with_ports
start_local(num_cpus=int(sys.argv[1]), object_store_memory=100 << 20)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
