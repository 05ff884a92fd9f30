"""Page 2 of the course: prefill and decode, two counters and one step.

Records every step of one request with a long prompt: how many tokens it computed, and the CPU time
of one core. Prefill computes many tokens in a step, decode one.

    python examples/course/02_prefill_decode.py [--plot prefill_decode.svg]
"""

from __future__ import annotations

import time
from typing import Any

from course_plot import BLUE, ORANGE, arguments, panels, save

from verbatim import LLM, SamplingParams

PROMPT = "The weather report for every day of the month: " + "sunny, then rain; " * 30
CHUNK, OUTPUT = 64, 12


def main(words: list[str] | None = None) -> list[tuple[int, float]]:
    """(tokens computed, seconds) of each step."""
    options = arguments(__doc__, words)
    steps: list[tuple[int, float]] = []
    settings = {"speculate": "off", "prefix_cache": False, "step_tokens": CHUNK, "threads": 1}
    with LLM("smollm2", **settings) as llm:
        backend: Any = llm.loaded.backend
        execute = backend.execute

        def timed(plan: Any) -> Any:
            start = time.process_time()
            result = execute(plan)
            steps.append((plan.rows, time.process_time() - start))
            return result

        llm.generate("warm up", SamplingParams(max_tokens=2, temperature=0))
        backend.execute = timed
        params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
        done = llm.generate(PROMPT, params)
    print(f"{done.usage.prompt_tokens} prompt tokens, {done.usage.output_tokens} output tokens")
    print("tokens computed per step:", [rows for rows, _ in steps])
    prefill = [step for step in steps if step[0] > 1]
    decode = [step for step in steps if step[0] == 1]
    for name, part in (("prefill", prefill), ("decode", decode)):
        rows, seconds = sum(r for r, _ in part), sum(s for _, s in part)
        print(f"{name:8} {len(part):3} steps, {seconds / rows * 1e3:.2f} ms per token")
    if options.plot:
        figure, [left, right] = panels(2)
        colours = [ORANGE if rows > 1 else BLUE for rows, _ in steps]
        left.bar(range(len(steps)), [s * 1e3 for _, s in steps], color=colours)
        left.set(xlabel="step (orange: prefill)", ylabel="ms per step")
        right.bar(range(len(steps)), [s / r * 1e3 for r, s in steps], color=colours)
        right.set(xlabel="step (orange: prefill)", ylabel="ms per token")
        save(figure, options.plot)
    return steps


if __name__ == "__main__":
    main()
