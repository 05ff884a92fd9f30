"""CUDA backend on shapes of real models with random weights: batch invariance and throughput.

    python bench/cuda.py [--shape qwen3-0.6b] [--kv-type fp8] [--skip-crowd] [--samplers]
    python bench/cuda.py --table qwen3-4b qwen3.5-4b gemma3-4b

Needs a GPU, PyTorch and Triton; no model file. The crowd is nano-vllm's benchmark: 256 concurrent
requests, prompts and outputs of 100 to 1,024 random tokens, temperature 0.6. The last line is JSON.
`--table` compares shapes: one sequence, 64 sequences, prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from importlib.util import find_spec
from typing import Any

from cuda_models import SHAPES, TYPES, open_shape  # bench/cuda_models.py

from verbatim import LLM, SamplingParams
from verbatim.base.config import CHOICES

SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p and top_k": {"top_p": 0.95, "top_k": 20},
    "top_p": {"top_p": 0.95},
    "min_p and top_k": {"min_p": 0.05, "top_k": 100},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.9},
    "logit_bias": {"logit_bias": {5: -100.0, 6: 2.0}},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence and frequency_penalty": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 5},
    "banned_token_ids": {"banned_token_ids": (1, 2, 3)},
}


def crowd(vocab: int, count: int = 256, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """nano-vllm's benchmark: first all prompts, then all output lengths."""
    r = random.Random(seed)
    prompts = [
        [r.randint(0, min(10000, vocab - 1)) for _ in range(r.randint(100, 1024))]
        for _ in range(count)
    ]
    return prompts, [r.randint(100, 1024) for _ in range(count)]


def same_in_company(llm: LLM, vocab: int) -> int:
    """Number of 24 completions that differ between running alone and in a batch, with drafts and
    chunked prefill."""
    r = random.Random(1)
    prompts = [[r.randrange(vocab) for _ in range(r.choice((3, 17, 130, 700)))] for _ in range(24)]
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=40, ignore_eos=True, logprobs=2
        )
        for i in range(24)
    ]
    together = llm.generate(prompts, params)
    alone = [
        llm.generate(p, q.with_(speculate="off")) for p, q in zip(prompts, params, strict=True)
    ]
    return sum(
        a.choices[0].logprobs != b.choices[0].logprobs for a, b in zip(together, alone, strict=True)
    )


def same_drawn(llm: LLM, vocab: int) -> int:
    """Number of 256 completions that differ between sampling on the device and on the host (which
    processed log-probabilities force). Without the native module the host samples in NumPy, 10 ms
    per token, so the completions are shorter."""
    r, length = random.Random(2), 64 if find_spec("verbatim.backend.cpu._native") else 4
    prompts = [[r.randrange(vocab) for _ in range(8)] for _ in range(256)]
    params = [
        SamplingParams(
            temperature=r.choice((0.0, 0.3, 0.6, 1.0, 3.0)),
            seed=i,
            max_tokens=length,
            ignore_eos=True,
            speculate="off",
            **r.choice(list(SAMPLERS.values())),
        )
        for i in range(256)
    ]
    device = llm.generate(prompts, params)
    on_host = {"logprobs": 0, "logprobs_mode": "processed"}
    host = llm.generate(prompts, [p.with_(**on_host) for p in params])
    return sum(a.token_ids != b.token_ids for a, b in zip(device, host, strict=True))


def one_sequence(llm: LLM, vocab: int, context: int = 32, **options: Any) -> float:
    """Milliseconds per token of one sequence after a prompt of `context` tokens."""
    times = []
    for i in range(5):
        r = random.Random(i)
        params = SamplingParams(
            max_tokens=129,
            ignore_eos=True,
            speculate="off",
            seed=1,
            **{"temperature": 0, **options},
        )
        done = llm.generate([r.randrange(vocab) for _ in range(context)], params)
        times.append((done.timings.total - done.timings.first_token) / 128 * 1000)
    return statistics.median(times[1:])


def many_sequences(llm: LLM, vocab: int, count: int = 64, context: int = 1000) -> float:
    """Milliseconds per step of `count` sequences after prompts of `context` tokens each: the
    difference of a long and a short run."""
    r, took = random.Random(7), []
    for length in (33, 33, 161):  # the first run compiles and captures
        prompts = [[r.randrange(vocab) for _ in range(context)] for _ in range(count)]
        params = SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, speculate="off", seed=1
        )
        began = time.perf_counter()
        llm.generate(prompts, params)
        took.append(time.perf_counter() - began)
    return (took[2] - took[1]) / 128 * 1000


