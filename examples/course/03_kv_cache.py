"""Page 3 of the course: the KV cache, O(n) instead of O(n²), and what it costs in memory.

Counts the tokens that the backend computes for answers of several lengths with and without the
cache, on a tiny random model, and evaluates the formula of the cache's size.

    python examples/course/03_kv_cache.py [--plot kv_cache.svg]
"""

from __future__ import annotations

import time
from typing import Any

from course_plot import BLUE, GREEN, GREY, ORANGE, arguments, panels, save

from verbatim import LLM, EngineConfig, SamplingParams
from verbatim.backend.reference import ReferenceBackend
from verbatim.base.records import StepPlan, StepResult
from verbatim.engine.loaded_model import LoadedModel
from verbatim.testing.fakes import ByteTokenizer
from verbatim.testing.tiny_models import tiny_model

PROMPT, LENGTHS = "The cache", (8, 16, 32, 64, 96)
# layers, KV heads, head size
MODELS = {"SmolLM2-135M": (30, 3, 64), "Qwen3-0.6B": (28, 8, 128), "Llama-3.1-8B": (32, 8, 128)}


def kv_bytes(layers: int, kv_heads: int, head_size: int, tokens: int, number: int = 2) -> int:
    """Keys and values of `tokens` positions; `number`: bytes of a number (f16: 2)."""
    return 2 * layers * kv_heads * head_size * number * tokens


def computed(use_cache: bool, count: int) -> tuple[int, float]:
    """Tokens that the backend computes for an answer of `count` tokens, and the CPU seconds."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=128)
    backend: Any = ReferenceBackend(model, EngineConfig())
    execute, rows = backend.execute, 0

    def counted(plan: StepPlan) -> StepResult:
        nonlocal rows
        rows += plan.rows
        result: StepResult = execute(plan)
        return result

    backend.execute = counted
    loaded = LoadedModel(backend, ByteTokenizer(), (), digest="tiny")
    options: dict[str, Any] = {"use_cache": use_cache, "prefix_cache": False, "speculate": "off"}
    with LLM.from_loaded(loaded, **options) as llm:
        start = time.process_time()
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        llm.generate(PROMPT, params)
        return rows, time.process_time() - start


def main(words: list[str] | None = None) -> list[tuple[int, int, int]]:
    """(answer length, tokens computed with the cache, without)."""
    options = arguments(__doc__, words)
    table = []
    print("answer  computed with the cache  without")
    for count in LENGTHS:
        (cached, fast), (plain, slow) = computed(True, count), computed(False, count)
        print(f"{count:6}  {cached:23}  {plain:7}")
        table.append((count, cached, plain, fast, slow))
    for name, shape in MODELS.items():
        one = kv_bytes(*shape, tokens=1)
        print(f"{name:13} {one:7,} bytes per token, {kv_bytes(*shape, tokens=8192) / 2**20:6.0f} "
              "MiB for 8,192 tokens")  # fmt: skip
    if options.plot:
        figure, [left, right] = panels(2)
        lengths = [row[0] for row in table]
        left.plot(lengths, [row[4] for row in table], "o-", color=GREY, label="without cache")
        left.plot(lengths, [row[3] for row in table], "o-", color=BLUE, label="with cache")
        left.set(xlabel="answer in tokens", ylabel="CPU seconds (tiny model)", ylim=(0, None))
        left.legend(frameon=False)
        tokens = range(0, 32769, 1024)
        for (name, shape), colour in zip(MODELS.items(), (BLUE, GREEN, ORANGE), strict=True):
            sizes = [kv_bytes(*shape, tokens=t) / 2**30 for t in tokens]
            right.plot(tokens, sizes, color=colour, label=name)
        right.set(xlabel="tokens in the cache", ylabel="GiB in f16")
        right.legend(frameon=False)
        save(figure, options.plot)
    return [row[:3] for row in table]


if __name__ == "__main__":
    main()
