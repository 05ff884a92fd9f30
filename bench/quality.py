"""Quality of quantised arithmetic: perplexity, top-1 agreement and log-probability error against
float32.

In: a GGUF file and a text. The text is cut into windows of 512 tokens, each scored alone from an
empty KV cache. Every engine scores the same token ids, so all differences are arithmetic.

    python bench/quality.py score reference MODEL.gguf --text TEXT --out reference.npz
    python bench/quality.py score cpu MODEL.gguf --like reference.npz --out cpu.npz
    python bench/quality.py score llama.cpp MODEL.gguf --like reference.npz --out llama.npz
    python bench/quality.py compare reference.npz cpu.npz llama.npz

`reference` is the arithmetic of the reference backend (float32 weights, activations and KV
cache) with all rows of a window in one matrix product, because one row at a time takes days. It
equals the backend to about 1e-4 in a log-probability. `simulate` is the same with activations
rounded as in a kernel; --rule REGEX=FORMAT selects matrices (the first rule that matches the
name decides) and the format: none, 8x32 (8 bits, blocks of 32), 8x16, 16x32 and so on.

--out is rewritten after every window, so an interrupted run can be compared as far as it came.
`score llama.cpp` needs llama-cpp-python, imports nothing of verbatim and runs in its own
environment.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from verbatim.model.loading.load import Model

Scorer = Callable[[list[int]], np.ndarray]  # a window of n token ids -> logits [n, vocab]
KEYS = ("logprob", "top1", "entropy")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    score = verbs.add_parser("score", help="score a text with one engine")
    score.add_argument("engine", choices=sorted(ENGINES))
    score.add_argument("model", type=Path)
    score.add_argument("--text", type=Path, help="a UTF-8 file; its first tokens are scored")
    score.add_argument(
        "--like", type=Path, help="take the token ids of this earlier result instead of a text"
    )
    score.add_argument("--out", type=Path, required=True)
    score.add_argument(
        "--tokens", type=int, default=20_000, help="tokens to score (default: %(default)s)"
    )
    score.add_argument(
        "--window", type=int, default=512, help="tokens of one window (default: %(default)s)"
    )
    score.add_argument("--threads", type=int, default=0, help="0: the engine's default")
    score.add_argument("--activations", default="auto", help="cpu: int8, int12 or auto")
    score.add_argument("--kv-type", default="f16", help="cpu: f16, q8 or fp8")
    score.add_argument("--rule", action="append", default=[], help="simulate: REGEX=FORMAT")
    compare = verbs.add_parser("compare", help="a table of several results against the first")
    compare.add_argument("results", nargs="+", type=Path)
    args = parser.parse_args()
    run_compare(args.results) if args.verb == "compare" else run_score(args)


# --- score


def run_score(args: argparse.Namespace) -> None:
    if (args.text is None) == (args.like is None):
        sys.exit("quality: give either --text or --like")
    windows = np.load(args.like)["windows"] if args.like else cut(args)
    scorer = ENGINES[args.engine](args)
    found: dict[str, list[np.ndarray]] = {key: [] for key in KEYS}
    began = time.perf_counter()
    for i, window in enumerate(windows):
        for key, value in zip(KEYS, figures(scorer(window.tolist()), window), strict=True):
            found[key].append(value)
        done = {key: np.stack(values) for key, values in found.items()}
        with args.out.open("wb") as file:
            np.savez(file, windows=windows, engine=args.engine, **done)  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
        perplexity = math.exp(-done["logprob"].mean())
        print(
            f"{args.engine}: window {i + 1} of {len(windows)}, perplexity {perplexity:.4f}, "
            f"{seconds:.0f} s",
            flush=True,
        )


def cut(args: argparse.Namespace) -> np.ndarray:
    """The first token ids of the text as [windows, window]; each window scores window - 1
    tokens."""
    from verbatim.files.gguf import read_gguf
    from verbatim.text.tokenizer import from_gguf

    ids = from_gguf(read_gguf(args.model).metadata).encode(args.text.read_text("utf-8"))
    count = -(-args.tokens // (args.window - 1))
    if len(ids) < count * args.window:
        sys.exit(f"quality: {args.text} has {len(ids)} tokens; {count * args.window} are needed")
    return np.array(ids[: count * args.window], np.int64).reshape(count, args.window)


def figures(logits: np.ndarray, window: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each token but the first: its log-probability, the largest probable id, the entropy
    (nats)."""
    wide = logits[: len(window) - 1].astype(np.float32)
    wide -= wide.max(axis=1, keepdims=True)
    rows = np.arange(len(wide))
    chosen, top = wide[rows, window[1:]].astype(np.float64), wide.argmax(axis=1)
    e = np.exp(wide)
    total = e.sum(axis=1, dtype=np.float64)
    e *= wide
    return chosen - np.log(total), top, np.log(total) - e.sum(axis=1, dtype=np.float64) / total


