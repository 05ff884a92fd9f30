"""Greedy, sampled, best-of-n and majority vote on a quiz, with 95 % intervals.

python examples/vote.py [--model smollm2] [--quiz examples/quiz.jsonl] [--samples 8] [--seed 0]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from verbatim import LLM, SamplingParams
from verbatim.diagnose.quiz import QuizResult, read_quiz, run_quiz


def main(arguments: list[str] | None = None) -> QuizResult:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quiz", default=str(Path(__file__).parent / "quiz.jsonl"))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    with LLM(options.model) as llm:
        result = run_quiz(
            llm, read_quiz(options.quiz), samples=options.samples, params=params, seed=options.seed
        )
    for accuracy in result.methods:
        low, high = accuracy.interval
        print(f"{accuracy.method:14} {accuracy.share:6.1%}   {low:.0%} to {high:.0%}")
    return result


if __name__ == "__main__":
    main()
