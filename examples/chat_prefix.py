"""A conversation: each turn sends all earlier turns, and the prefix cache makes that cheap.

    python examples/chat_prefix.py [--model smollm2]

The KV blocks of earlier turns, the model's own answers included, are still cached; only new tokens
are computed. Usage reports how many were prefix hits.
"""

from __future__ import annotations

import argparse

from verbatim import LLM, SamplingParams

QUESTIONS = [
    "Name a large animal that lives in the sea.",
    "What does it eat?",
    "And how big does it get?",
]


def main(arguments: list[str] | None = None) -> list[tuple[int, int]]:
    """Returns (prompt tokens, prefix hits among them) per turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args(arguments)
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0)
    turns: list[tuple[int, int]] = []
    messages: list[dict[str, str]] = []

    with LLM(options.model) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            done = llm.chat(messages, params)
            messages.append({"role": "assistant", "content": done.text})
            usage = done.usage
            turns.append((usage.prompt_tokens, usage.cached_tokens))
            print(f"> {question}\n{done.text}")
            print(
                f"  [{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} reused; first "
                f"token after {done.timings.first_token * 1e3:.0f} ms]\n"
            )
    return turns


if __name__ == "__main__":
    main()
