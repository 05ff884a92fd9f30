"""Page 4 of the course: from logits to a token: temperature, filters, noise.

Takes one row of logits of the default model and shows what each stage leaves, then draws with
Gumbel noise and compares the frequencies with the probabilities.

    python examples/course/04_sampling.py [--plot sampling.svg]
"""

from __future__ import annotations

import math
from collections import Counter

from course_plot import BLUE, GREY, ORANGE, arguments, panels, save

from verbatim import LLM, SamplingParams

PROMPT = "My favourite colour is"
TOP, DRAWS = 12, 200
SETTINGS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "top-k 5": {"top_k": 5},
    "top-p 0.5": {"top_p": 0.5},
    "min-p 0.2": {"min_p": 0.2},
}


def main(words: list[str] | None = None) -> dict[str, list[float]]:
    """Probabilities of the most likely tokens under each setting; 0: removed."""
    options = arguments(__doc__, words)
    out: dict[str, list[float]] = {}
    with LLM("smollm2") as llm:
        plain = SamplingParams(max_tokens=1, logprobs=TOP, seed=1, temperature=1, top_p=1)
        top = llm.generate(PROMPT, plain).logprobs[0].top
        names = [llm.decode([token]) for token, _ in top]
        for name, setting in SETTINGS.items():
            params = plain.with_(logprobs_mode="processed", **setting)
            found = dict(llm.generate(PROMPT, params).logprobs[0].top)
            out[name] = [math.exp(found.get(token, -math.inf)) for token, _ in top]
        print(f"{'':10}" + "".join(f"{name:>17}" for name in SETTINGS))
        for row, text in enumerate(names[:6]):
            print(f"{text!r:10}" + "".join(f"{out[name][row]:17.3f}" for name in SETTINGS))
        many = llm.generate(PROMPT, plain.with_(logprobs=None, n=DRAWS, top_k=5))
        counts = Counter(choice.text for choice in many.choices)
        print(f"{DRAWS} draws with top-k 5:", [counts[name] for name in names[:5]])
    if options.plot:
        figure, axes = panels(len(SETTINGS), 2.6)
        for one, (name, values) in zip(axes, out.items(), strict=True):
            one.bar(range(TOP), out["temperature 1"], color="#dfe2ee")
            one.bar(range(TOP), values, color=BLUE, width=0.5)
            one.set(title=name, ylim=(0, 0.62), xticks=())
        axes[2].plot(range(5), [counts[n] / DRAWS for n in names[:5]], "o", color=ORANGE, ms=4)
        axes[2].set_xlabel(f"dots: {DRAWS} draws", color=GREY)
        save(figure, options.plot)
    return out


if __name__ == "__main__":
    main()
