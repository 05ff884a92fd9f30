"""Exposure bias: a model that reads its own output against one that reads a person's text.

python examples/exposure_bias.py [--model smollm2] [--tokens 192] [--prompt "Once upon a time"]
"""

from __future__ import annotations

import argparse

from verbatim import LLM
from verbatim.diagnose.exposure import GIVEN, Series, measure_drift


def main(arguments: list[str] | None = None) -> list[Series]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with LLM(options.model) as llm:
        start, given = map(llm.tokenizer.encode_prompt, (options.prompt, GIVEN))
        found = measure_drift(
            llm, start, given, tokens=options.tokens, seed=options.seed, context=32
        )
    print("mean entropy in nats, by thirds of the text")
    for series in found:
        thirds = " → ".join(f"{series.mean(series.entropies, part):.2f}" for part in range(3))
        loop = "" if series.loop_at is None else f", a loop of {series.loop} tokens"
        print(f"{series.name:28} {thirds}{loop}")
    return found


if __name__ == "__main__":
    main()
