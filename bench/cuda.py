"""CUDA backend on shapes of real models with random weights: batch invariance and throughput.

    python bench/cuda.py [--shape qwen3-0.6b] [--kv-type fp8] [--skip-crowd] [--samplers]

Needs a GPU, PyTorch and Triton; no model file. The crowd is nano-vllm's benchmark: 256 concurrent
requests, prompts and outputs of 100 to 1,024 random tokens, temperature 0.6. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from verbatim import LLM, SamplingParams
from verbatim.backend.cuda.backend import CudaBackend
from verbatim.backend.cuda.device_weights import unpack_blocks
from verbatim.backend.cuda.kernel_compile import compile_kernels
from verbatim.backend.cuda.kernels import quant
from verbatim.backend.cuda.kernels.block_readers import E2M1_BIAS, E4M3_BIAS, HALVES
from verbatim.backend.gpu_weights import BLOCK_FORMATS, TILE, BlockMode, packing
from verbatim.base.config import CHOICES, EngineConfig
from verbatim.engine.loaded_model import LoadedModel
from verbatim.files.safetensors import SafetensorsDir
from verbatim.formats.tensor import Weights
from verbatim.model.architecture import spec_from_config
from verbatim.model.layout import layout
from verbatim.model.loading.load import Model
from verbatim.testing.fakes import ByteTokenizer

_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **_COMMON, "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
        "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_COMMON, "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_COMMON, "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
    },
    "qwen3-30b-a3b": {
        **_COMMON, "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1e6,
    },
}  # fmt: skip


# types that random_blocks can make
TYPES = [t for t, form in BLOCK_FORMATS.items() if form.offset != "add" and t != "q6_k"]
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


class FakeTokenizer(ByteTokenizer):
    """Ids of a vocabulary of any size; the text does not matter here."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    @property
    def vocab_size(self) -> int:
        return self._count

    def token_bytes(self, token: int) -> bytes:
        return b"x"


def random_blocks(
    shape: tuple[int, ...], type: str, make: torch.Generator, device: torch.device
) -> quant.BlockWeight:
    """Random codes of a format, with one scale for all groups and zero points near 0."""
    (*experts, n, k), form = shape, BLOCK_FORMATS[type]
    pack, wide = packing(k)
    count = math.prod(experts) * -(-n // TILE) * TILE * wide
    size, groups = (count * form.bits // 8,), (count // form.group,)
    codes = torch.randint(0, 256, size, generator=make, device=device, dtype=torch.uint8)
    spread = 4.6 if form.bits == 4 else 74.0  # standard deviation of the codes
    dtype = torch.float32 if form.group == 128 else HALVES[form.result]
    if form.code == "e4m3":
        codes &= 0b10111111  # below 2; the kernel's values are smaller by 2 ** 8
        spread, dtype = 0.6 / E4M3_BIAS, torch.float32
    elif form.code == "e2m1":
        spread = 2.9 / 2**E2M1_BIAS
    scales = torch.full(groups, 1 / (spread * k**0.5), device=device).to(dtype)
    zeros = None
    if form.offset == "zero":
        zeros = torch.randint(-1, 2, groups, generator=make, device=device)
        zeros = zeros.to(torch.float32 if form.group == 128 else torch.float16)
    return quant.BlockWeight(shape, wide, codes, scales, zeros, form, pack)


def weights_of(
    spec: Any, device: torch.device, type: str | None = None, blocks: BlockMode = "both"
) -> dict[str, Any]:
    """Random weights, created on the device in the layout of device_weights.load: bfloat16, or
    blocks of a quantised type."""
    make = torch.Generator(device=device).manual_seed(0)
    found: dict[str, Any] = {}
    for name, shape in layout(spec).items():
        if len(shape) == 1:
            found[name] = torch.ones(shape, device=device)
        elif type is not None and not name.endswith(".router"):
            found[name] = random_blocks(tuple(shape), type, make, device)
        else:
            values = (
                torch.randn(shape, generator=make, device=device, dtype=torch.float32)
                / shape[-1] ** 0.5
            )
            values = values * (0.5 if name == "embed" else 1.0)
            found[name] = values if name.endswith(".router") else values.to(torch.bfloat16)
    for i in range(len(spec.layers)):
        for prefix, parts in (
            (f"layers.{i}.attn", ("q", "k", "v")),
            (f"layers.{i}.mlp", ("gate", "up")),
            (f"layers.{i}.moe", ("gate", "up")),
        ):
            if f"{prefix}.{parts[0]}" not in found:
                continue
            each = [found.pop(f"{prefix}.{part}") for part in parts]
            joined = torch.cat(each, -2) if type is None else quant.join(each)
            found[f"{prefix}.{'+'.join(parts)}"] = joined
    unpack_blocks(found, blocks)
    return found


def open_shape(
    name: str, type: str | None = None, blocks: BlockMode = "both", **options: Any
) -> LLM:
    spec = spec_from_config(SHAPES[name], context=None, file=name)
    source = SafetensorsDir(Path(name), SHAPES[name], {}, {}, name)
    model = Model(spec, Weights({}, name, name), source, (), {})
    config = EngineConfig(backend="cuda", **options)
    weights = weights_of(spec, torch.device("cuda"), type, blocks)
    backend = CudaBackend(model, config, weights=weights)
    loaded = LoadedModel(backend, FakeTokenizer(spec.vocab), (), name=name, digest=name)
    llm = LLM.from_loaded(loaded, **{"backend": "cuda", **options})
    compile_kernels(backend)
    return llm


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


def prefill_rate(llm: LLM, vocab: int) -> float:
    """Prompt tokens per second of one prompt of 2,000 tokens."""
    times = []
    for i in range(6):
        r = random.Random(50 + i)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, speculate="off")
        done = llm.generate([r.randrange(vocab) for _ in range(2000)], params)
        times.append(done.timings.first_token)
    return 2000 / statistics.median(times[2:])


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
    args = parser.parse_args()
    began = time.perf_counter()
    options = {"max_running": 256, "step_tokens": args.step_tokens, "kv_type": args.kv_type}
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
