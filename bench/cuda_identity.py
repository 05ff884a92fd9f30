"""Promise 1 on a GPU with real weights: a needle in a crowd, and draws of the device and the host.

    python bench/cuda_identity.py [--model smollm2] [--copies 1000] [--draws 1000000]

Needle: copies of one request among random requests, half of them in an engine with prefix cache and
large steps, half in one without and with small steps, with and without drafts. Every copy must have
the same tokens. Draws: random logits with random sampling parameters, drawn by the device and by
the host sampler; rows that the device leaves to the host are counted per filter and kind of row.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch

from verbatim import LLM, SamplingParams
from verbatim.backend.cuda.runtime.device import device
from verbatim.backend.cuda.sampler.gpu_sampler import GpuSampler
from verbatim.base.records import DrawSpec
from verbatim.sampling.pipeline import Row, sample_rows

TOKENS = 400
SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature 1, seed": {"temperature": 1.0},
    "top_p, top_k, min_p": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "repetition_penalty": {"temperature": 1.0, "repetition_penalty": 1.1},
}
ENGINES: tuple[dict[str, Any], ...] = (
    {"prefix_cache": True, "step_tokens": 4096},
    {"prefix_cache": False, "step_tokens": 333},
)
VOCAB = 8192  # of the random logits
BATCH = 512
# Standard deviation of the logits of a row. Sharp rows are like a model's; a flat row with a filter
# other than top-k may keep more ids than the device lists, and so may one with ties.
KINDS = {"sharp": 6.0, "middling": 3.0, "flat": 1.0, "ties": 3.0}


def needle(model: str, copies: int) -> dict[str, Any]:
    """Distinct answers of all copies, per sampler."""
    answers: dict[str, set[tuple[int, ...]]] = {name: set() for name in SAMPLERS}
    counts, left = dict.fromkeys(SAMPLERS, 0), dict.fromkeys(SAMPLERS, 0)
    began, tokens = time.perf_counter(), 0
    for engine, options in enumerate(ENGINES):
        llm = LLM(model, backend="cuda", max_running=256, **options)
        prompt = llm.encode("The keeper of the lighthouse wrote in his diary:")
        for number, (name, sampling) in enumerate(SAMPLERS.items()):
            r = random.Random(10 * engine + number)
            prompts, params = [], []
            for i in range(copies // len(ENGINES)):
                speculate = r.choice(("off", "off", "ngram"))
                prompts.append(prompt)
                params.append(
                    SamplingParams(
                        seed=7, max_tokens=TOKENS, ignore_eos=True, speculate=speculate, **sampling
                    )
                )
                if i % 4 == 0:  # other requests
                    prompts.append([r.randrange(1000) for _ in range(r.choice((3, 60, 700)))])
                    size = r.choice((5, 100, 300))
                    params.append(SamplingParams(seed=i, max_tokens=size, ignore_eos=True))
            order = r.sample(range(len(prompts)), len(prompts))
            sampler = llm.core.backend.gpu_sampler
            sampler.undecided = 0
            done = llm.generate([prompts[i] for i in order], [params[i] for i in order])
            tokens += sum(len(one.token_ids) for one in done)
            found = [d.token_ids for i, d in zip(order, done, strict=True) if prompts[i] is prompt]
            counts[name] += len(found)
            left[name] += sampler.undecided
            answers[name] |= {tuple(ids) for ids in found}
            seen = f"{counts[name]} copies, {len(answers[name])} distinct answers"
            print(f"needle: {name}, {options}: {seen}", flush=True)
        llm.close()
    seconds = time.perf_counter() - began
    distinct = {name: len(found) for name, found in answers.items()}
    return {
        "copies": counts,
        "distinct": distinct,
        "left_to_host": left,
        "tokens": tokens,
        "seconds": round(seconds, 1),
    }


# ---- draws


def random_params(r: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"temperature": r.choice((0.0, 0.3, 0.8, 1.0, 1.7))}
    choices: dict[str, tuple[Any, ...]] = {
        "top_k": (1, 3, 20, 40, 200), "top_p": (0.01, 0.3, 0.9, 0.999), "min_p": (0.001, 0.1, 1.0),
        "repetition_penalty": (1.3, 0.7), "frequency_penalty": (0.4, -0.3),
        "presence_penalty": (0.7, -1.1), "banned_token_ids": ((0, 5, 700),), "logprobs": (0, 5),
        "typical_p": (0.1, 0.6, 0.95), "top_n_sigma": (0.3, 1.0, 2.0),
        "logit_bias": ({0: 4.0, 5: -100.0, 300: 2.5},),
    }  # fmt: skip
    for name, values in choices.items():
        if r.random() < 0.2:
            options[name] = r.choice(values)
    return SamplingParams(**options)


def filter_of(p: SamplingParams) -> str:
    """The filter that decides how many ids a row keeps."""
    if p.greedy or p.top_k:
        return "temperature 0" if p.greedy else "top_k"
    active = {
        "top_p": p.top_p < 1.0, "min_p": p.min_p > 0.0, "typical_p": p.typical_p < 1.0,
        "top_n_sigma": p.top_n_sigma > 0.0,
    }  # fmt: skip
    return next((name for name, on in active.items() if on), "temperature")


PARAMS = [random_params(random.Random(i)) for i in range(1000)]


def batch(seed: int) -> tuple[np.ndarray, list[Row]]:
    """Logits [BATCH, VOCAB] and a Row for each. Row i has the kind KINDS[i % 4]."""
    r, numbers = random.Random(seed), np.random.default_rng(seed)
    logits = numbers.standard_normal((BATCH, VOCAB), np.float32)
    for i, spread in enumerate(KINDS.values()):
        logits[i :: len(KINDS)] *= spread
    logits[3::4] = np.rint(logits[3::4])
    rows = []
    for _ in range(BATCH):
        params, prompt, written = r.choice(PARAMS), r.randint(1, 20), r.randint(0, 40)
        history = tuple(r.choices(range(VOCAB), k=prompt + written)) if params.needs_history else ()
        spec = DrawSpec(params, r.getrandbits(64), prompt, history)
        rows.append(Row(spec, prompt + written, history))
    return logits, rows


@functools.cache
def device_sampler() -> GpuSampler:
    return GpuSampler(VOCAB, device())


def compare(seed: int) -> tuple[int, Counter[tuple[str, str, bool]]]:
    """(draws of a batch that differ between device and host, rows by filter, kind of row, and
    whether they are left to the host)."""
    logits, rows = batch(seed)
    # sequence ids are new in every batch: counts of another sequence must not remain
    ids = range(seed * BATCH, (seed + 1) * BATCH)
    found = device_sampler()(torch.from_numpy(logits).to(device()), rows, list(ids))
    wanted = sample_rows(logits, rows)
    differ = sum(one is not None and one != right for one, right in zip(found, wanted, strict=True))
    kinds = list(KINDS) * (BATCH // len(KINDS))
    return differ, Counter(
        (filter_of(row.spec.params), kind, one is None)
        for row, kind, one in zip(rows, kinds, found, strict=True)
    )


def draws(count: int) -> dict[str, Any]:
    """Compare in one process per core: the host's sampler takes most of the time."""
    seeds = range(-(-count // BATCH))
    began = time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"  # of NumPy in the processes, which start anew
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        found = []
        for one in pool.map(compare, seeds, chunksize=4):
            found.append(one)
            if len(found) % 200 == 0:  # a run that is stopped has shown something, too
                different = sum(differ for differ, _ in found)
                print(f"draws: {len(found) * BATCH}, {different} differ", flush=True)
    counts: Counter[tuple[str, str, bool]] = sum((rows for _, rows in found), Counter())
    left: dict[str, dict[str, float]] = {}
    for name, kind in sorted({key[:2] for key in counts}):
        host, device = counts[name, kind, True], counts[name, kind, False]
        left.setdefault(name, {})[kind] = round(host / (host + device), 6)
    return {
        "draws": len(seeds) * BATCH,
        "differ": sum(differ for differ, _ in found),
        "left_to_host": left,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--copies", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=1_000_000)
    args = parser.parse_args()
    out: dict[str, Any] = {}
    if args.draws:
        out["draws"] = draws(args.draws)
        print(json.dumps(out), flush=True)
    if args.copies:
        out["needle"] = needle(args.model, args.copies)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