def sampler_rates(llm: LLM, vocab: int) -> dict[str, dict[str, float]]:
    """Tokens per second of the crowd's first 96 requests with each sampler, and the share of draws
    that the host had to repeat."""
    out = {}
    sampler = llm.core.backend.gpu_sampler
    for seed, (name, options) in enumerate(SAMPLERS.items()):
        rates = []
        for run in range(2):  # the first run compiles and captures
            prompts, _ = crowd(vocab, seed=100 + 2 * seed + run)
            _, lengths = crowd(vocab)
            params = [
                SamplingParams(
                    temperature=0.6, seed=i, max_tokens=n, ignore_eos=True, speculate="off",
                    **options,
                )
                for i, n in enumerate(lengths[:96])
            ]  # fmt: skip
            sampler.rows = sampler.undecided = 0
            began = time.perf_counter()
            llm.generate(prompts[:96], params)
            rates.append(sum(lengths[:96]) / (time.perf_counter() - began))
        out[name] = {
            "tokens_s": round(rates[-1]),
            "undecided": round(sampler.undecided / max(1, sampler.rows), 6),
        }
        print(name, out[name], flush=True)
    return out


def prefill_rate(llm: LLM, vocab: int, count: int = 2000) -> float:
    """Prompt tokens per second of one prompt."""
    times = []
    for i in range(6):
        r = random.Random(50 + i)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, speculate="off")
        done = llm.generate([r.randrange(vocab) for _ in range(count)], params)
        times.append(done.timings.first_token)
    return count / statistics.median(times[2:])


def crowd_rate(llm: LLM, vocab: int, temperature: float = 0.6) -> dict[str, float]:
    """Seconds and tokens per second of the crowd."""
    prompts, lengths = crowd(vocab)
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=n, ignore_eos=True, speculate="off"
        )
        for i, n in enumerate(lengths)
    ]
    # Warm-up: compile the kernels and capture the graphs of all sizes that occur while the crowd
    # shrinks. Other prompts, to avoid prefix hits.
    others, _ = crowd(vocab, seed=1)
    llm.generate(others, params)
    sampler = llm.core.backend.gpu_sampler
    sampler.rows = sampler.undecided = 0
    began = time.perf_counter()
    answers = llm.generate(prompts, params)
    took = time.perf_counter() - began
    return {
        "crowd_s": took,
        # must be 0: a prefix hit would make the run faster than nano-vllm's benchmark
        "crowd_cached": sum(answer.usage.cached_tokens for answer in answers),
        "crowd_tokens_s": sum(lengths) / took,
        # share of the device's draws that the host had to repeat
        "crowd_unsure": sampler.undecided / sampler.rows,
    }


TABLE = {
    "one sequence, ms per token": lambda llm, vocab: one_sequence(llm, vocab),
    "at context 2,000": lambda llm, vocab: one_sequence(llm, vocab, 2000),
    "64 sequences, ms per step": many_sequences,
    "prompt of 2,000, tokens/s": prefill_rate,
    "of 8,000": lambda llm, vocab: prefill_rate(llm, vocab, 8000),
}


def print_table(shapes: list[str], options: dict[str, Any]) -> None:
    """A row per shape, as it is measured."""
    print("| | differ |", " | ".join(TABLE), "|\n|---|---|" + "---|" * len(TABLE))
    for name in shapes:
        llm = open_shape(name, **options)
        vocab = llm.core.backend.spec.vocab
        cells = [f"{same_in_company(llm, vocab)} of 24"]
        for measure in TABLE.values():
            value = measure(llm, vocab)
            cells.append(f"{value:.2f}" if value < 1000 else f"{value:,.0f}")
        print(f"| {name} |", " | ".join(cells), "|", flush=True)
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--skip-crowd", action="store_true")
    parser.add_argument("--samplers", action="store_true", help="the crowd with each sampler")
    parser.add_argument(
        "--type", choices=TYPES, help="random weights of this type (formats/checkpoint_blocks.py)"
    )
    parser.add_argument("--blocks", choices=("both", "only"), default="both")
    parser.add_argument("--kv-type", choices=CHOICES["kv_type"], default="f16")
    parser.add_argument("--temperature", type=float, default=0.6, help="of the crowd")
    parser.add_argument("--step-tokens", type=int, default=16384, help="vLLM's default")
    parser.add_argument("--table", nargs="+", choices=SHAPES, help="a row per shape")
    args = parser.parse_args()
    began = time.perf_counter()
    options = {"max_running": 256, "step_tokens": args.step_tokens, "kv_type": args.kv_type}
    if args.table:
        print_table(args.table, options)
        return
    llm = open_shape(args.shape, args.type, args.blocks, **options)
    out: dict[str, Any] = {
        "shape": args.shape,
        "info": llm.core.backend.info.detail,
        "type": args.type or "bf16",
        "kv_type": args.kv_type,
        "kv_token_bytes": llm.core.backend.info.kv_token_bytes,
        "opened_s": time.perf_counter() - began,
    }
    vocab = llm.core.backend.spec.vocab
    out["differ"] = same_in_company(llm, vocab)
    out["differ_drawn"] = same_drawn(llm, vocab)
    out["ms_token"] = one_sequence(llm, vocab)
    out["ms_token_top_p_top_k"] = one_sequence(llm, vocab, temperature=0.6, top_p=0.95, top_k=20)
    out["ms_token_context_2000"] = one_sequence(llm, vocab, 2000)
    out["prefill_tokens_s"] = prefill_rate(llm, vocab)
    if args.samplers:
        out["samplers"] = sampler_rates(llm, vocab)
    if not args.skip_crowd:
        out |= crowd_rate(llm, vocab, args.temperature)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
