"""Write a GGUF file of a llama shape with random weights, for timing without a real model file.

    python bench/random_model.py OUT.gguf --words FILE.gguf --type q4_0 --shape 1b

The tokenizer comes from another whole GGUF file (a vocabulary without tensors, such as llama.cpp's
models/ggml-vocab-*.gguf, is enough; a file that was cut is not), so that this engine and llama.cpp
both load the result. Matrices are random bytes with small scales: every kernel does
the same work as on a trained model, and the output is noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from verbatim.files.gguf import read_gguf
from verbatim.files.gguf_write import LazyTensor, write_gguf
from verbatim.formats.registry import BLOCKS

# layers, hidden, inner, heads, key/value heads
SHAPES = {
    "135m": (30, 576, 1536, 9, 3),
    "0.6b": (28, 1024, 3072, 16, 8),
    "1b": (16, 2048, 8192, 32, 8),
    "8b": (32, 4096, 14336, 32, 8),
}
# type -> {byte offset of an f16 scale in the block: its value}
SCALES = {
    "q4_0": {0: 0.004},
    "q4_1": {0: 0.004, 2: -0.03},
    "q8_0": {0: 0.0002},
    "q4_k": {0: 0.0001, 2: 0.0008},
    "q6_k": {208: 0.00002},
}


def matrix(kind: str, rows: int, width: int, seed: int) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
        values, size = BLOCKS[kind]
        data = np.random.default_rng(seed).integers(
            0, 256, (rows * width // values, size), np.uint8
        )
        for at, scale in SCALES[kind].items():
            data[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        return data.reshape(-1)

    return make


def tensors(kind: str, shape: tuple[int, ...], vocab: int) -> list[LazyTensor]:
    layers, hidden, inner, heads, kv = shape
    key = hidden // heads * kv
    out: list[LazyTensor] = []

    def add(name: str, rows: int, width: int) -> None:
        out.append(LazyTensor(name, kind, (rows, width), matrix(kind, rows, width, len(out))))

    def norm(name: str) -> None:
        out.append(
            LazyTensor(name, "f32", (hidden,), lambda: np.ones(hidden, np.float32).view(np.uint8))
        )

    add("token_embd.weight", vocab, hidden)
    norm("output_norm.weight")
    for i in range(layers):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        for name, rows, width in (
            ("attn_q", hidden, hidden),
            ("attn_k", key, hidden),
            ("attn_v", key, hidden),
            ("attn_output", hidden, hidden),
        ):
            add(f"blk.{i}.{name}.weight", rows, width)
        for name, rows, width in (
            ("ffn_gate", inner, hidden),
            ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):
            add(f"blk.{i}.{name}.weight", rows, width)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("--words", required=True, help="a whole GGUF file whose tokenizer is taken")
    parser.add_argument("--type", default="q4_0", choices=sorted(SCALES))
    parser.add_argument("--shape", default="1b", choices=sorted(SHAPES))
    args = parser.parse_args()
    source = read_gguf(args.words)
    layers, hidden, inner, heads, kv = shape = SHAPES[args.shape]
    meta = dict(source.metadata) | {
        "general.name": f"random {args.shape} {args.type}",
        "llama.block_count": layers,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv,
        "llama.rope.dimension_count": hidden // heads,
    }
    vocab = len(source.metadata["tokenizer.ggml.tokens"])
    write_gguf(args.out, meta, tensors(args.type, shape, vocab), types=source.types)


if __name__ == "__main__":
    main()