def reference_engine(args: argparse.Namespace) -> Scorer:
    from verbatim.model.loading.load import load_model

    return batched(load_model(args.model), [])


def simulated_engine(args: argparse.Namespace) -> Scorer:
    from verbatim.model.loading.load import load_model

    rules = [(re.compile(rule.rpartition("=")[0]), rule.rpartition("=")[2]) for rule in args.rule]
    if not rules:
        sys.exit("quality: simulate needs at least one --rule")
    return batched(load_model(args.model), rules)


def batched(model: Model, rules: list[tuple[re.Pattern[str], str]]) -> Scorer:
    """The operations of the reference backend on all rows of a window at once, with activations
    rounded by `rules`."""
    from verbatim.backend.reference.blas import one_thread
    from verbatim.backend.reference.ops import FloatWeights, ReferenceOps, soft_cap, softmax
    from verbatim.backend.step_rows import Batch
    from verbatim.model.decoder import forward

    class BatchedOps(ReferenceOps):
        def _product(self, x: Any, name: str) -> Any:
            rule = next((how for pattern, how in rules if pattern.search(name)), "none")
            return rounded(x, rule) @ self.weights[name].T

        def linear(self, x: Any, name: str, bias: bool) -> Any:
            y = self._product(x, name)
            return y + self.weights[f"{name}.bias"] if bias else y

        def head(self, h: Any) -> Any:
            return soft_cap(
                self._product(h, "embed" if self.spec.tied else "head"), self.spec.logit_softcap
            )

        def attend(self, q: Any, k: Any, v: Any, layer: int) -> Any:
            """Causal attention of one sequence over its own rows, from position 0; the KV cache
            is empty."""
            n, spec = len(q), self.spec
            heads = [
                x.reshape(n, spec.kv_heads, -1, spec.head_dim).transpose(1, 2, 0, 3)
                for x in (q, k, v)
            ]
            scores = soft_cap(
                heads[0] @ heads[1].swapaxes(2, 3) * np.float32(spec.scale), spec.attention_softcap
            )
            behind = np.arange(n)[:, None] - np.arange(n)
            window = spec.layers[layer].window
            hidden = (behind < 0) | (behind >= (n if window is None else window))
            scores[..., hidden] = -np.inf
            out = softmax(scores) @ heads[2]
            return np.ascontiguousarray(out.transpose(2, 0, 1, 3)).reshape(q.shape)

    weights = FloatWeights(model.weights)

    def logits(window: list[int]) -> np.ndarray:
        rows = np.arange(len(window), dtype=np.int32)
        batch = Batch(
            tokens=np.array(window, np.int32),
            positions=rows,
            ends=rows + 1,
            first=np.array([0, len(window)], np.int32),
            tables=(),
            outputs=rows,
            logits=rows,
        )
        with one_thread(), np.errstate(over="ignore", under="ignore"):
            found: np.ndarray = forward(model.spec, BatchedOps(model.spec, weights, (), batch))[1]
        return found

    return logits


