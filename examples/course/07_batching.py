"""Page 7 of the course: batching, latency against throughput.

Decodes 1, 2, 4 and 8 sequences at once and measures the CPU time of a step on one core.

    python examples/course/07_batching.py [--plot batching.svg]
"""

from __future__ import annotations

import time

from course_plot import BLUE, ORANGE, arguments, panels, save

from verbatim import LLM, SamplingParams

BATCHES, TOKENS, ROUNDS = (1, 2, 4, 8), 6, 2


def main(words: list[str] | None = None) -> list[tuple[int, float, float]]:
    """(sequences, ms per step, tokens per second)."""
    options = arguments(__doc__, words)
    table = []
    with LLM("smollm2", speculate="off", prefix_cache=False, threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        answers = set()
        print("sequences  ms per step  tokens per second")
        for count in BATCHES:
            prompts = [f"Story number {i}:" for i in range(count)]
            llm.generate(prompts, params.with_(max_tokens=2))  # warm up
            times = []
            for _ in range(ROUNDS):
                start = time.process_time()
                done = llm.generate(prompts, params)
                times.append(time.process_time() - start)
                answers.add(done[0].token_ids)
            step = min(times) / TOKENS
            print(f"{count:9}  {step * 1e3:11.1f}  {count / step:17.0f}")
            table.append((count, step * 1e3, count / step))
        print(f"different answers of the first sequence: {len(answers)}")
    if options.plot:
        figure, [left, right] = panels(2)
        counts = [row[0] for row in table]
        left.plot(counts, [row[1] for row in table], "o-", color=ORANGE)
        left.set(xlabel="sequences at once", ylabel="latency: ms per token", ylim=(0, None))
        right.plot(counts, [row[2] for row in table], "o-", color=BLUE)
        right.set(xlabel="sequences at once", ylabel="throughput: tokens/s", ylim=(0, None))
        save(figure, options.plot)
    assert len(answers) == 1, "the batch changes the time, never the answer"
    return table


if __name__ == "__main__":
    main()
