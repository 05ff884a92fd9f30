"""Batched generation: the prompts share every pass over the weights, and each output is the same as
alone.

python examples/batch.py [--model smollm2] [--max-tokens 24]
"""

from __future__ import annotations

import argparse
import time

from verbatim import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "The opposite of hot is",
    "Once upon a time",
    "2, 4, 6, 8,",
    "My favourite colour is",
]


def main(arguments: list[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=24)
    options = parser.parse_args(arguments)
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0.7, seed=1)

    with LLM(options.model) as llm:
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))  # warm-up: pages in the weights
        began = time.perf_counter()
        together = llm.generate(PROMPTS, params)
        middle = time.perf_counter()
        alone = [llm.generate(prompt, params) for prompt in PROMPTS]
        end = time.perf_counter()

    for prompt, done in zip(PROMPTS, together, strict=True):
        print(f"{prompt!r} -> {done.text!r} ({done.finish_reason})")
    assert [done.choices for done in together] == [done.choices for done in alone], (
        "batching never changes an output"
    )
    tokens = sum(done.usage.output_tokens for done in together)
    print(
        f"together {tokens / (middle - began):.0f} tokens/s, one after another "
        f"{tokens / (end - middle):.0f} tokens/s, the same tokens"
    )
    return [done.text for done in together]


if __name__ == "__main__":
    main()
