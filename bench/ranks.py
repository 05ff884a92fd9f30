"""One model over 1, 2 and 4 ranks of this machine: the same bits, and the time of a step.

    python bench/ranks.py [--shape 1b] [--type q4_0] [--backend cpu] [--threads 16] [--ranks 1 2 4]
    python bench/ranks.py --ranks 1 2 --split pipeline --gbit 1

Random weights in a llama's shape; the threads are shared by the ranks. A prompt of 512 tokens, then
decode steps of 1 and of 8 sequences. On a GPU also the time of rank 0's kernels in a decode step of
one sequence, copies not counted. --gbit: two ranks over TCP, through a relay that passes so many
Gbit/s in each direction; its own delay of about 0.1 ms per message counts, too. Exit status 1 if a
token or a bit of a log-probability differs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from random_model import SCALES, SHAPES, tensors  # bench/random_model.py

from verbatim import SamplingParams
from verbatim.backend import open_backend
from verbatim.backend.protocol import Backend
from verbatim.base.config import EngineConfig
from verbatim.base.records import DrawSpec, SeqStep, StepPlan
from verbatim.files.gguf_write import write_gguf
from verbatim.model.loading.load import load_model
from verbatim.parallel.backend import ParallelBackend

VOCAB, PROMPT, STEPS, CROWD, PROFILED = 32000, 512, 32, 8, 4
PARAMS = SamplingParams(temperature=1.0, seed=7, logprobs=0)


def write_model(path: Path, shape: tuple[int, ...], kind: str) -> None:
    layers, hidden, inner, heads, kv = shape
    keys = {
        "block_count": layers,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": hidden // heads,
        "context_length": 4096,
        "vocab_size": VOCAB,
    }
    meta = {"general.architecture": "llama", **{f"llama.{k}": v for k, v in keys.items()}}
    write_gguf(path, meta, tensors(kind, shape, VOCAB))


def steps(backend: Backend, count: int) -> tuple[list[object], float, float]:
    """(draws, seconds of the prompt, seconds of the median decode step) of `count` sequences."""
    blocks = -(-(PROMPT + STEPS + 1) // 16)
    tables = [tuple(range(i * blocks, (i + 1) * blocks)) for i in range(count)]
    prompt = tuple(np.random.default_rng(1).integers(0, VOCAB, PROMPT).tolist())
    draws = [DrawSpec(PARAMS, key=i + 1, prompt_len=PROMPT) for i in range(count)]
    found: list[object] = []
    began, tokens = time.perf_counter(), []
    for i in range(count):
        step = SeqStep(i, prompt, 0, (tables[i],), 1, draws[i])
        (result,) = backend.execute(StepPlan(0, (step,))).sequences
        tokens.append(result.drawn[0].token)
    first, times = (time.perf_counter() - began) / count, []
    for at in range(PROMPT, PROMPT + STEPS):
        began = time.perf_counter()
        plan = tuple(SeqStep(i, (tokens[i],), at, (tables[i],), 1, draws[i]) for i in range(count))
        results = backend.execute(StepPlan(at, plan)).sequences
        times.append(time.perf_counter() - began)
        tokens = [result.drawn[0].token for result in results]
        found += [(d.token, d.logprob) for result in results for d in result.drawn]
    return found, first, statistics.median(times)


def kernel_ms(backend: Backend) -> float:
    """Device time of a decode step of one sequence in this process, in ms."""
    from torch.profiler import ProfilerActivity, profile

    table = (tuple(range(-(-(PROMPT + STEPS + 1) // 16))),)
    step = SeqStep(0, (1,), PROMPT, table, 1, DrawSpec(PARAMS, key=1, prompt_len=PROMPT))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            backend.execute(StepPlan(0, (step,)))
    kernels = [e for e in profiled.key_averages() if "mem" not in e.key.lower()]
    return sum(e.self_device_time_total for e in kernels) / PROFILED / 1000


def relay(server: socket.socket, port: int, gbit: float) -> None:
    """Pass bytes between the client of `server` and the port, so many Gbit/s in each direction."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        free = 0.0  # when the link has sent all bytes so far
        while data := source.recv(1 << 16):
            now = time.perf_counter()
            free = max(free, now) + len(data) * 8 / (gbit * 1e9)
            if free - now > 1e-4:  # shorter sleeps are not exact; the debt adds up
                time.sleep(free - now)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    while True:
        near = server.accept()[0]
        try:
            far = socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:  # rank 0 does not listen yet
            near.close()
            continue
        for ends in ((near, far), (far, near)):
            for end in ends:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=pump, args=ends, daemon=True).start()


@contextmanager
def slow_rank(path: Path, gbit: float, threads: int) -> Iterator[str]:
    """Rank 1 behind a slow link; yields the address for rank 0."""
    os.environ["VERBATIM_RANK_SECRET"] = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        fork = multiprocessing.get_context("fork")
        link = fork.Process(target=relay, args=(server, port, gbit), daemon=True)
        link.start()
        command = [sys.executable, "-m", "verbatim", "rank", str(path), "--threads", str(threads)]
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with subprocess.Popen([*command, "--rank-address", address]) as rank:
            yield f"127.0.0.1:{port}"
            rank.terminate()
        link.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="of the shape; default: all")
    parser.add_argument("--type", default="q4_0", choices=sorted(SCALES))
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--split", default="tensor", choices=("tensor", "pipeline"))
    parser.add_argument("--gbit", type=float, help="of the link between two ranks")
    args = parser.parse_args()
    rows, bits = [], []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as links:
        path = Path(folder, "model.gguf")
        layers, *sizes = SHAPES[args.shape]
        write_model(path, (args.layers or layers, *sizes), args.type)
        for ranks in args.ranks:
            threads = max(1, args.threads // ranks)
            kind = {f"{args.split}_parallel": ranks}
            config = EngineConfig(backend=args.backend, threads=threads, **kind)
            model = load_model(path)
            if ranks == 1:
                backend: Backend = open_backend(model, config)
            else:
                if args.gbit:
                    address = links.enter_context(slow_rank(path, args.gbit, threads))
                    config = replace(config, rank_address=address)
                backend = ParallelBackend(model, config)
            backend.allocate((CROWD * -(-(PROMPT + STEPS + 1) // 16),))
            found = [steps(backend, count) for count in (1, CROWD)]
            device = {"kernel_ms": kernel_ms(backend)} if args.backend == "cuda" else {}
            backend.close()
            bits.append([draws for draws, _, _ in found])
            row = {"ranks": ranks, "threads": threads, "prompt": PROMPT / found[0][1]}
            row |= {f"ms_{n}": 1e3 * f[2] for n, f in zip((1, CROWD), found, strict=True)} | device
            rows.append(row)
            print({name: round(value, 2) for name, value in row.items()}, flush=True)
    same = all(one == bits[0] for one in bits)
    print(json.dumps({"shape": args.shape, "type": args.type, "same_bits": same, "rows": rows}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
