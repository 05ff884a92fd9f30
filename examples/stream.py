"""Streaming: print a completion as it is generated, and abort a stream early.

python examples/stream.py [--model smollm2] [--prompt "..."]
"""

from __future__ import annotations

import argparse

from verbatim import LLM, SamplingParams


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", default="The three primary colours are")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0, logprobs=0)

    with LLM(options.model) as llm:
        stream = llm.stream(options.prompt, params)
        text = ""
        print(options.prompt, end="", flush=True)
        for delta in stream:
            print(delta.text, end="", flush=True)
            text += delta.text
        done = stream.completion
        assert done is not None
        assert text == done.text, "the pieces are the whole"
        least = min(done.logprobs, key=lambda entry: entry.logprob)
        print(
            f"\n\n{done.usage.output_tokens} tokens, first after "
            f"{done.timings.first_token * 1e3:.0f} ms, ended by {done.finish_reason}"
        )
        print(
            f"the model was least sure of {llm.tokenizer.decode([least.token])!r}: log-probability "
            f"{least.logprob:.2f}"
        )

        # Leaving `with`, close(), or dropping the stream aborts it and frees its KV blocks at once.
        with llm.stream(options.prompt, params) as stream:
            first = next(iter(stream))
        print(f"left after {first.text!r}; {llm.stats()['blocks_used']} cache blocks in use")
    return text


if __name__ == "__main__":
    main()
