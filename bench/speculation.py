"""What speculation is worth on real prompts: 20 copying tasks and 40 mixed chat turns, plain and guessed in turns, the same text both ways.

    python bench/speculation.py [--model smollm2] [--tokens 96] [--rounds 3] [--mode auto]

A prompt's ratio is that of its median times of writing, prompt reading excluded (the prompt is in the prefix cache after the first round).
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics

from prompts import CHAT, COPY

from verbatim import LLM, SamplingParams


def seconds(llm: LLM, prompt: str, mode: str, tokens: int) -> tuple[float, str, int, int]:
    params = SamplingParams(temperature=0, max_tokens=tokens, speculate=mode)
    done = llm.chat([{"role": "user", "content": prompt}], params)
    return done.timings.total, done.text, done.usage.drafted_tokens, done.usage.accepted_tokens


def ratios(llm: LLM, prompts: tuple[str, ...], mode: str, tokens: int, rounds: int) -> list[float]:
    out = []
    for prompt in prompts:
        seconds(llm, prompt, "off", tokens)  # fills the prefix cache
        times: dict[str, list[float]] = {"off": [], mode: []}
        texts = set()
        for _ in range(rounds):
            for way, found in times.items():
                spent, text, drafted, accepted = seconds(llm, prompt, way, tokens)
                found.append(spent)
                texts.add(text)
        assert len(texts) == 1, f"speculation changed an answer: {texts}"
        ratio = statistics.median(times["off"]) / statistics.median(times[mode])
        out.append(ratio)
        print(f"{ratio:6.2f}x  {accepted:4d} of {drafted:4d} drafts  {prompt[:60]!r}")
    return out


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--model", default="smollm2")
    ask.add_argument("--mode", default="auto")
    ask.add_argument("--tokens", type=int, default=96)
    ask.add_argument("--rounds", type=int, default=3)
    asked = ask.parse_args()
    result = {}
    with LLM(asked.model, context=2048) as llm:
        print(f"backend {llm.core.backend.info.name} {llm.core.backend.info.detail}, mode {asked.mode}")
        for name, prompts in (("copy", COPY), ("chat", CHAT)):
            found = ratios(llm, prompts, asked.mode, asked.tokens, asked.rounds)
            result[name] = {"geometric_mean": statistics.geometric_mean(found), "least": min(found), "most": max(found)}
            print(f"{name}: {result[name]['geometric_mean']:.2f}x (least {min(found):.2f}, most {max(found):.2f})")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
