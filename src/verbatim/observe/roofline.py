"""Roofline: the machine's limits and the model's cost bound the speed of any engine.

A decode step reads every weight once (shared by the batch) and the KV cache of each sequence; each
row costs two operations per weight. Of a mixture's experts it reads those that its rows choose. So
with b sequences at context c

    seconds per step >= max((weights + b * c * kv) / bandwidth,  b * (ops + c * attention) / peak)

Example: 98 MB of weights at 37.9 GB/s: at least 2.6 ms per token, 387 tokens/s at context 0.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FILE = "limits.json"
REPEATS = 7  # passes of the probe; the best counts. A few seconds: a busy spell rarely lasts longer


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What this machine can do, measured. Bytes and operations per second; int8_ops is None if
    it could not be measured."""

    read_bytes: float
    threads: int
    method: str  # how it was measured: "native" or "numpy"
    int8_ops: float | None = None
    one_thread_bytes: float | None = None
    buffer_bytes: int = 0
    when: float = 0.0  # seconds since 1970
    beaten: bool = False  # by a run since then: they were measured while the machine was busy

    def decode_ceiling(self, bytes_per_token: float) -> float:
        """Tokens per second of one sequence, from memory bandwidth alone."""
        return self.read_bytes / bytes_per_token


@dataclass(frozen=True, slots=True)
class CostCard:
    """The cost of one token, from the model's shape and file alone."""

    weight_bytes: int  # read per step, every expert counted
    kv_token_bytes: int  # keys and values of one position, all layers
    ops_token: int  # multiplications and additions in matrices, per token
    ops_position: int  # the same in attention, per position attended to
    prompt_ops_token: int = 0  # prompt tokens skip the LM head; 0: the same as ops_token
    expert_bytes: int = 0  # share of weight_bytes: all experts
    experts: int = 0  # per layer
    experts_used: int = 0  # per row

    def read_bytes(self, batch: float = 1) -> float:
        """Weight bytes that one decode step of `batch` sequences reads."""
        unread = 1.0 - expert_share(self.experts, self.experts_used, batch)
        return self.weight_bytes - unread * self.expert_bytes

    def step_seconds(self, limits: MachineLimits, context: int, batch: int = 1) -> float:
        kv = batch * context * self.kv_token_bytes
        read = (self.read_bytes(batch) + kv) / limits.read_bytes
        if limits.int8_ops is None:
            return read
        return max(read, batch * (self.ops_token + context * self.ops_position) / limits.int8_ops)

    def decode_ceiling(self, limits: MachineLimits, context: int, batch: int = 1) -> float:
        return batch / self.step_seconds(limits, context, batch)

    def prefill_ceiling(self, limits: MachineLimits, tokens: int) -> float | None:
        """Prompt tokens per second at the int8 peak; None if that was not measured. Token i
        attends to i positions, tokens/2 on average."""
        if limits.int8_ops is None:
            return None
        return limits.int8_ops / (
            (self.prompt_ops_token or self.ops_token) + tokens / 2 * self.ops_position
        )


def expert_share(experts: int, used: int, rows: float) -> float:
    """Share of a layer's experts that at least one of `rows` rows chooses, under even routing:
    with E experts and k per row, 1 - (1 - k/E) ** rows. 1 for a model without experts.

    >>> expert_share(8, 2, 1), round(expert_share(8, 2, 16), 3)
    (0.25, 0.99)
    """
    return 1.0 - float((1 - used / experts) ** rows) if experts else 1.0


def cost_card(spec: Any, info: Any) -> CostCard:
    """The CostCard of a ModelSpec and a BackendInfo. Both are read by their fields, so that this
    package imports no other."""
    linear, experts, position = 0, spec.experts_used, 0
    matrices = 3 if spec.gated else 2
    for layer in spec.layers:
        linear += _mixer_weights(spec, layer) + 2 * spec.hidden * spec.layer_input
        if not layer.experts or spec.experts_beside:
            linear += matrices * spec.hidden * (layer.mlp or spec.mlp)
        linear += layer.experts * spec.hidden  # the router
        linear += matrices * spec.hidden * spec.expert_mlp * experts if layer.experts else 0
        position += layer_position_ops(spec, layer)
    linear += spec.hidden * len(spec.layers) * spec.layer_input  # its projection
    head = spec.hidden * spec.vocab
    return CostCard(
        weight_bytes=info.weight_bytes,
        kv_token_bytes=info.kv_token_bytes,
        ops_token=2 * (linear + head),
        ops_position=position,
        prompt_ops_token=2 * linear,
        expert_bytes=info.expert_bytes,
        experts=max((layer.experts for layer in spec.layers), default=0),
        experts_used=spec.experts_used,
    )


def layer_position_ops(spec: Any, layer: Any) -> int:
    """Operations in one layer's attention per position attended to."""
    if layer.mixer != "attention":
        return 0
    return int(4 * spec.heads * (layer.head_dim or spec.head_dim))


