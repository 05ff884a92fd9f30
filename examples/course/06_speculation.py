"""Page 6 of the course: speculative decoding, exact.

Counts drafts, accepted drafts and passes for a text that repeats and one that does not, checks that
the tokens are those of plain decoding, and plots what acceptance is worth.

    python examples/course/06_speculation.py [--plot speculation.svg]
"""

from __future__ import annotations

from course_plot import BLUE, GREEN, ORANGE, arguments, panels, save

from verbatim import LLM, Completion, SamplingParams

LIST = "one, two, three, four, five, six, seven, eight, nine, ten. "
PROMPTS = {"repeats": f"{LIST}Again: {LIST}Again:", "prose": "The old house at the end of the road"}
TOKENS = 32


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Mean tokens per pass: 1 + a + a² + … for `drafts` drafts, each accepted with probability a
    if all before it were."""
    return sum(acceptance**i for i in range(drafts + 1))


def main(words: list[str] | None = None) -> dict[str, Completion]:
    options = arguments(__doc__, words)
    out: dict[str, Completion] = {}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM("smollm2", speculate="ngram", prefix_cache=False) as llm:
        # Submit every draft in full. The policy drops drafts that do not pay on this machine.
        llm.core.drafting.adaptive = False
        print("text     tokens  drafted  accepted  tokens per pass  same tokens")
        for name, prompt in PROMPTS.items():
            done = out[name] = llm.generate(prompt, params)
            plain = llm.generate(prompt, params.with_(speculate="off"))
            usage, same = done.usage, done.token_ids == plain.token_ids
            counts = f"{usage.output_tokens:6}  {usage.drafted_tokens:7}  {usage.accepted_tokens:8}"
            print(f"{name:8} {counts}  {usage.mean_accepted_length:15.2f}  {same!s:>11}")
    if options.plot:
        figure, [left, right] = panels(2)
        rates = [i / 50 for i in range(50)]
        for drafts, colour in ((1, GREEN), (3, BLUE), (7, ORANGE)):
            curve = [expected_tokens(rate, drafts) for rate in rates]
            left.plot(rates, curve, color=colour, label=f"{drafts} drafts")
        left.set(xlabel="probability that a draft is accepted", ylabel="tokens per pass")
        left.legend(frameon=False)
        lengths = [done.usage.mean_accepted_length for done in out.values()]
        bars = right.bar(list(out), lengths, color=(BLUE, "#9aa0b5"), width=0.5)
        right.bar_label(bars, [f"{length:.2f}" for length in lengths])
        right.set(ylabel="tokens per pass, measured", ylim=(0, 1.2 * max(lengths)))
        save(figure, options.plot)
    return out


if __name__ == "__main__":
    main()
