"""Page 1 of the course: the loop by hand, on the reference backend.

The engine is left out: this script plans each step itself. It runs the forward pass over the tokens
that are known, takes the most likely next token, appends it, and repeats.

    python examples/course/01_loop.py [--plot loop.svg]
"""

from __future__ import annotations

import math

from course_plot import BLUE, arguments, panels, save

from verbatim import LLM, SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, StepPlan

QUESTION = [{"role": "user", "content": "Name the capital of France."}]
STEPS, TOP = 8, 5


def main(words: list[str] | None = None) -> list[int]:
    options = arguments(__doc__, words)
    with LLM("smollm2", backend="reference", context=64, speculate="off") as llm:
        backend, ends = llm.loaded.backend, set(llm.loaded.eos_ids)
        known = llm.encode_chat(QUESTION)
        prompt_len, computed = len(known), 0
        greedy = DrawSpec(SamplingParams(temperature=0, logprobs=TOP), key=0, prompt_len=prompt_len)
        blocks = ((0, 1, 2, 3),)  # four blocks of 16 positions: our whole KV cache
        steps = []
        print("step  computed  known  next token")
        for step in range(STEPS):
            tokens = tuple(known[computed:])
            plan = StepPlan(step, (SeqStep(0, tokens, computed, blocks, draws=1, draw=greedy),))
            [drawn] = backend.execute(plan).sequences[0].drawn
            computed = len(known)
            known.append(drawn.token)
            text = llm.tokenizer.token_bytes(drawn.token).decode()
            print(f"{step + 1:4}  {computed:8}  {len(known):5}  {text!r}")
            steps.append([(llm.tokenizer.token_bytes(t).decode(), p) for t, p in drawn.top])
            if drawn.token in ends:
                break
        print(llm.decode(known[prompt_len:]))
    if options.plot:
        figure, axes = panels(len(steps), 2.6)
        for number, (one, top) in enumerate(zip(axes, steps, strict=True)):
            names = [repr(text)[1:-1][:9] for text, _ in top]
            one.barh(range(TOP), [math.exp(p) for _, p in top], color=[BLUE, *["#c5cbe9"] * 4])
            one.set_yticks(range(TOP), names, fontsize=6)
            one.set(xlim=(0, 1), xticks=(0, 1), title=f"step {number + 1}")
            one.invert_yaxis()
        save(figure, options.plot)
    return known[prompt_len:]


if __name__ == "__main__":
    main()