def _mixer_weights(spec: Any, layer: Any) -> int:
    """Weights of the matrices of attention, of a convolution layer or of a delta net."""
    if layer.mixer == "conv":
        return int(4 * spec.hidden * spec.hidden)
    if layer.mixer == "delta":
        delta = spec.delta
        return int(spec.hidden * (delta.qkv + 2 * delta.values + 2 * delta.value_heads))
    gates = 1 if spec.attention_gate else 0
    projections = 0 if layer.kv_layer is not None else 1 if layer.value_is_key else 2
    kv = projections * (layer.kv_heads or spec.kv_heads)
    return int(spec.hidden * (layer.head_dim or spec.head_dim) * ((2 + gates) * spec.heads + kv))


# --- measurement


def measure_limits(
    threads: int,
    *,
    native_read: Callable[[int, int], float] | None = None,
    native_ops: Callable[[int], float] | None = None,
    megabytes: int = 256,
    repeats: int = 5,
) -> MachineLimits:
    """The best of several passes, because interruptions by other programs are not a limit.

    native_read(threads, bytes) and native_ops(threads) return bytes and operations per second;
    without them NumPy reads and the int8 peak stays unknown."""
    size = megabytes << 20
    read = native_read or _numpy_read
    both = max(read(threads, size) for _ in range(repeats))
    one = max(read(1, size) for _ in range(repeats)) if threads > 1 else both
    # 0 (no int8 instruction is known) becomes None.
    ops = max(native_ops(threads) for _ in range(repeats)) or None if native_ops else None
    return MachineLimits(
        max(both, one), threads, "native" if native_read else "numpy", ops, one, size, time.time()
    )


def native_probes() -> (
    tuple[Callable[[int, int], float], Callable[[int], float]] | tuple[None, None]
):
    """The two functions of probe.cpp, if built. They share no code with the kernels that are
    compared with the limit."""
    import ctypes
    from importlib.util import find_spec

    spec = find_spec("verbatim.observe._probe")
    if spec is None or spec.origin is None:
        return None, None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:
        return None, None
    read, ops = library.verbatim_read, library.verbatim_int8
    read.restype = ops.restype = ctypes.c_double
    read.argtypes, ops.argtypes = [ctypes.c_int, ctypes.c_int64], [ctypes.c_int]
    return (lambda threads, size: float(read(threads, size))), (lambda threads: float(ops(threads)))


_buffers: dict[int, Any] = {}


def _numpy_read(threads: int, size: int) -> float:
    """Bytes per second that `threads` threads read together: the maximum of an int32 array takes
    one load and one compare per lane."""
    import numpy as np

    if size not in _buffers:
        _buffers.clear()
        _buffers[size] = np.ones(size // 4, np.int32)
    parts = np.array_split(_buffers[size], threads)
    if threads == 1:
        began = time.perf_counter()
        parts[0].max()
        return float(size / (time.perf_counter() - began))
    gate = threading.Barrier(threads + 1)

    def work(part: Any) -> None:
        gate.wait()
        part.max()  # NumPy releases the GIL here
        gate.wait()

    team = [threading.Thread(target=work, args=(part,), daemon=True) for part in parts]
    for member in team:
        member.start()
    gate.wait()
    began = time.perf_counter()
    gate.wait()
    seconds = time.perf_counter() - began
    for member in team:
        member.join()
    return float(size / seconds)


def forget_buffers() -> None:
    _buffers.clear()


# --- on disk


def refresh_limits(
    directory: Path, threads: int, note: Callable[[str], None], repeats: int = REPEATS
) -> MachineLimits:
    """Measure the limits of the CPU, and save them beside the models."""
    read, ops = native_probes()
    limits = measure_limits(threads, native_read=read, native_ops=ops, repeats=repeats)
    forget_buffers()
    try:
        return save_limits(directory, limits)
    except OSError as error:
        note(f"warning: the limits could not be saved: {error.strerror}")
        return limits


def save_limits(directory: Path, limits: MachineLimits) -> MachineLimits:
    """Save the limits, each the best of this measurement and the saved one: a busy machine lowers
    neither. `verbatim run -v` prints them next to the speed."""
    before = load_limits(directory)
    if before is not None and (before.threads, before.method) == (limits.threads, limits.method):
        limits = replace(
            limits,
            read_bytes=max(limits.read_bytes, before.read_bytes),
            int8_ops=max(limits.int8_ops or 0, before.int8_ops or 0) or None,
        )
    _write(directory, limits)
    return limits


def mark_beaten(directory: Path) -> None:
    """Mark the saved limits as too low, because a run was faster; `plan` measures them again."""
    if (limits := load_limits(directory)) is not None and not limits.beaten:
        _write(directory, replace(limits, beaten=True))


def _write(directory: Path, limits: MachineLimits) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(asdict(limits)) + "\n", "utf-8")
    part.replace(path)


def load_limits(directory: Path) -> MachineLimits | None:
    """None if nothing was measured, or if the file cannot be parsed."""
    try:
        return MachineLimits(**json.loads((directory / FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
