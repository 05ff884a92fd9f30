"""From tokens to what the caller reads: the drawn tokens of one choice come in, Deltas and at last a Choice go out.

    Drawn -> TextDecoder (whole characters) -> StopMatcher (nothing that could be part of a stop string) -> Delta

Rules of the record:
- `token_ids` and `logprobs` hold every token that was drawn, the one that ended the text included; usage counts the same
  tokens.
- `text` stops before the stop string, or before the text of the stop token, unless include_stop is set. So with a stop
  string the text can be shorter than its tokens.
- `text` holds whole characters. An answer that ends inside one ends before it, however it ended: the tokens have its bytes.
- Stop strings are looked for in what is written after min_tokens tokens; text before that has left already and is never
  taken back.
"""

from __future__ import annotations

from typing import Any

from verbatim.base.params import STRUCTURE, SamplingParams
from verbatim.base.records import Choice, Delta, Drawn, Finish, TokenLogprob
from verbatim.engine.loaded_model import Tokenizer
from verbatim.engine.loop_detector import LoopDetector
from verbatim.text.decode import TextDecoder
from verbatim.text.stop import StopMatcher


class ChoiceStream:
    """One choice of one request. push() each token, then take() what can be sent."""

    __slots__ = (
        "_decoder",
        "_loop",
        "_params",
        "_sent",
        "_stops",
        "_text",
        "_text_sent",
        "_told",
        "_total",
        "explain",
        "finish",
        "index",
        "logprobs",
        "request_id",
        "score",
        "token_ids",
    )

    def __init__(
        self, request_id: str, index: int, params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self.request_id = request_id
        self.index = index
        self._params = params
        self._decoder = TextDecoder(tokenizer, params.skip_special)
        self._stops = StopMatcher(params.stop, params.include_stop)
        self._loop = LoopDetector()
        self._text: list[str] = []
        self._told = False
        self._sent = 0  # tokens already in a Delta
        self._text_sent = 0  # pieces of text already in a Delta
        self._total = 0.0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.explain: list[dict[str, Any]] = []
        self.finish: Finish | None = None
        self.score: float | None = None

    def push(self, drawn: Drawn, finish: Finish | None) -> Finish | None:
        """One more token; `finish` is the scheduler's verdict. Returns the final one: text may end it earlier (a stop
        string, a loop)."""
        self.token_ids.append(drawn.token)
        self._total += drawn.logprob
        if self._params.logprobs is not None:
            self.logprobs.append(TokenLogprob(drawn.token, drawn.logprob, drawn.top))
        if drawn.explain is not None:
            self.explain.append(drawn.explain)
        looped = self._loop.look(self.token_ids)
        swallowed = (
            finish is not None and finish.reason == "stop" and finish.detail not in STRUCTURE
        )  # a structure's last token is text
        if not swallowed or self._params.include_stop:
            stop = self._write(self._decoder.push(drawn.token))
            if stop is not None:
                finish = Finish("stop", stop)
        if (
            finish is None
            and looped
            and self._params.on_loop == "stop"
            and len(self.token_ids) >= self._params.min_tokens
        ):
            finish = Finish("loop", f"{self._loop.length} tokens repeat")
        if finish is not None:
            self.end(finish)
        return finish

    def end(self, finish: Finish) -> None:
        """Nothing more comes: what was held back leaves, unless a stop string swallowed it. Half a character never leaves."""
        if self.finish is None:
            self.finish = finish
            self._text.append(self._stops.flush())

    def _write(self, text: str) -> str | None:
        if len(self.token_ids) <= self._params.min_tokens:
            self._text.append(text)
            return None
        safe, stop = self._stops.push(text)
        self._text.append(safe)
        return stop

    def take(self) -> Delta | None:
        """What is new since the last Delta; None if nothing is."""
        sent = self._sent
        tokens = tuple(self.token_ids[sent:])
        text = "".join(self._text[self._text_sent :])
        if not tokens and not text and (self.finish is None or self._told):
            return None
        self._told = self.finish is not None  # the end is said once
        logprobs = tuple(self.logprobs[sent:]) if self.logprobs else ()
        explain = tuple(self.explain[sent:]) if self.explain else ()
        self._sent, self._text_sent = len(self.token_ids), len(self._text)
        return Delta(self.request_id, self.index, text, tokens, logprobs, explain, self.finish)

    def choice(self, index: int) -> Choice:
        assert self.finish is not None, "a choice is complete when it has ended"
        return Choice(
            index,
            "".join(self._text),
            tuple(self.token_ids),
            self.finish,
            tuple(self.logprobs),
            tuple(self.explain),
            self.score,
            self._loop.length,
        )

    @property
    def mean_logprob(self) -> float:
        """What best_of ranks by: the sum in the order of the text, over its length."""
        return self._total / max(len(self.token_ids), 1)
