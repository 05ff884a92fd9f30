"""llama.cpp as a rival worker, through the C API of llama-cpp-python; the protocol is in
worker_loop.py.

It runs the same file, threads and number of tokens as ours. Only llama_decode and the copy of the
logits are timed, not its sampler and detokenizer, which favours it. Tokens are random, because the
cost does not depend on them.
"""

from __future__ import annotations

import ctypes
import random
import time
from typing import Any

import llama_cpp as lib
from worker_loop import serve  # type: ignore[import-not-found, unused-ignore]

UBATCH = 512  # tokens per llama.cpp micro-batch, its default


class Worker:
    def __init__(self, model: str, threads: int, context: int, device: str) -> None:
        lib.llama_log_set(_silent, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.version = lib.__version__
        began = time.perf_counter()
        self.model = lib.llama_model_load_from_file(
            model.encode(), lib.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self.load = time.perf_counter() - began
        self.threads = threads
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.random = random.Random(0)
        self.context, self.sequences = 0, 0
        self.ctx: Any = None
        self._open(context, 1)

    def _open(self, context: int, sequences: int) -> None:
        """Create a context that is large enough, if the current one is not; never timed."""
        if context <= self.context and sequences == self.sequences:
            return
        if self.ctx:
            lib.llama_free(self.ctx)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, max(2048, sequences), UBATCH
        params.n_threads = params.n_threads_batch = self.threads
        params.n_seq_max = sequences
        self.ctx = lib.llama_init_from_model(self.model, params)
        if not self.ctx:
            raise RuntimeError("llama.cpp cannot make a context")
        self.context, self.sequences = context, sequences

    def _clear(self) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(self.ctx), True)

    def _decode(self, rows: list[tuple[int, int]], *, every: bool = False) -> float:
        """Compute one token per (position, sequence); returns the seconds until the logits are
        there."""
        batch = lib.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (position, sequence) in enumerate(rows):
            batch.token[i] = self.random.randrange(self.vocab)
            batch.pos[i], batch.n_seq_id[i] = position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = every or i == len(rows) - 1
        began = time.perf_counter()
        code = lib.llama_decode(self.ctx, batch)
        lib.llama_get_logits_ith(self.ctx, -1)
        seconds = time.perf_counter() - began
        lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        return seconds

    def prefill(self, tokens: int) -> float:
        self._open(tokens + 64, 1)
        self._clear()
        return self._decode([(p, 0) for p in range(tokens)])

    def decode(self, context: int, steps: int) -> float:
        self._open(context + steps + 64, 1)
        self._clear()
        self._decode([(p, 0) for p in range(context)])
        return sum(self._decode([(context + i, 0)]) for i in range(steps))

    def batch(self, sequences: int, context: int, steps: int) -> float:
        self._open(sequences * (context + steps + 16), sequences)
        self._clear()
        for s in range(sequences):
            self._decode([(p, s) for p in range(context)])
        return sum(
            self._decode([(context + i, s) for s in range(sequences)], every=True)
            for i in range(steps)
        )


@lib.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
def _silent(level: int, text: bytes, data: object) -> None:
    pass


if __name__ == "__main__":
    serve(Worker)
