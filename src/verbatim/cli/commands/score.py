"""`verbatim score TEXT`: the log-probability of each token of a text, from prefill alone, and the
perplexity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import ContextError
from verbatim.base.json_io import JsonObject
from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import JSON, NO_SAMPLING, engine_options, model_options
from verbatim.cli.lib.report import token_logprobs
from verbatim.cli.lib.sampling_options import chosen_adapter, use_adapter_flag
from verbatim.cli.lib.terminal import note, warn, write, write_json
from verbatim.cli.lib.texts import read_prompt

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM
    from verbatim.engine.calls.scoring import Score


@as_command(model_options, engine_options(unused=("pooling", *NO_SAMPLING)))
def command(
    text: tuple[str, ...] = argument("[TEXT]", nargs=-1),
    file: str | None = flag("read the text from FILE", metavar="FILE"),
    top: int = flag("alternatives reported per token", default=0, least=0, most=1024),
    tokens: bool = flag("one line per token: log-probability, token"),
    window: int | None = flag("score a text of any length in windows of N tokens"),
    stride: int | None = flag("tokens from one window to the next [half a window]"),
    as_json: bool = JSON,
    use_adapter: str | None = use_adapter_flag(),
    **flags: Any,
) -> int:
    """Log-probability of every token of TEXT, and its perplexity.

    TEXT is one argument, in quotes; @FILE or --file FILE reads a file; `-`, or no argument and a
    pipe, reads stdin. Plain output is `perplexity`, a tab, and the number. Log-probabilities are
    natural logarithms. With --window each token is scored once, in the first window that contains
    it, after at least window - stride tokens of context (fewer in the first window).
    """
    named = text[0][1:] if len(text) == 1 and text[0].startswith("@") else None
    content = read_prompt(() if named and not file else text, "text", file or named)
    adapter = chosen_adapter(flags, use_adapter)
    with open_llm(flags, quiet=as_json) as llm:
        try:
            score = llm.score(content, top=top, window=window, stride=stride, adapter=adapter)
        except ContextError as error:
            why = f"{error.message}, or score it in windows (--window {llm.context})"
            raise ContextError(why, param=error.param) from None
        if as_json:
            fingerprint = llm.core.fingerprints[0 if adapter else -1]
            # None: a single token has no perplexity
            perplexity = score.perplexity if math.isfinite(score.perplexity) else None
            found: JsonObject = {"perplexity": perplexity, "total_logprob": score.total}
            found |= {"tokens": score.token_ids, "logprobs": token_logprobs(score.logprobs)}
            about = {"model": llm.loaded.name, "fingerprint": fingerprint}
            write_json({**found, **about, "warnings": score.warnings})
        else:
            _print(llm, score, table=tokens or bool(top))
    return 0


def _print(llm: LLM, score: Score, *, table: bool) -> None:
    if table:
        _table(llm, score)
    write(f"perplexity\t{score.perplexity:.4f}\n")
    for line in score.warnings:
        warn(line)
    scored = sum(row is not None for row in score.logprobs)
    if not scored:
        note(
            "a text of one token has no perplexity: no token before it predicts it; "
            "give a longer text"
        )
        return
    note(
        f"{len(score.token_ids)} tokens, {scored} scored · {score.total:.4f} nats · "
        f"{score.total / scored:.4f} nats per token"
    )


def _table(llm: LLM, score: Score) -> None:
    from verbatim.explain.explanation import quoted

    for token, row in zip(score.token_ids, score.logprobs, strict=True):
        number = "       -" if row is None else f"{row.logprob:8.4f}"
        others = (
            ""
            if row is None
            else "".join(f"\t{quoted(llm.tokenizer.token_bytes(t))} {lp:.3f}" for t, lp in row.top)
        )
        write(f"{number}\t{token}\t{quoted(llm.tokenizer.token_bytes(token))}{others}\n")