def rounded(x: np.ndarray, how: str) -> np.ndarray:
    """x in the activation format BITSxBLOCK: one scale per block, symmetric about 0."""
    if how == "none":
        return x
    bits, block = map(int, how.split("x"))
    steps = np.float32(2 ** (bits - 1) - 1)
    blocks = x.reshape(-1, block)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.rint(blocks * (steps / largest)) * (largest / steps)
    return np.where(largest > 0, kept, np.float32(0)).astype(np.float32).reshape(x.shape)


def cpu_engine(args: argparse.Namespace) -> Scorer:
    from verbatim.backend.cpu.backend import CpuBackend
    from verbatim.base.config import EngineConfig
    from verbatim.base.records import SeqStep, StepPlan
    from verbatim.model.loading.load import load_model

    config = EngineConfig(
        threads=args.threads or None, activations=args.activations, kv_type=args.kv_type
    )
    backend = CpuBackend(load_model(args.model), config)
    blocks = tuple(range(-(-args.window // 16)))
    backend.allocate((len(blocks),) * len(backend.spec.groups))

    def logits(window: list[int]) -> np.ndarray:
        ids = tuple(window)
        step = SeqStep(0, ids, 0, (blocks,) * len(backend.spec.groups), targets=(*ids[1:], 0))
        backend.execute(StepPlan(0, (step,)))
        found: np.ndarray = backend._engine.logits()
        return found

    return logits


def llama_engine(args: argparse.Namespace) -> Scorer:
    from llama_cpp import Llama  # type: ignore[import-not-found,unused-ignore]

    size = {"n_ctx": args.window, "n_batch": args.window, "n_ubatch": args.window}
    llama = Llama(
        str(args.model),
        **size,
        logits_all=True,
        n_threads_batch=args.threads or None,
        verbose=False,
    )

    def logits(window: list[int]) -> np.ndarray:
        llama.reset()
        llama.eval(window)
        found: np.ndarray = llama.scores[: len(window)]
        return found

    return logits


ENGINES = {
    "reference": reference_engine,
    "simulate": simulated_engine,
    "cpu": cpu_engine,
    "llama.cpp": llama_engine,
}


# --- compare


def run_compare(files: list[Path]) -> None:
    results = [dict(np.load(file)) for file in files]
    count = min(len(r["logprob"]) for r in results)
    first = results[0]
    for file, r in zip(files, results, strict=True):
        if not np.array_equal(r["windows"][:count], first["windows"][:count]):
            sys.exit(f"quality: {file} scored other tokens than {files[0]}")
    tokens = first["logprob"][:count].size
    exact = math.exp(-first["logprob"][:count].mean())
    print(f"{tokens} tokens, perplexity of {files[0].stem} {exact:.4f}")
    print(f"{'':24s} {'perplexity':>11s} {'delta':>18s} {'top-1 equal':>12s} {'rms':>16s}")
    rows = list(compared(files, results, count))
    for row in rows:
        delta = f"{row['delta']:+.3%} ± {row['error']:.3%}"
        rms = f"{row['rms']:.4f} ± {row['rms_error']:.4f}"
        print(
            f"{row['name']:24s} {row['perplexity']:11.4f} {delta:>18s} {row['top1']:12.3%} "
            f"{rms:>16s}"
        )
    print(json.dumps({"tokens": tokens, "perplexity": exact, "results": rows}))


def compared(
    files: list[Path], results: list[dict[str, np.ndarray]], count: int
) -> Iterator[dict[str, Any]]:
    """`rms`: of the differences of log-probabilities, in nats; `error` and `rms_error`: one
    standard error."""
    first = results[0]
    for file, r in zip(files[1:], results[1:], strict=True):
        difference = r["logprob"][:count] - first["logprob"][:count]
        rms = math.sqrt((difference**2).mean())
        yield {
            "name": file.stem,
            "perplexity": math.exp(-r["logprob"][:count].mean()),
            "delta": math.expm1(-difference.mean()),
            "error": difference.std() / math.sqrt(difference.size),
            "top1": float((r["top1"][:count] == first["top1"][:count]).mean()),
            "rms": rms,
            "rms_error": (difference**2).std() / (2 * rms * math.sqrt(difference.size))
            if rms
            else 0.0,
        }


if __name__ == "__main__":
    main()
