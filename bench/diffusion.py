"""Passes and seconds of block diffusion beside autoregressive decoding of the same layers.

    python bench/diffusion.py [--backend cpu] [--lengths 32 128] [--size small]
    python bench/diffusion.py --model FOLDER [--backend cpu] [--prompts 3] [--lengths 48]

Random weights (sdar and qwen3 of one size), so only time means something: a block of L positions
in S steps, whatever a trained model would be sure of. First every answer is compared alone, in a
crowd and in small steps. With --model, a trained model with both modes (train_block_diffusion.py)
answers prompts of bench/prompts.py at temperature 0: from left to right, with self-speculation, and
in blocks at several thresholds. Seconds are CPU time of the process on a CPU, and wall time on a
GPU. Ends in one line of JSON; exit status 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from cuda_models import FakeTokenizer  # bench/cuda_models.py
from prompts import CHAT

from verbatim import LLM, SamplingParams
from verbatim.backend import open_backend
from verbatim.base.config import EngineConfig
from verbatim.engine.loaded_model import LoadedModel
from verbatim.testing.tiny_models import tiny_model

SIZES = {"tiny": (64, 128, 2, 4), "small": (512, 1536, 8, 8), "0.6b": (1024, 3072, 28, 16)}
# positions of a block, denoising steps
BLOCKS = ((4, 4), (4, 2), (8, 4), (16, 4), (32, 8), (32, 32))
VOCAB = 4000
PROMPT = list(range(3, 40))
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95)


def opened(family: str, size: str, backend: str, **options: Any) -> LLM:
    hidden, inner, layers, heads = SIZES[size]
    more = {"mask_token_id": VOCAB - 1} if family == "sdar" else {}
    model = tiny_model(
        family, type="q8_0", vocab_size=VOCAB, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
        head_dim=hidden // heads, max_position_embeddings=4096, **more,
    )  # fmt: skip
    config = EngineConfig(backend=backend, threads=1, context=2048)
    loaded = LoadedModel(open_backend(model, config), FakeTokenizer(VOCAB), (), digest=family)
    return LLM.from_loaded(loaded, speculate="off", prefix_cache=False, **options)


def params(length: int, block: int = 0, steps: int = 0) -> SamplingParams:
    more: dict[str, Any] = {}
    if block:
        more = {"block_length": block, "denoising_steps": steps}
        more |= {"remasking": "low_confidence_static"}
    return SamplingParams(seed=5, max_tokens=length, ignore_eos=True, **more)


def differing(size: str, backend: str) -> int:
    """Answers that another cut of the steps changes."""
    wanted = [params(21, block, steps) for block, steps in BLOCKS]
    plain = opened("sdar", size, backend)
    alone = [plain.generate(PROMPT, p).token_ids for p in wanted]
    small = opened("sdar", size, backend, step_tokens=64)
    crowds = [llm.generate([PROMPT] * len(wanted), wanted) for llm in (plain, small)]
    plain.close()
    small.close()
    return sum(
        done.token_ids != one for crowd in crowds for done, one in zip(crowd, alone, strict=True)
    )


def seconds(llm: LLM, p: SamplingParams, clock: Any) -> tuple[float, int]:
    llm.generate(PROMPT, p.with_(max_tokens=4))  # warms up
    before, steps = clock(), llm.core.scheduler._step
    llm.generate(PROMPT, p)
    return clock() - before, llm.core.scheduler._step - steps


def trained(args: Any, clock: Any) -> dict[str, Any]:
    """Tokens, passes and seconds per setting, and whether self-speculation changed an answer."""
    llm = LLM(
        args.model, backend=args.backend, threads=1, context=1024, quant=args.quant,
        prefix_cache=False,
    )  # fmt: skip
    plain = SamplingParams(temperature=0, max_tokens=max(args.lengths), ignore_eos=True)
    settings = {
        "left to right": plain.with_(speculate="off"),
        "self-speculation": plain.with_(speculate="self"),
    }
    for block in (4, 8, 16, 32):
        for threshold in THRESHOLDS:
            name = f"blocks of {block}, threshold {threshold}"
            settings[name] = plain.with_(block_length=block, confidence_threshold=threshold)
    rows, answers = {}, {}
    for name, p in settings.items():
        llm.chat([{"role": "user", "content": CHAT[-1]}], p.with_(max_tokens=8))  # warms up
        before, steps, tokens = clock(), llm.core.scheduler._step, 0
        for text in CHAT[: args.prompts]:
            answers[name, text] = llm.chat([{"role": "user", "content": text}], p).token_ids
            tokens += len(answers[name, text])
        spent, passes = clock() - before, llm.core.scheduler._step - steps
        rows[name] = [tokens, passes, round(spent, 3)]
        print(
            f"{name:30} {tokens:5} tokens {passes:5} steps {tokens / passes:6.2f} tokens per step"
            f" {1000 * spent / passes:7.1f} ms per step {tokens / spent:7.1f} tokens/s",
            flush=True,
        )
    llm.close()
    differ = sum(
        answers["left to right", text] != answers["self-speculation", text]
        for text in CHAT[: args.prompts]
    )
    return {"backend": args.backend, "differ": differ, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--model", help="a trained model with both modes")
    parser.add_argument("--quant", help="store its weights in this type")
    parser.add_argument("--prompts", type=int, default=3)
    args = parser.parse_args()
    clock = time.perf_counter if args.backend == "cuda" else time.process_time
    if args.model:
        result = trained(args, clock)
        print(json.dumps(result))
        sys.exit(1 if result["differ"] else 0)
    differ = differing("tiny" if args.backend == "reference" else args.size, args.backend)
    print(f"{differ} of {2 * len(BLOCKS)} answers differ in a crowd or in small steps")
    kinds = [("qwen3", 0, 0), *(("sdar", *block) for block in BLOCKS)]
    rows = []
    for family in ("qwen3", "sdar"):
        llm = opened(family, args.size, args.backend)
        if family == "qwen3":
            print(f"weights {llm.loaded.backend.info.weight_bytes / 1e6:.0f} MB, read in each pass")
        for _, block, steps in [kind for kind in kinds if kind[0] == family]:
            for length in args.lengths:
                spent, passes = seconds(llm, params(length, block, steps), clock)
                name = f"block {block}, {steps} steps" if block else "autoregressive"
                print(
                    f"{name:22} {length:5} tokens  {passes:4} passes  {spent:7.3f} s"
                    f"  {1000 * spent / passes:7.2f} ms per pass  {length / spent:7.1f} tokens/s"
                )
                rows.append([name, length, passes, round(spent, 4)])
        llm.close()
    print(json.dumps({"backend": args.backend, "size": args.size, "differ": differ, "rows": rows}))
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
