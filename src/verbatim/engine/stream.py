"""ChoiceStream: the drawn tokens of one choice come in; Deltas and finally a Choice go out.

    Drawn -> TextDecoder (whole characters) -> reasoning (reasoning models) ->
    StopMatcher (holds back partial stops) -> Delta

- `token_ids`, `logprobs` and usage count every drawn token, including the one that ends the choice.
- `text` ends before the stop string or stop token, unless include_stop is set. So the text can be
  shorter than its tokens.
- `text` holds whole characters. A choice that ends inside a character ends before it; the token ids
  still hold its bytes.
- Stop strings are searched only in the text after min_tokens tokens: earlier text is already sent.
- `reasoning` comes without its markers. Stop strings do not apply to it, and `text` does not
  contain it. Nor does it contain the calls of tools, which are parsed last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from json import loads
from typing import Any

from verbatim.base.params import STRUCTURE, SamplingParams
from verbatim.base.records import Choice, Delta, Drawn, Finish, TokenLogprob, ToolCall, loop_text
from verbatim.engine.loaded_model import EngineTokenizer
from verbatim.engine.loop_detector import LoopDetector
from verbatim.text.decode import TextDecoder
from verbatim.text.reasoning.reasoning_format import ReasoningFormat
from verbatim.text.reasoning.tag_splitter import Piece
from verbatim.text.stop import StopMatcher
from verbatim.text.tools.tool_use import ToolUse


def with_texts(row: TokenLogprob, tokenizer: EngineTokenizer) -> TokenLogprob:
    """A log-probability with the texts of its tokens."""
    ids = (row.token, *(token for token, _ in row.top))
    text, *others = (tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids)
    return replace(row, text=text, top_texts=tuple(others))


class ChoiceStream:
    """One choice of one request: push() each token, then take() a Delta."""

    __slots__ = (
        *(
            "_calls_sent",
            "_parser",
            "_tools",
            "tool_calls",
            "_decoder",
            "_finish_sent",
            "_loop",
            "_markers",
            "_params",
            "_reasoning",
        ),
        *("_reasoning_sent", "_reasoning_tokens_sent", "_sent", "_splitter", "_stops", "_text"),
        *("_text_sent", "_tokenizer", "_total", "_written", "explain", "finish", "index"),
        *("logprobs", "reasoning_tokens", "request_id", "score", "token_ids"),
    )

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        tokenizer: EngineTokenizer,
        reasoning: ReasoningFormat | None = None,
        prefix: Sequence[int] = (),
        tools: ToolUse | None = None,
    ) -> None:
        """`prefix`: the output_prefix, which stop strings, characters and loops may start in."""
        self.request_id = request_id
        self.index = index
        self._params = params
        self._markers = frozenset() if reasoning is None else reasoning.marker_ids
        self._tokenizer = tokenizer
        self._decoder = TextDecoder(tokenizer, params.skip_special, visible=self._markers)
        self._splitter = None if reasoning is None else reasoning.splitter()
        self._reasoning: list[str] = []
        self._reasoning_sent = 0  # pieces already in a Delta
        self._reasoning_tokens_sent = 0
        self.reasoning_tokens = 0
        self._stops = StopMatcher(params.stop, params.include_stop)
        self._loop = LoopDetector()
        self._text: list[str] = []
        self._tools = tools
        self._parser = None if tools is None else tools.parser()
        self.tool_calls: list[ToolCall] = []
        self._calls_sent = 0  # calls already in a Delta
        self._finish_sent = False
        self._sent = 0  # tokens already in a Delta
        self._text_sent = 0  # text pieces already in a Delta
        self._total = 0.0  # sum of the log-probabilities, in nats
        self.token_ids: list[int] = []
        self._written = [*prefix] if prefix else self.token_ids  # the whole output
        if prefix:
            text = [self._decoder.push(token) for token in prefix]
            self._stops.skip("".join(text[params.min_tokens :]))
        self.logprobs: list[TokenLogprob] = []
        self.explain: list[dict[str, Any]] = []
        self.finish: Finish | None = None
        self.score: float | None = None

    def push(self, drawn: Drawn, finish: Finish | None) -> Finish | None:
        """Add a token; `finish` is the scheduler's. Returns the final Finish: a stop string or a
        loop may end the choice first."""
        self.token_ids.append(drawn.token)
        if self._written is not self.token_ids:
            self._written.append(drawn.token)
        self._total += drawn.logprob
        if self._params.logprobs is not None:
            row = TokenLogprob(drawn.token, drawn.logprob, drawn.top)
            self.logprobs.append(with_texts(row, self._tokenizer))
        if drawn.explain is not None:
            self.explain.append(drawn.explain)
        looped = self._loop.look(self._written)
        # The last token of a structured output is text; a stop token and an end token are not.
        hidden = (
            finish is not None
            and finish.reason == "stop"
            and (finish.detail not in STRUCTURE or self._tokenizer.is_control(drawn.token))
        )
        if not hidden or self._params.include_stop:
            text = self._decoder.push(drawn.token)
            stop = self._write(text) if self._splitter is None else self._split(drawn.token, text)
            if stop is not None:
                finish = Finish("stop", stop)
        if (
            finish is None
            and looped
            and self._params.on_loop == "stop"
            and len(self._written) >= self._params.min_tokens
        ):
            finish = Finish("loop", f"the end repeats {loop_text(self._loop.length)}")
        if finish is not None:
            self.end(finish)
        return finish

    def end(self, finish: Finish) -> None:
        """End the choice and release text held back for stop strings. An incomplete character is
        dropped."""
        if self.finish is None:
            self.finish = finish
            if self._splitter is not None and self._stops.matched is None:
                self._sort(self._splitter.finish())
            self._add(self._stops.flush())
            if self._parser is not None:
                self._sort_calls(self._parser.finish())

    def _split(self, token: int, text: str) -> str | None:
        """Separate the reasoning from the answer. Returns the stop string that ends the choice."""
        assert self._splitter is not None
        in_reasoning = self._splitter.in_reasoning
        if token in self._markers:  # the text before it is U+FFFD, if it cuts off a character
            marker = self._tokenizer.token_bytes(token).decode()
            pieces = self._splitter.push(text.removesuffix(marker)) + self._splitter.mark(marker)
        else:
            pieces = self._splitter.push(text)
        self.reasoning_tokens += in_reasoning or self._splitter.in_reasoning
        return self._sort(pieces)

    def _sort(self, pieces: list[Piece]) -> str | None:
        stop = None
        for kind, text in pieces:
            if kind == "reasoning":
                self._reasoning.append(text)
            else:
                stop = stop or self._write(text)
        return stop

    def _write(self, text: str) -> str | None:
        if len(self._written) <= self._params.min_tokens:
            self._add(text)
            return None
        safe, stop = self._stops.push(text)
        self._add(safe)
        return stop

    def _add(self, text: str) -> None:
        if self._parser is None:
            self._text.append(text)
        else:
            self._sort_calls(self._parser.push(text))

    def _sort_calls(self, found: list[tuple[str, Any]]) -> None:
        for kind, value in found:
            if kind == "call":
                self.tool_calls.append(ToolCall(value.name, loads(value.arguments), value.id))
            else:
                self._text.append(value)

    def take(self) -> Delta | None:
        """A Delta of everything new since the last one; None if nothing is."""
        sent = self._sent
        tokens = tuple(self.token_ids[sent:])
        text = "".join(self._text[self._text_sent :])
        reasoning = "".join(self._reasoning[self._reasoning_sent :])
        calls = tuple(self.tool_calls[self._calls_sent :])
        if not (tokens or text or reasoning or calls) and (
            self.finish is None or self._finish_sent
        ):
            return None
        self._reasoning_sent, self._calls_sent = len(self._reasoning), len(self.tool_calls)
        self._finish_sent = self.finish is not None
        logprobs = tuple(self.logprobs[sent:]) if self.logprobs else ()
        explain = tuple(self.explain[sent:]) if self.explain else ()
        self._sent, self._text_sent = len(self.token_ids), len(self._text)
        count = self.reasoning_tokens - self._reasoning_tokens_sent
        self._reasoning_tokens_sent = self.reasoning_tokens
        finish = self.finish
        return Delta(
            *(self.request_id, self.index, text, tokens, logprobs, explain, finish),
            *(reasoning, count, calls),
        )

    def choice(self, index: int) -> Choice:
        assert self.finish is not None, "the choice has not ended"
        schema = self._params.json_schema if self._tools is None else self._tools.text_schema
        return Choice(
            index,
            "".join(self._text),
            tuple(self.token_ids),
            self.finish,
            tuple(self.logprobs),
            tuple(self.explain),
            self.score,
            self._loop.length,
            "".join(self._reasoning),
            schema if isinstance(schema, str) else None,
            tuple(self.tool_calls),
        )

    @property
    def failed(self) -> bool:
        return self.finish is not None and self.finish.reason == "error"

    @property
    def mean_logprob(self) -> float:
        """Score by which best_of ranks: the mean log-probability per token, summed in order."""
        return self._total / max(len(self.token_ids), 1)
