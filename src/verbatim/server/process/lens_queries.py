"""Read-only questions of the Lens, answered in the engine process.

In: an Inspect message. Out: plain data for Inspected.

    facts    model, backend, numerics, cache and the roofline's limit of a decode step
    vocab    the bytes of every token
    step     one draw, stage by stage: the logits after bias, masks and penalties, and what each of
             these stages removed; the page runs the stages from the temperature on itself
    engine   running requests of the tenant, cache blocks, the last steps
    prefix   the newest block hashes of the prefix cache, for the router of several replicas

Invariant: an answer changes no state, and shows a tenant no request of another.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec
from verbatim.engine.request import Request
from verbatim.sampling.draw import noise_key
from verbatim.sampling.logprobs import as_row
from verbatim.sampling.numerics import best, lane_sum, log_mass, masses, spreads
from verbatim.sampling.pipeline import Row, state_of
from verbatim.sampling.processors import BEFORE
from verbatim.sampling.row_state import REMOVED
from verbatim.server.process.results import cost_of

if TYPE_CHECKING:
    from verbatim.engine.calls.async_engine import AsyncEngine
    from verbatim.engine.core import EngineCore
    from verbatim.engine.running_request import RunningRequest
    from verbatim.schedule.blocks import BlockPool

TOP = 256  # candidates sent with a step; the page requests the rest when a cut lies outside
CUT = 64  # most likely ids that bias, masks or bans removed
BARS = 24  # ids in the bar of a stage
BIN = 0.25  # width of a bin of the tail's histogram, in logits
MAX_STRIP = 4096  # blocks drawn one by one


class Inspector:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def answer(self, what: str, arguments: JsonMapping, tenant: str) -> JsonObject:
        match what:
            case "facts":
                return await asyncio.to_thread(self._facts)
            case "vocab":
                return await asyncio.to_thread(self._vocab)
            case "step":
                return await asyncio.to_thread(self._step, **arguments)
            case "engine":
                after = int(arguments.get("after", 0))
                report = await self._engine.call(lambda core: engine_report(core, tenant, after))
                return cast(JsonObject, report)
            case "prefix":
                limit = int(arguments["limit"])
                hashes = await self._engine.call(
                    lambda core: core.scheduler.cache.prefix_hashes(limit)
                )
                return {"hashes": hashes}
            case _:
                raise AssertionError(f"no such question: {what}")

    # --------------------------------------------------------------------------------------- facts

    def _facts(self) -> JsonObject:
        engine, backend = self._engine, self._engine.loaded.backend
        info, spec = backend.info, backend.spec
        card, limits = cost_of(engine)
        blocks = spec.diffusion
        return {
            "model": engine.loaded.name,
            "digest": engine.loaded.digest,
            "fingerprint": engine.fingerprint,
            "backend": info.name,
            "detail": info.detail,
            "threads": info.threads,
            "numerics": info.numerics,
            "context": engine.context,
            "vocab": engine.tokenizer.vocab_size,
            "layers": len(spec.layers),
            "hidden": spec.hidden,
            "has_template": engine.has_template,
            "speculate": engine.config.speculate,
            "diffusion": blocks
            and {
                "block": blocks.block,
                "behind_prompt": blocks.full or blocks.causal,
                "both": blocks.causal,
            },
            "step_tokens": engine.config.step_tokens,
            "block_size": backend.block_size,
            "weight_bytes": int(card.read_bytes()),
            "kv_token_bytes": info.kv_token_bytes,
            # seconds of one decode step at context 0; None: `verbatim bench` has not measured
            "floor_seconds": card.step_seconds(limits, 0) if limits is not None else None,
        }

    def _vocab(self) -> JsonObject:
        tokenizer = self._engine.tokenizer
        ids = range(tokenizer.vocab_size)
        raw = [tokenizer.token_bytes(i) for i in ids]
        return {
            "lengths": [len(piece) for piece in raw],
            "bytes": b"".join(raw),
            "control": [i for i in ids if tokenizer.is_control(i)],
        }

    # ---------------------------------------------------------------------------------------- step

    def _step(
        self,
        row: bytes,
        prompt: list[int],
        output: list[int],
        params: JsonObject,
        choice: int,
        rest: bool,
    ) -> JsonObject:
        """The report of one step. `row`: the raw float32 logits that follow prompt + output."""
        wanted = SamplingParams.from_mapping(params)
        request = self._engine.core.request(prompt, wanted)
        if request.canvas is not None:
            raise UnsupportedError(
                "output", "a step of a diffusion model depends on masks, which no output tells"
            )
        raw = as_row(np.frombuffer(row, "<f4"))
        state, stages, cut = self._before_temperature(raw, request, output, choice)
        return step_report(raw, state, stages, cut, rest)

    def _before_temperature(
        self, raw: Any, request: Request, output: list[int], choice: int
    ) -> tuple[object, list[JsonObject], list[list[Any]]]:
        """Run bias, masks and penalties: (state, stages, [id, raw logit, stage] of removed ids)."""
        params, prompt = request.params, request.prompt_ids
        spec = DrawSpec(
            params,
            noise_key(request.seed, choice),
            len(prompt) - params.output_prefix,
            withheld=self._withheld(params, params.output_prefix + len(output)),
            breakers=request.breakers,
        )
        known = (*prompt, *output)
        state = state_of(raw, Row(spec, len(known), known, mask_after(request, output)))
        stages, cut = [], []
        live, mass_left = raw > REMOVED, 1.0
        likely = best(raw, min(4 * CUT, len(raw)))
        for stage in BEFORE:
            if not stage.active(state):
                continue
            before = state.logits.copy()
            stage.apply(state)
            after = state.logits > REMOVED
            changed = np.count_nonzero((before != state.logits) & after)
            cut += [[int(i), float(raw[i]), stage.name] for i in likely if live[i] and not after[i]]
            mass_left *= mass_share(before, after)
            left, removed = np.count_nonzero(after), np.count_nonzero(live & ~after)
            counts = {"removed": int(removed), "left": int(left), "changed": int(changed)}
            top = most_likely(state.logits)
            stages.append({"name": stage.name, **counts, "mass": mass_left, "top": top})
            live = after
        return state, stages, cut[:CUT]

    def _withheld(self, params: SamplingParams, written: int) -> tuple[int, ...]:
        if written >= params.min_tokens:
            return ()
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= set(self._engine.loaded.eos_ids)
        return tuple(sorted(ends))


def mass_share(logits: Any, kept: Any) -> float:
    """The probability of the ids that a stage keeps, in the distribution before the stage."""
    if not (logits > REMOVED).any():
        return 0.0
    mass = masses(logits - logits.max())
    return float(int(mass[kept].sum())) / float(int(mass.sum()))


def most_likely(logits: Any) -> list[list[Any]]:
    """[id, probability] of the first ids after a stage."""
    if not (logits > REMOVED).any():
        return []
    mass = masses(logits - logits.max())
    total, first = float(int(mass.sum())), best(logits, min(BARS, len(logits)))
    return [[int(i), float(mass[i]) / total] for i in first if mass[i]]


def mask_after(request: Request, output: list[int]) -> bytes | None:
    """The grammar's mask after `output`; None without a grammar."""
    matcher = request.grammar_matcher()
    if matcher is None:
        return None
    for token in output:
        mask = matcher.mask() if not matcher.finished else b""
        if not (token // 8 < len(mask) and mask[token // 8] >> (token % 8) & 1):
            raise ParameterError("output", f"the grammar does not allow token {token} here")
        matcher.advance(token)
    if matcher.finished:
        raise ParameterError("output", "the structure is complete; nothing follows it")
    return bytes(matcher.mask())


def step_report(
    raw: Any, state: Any, stages: list[JsonObject], cut: list[list[Any]], rest: bool
) -> JsonObject:
    d = raw - raw.max()
    mass = masses(d)
    total = int(mass.sum())
    live = np.flatnonzero(state.logits > REMOVED)
    first = live[best(state.logits[live], min(TOP, len(live)))]
    out: JsonObject = {
        "position": state.position,
        "prompt_len": state.prompt_len,
        "vocab": len(raw),
        "key": f"{state.key:016x}",
        "peak": float(raw.max()),
        "log_total": log_mass(total),  # logprob = logit - peak - log_total
        "entropy": log_mass(total) + float(int(spreads(d).sum())) / float(total),
        "stages": stages,
        "cut": cut,
        "top": [[int(i), float(raw[i]), float(state.logits[i])] for i in first],
        "live": len(live),
        "sigma": sigma_of(state.logits) if len(live) else 0.0,
        "tail": tail_of(state.logits, live, first),
    }
    if rest:
        same = np.array_equal(raw, state.logits)
        out["row"] = state.logits.astype("<f4" if same else "<f8").tobytes()
        out["row_type"] = "f4" if same else "f8"
    return out


def sigma_of(logits: Any) -> float:
    """The standard deviation that TopNSigma uses, in its order of additions."""
    live = logits > REMOVED
    z = np.where(live, logits - logits.max(), 0.0)
    count = float(np.count_nonzero(live))
    off = np.where(live, z - lane_sum(z) / count, 0.0)
    return float(np.sqrt(lane_sum(off * off) / count))


def tail_of(logits: Any, live: Any, first: Any) -> JsonObject:
    """Histogram of the live logits that are not sent. Bin i holds start + i * width and more."""
    rest = np.setdiff1d(live, first, assume_unique=True)
    if not len(rest):
        return {"count": 0, "best": None, "start": 0.0, "width": BIN, "counts": []}
    values = logits[rest]
    start = float(np.floor(values.min() / BIN) * BIN)
    counts = np.bincount(np.floor((values - start) / BIN).astype(np.int64))
    bins = {"start": start, "width": BIN, "counts": counts.tolist()}
    return {"count": len(rest), "best": float(values.max()), **bins}


# ------------------------------------------------------------------------------------------ engine


def _request_row(running: RunningRequest) -> JsonObject:
    return {
        "id": running.request.id,
        "prompt_tokens": len(running.request.prompt_ids),
        "output_tokens": running.output_tokens,
        "cached_tokens": running.sequences[0].cached_tokens,
        "sequences": len(running.sequences),
        "waiting": running.started_at is None,
        "preemptions": running.preemptions,
        "seconds": time.perf_counter() - running.request.arrival,
    }


def _pool_row(core: EngineCore, pool: BlockPool, group: int, own: set[int]) -> JsonObject:
    """One pool of cache blocks. `own`: the ids of the tenant's sequences."""
    mine = [seq.blocks for seq in core.scheduler.sequences.values() if id(seq) in own]
    tables = [blocks[group] for blocks in mine if len(blocks) > group]
    blocks = {block for table in tables for block in table if block >= 0}
    return {
        "total": pool.total,
        "used": pool.used,
        "cached": len(pool.cached),
        "free": len(pool.free),
        "own": len(blocks),
        "shared": sum(count > 1 for count in pool.refs),
        "evictions": pool.evictions,
        "evicted": list(pool.evicted),
        "strip": strip_of(pool, blocks),
    }


def engine_report(core: EngineCore, tenant: str, after: int) -> JsonObject:
    """Runs on the engine's thread, between two steps."""
    scheduler = core.scheduler
    mine = [running for running in core.requests.values() if running.request.tenant == tenant]
    own = {id(seq) for running in mine for seq in running.sequences}
    return {
        "now": time.perf_counter(),
        "requests": [_request_row(running) for running in mine if running.sequences],
        "others": len(core.requests) - len(mine),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "preemptions": scheduler.preemptions,
        "prefix_queries": scheduler.prefix_queries,
        "prefix_hits": scheduler.prefix_hits,
        "pools": [_pool_row(core, pool, n, own) for n, pool in enumerate(scheduler.cache.pools)],
        "steps": core.step_log.read(tenant, after),
    }


def strip_of(pool: BlockPool, own: set[int]) -> str:
    """One letter per block: own (o), shared between sequences (s), of other keys (x), cached (c),
    free (.)."""
    letters = []
    for block in range(min(pool.total, MAX_STRIP)):
        refs = pool.refs[block]
        if refs:
            letters.append("s" if refs > 1 else "o" if block in own else "x")
        else:
            letters.append("c" if block in pool.cached else ".")
    return "".join(letters)
