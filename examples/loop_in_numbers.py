"""The loop in numbers: draws by hand, what the KV cache saves, what it costs, when decode turns
compute-bound. docs/loop-in-numbers.md shows its output; --plots writes the figures there.

python examples/loop_in_numbers.py [--model smollm2] [--plots docs/assets]
"""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path

import numpy as np

from verbatim import LLM, SamplingParams
from verbatim.diagnose.capacity import make_plan
from verbatim.diagnose.devices import DEVICES
from verbatim.diagnose.footprint import Footprint, footprint_of_config
from verbatim.observe.plot import Chart, Line, draw
from verbatim.sampling.draw import gumbel, noise_key

GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
SEED = 4


def logits_of(llm: LLM, ids: list[int]) -> np.ndarray:
    """The model as a function: token ids in, one logit per token of the vocabulary out."""
    params = SamplingParams(max_tokens=1, temperature=0, explain=1, receipt=True, ignore_eos=True)
    record = llm.generate(ids, params).choices[0].explain[0]
    return np.frombuffer(base64.b64decode(record["row"]), "<f4")


def loop_by_hand(llm: LLM, prompt: str, steps: int) -> list[int]:
    """context → logits → softmax → sample → append, written out."""
    ids = llm.tokenizer.encode_prompt(prompt)
    start = len(ids)
    print(f"prompt {prompt!r}: {start} tokens; logits: {llm.core.backend.spec.vocab} numbers")
    for _ in range(steps):
        logits = logits_of(llm, ids).astype(np.float64)
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        noise = gumbel(noise_key(SEED, 0), len(ids), np.arange(len(logits)))
        token = int(np.argmax(logits + noise))
        best = int(np.argmax(logits))
        shown, top = (repr(llm.tokenizer.decode([t])) for t in (token, best))
        print(f"  {shown:14} probability {probs[token]:6.3f}   most likely {top:14}")
        ids.append(token)
    return ids[start:]


def work(shape: Footprint, tokens: int) -> tuple[float, float]:
    """Operations for `tokens` tokens with a KV cache, and without one, where every step
    recomputes all of them."""
    per_row = shape.ops_token
    cached = tokens * per_row + shape.prompt_attention_ops(tokens)
    recomputed = sum(t * per_row + shape.prompt_attention_ops(t) for t in range(1, tokens + 1))
    return cached, recomputed


def main(arguments: list[str] | None = None) -> tuple[list[int], list[int]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plots", type=Path)
    options = parser.parse_args(arguments)
    prompt = "The capital of France is"
    with LLM(options.model) as llm:
        by_hand = loop_by_hand(llm, prompt, options.steps)
        params = SamplingParams(
            temperature=1.0, top_p=1.0, seed=SEED, max_tokens=options.steps, ignore_eos=True
        )
        engine = list(llm.generate(prompt, params).token_ids)
    print(f"the engine's own tokens: {'the same' if engine == by_hand else 'DIFFERENT'}")

    shape = footprint_of_config(GPT2, "gpt2.json")
    print(f"\n{shape.name}: {shape.params / 1e6:.1f} M parameters")
    for tokens in (64, 256, 1024):
        cached, recomputed = work(shape, tokens)
        print(
            f"  {tokens:5} tokens: {cached / 1e9:8.1f} GFLOP with a KV cache, "
            f"{recomputed / 1e9:10.1f} without: {recomputed / cached:5.0f} times"
        )

    folder = Path(__file__).parent / "configs"
    large = {
        heads: footprint_of_config(
            json.loads((folder / "llama-3-70b.json").read_text()) | {"num_key_value_heads": heads},
            "70b.json",
        )
        for heads in (64, 8, 1)
    }
    print("\nKV cache of a 70B shape at 4,096 tokens")
    names = {64: "MHA, 64 key heads", 8: "GQA, 8 key heads", 1: "MQA, 1 key head"}
    for heads, each in large.items():
        print(f"  {names[heads]:18} {each.kv_bytes(4096) / 1e9:6.2f} GB")

    seven = footprint_of_config(json.loads((folder / "mistral-7b.json").read_text()), "7b.json")
    batches = [2**i for i in range(10)]
    steps = {
        name: [
            make_plan(seven, DEVICES["a100"], context=c, output=1, batch=b).decode.seconds * 1e3
            for b in batches
        ]
        for name, c in (("context 32", 32), ("context 4,096", 4096))
    }
    print("\nleast time of a decode step, mistral-7b on an A100, in ms")
    print("  batch          " + "".join(f"{b:8}" for b in batches[::3]))
    for name, values in steps.items():
        print(f"  {name:15}" + "".join(f"{v:8.1f}" for v in values[::3]))
    if options.plots:
        _plots(options.plots, shape, large, names, batches, steps)
    return by_hand, engine


def _plots(
    folder: Path,
    shape: Footprint,
    large: dict[int, Footprint],
    names: dict[int, str],
    batches: list[int],
    steps: dict[str, list[float]],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [2**i for i in range(4, 11)]
    done = [work(shape, n) for n in lengths]
    lines = [
        Line(name, tuple((n, w[at] / 1e12) for n, w in zip(lengths, done, strict=True)))
        for name, at in (("without a KV cache", 1), ("with a KV cache", 0))
    ]
    cache = Chart("GPT-2, operations for n tokens", "tokens", "TFLOP", tuple(lines))
    sizes = Chart(
        "70B, KV cache of one sequence",
        "tokens",
        "GB",
        tuple(
            Line(names[h], tuple((n, f.kv_bytes(n) / 1e9) for n in (512, 1024, 2048, 4096, 8192)))
            for h, f in large.items()
        ),
    )
    roof = Chart(
        "7B on an A100, decode step",
        "batch",
        "ms, at least",
        tuple(Line(n, tuple(zip(batches, v, strict=True))) for n, v in steps.items()),
        log_x=True,
    )
    draw([cache, sizes, roof], str(folder / "loop-in-numbers.svg"))


if __name__ == "__main__":
    main()
