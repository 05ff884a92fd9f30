"""The cuda backend on shapes of real models with random weights: does a text depend on its neighbours, and how fast is it?

    python bench/cuda.py [--shape qwen3-0.6b] [--skip-crowd]

Needs a GPU, PyTorch and Triton; no file. The crowd is nano-vllm's benchmark: 256 requests at once, prompts and outputs of 100 to 1,024 random
tokens, temperature 0.6. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from verbatim import LLM, SamplingParams
from verbatim.backend.cuda.backend import CudaBackend
from verbatim.base.config import EngineConfig
from verbatim.engine.loaded_model import LoadedModel
from verbatim.model.families import spec_from_config
from verbatim.model.layout import layout
from verbatim.model.load import Model
from verbatim.testing import ByteTokenizer
from verbatim.weights.safetensors import SafetensorsDir
from verbatim.weights.tensor import Weights

_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **_COMMON, "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_COMMON, "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_COMMON, "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
    },
}  # fmt: skip


class Words(ByteTokenizer):
    """Ids of any vocabulary; the text does not matter here."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    @property
    def vocab_size(self) -> int:
        return self._count

    def token_bytes(self, token: int) -> bytes:
        return b"x"


def weights_of(spec: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Random weights, made on the device in the form of ops.load."""
    make = torch.Generator(device=device).manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    for name, shape in layout(spec).items():
        if len(shape) == 1:
            found[name] = torch.ones(shape, device=device)
        else:
            values = (
                torch.randn(shape, generator=make, device=device, dtype=torch.float32)
                / shape[-1] ** 0.5
            )
            found[name] = (values * (0.5 if name == "embed" else 1.0)).to(torch.bfloat16)
    for i in range(len(spec.layers)):
        for prefix, parts in (
            (f"layers.{i}.attn", ("q", "k", "v")),
            (f"layers.{i}.mlp", ("gate", "up")),
        ):
            found[f"{prefix}.{'+'.join(parts)}"] = torch.cat(
                [found.pop(f"{prefix}.{part}") for part in parts]
            )
    return found


def open_shape(name: str, **options: Any) -> LLM:
    spec = spec_from_config(SHAPES[name], context=None, file=name)
    source = SafetensorsDir(Path(name), SHAPES[name], {}, {}, name)
    model = Model(spec, Weights({}, name, name), source, (), {})
    config = EngineConfig(backend="cuda", **options)
    backend = CudaBackend(model, config, weights=weights_of(spec, torch.device("cuda")))
    parts = LoadedModel(backend, Words(spec.vocab), (), name=name, digest=name)
    return LLM.from_parts(parts, **{"backend": "cuda", **options})


def crowd(vocab: int, count: int = 256, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """nano-vllm's benchmark: first all prompts, then all lengths."""
    r = random.Random(seed)
    prompts = [
        [r.randint(0, min(10000, vocab - 1)) for _ in range(r.randint(100, 1024))]
        for _ in range(count)
    ]
    return prompts, [r.randint(100, 1024) for _ in range(count)]


def same_in_company(llm: LLM, vocab: int) -> int:
    """How many of 24 texts differ between being written alone and beside the 23 others; drafts and chunks included."""
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
    """How many of 256 texts differ where the device draws them and where the host does, because log-probabilities are asked for."""
    r = random.Random(2)
    prompts = [[r.randrange(vocab) for _ in range(8)] for _ in range(256)]
    params = [
        SamplingParams(
            temperature=r.choice((0.0, 0.3, 0.6, 1.0, 3.0)),
            seed=i,
            max_tokens=64,
            ignore_eos=True,
            speculate="off",
        )
        for i in range(256)
    ]
    device = llm.generate(prompts, params)
    host = llm.generate(prompts, [p.with_(logprobs=0) for p in params])
    return sum(a.token_ids != b.token_ids for a, b in zip(device, host, strict=True))


def one_sequence(llm: LLM, vocab: int) -> float:
    """Milliseconds a token behind a context of 32."""
    times = []
    for i in range(5):
        r = random.Random(i)
        params = SamplingParams(temperature=0, max_tokens=129, ignore_eos=True, speculate="off")
        done = llm.generate([r.randrange(vocab) for _ in range(32)], params)
        times.append((done.timings.total - done.timings.first_token) / 128 * 1000)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--skip-crowd", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.6, help="of the crowd")
    asked = parser.parse_args()
    began = time.perf_counter()
    llm = open_shape(asked.shape, max_running=256, step_tokens=4096)
    out: dict[str, Any] = {
        "shape": asked.shape,
        "info": llm.core.backend.info.detail,
        "opened_s": time.perf_counter() - began,
    }
    vocab = llm.core.backend.spec.vocab
    out["differ"] = same_in_company(llm, vocab)
    out["differ_drawn"] = same_drawn(llm, vocab)
    out["ms_token"] = one_sequence(llm, vocab)
    if not asked.skip_crowd:
        prompts, lengths = crowd(vocab)
        asks = [
            SamplingParams(
                temperature=asked.temperature,
                seed=i,
                max_tokens=n,
                ignore_eos=True,
                speculate="off",
            )
            for i, n in enumerate(lengths)
        ]
        others, _ = crowd(vocab, seed=1)  # not the same: their keys and values would still be there
        llm.generate(
            others, [ask.with_(max_tokens=4) for ask in asks]
        )  # kernels of these sizes are compiled
        screen = llm.core.backend.screen
        screen.rows = screen.unsure = 0
        began = time.perf_counter()
        answers = llm.generate(prompts, asks)
        out["crowd_s"] = time.perf_counter() - began
        out["crowd_cached"] = sum(
            answer.usage.cached_tokens for answer in answers
        )  # 0, or it was not the benchmark
        out["crowd_tokens_s"] = sum(lengths) / out["crowd_s"]
        out["crowd_unsure"] = (
            screen.unsure / screen.rows
        )  # share of the device's draws that the host had to make
    print(json.dumps(out))


if __name__ == "__main__":
    main()
