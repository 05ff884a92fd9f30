"""One real token on its way through the stages of docs/one-token.md, with the numbers of the code.

    python examples/one_token.py            prints the trace
    python examples/one_token.py --write    puts it into docs/one-token.md, between its markers

A test compares the document with this trace, so its numbers stay those of the code. It runs on the
reference backend, which is the specification.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

from verbatim import LLM, SamplingParams
from verbatim.backend.reference import backend as reference
from verbatim.base.records import StepPlan, StepResult
from verbatim.text.decode import TextDecoder
from verbatim.text.stop import StopMatcher

DOCUMENT = Path(__file__).parents[1] / "docs" / "one-token.md"
QUESTION = "Name the capital of France."
MESSAGES = [{"role": "user", "content": QUESTION}]
FOLLOWED = " Paris"
PARAMS = SamplingParams(
    temperature=1.0, top_k=40, top_p=0.98, seed=4, max_tokens=16, stop="Parisian", explain=5
)


class Watch:
    """Wraps the backend: keeps every plan and result, and the residual stream after each sum."""

    def __init__(self, llm: LLM) -> None:
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.sums: list[list[Any]] = []
        backend: Any = llm.loaded.backend
        self._execute = backend.execute
        backend.execute = self.execute

    def execute(self, plan: StepPlan) -> StepResult:
        sums: list[Any] = []

        class Recording(reference.ReferenceOps):
            def embed(self) -> Any:
                x = super().embed()
                sums.append(x[-1].copy())
                return x

            def add(self, x: Any, y: Any) -> Any:
                out = super().add(x, y)
                sums.append(out[-1].copy())
                return out

        plain, reference.ReferenceOps = reference.ReferenceOps, Recording  # type: ignore[misc]
        try:
            result = self._execute(plan)
        finally:
            reference.ReferenceOps = plain  # type: ignore[misc]
        self.plans.append(plan)
        self.results.append(result)
        self.sums.append(sums)
        return result


def trace() -> dict[str, str]:
    """Every block of the document, by name."""
    with LLM("smollm2", backend="reference", speculate="off", context=256) as llm:
        tokenizer = llm.tokenizer
        prompt = llm.loaded.template.render(MESSAGES)
        ids = llm.encode_chat(MESSAGES)
        watch = Watch(llm)
        with llm.chat_stream(MESSAGES, PARAMS) as stream:
            deltas = list(stream)
        assert stream.completion is not None
        drawn = [result.sequences[0].drawn[0] for result in watch.results]
        at = next(
            i for i, d in enumerate(drawn) if tokenizer.token_bytes(d.token).decode() == FOLLOWED
        )
        return {
            "chat": repr(str(prompt)),
            "tokens": _tokens(tokenizer, ids),
            "steps": _steps(tokenizer, watch, drawn),
            "plan": _plan(watch.plans[at]),
            "backend": _backend(llm),
            "forward": _forward(watch.sums[at]),
            "sample": _sample(tokenizer, drawn[at].explain or {}),
            "commit": _commit(tokenizer, watch.plans[at], drawn[at].token),
            "decode": _decode(tokenizer, drawn[at].token),
            "stop": _stop(),
            "stream": _stream(deltas, drawn[at].token, stream.completion),
        }


def _tokens(tokenizer: Any, ids: list[int]) -> str:
    lines = []
    for start in range(0, len(ids), 8):
        pairs = [f"{i} {tokenizer.token_bytes(i).decode()!r}" for i in ids[start : start + 8]]
        lines.append("  ".join(pairs))
    return f"{len(ids)} tokens\n" + "\n".join(lines)


def _steps(tokenizer: Any, watch: Watch, drawn: list[Any]) -> str:
    lines = ["step  computes                 known  draws"]
    for plan, d in zip(watch.plans, drawn, strict=True):
        seq = plan.sequences[0]
        what = (
            f"positions {seq.start}..{seq.end - 1}"
            if len(seq.tokens) > 1
            else f"position {seq.start}"
        )
        lines.append(
            f"{plan.step:4}  {what:23}  {seq.end:5}  {tokenizer.token_bytes(d.token).decode()!r} "
            f"({d.token})"
        )
    return "\n".join(lines)


def _plan(plan: StepPlan) -> str:
    seq = plan.sequences[0]
    blocks = f"blocks={seq.blocks}"
    return (
        f"StepPlan(step={plan.step}, sequences=(SeqStep(seq_id={seq.seq_id}, tokens={seq.tokens}, "
        f"start={seq.start}, {blocks}, draws={seq.draws}, …),))"
    )


def _backend(llm: LLM) -> str:
    spec, info = llm.loaded.backend.spec, llm.loaded.backend.info
    return "\n".join(
        [
            f"{len(spec.layers)} layers, hidden {spec.hidden}, {spec.heads} query heads over "
            f"{spec.kv_heads} key heads of {spec.head_dim}, "
            f"MLP {spec.mlp}, vocabulary {spec.vocab}",
            f"keys and values of one position: {info.kv_token_bytes:,} bytes in float32, all "
            "layers",
            f"one block of {llm.loaded.backend.block_size} positions: "
            f"{llm.loaded.backend.block_bytes()[0]:,} bytes",
        ]
    )


def _forward(sums: list[Any]) -> str:
    """The residual stream of this step's row: after the embedding, each attention and each MLP."""

    def line(name: str, x: Any) -> str:
        return (
            f"{name:18} length {float((x.astype(float) ** 2).sum()) ** 0.5:8.2f}   first numbers "
            + " ".join(f"{v:8.3f}" for v in x[:4])
        )

    last = (len(sums) - 1) // 2 - 1
    return "\n".join(
        [
            line("embedding", sums[0]),
            line("+ attention 0", sums[1]),
            line("+ MLP 0", sums[2]),
            line(f"+ attention {last}", sums[-2]),
            line(f"+ MLP {last}", sums[-1]),
        ]
    )


