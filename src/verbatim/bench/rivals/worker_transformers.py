"""transformers (PyTorch) as a rival worker; the protocol is in worker_loop.py.

It computes in float32 on the CPU and in bfloat16 on a GPU. It dequantises a GGUF file when it loads
it.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from worker_loop import serve  # type: ignore[import-not-found, unused-ignore]


class Worker:
    def __init__(self, model: str, threads: int, context: int, device: str) -> None:
        self.version = transformers.__version__
        torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        began = time.perf_counter()
        folder, file = os.path.split(model) if os.path.isfile(model) else (model, None)
        options: dict[str, Any] = {"gguf_file": file} if file else {}
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder or ".", dtype=dtype, **options)
        self.model, self.device = loaded.eval().to(device), device
        self.load = time.perf_counter() - began
        self.vocab = self.model.config.vocab_size
        self.random = random.Random(0)

    def _ids(self, rows: int, tokens: int) -> object:
        return torch.tensor(
            [[self.random.randrange(self.vocab) for _ in range(tokens)] for _ in range(rows)],
            device=self.device,
        )

    def _run(self, rows: int, tokens: int, past: object) -> tuple[float, object]:
        ids = self._ids(rows, tokens)
        began = time.perf_counter()
        with torch.no_grad():
            out = self.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            out.logits.cpu()  # waits for a GPU
        return time.perf_counter() - began, out.past_key_values

    def prefill(self, tokens: int) -> float:
        return self._run(1, tokens, None)[0]

    def decode(self, context: int, steps: int) -> float:
        return self.batch(1, context, steps)

    def batch(self, sequences: int, context: int, steps: int) -> float:
        _, past = self._run(sequences, context, None)
        total = 0.0
        for _ in range(steps):
            seconds, past = self._run(sequences, 1, past)
            total += seconds
        return total


if __name__ == "__main__":
    serve(Worker)
