"""Page 5 of the course: why temperature 0 is not deterministic elsewhere.

Adds the same numbers in different orders, as a kernel does that splits a sum by the batch; then
measures how close the two best logits of real positions are, which is where such a difference
changes a token.

    python examples/course/05_determinism.py [--plot determinism.svg]
"""

from __future__ import annotations

from course_plot import BLUE, ORANGE, arguments, panels, save

from verbatim import LLM, SamplingParams

import numpy as np  # isort: skip

PROMPTS = ("Write a short story about a dragon.", "Explain how rain forms.", "Describe a cat.")
ORDERS, WIDTH, TOKENS = 200, 4096, 64


def sum_in_splits(values: np.ndarray, splits: int) -> np.float32:
    """One float32 sum per split, then the splits in order: what split-K does."""
    parts = [np.add.accumulate(part)[-1] for part in np.array_split(values, splits)]
    total = np.float32(0)
    for part in parts:
        total += part
    return total


def main(words: list[str] | None = None) -> tuple[int, float]:
    """Different sums of the same numbers, and the share of tokens that lead by less than 0.1."""
    options = arguments(__doc__, words)
    random = np.random.default_rng(0)
    products = (random.normal(size=WIDTH) * random.normal(size=WIDTH)).astype(np.float32)
    exact = float(np.sum(products.astype(np.float64)))
    sums = {splits: sum_in_splits(products, splits) for splits in (1, 2, 4, 8, 16, 32)}
    for splits, total in sums.items():
        print(f"{splits:2} splits: {total:.6f}  (exact {exact:.6f})")
    print(f"{len(set(map(float, sums.values())))} different sums of the same {WIDTH} products")
    leads: list[float] = []
    with LLM("smollm2", speculate="off") as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=2)
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        for done in llm.chat(chats, params):
            leads += [entry.top[0][1] - entry.top[1][1] for entry in done.logprobs]
    close = sum(lead < 0.1 for lead in leads) / len(leads)
    print(f"{close:.0%} of {len(leads)} greedy tokens lead by less than 0.1 nats")
    if options.plot:
        figure, [left, right] = panels(2)
        errors = [float(random.permutation(products).cumsum()[-1]) - exact for _ in range(ORDERS)]
        left.hist(np.array(errors) * 1e6, bins=30, color=ORANGE)
        left.set(xlabel=f"error of {ORDERS} orders of one sum, in millionths", ylabel="orders")
        right.hist(np.minimum(leads, 6), bins=30, color=BLUE)
        right.set(xlabel="lead of the greedy token over the next (nats)", ylabel="tokens")
        save(figure, options.plot)
    return len(set(map(float, sums.values()))), close


if __name__ == "__main__":
    main()
