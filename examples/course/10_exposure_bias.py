"""Page 10 of the course: exposure bias. The model reads what it wrote.

Compares the log-probability of the tokens of a text that a person wrote (teacher forcing) with that
of the model's own greedy and sampled continuations, and checks that scoring an output gives the
log-probabilities it was generated with.

    python examples/course/10_exposure_bias.py [--plot exposure_bias.svg]
"""

from __future__ import annotations

from course_plot import BLUE, GREY, ORANGE, arguments, panels, save

from verbatim import LLM, SamplingParams

HUMAN = (
    "The ferry left at six, with eleven goats and a piano on deck. Half the island had come to "
    "see the piano go; the other half had come to see whether the goats would stay."
)
START, TOKENS = "The ferry left at six, with", 64


def running_mean(values: list[float], width: int = 8) -> list[float]:
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1])
        for i in range(len(values))
    ]


def main(words: list[str] | None = None) -> dict[str, list[float]]:
    options = arguments(__doc__, words)
    out: dict[str, list[float]] = {}
    with LLM("smollm2", speculate="off") as llm:
        params = SamplingParams(max_tokens=TOKENS, logprobs=0, ignore_eos=True)
        prompt = llm.encode(START)
        score = llm.score(HUMAN)
        first = len(prompt)
        out["a person's text"] = [entry.logprob for entry in score.logprobs[first:] if entry]
        for name, setting in (
            ("greedy", {"temperature": 0}),
            ("sampled", {"seed": 1, "temperature": 1, "top_p": 1}),
        ):
            done = llm.generate(prompt, params.with_(**setting))
            out[name] = [entry.logprob for entry in done.logprobs]
            if name == "greedy":
                again = llm.score([*prompt, *done.token_ids])
                equal = [e.logprob for e in again.logprobs[first:] if e] == out[name]
                text = done.text.replace("\n", " ")
        for name, values in out.items():
            print(f"{name:16} {sum(values) / len(values):6.2f} nats per token")
        print("greedy text:", text[:60] + " …")
        print("scoring the output gives its own log-probabilities:", equal)
    if options.plot:
        figure, [one] = panels(1)
        for (name, values), colour in zip(out.items(), (ORANGE, BLUE, GREY), strict=True):
            one.plot(running_mean(values), color=colour, label=name)
        one.set(xlabel="token after the start", ylabel="log-probability, mean of 8 (nats)")
        one.legend(frameon=False)
        save(figure, options.plot)
    return out


if __name__ == "__main__":
    main()
