"""vLLM on a GPU as a rival worker; the protocol is in worker_loop.py, and one operation more:

    {"op": "crowd", "prompts": [100, 912], "lengths": [300, 20]}  -> {"seconds": s}

Times are those of LLM.generate: they include scheduling and sampling, and no detokenization, which
ours include.
"""

from __future__ import annotations

import random
import time
from importlib import import_module
from typing import Any

from worker_loop import serve  # type: ignore[import-not-found, unused-ignore]


class Worker:
    def __init__(self, model: str, threads: int, context: int, device: str) -> None:
        # imported here: they may print something, and serve() has redirected it by now
        self.vllm = import_module("vllm")
        self.version = self.vllm.__version__
        began = time.perf_counter()
        free, total = import_module("torch").cuda.mem_get_info()  # our engine holds the rest
        self.llm: Any = self.vllm.LLM(
            model,
            max_model_len=context,
            gpu_memory_utilization=0.9 * free / total,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self.load = time.perf_counter() - began
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()
        self.random = random.Random(0)

    def _run(self, prompts: list[int], lengths: list[int], temperature: float = 0.0) -> float:
        """Seconds for prompts and outputs of these numbers of tokens."""
        given = [
            {"prompt_token_ids": [self.random.randrange(self.vocab) for _ in range(n)]}
            for n in prompts
        ]
        params = [
            self.vllm.SamplingParams(
                temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False
            )
            for n in lengths
        ]
        began = time.perf_counter()
        self.llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - began

    def prefill(self, tokens: int) -> float:
        return self._run([tokens], [1])

    def decode(self, context: int, steps: int) -> float:
        return self.batch(1, context, steps)

    def batch(self, sequences: int, context: int, steps: int) -> float:
        """The time of a prompt and steps + 1 tokens, less that of a prompt and one token."""
        prompts = [context] * sequences
        first = self._run(prompts, [1] * sequences)
        return max(1e-9, self._run(prompts, [steps + 1] * sequences) - first)

    def crowd(self, prompts: list[int], lengths: list[int]) -> float:
        return self._run(prompts, lengths, 0.6)


if __name__ == "__main__":
    serve(Worker)
