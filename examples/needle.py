"""Promise 1 by hand: one request alone and in a crowd, equal in every token and every bit.

python examples/needle.py [--model smollm2] [--others 7]
"""

from __future__ import annotations

import argparse
import random

from verbatim import LLM, SamplingParams


def main(arguments: list[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--others", type=int, default=7)
    options = parser.parse_args(arguments)
    needle = SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=2, ignore_eos=True)
    with LLM(options.model) as llm:
        prompt = llm.tokenizer.encode_prompt("The three primary colours are")
        alone = llm.generate(prompt, needle)
        rng = random.Random(0)
        crowd = [
            [rng.randrange(200) for _ in range(rng.randrange(2, 40))] for _ in range(options.others)
        ]
        others = [needle.with_(seed=i, temperature=i / 4) for i in range(options.others)]
        together = llm.generate([prompt, *crowd], [needle, *others])[0]
    same = alone.logprobs == together.logprobs
    print(f"alone:         {alone.text!r}")
    print(f"in a crowd:    {together.text!r}")
    print(f"tokens and log-probabilities, bit for bit: {'the same' if same else 'DIFFERENT'}")
    return same


if __name__ == "__main__":
    main()