def _sample(tokenizer: Any, record: dict[str, Any]) -> str:
    lines = [
        f"position {record['position']}, entropy of the model's own distribution "
        f"{record['entropy']:.3f} nats"
    ]
    lines += [
        f"  {stage['name']:12} removes {stage['removed']:6}, leaves {stage['left']:6}"
        for stage in record["stages"]
        if stage["removed"]
    ]
    lines.append("token            logit   probability   kept with    noise    score")
    for row in record["top"]:
        shown = repr(tokenizer.token_bytes(row["id"]).decode(errors="replace"))
        kept = (
            f"{row['final_prob']:9.4f}"
            if row["final_prob"] is not None
            else f"({row['removed_by']})"
        )
        noise = f"{row['noise']:8.3f} {row['score']:8.3f}" if row["score"] is not None else ""
        lines.append(
            f"{shown:14} {row['logit']:8.3f}   {math.exp(row['logprob']):11.4f}   "
            f"{kept:>9} {noise}".rstrip()
        )
    lines.append(
        f"drawn: {tokenizer.token_bytes(record['token']).decode()!r}, {record['lead']:.3f} ahead "
        "of the next"
        if record["lead"]
        else "drawn"
    )
    return "\n".join(lines)


def _commit(tokenizer: Any, plan: StepPlan, token: int) -> str:
    end = plan.sequences[0].end
    shown = repr(tokenizer.token_bytes(token).decode())
    return (
        f"before: computed {end - 1}, known {end}\n"
        f"step:   computed {end}, known {end}: they are equal, so a token is drawn\n"
        f"after:  computed {end}, known {end + 1}: {shown} is known and not yet computed"
    )


def _decode(tokenizer: Any, token: int) -> str:
    lines = [f"token_bytes({token}) = {tokenizer.token_bytes(token)!r}"]
    decoder = TextDecoder(tokenizer)
    lines += [
        f"push({i}): bytes {tokenizer.token_bytes(i)!r:14} -> text {decoder.push(i)!r}"
        for i in tokenizer.encode("é→🙂")
    ]
    return "\n".join(lines)


def _stop() -> str:
    matcher = StopMatcher(PARAMS.stop)
    return "\n".join(
        f"push({piece!r:8}) -> {matcher.push(piece)[0]!r}" for piece in (" is", " Paris", ".")
    )


def _stream(deltas: list[Any], token: int, completion: Any) -> str:
    lines = [
        f"Delta(text={d.text!r}, token_ids={d.token_ids})"
        for d in deltas
        if token in d.token_ids or d.text.startswith("Paris")
    ]
    usage = completion.usage
    return "\n".join(
        [
            *lines,
            f"Completion(text={completion.text!r}, finish={completion.finish.reason!r} "
            f"({completion.finish.detail}), seed={completion.seed})",
            f"usage: {usage.prompt_tokens} prompt + {usage.output_tokens} output tokens",
        ]
    )


# --- document

BLOCK = re.compile(r"(<!-- one_token: (\w+) -->\n```\w*\n)(.*?)(```\n)", re.DOTALL)


def blocks(text: str) -> dict[str, str]:
    return {match[2]: match[3].removesuffix("\n") for match in BLOCK.finditer(text)}


def main() -> None:
    made = trace()
    if "--write" in sys.argv:
        text = DOCUMENT.read_text("utf-8")
        DOCUMENT.write_text(BLOCK.sub(lambda m: m[1] + made[m[2]] + "\n" + m[4], text), "utf-8")
        return
    for name, block in made.items():
        print(f"--- {name}\n{block}\n")


if __name__ == "__main__":
    main()
