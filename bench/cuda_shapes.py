"""Layers of published sizes on a backend: they run, with the same bits alone and in a batch.

    python bench/cuda_shapes.py [NAME ...] [--backend cuda] [--processes 14] [--kv-type f16]

Some faults depend on a model's sizes only: a tile that does not fit into an SM's shared memory, a
kernel that was never compiled for that many query heads per KV head. A few layers of each shape
with random weights; the MLP and the vocabulary are smaller than published, because they change no
kernel. Prompts of 3 to 1,500 tokens alone and five times each in one batch; log-probabilities of a
prompt beside those of the NumPy reference. Exit status 1 if a shape fails or a text differs.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from cuda_models import FakeTokenizer  # bench/cuda_models.py

from verbatim import LLM, SamplingParams
from verbatim.backend import open_backend
from verbatim.base.config import CHOICES, EngineConfig
from verbatim.engine.loaded_model import LoadedModel
from verbatim.testing.tiny_models import tiny_model

LENGTHS = (3, 17, 40, 129, 300, 700, 1500)
SCORED = 2  # the prompt of LENGTHS that the reference scores
COPIES = 5
VOCAB = 2011
# of the mean log-probability: bfloat16 has 8 bits, and a tied model's random logits are large
TOLERANCE = 0.05


def shape(
    family: str, hidden: int, mlp: int, heads: int, kv_heads: int | None, layers: int, **more: Any
) -> tuple[str, dict[str, Any]]:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return family, {**sizes, **more}


GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512}
DELTA = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2-2b": shape("gemma2", 2304, 2048, 8, 4, 2, **GEMMA),
    "gemma2-9b": shape("gemma2", 3584, 2048, 16, 8, 2, **GEMMA),
    "gemma3-270m": shape("gemma3", 640, 2048, 4, 1, 6, **GEMMA),
    "gemma3-1b": shape("gemma3", 1152, 2048, 4, 1, 6, **GEMMA),
    "gemma3-4b": shape("gemma3", 2560, 1024, 8, 4, 6, **GEMMA),
    "gemma3-12b": shape("gemma3", 3840, 1024, 16, 8, 6, **GEMMA),
    "gemma3-27b": shape("gemma3", 5376, 512, 32, 16, 6, **{**GEMMA, "head_dim": 128}),
    "gemma4-e2b": shape(
        "gemma4", 1536, 2048, 8, 1, 4, head_dim=256, global_head_dim=512, sliding_window=512,
        vocab_size_per_layer_input=VOCAB,
    ),
    "qwen3-next-80b": shape(
        "qwen3next", 2048, 512, 16, 2, 4, **DELTA, linear_num_key_heads=16,
        linear_num_value_heads=32, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=32, shared_expert_intermediate_size=512,
    ),
    "qwen3.5-0.8b": shape(
        "qwen35", 1024, 2048, 8, 2, 4, **DELTA, linear_num_key_heads=16, linear_num_value_heads=16
    ),
    "qwen3.5-27b": shape(
        "qwen35", 5120, 1024, 24, 4, 4, **DELTA, linear_num_key_heads=16, linear_num_value_heads=48
    ),
    "llama-3.2-1b": shape("llama", 2048, 2048, 32, 8, 2),
    "llama-3.1-70b": shape("llama", 8192, 1024, 64, 8, 1),
    "llama-3.1-405b": shape("llama", 16384, 256, 128, 8, 1),
    "qwen2.5-0.5b": shape("qwen2", 896, 2048, 14, 2, 2),
    "qwen2.5-7b": shape("qwen2", 3584, 1024, 28, 4, 1),
    "qwen3-32b": shape("qwen3", 5120, 1024, 64, 8, 1, head_dim=128),
    "qwen3-30b-a3b": shape(
        "qwen3moe", 2048, 768, 32, 4, 1, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=96,
    ),
    "phi-3-mini": shape("phi3", 3072, 1024, 32, 32, 1),
    "phi-4": shape("phi3", 5120, 1024, 40, 10, 1),
    "stablelm-2-12b": shape("stablelm", 5120, 1024, 32, 8, 1),
    "gpt-neox-20b": shape("gpt_neox", 6144, 1024, 64, None, 1),
    "starcoder2-15b": shape("starcoder2", 6144, 1024, 48, 4, 1),
    "command-r": shape("cohere", 8192, 512, 64, 64, 1),
    "command-r7b": shape("cohere2", 4096, 1024, 32, 8, 4),
    "gpt-oss-120b": shape(
        "gpt_oss", 2880, 64, 64, 8, 2, head_dim=64, num_local_experts=128, num_experts_per_tok=4,
        sliding_window=128,
    ),
    "glm-4-9b": shape("glm4", 4096, 1024, 32, 2, 1, head_dim=128),
    "glm-4.5-air": shape(
        "glm4_moe", 4096, 512, 96, 8, 2, head_dim=128, n_routed_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=64,
    ),
    "mixtral-8x7b": shape("mixtral", 4096, 256, 32, 8, 1, num_local_experts=8),
    "lfm2-1.2b": shape("lfm2", 2048, 2048, 32, 8, 4),
    "seed-oss-36b": shape("seed_oss", 5120, 512, 80, 8, 1, head_dim=128),
    "olmo-2-32b": shape("olmo2", 5120, 512, 40, 8, 1),
    "smollm3-3b": shape("smollm3", 2048, 2048, 16, 4, 4),
    "exaone-4-32b": shape("exaone4", 5120, 512, 40, 8, 4, head_dim=128),
    "48 heads per KV head": shape("llama", 6144, 512, 48, 1, 1),
    "71 heads per KV head": shape("llama", 71 * 64, 512, 71, 1, 1, head_dim=64),
    "heads of 192": shape("llama", 1536, 1024, 8, 2, 1, head_dim=192),
}  # fmt: skip


def check(name: str, backend: str, kv_type: str) -> str | None:
    """Print a line about one shape; return what is wrong."""
    began = time.perf_counter()
    family, sizes = SHAPES[name]
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 2048, **sizes}
    model = tiny_model(family, type="bf16", **sizes)
    r = random.Random(3)
    prompts = [[r.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_tokens=6,
            ignore_eos=True,
            logprobs=3,
            prompt_logprobs=1 if i == SCORED else None,
        )
        for i in range(len(prompts))
    ]

    def opened(kind: str) -> LLM:
        options = {"kv_type": kv_type, "context": 2048, "speculate": "off", "kv_blocks": 2000}
        config = EngineConfig(backend=kind, prefix_cache=False, **options)
        loaded = LoadedModel(
            open_backend(model, config), FakeTokenizer(VOCAB), (), name=name, digest=""
        )
        return LLM.from_loaded(loaded, backend=kind, prefix_cache=False, **options)

    with opened(backend) as llm:
        alone = [llm.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        together = llm.generate(prompts * COPIES, params * COPIES)
    differ = sum(
        (one.token_ids, one.logprobs, one.prompt_logprobs)
        != (other.token_ids, other.logprobs, other.prompt_logprobs)
        for one, other in zip(alone * COPIES, together, strict=True)
    )
    with opened("reference") as llm:
        exact = scores(llm.generate(prompts[SCORED], params[SCORED].with_(max_tokens=1)))
    error = np.abs(scores(alone[SCORED]) - exact).mean() / np.abs(exact).mean()
    took = time.perf_counter() - began
    print(
        f"{name}: {differ} of {len(together)} texts differ; log-probabilities of a prompt differ "
        f"from the reference's by {error:.2%}; {took:.0f} s",
        flush=True,
    )
    return None if not differ and error < TOLERANCE else name


def scores(done: Any) -> np.ndarray:
    return np.array([entry.logprob for entry in done.prompt_logprobs if entry is not None])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(SHAPES)}")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kv-type", choices=CHOICES["kv_type"], default="f16")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    args = parser.parse_args()
    names = args.names or list(SHAPES)
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"no shape is called {', '.join(unknown)}")
    if len(names) == 1:
        try:
            return int(check(names[0], args.backend, args.kv_type) is not None)
        except Exception:
            traceback.print_exc()
            return 1
    options = ["--backend", args.backend, "--kv-type", args.kv_type]

    def run(name: str) -> int:
        return subprocess.run([sys.executable, __file__, *options, name]).returncode

    with ThreadPoolExecutor(args.processes) as pool:  # compiling is most of the time
        failed = [name for name, code in zip(names, pool.map(run, names), strict=True) if code]
    print(f"{len(names) - len(failed)} of {len(names)} shapes are right")
    if failed:
        print("wrong:", ", ".join(failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
