"""Check the JSON documents inside other text: tool calls between tags, or a text that is JSON.

In: where each kind of document starts, and its schema. Out: the masks and states of a
DocumentCheck. The text around the documents is free; the grammar alone binds it. Outside a
document nothing is filtered, so free text costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from verbatim.grammar.document_check import CheckState, DocumentCheck, Invalid

NOT_JSON = (Invalid, IndexError, ValueError)  # what reading another text as a document raises


class Document(NamedTuple):
    """A kind of document. `before`: the text it follows; "": it starts the output. `first`: its
    possible first characters; "": all. `schema` and `names`: of its DocumentCheck."""

    before: str
    first: str
    schema: Any
    names: str = ""


class Outside(NamedTuple):
    """Between documents: the end of the text so far, and whether there is any."""

    tail: bytes = b""
    started: bool = False


class Inside(NamedTuple):
    number: int  # the kind of document
    state: CheckState


class EmbeddedCheck(DocumentCheck):
    def __init__(
        self, documents: Sequence[Document], token_bytes: Sequence[bytes], eos_ids: Sequence[int]
    ) -> None:
        self._tokens, self._eos = token_bytes, frozenset(eos_ids)
        self._starts = [(d.before.encode(), d.first.encode()) for d in documents]
        self._checks = [DocumentCheck(d.schema, token_bytes, eos_ids, d.names) for d in documents]
        self._longest = max(len(before) for before, _ in self._starts)
        # A token may hold a whole document.
        self._whole = [i for i, t in enumerate(token_bytes) if t.strip()[-1:] in b"]}" and t[1:]]

    def after(self, token: int, state: Any) -> Any:
        if token in self._eos:
            return state
        try:
            return self._walk(_begun(state), self._tokens[token])
        except NOT_JSON:  # a grammar that names the place of its documents wrongly
            return Outside(started=True)

    def has_work(self, mask: bytes, state: Any) -> bool:
        here = _begun(state)
        if isinstance(here, Inside):
            return self._checks[here.number].has_work(mask, here.state)
        return any(mask[token // 8] >> token % 8 & 1 for token in self._whole)

    def filter(self, mask: bytes, state: Any) -> tuple[bytes, str]:
        here = _begun(state)
        if isinstance(here, Inside):
            try:
                return self._checks[here.number].filter(mask, here.state)
            except IndexError:
                return mask, ""
        kept, reason = bytearray(mask), ""
        for token in self._whole:
            if kept[token // 8] >> token % 8 & 1:
                try:
                    self._walk(here, self._tokens[token])
                except (*NOT_JSON, RecursionError) as why:
                    kept[token // 8] &= ~(1 << token % 8)
                    reason = str(why)
        return bytes(kept), reason

    def accepts(self, state: Any) -> bool:
        here = _begun(state)
        return isinstance(here, Outside) or self._checks[here.number].accepts(here.state)

    def _walk(self, here: Outside | Inside, text: bytes) -> Outside | Inside:
        """The state after more text. Raises Invalid."""
        while text:
            if isinstance(here, Outside):
                here, text = self._enter(here, text)
                continue
            ends = [at for at in (text.find(b"}"), text.find(b"]")) if at >= 0]
            part = text[: min(ends) + 1] if ends else text
            text = text[len(part) :]
            state = self._checks[here.number]._feed(here.state, part)
            here = Outside(started=True) if state.complete else Inside(here.number, state)
        return here

    def _enter(self, here: Outside, text: bytes) -> tuple[Outside | Inside, bytes]:
        """The start of the next document and the text from there, if the text has it."""
        tagged = any(before.startswith(text[:1]) for before, _ in self._starts if before)
        for number, (before, first) in enumerate(self._starts):
            if not before and not here.started and not tagged and text[:1] in (first or text):
                return Inside(number, CheckState()), text
        text = here.tail + text
        found = [(text.find(before), n) for n, (before, _) in enumerate(self._starts) if before]
        at, number = min(((at, n) for at, n in found if at >= 0), default=(-1, 0))
        if at < 0:
            return Outside(text[-self._longest :], started=True), b""
        return Inside(number, CheckState()), text[at + len(self._starts[number][0]) :]


def _begun(state: Any) -> Outside | Inside:
    """A matcher starts every check with CheckState()."""
    return Outside() if isinstance(state, CheckState) else state
