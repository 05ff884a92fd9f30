"""Seconds of one engine step of a replica. In: a StepPlan. Out: seconds.

    seconds = rows(d) + position * (sum of the contexts of the d decoding sequences)
              + sum over prefill chunks of n tokens from depth s on:
                    n * (prompt + prompt_position * (s + n / 2))

rows(d) is linear between the measured batch sizes. A step without decoding sequences takes at least
rows(1): it reads the weights once, however few prompt tokens it has.

Worked numbers: rows(16) = 18 ms, prompt = 0.8 ms: 16 streams beside a chunk of 50 prompt tokens
take 18 + 40 = 58 ms.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from verbatim.base.errors import ParameterError
from verbatim.base.records import CacheGroup, StepPlan
from verbatim.observe.roofline import cost_card
from verbatim.schedule.token_cost import TokenCost

if TYPE_CHECKING:
    from verbatim.diagnose.capacity import Plan
    from verbatim.diagnose.devices import Device
    from verbatim.diagnose.footprint import Footprint
    from verbatim.engine.calls.llm import LLM

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # batch sizes that are measured
STEPS = 12  # decode steps of one measurement
REPEATS = 3  # the median counts
SHORT, LONG = 32, 1024  # contexts of the decode measurements
CHUNKS = (256, 1024)  # prompt lengths of the prefill measurements


class Timer(Protocol):
    """Seconds of work on a real engine (bench/measure.py)."""

    def prefill(self, tokens: int) -> float: ...
    def decode(self, context: int, steps: int) -> float: ...
    def batch(self, sequences: int, context: int, steps: int) -> float: ...


@dataclass(frozen=True, slots=True)
class ReplicaCosts:
    """What one replica costs and holds: the data of a simulation, as JSON in a costs file."""

    name: str  # model and machine, for the report
    rows: tuple[tuple[int, float], ...]  # (decoding sequences, seconds of a step), by size
    position: float  # seconds per decoding sequence and position of its context
    prompt: float  # seconds per prompt token
    prompt_position: float  # seconds per prompt token and position before it
    # Operations of a prompt token in matrices, and per position before it: the scheduler's measure
    # of how much longer a prompt token at a depth takes.
    prompt_ops: int
    position_ops: int
    blocks: int  # KV blocks
    block_size: int
    step_tokens: int
    max_running: int
    step_ms: float | None  # limit of a step beside streams; None: no limit

    def seconds(self, plan: StepPlan) -> float:
        decoding, contexts, prompt = 0, 0, 0.0
        for step in plan.sequences:
            n = len(step.tokens)
            if step.draws == n:
                decoding += 1
                contexts += step.end
            else:
                prompt += n * (self.prompt + self.prompt_position * (step.start + n / 2))
        if not decoding:
            return max(prompt, self.rows_seconds(1))
        return self.rows_seconds(decoding) + self.position * contexts + prompt

    def rows_seconds(self, rows: int) -> float:
        sizes = self.rows
        at = bisect_left(sizes, (rows, 0.0))
        if (at < len(sizes) and sizes[at][0] == rows) or len(sizes) == 1:
            return sizes[min(at, len(sizes) - 1)][1]
        at = min(max(at, 1), len(sizes) - 1)  # beyond the largest size: the last slope
        (low, first), (high, second) = sizes[at - 1], sizes[at]
        return max(first + (second - first) * (rows - low) / (high - low), 0.0)

    @property
    def token_cost(self) -> TokenCost:
        return TokenCost(self.prompt_ops, self.position_ops)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return (CacheGroup(None, (0,)),)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")

    @staticmethod
    def load(path: Path) -> ReplicaCosts:
        known = {f.name for f in fields(ReplicaCosts)}
        try:
            data = json.loads(path.read_text("utf-8"))
            if set(data) != known:
                raise ValueError(f"its keys must be {sorted(known)}")
            data["rows"] = tuple(sorted((int(n), float(s)) for n, s in data["rows"]))
            return ReplicaCosts(**data)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ParameterError("costs", f"{path} is no costs file: {error}") from None


def _median(run: Callable[[], float]) -> float:
    """Median seconds of REPEATS runs, after one that does not count."""
    run()
    return statistics.median(run() for _ in range(REPEATS))


def measure_costs(llm: LLM, runner: Timer, sizes: tuple[int, ...] = SIZES) -> ReplicaCosts:
    """Measure the engine of `llm`, which has no prefix cache and no drafts, on this machine."""
    from verbatim.engine.step.step_budget import step_limit

    core, config = llm.core, llm.core.config
    card = cost_card(core.backend.spec, core.backend.info)
    room = core.cache_plan.tokens
    most = min(config.max_running, room // (2 * SHORT + STEPS))
    rows = tuple(
        (n, _median(partial(runner.batch, n, SHORT, STEPS)) / STEPS) for n in sizes if n <= most
    )
    deep = min(LONG, llm.context - STEPS - 2)
    at_depth = _median(lambda: runner.decode(deep, STEPS)) / STEPS
    position = max(at_depth - rows[0][1], 0.0) / max(deep - SHORT, 1)
    short, long = (min(n, llm.context - 2) for n in CHUNKS)
    first = _median(lambda: runner.prefill(short)) / short
    second = _median(lambda: runner.prefill(long)) / long
    slope = max(second - first, 0.0) / max((long - short) / 2, 1)
    return ReplicaCosts(
        f"{core.loaded.name} on {core.backend.info.detail or core.backend.info.name}",
        tuple((n, max(s - position * n * SHORT, s / 2)) for n, s in rows),
        position,
        max(first - slope * short / 2, first / 2),
        slope,
        card.prompt_ops_token,
        card.ops_position,
        core.cache_plan.blocks[0],
        core.cache_plan.block_size,
        config.step_tokens or max(CHUNKS),
        config.max_running,
        step_limit(core.loaded, config),
    )


def roofline_costs(
    footprint: Footprint, device: Device, count: int, max_running: int, step_tokens: int
) -> ReplicaCosts:
    """Lower bounds of the seconds on `count` devices that share every matrix: what a data sheet
    allows, without communication and launches."""
    from verbatim.base.config import BLOCK_SIZE
    from verbatim.diagnose.capacity import make_plan

    def plan(context: int, output: int, batch: int) -> Plan:
        return make_plan(footprint, device, context=context, output=output, batch=batch, tp=count)

    sizes = [n for n in SIZES if n <= max_running]
    rows = tuple((n, plan(2, 1, n).decode_empty.seconds) for n in sizes)
    deep = plan(LONG + 1, 1, 1)
    short, long = (plan(n + 1, 1, 1).prefill.seconds / n for n in CHUNKS)
    slope = max(long - short, 0.0) / ((CHUNKS[1] - CHUNKS[0]) / 2)
    if not deep.room_tokens or not deep.fits:
        raise ParameterError("device", f"{footprint.name} does not fit on {count} × {device.name}")
    return ReplicaCosts(
        f"{footprint.name} on {count} × {device.name}, lower bounds",
        rows,
        max(deep.decode.seconds - deep.decode_empty.seconds, 0.0) / LONG,
        max(short - slope * CHUNKS[0] / 2, short / 2),
        slope,
        footprint.prompt_ops_token,
        sum(layer.ops_position for layer in footprint.attention),
        int(deep.room_tokens) // BLOCK_SIZE,
        BLOCK_SIZE,
        step_tokens,
        max_running,
        None,
    )
