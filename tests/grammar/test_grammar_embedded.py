"""Documents inside other text are checked where a grammar says that they start."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.params import SamplingParams
from verbatim.grammar.compiler import compile_structure
from verbatim.grammar.document_check import CheckState
from verbatim.grammar.embedded_check import Document, EmbeddedCheck
from verbatim.testing.fakes import ByteTokenizer

TOKENIZER = ByteTokenizer()  # the compiler keeps only a weak reference
UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
RULE = 'body: %json {"type": "array", "items": {"type": "integer"}, "uniqueItems": true}\n'


def takes(grammar: str, text: str) -> bool:
    """Whether the text is complete, byte by byte through the masks."""
    structure = compile_structure(SamplingParams(grammar=grammar), TOKENIZER)
    assert structure is not None
    matcher = structure.start()
    for byte in text.encode():
        if matcher.finished or not matcher.mask()[byte // 8] >> byte % 8 & 1:
            return False
        matcher.advance(byte)
    return bool(matcher.accepting)


def test_each_document_is_checked_on_its_own() -> None:
    grammar = f'// documents: [["list ", "", "body"]]\nstart: ("list " body ";")+\n{RULE}'
    assert takes(grammar, "list [1,2];list [1,2];")
    assert not takes(grammar, "list [1,2];list [1,1];")


def test_text_that_starts_otherwise_is_free() -> None:
    grammar = f'// documents: [["", "[", "body"]]\nstart: body | /x[0-9,\\[\\]]*/\n{RULE}'
    assert takes(grammar, "[1,2]")
    assert not takes(grammar, "[1,1]")
    assert takes(grammar, "x[1,1]")


@pytest.mark.parametrize("text", ["]]", "1]2", '"\\', "[1}}", "[[]1"])
def test_a_wrong_place_ends_the_sequence_at_most(text: str) -> None:
    """The engine reports an UnsupportedError of a mask for its sequence alone."""
    rest = r'start: /[\[\]"\\{}0-9]*/ | "y" body'
    with contextlib.suppress(UnsupportedError):
        takes(f'// documents: [["", "", "body"]]\n{rest}\n{RULE}', text)


@pytest.mark.parametrize("places", ["[1]", "{}3", '[["a", "b"]]', '[["a", 1, "b"]]', "[["])
def test_a_malformed_line_is_refused(places: str) -> None:
    with pytest.raises(ParameterError, match="grammar"):
        takes(f"// documents: {places}\nstart: body\n{RULE}", "[]")


def test_a_token_that_holds_a_whole_document_is_filtered() -> None:
    tokens = [b"<a>[1,1]", b"<a>[1,2]", b"<a>", b"[", b"1", b"]", b"x"]
    check = EmbeddedCheck([Document("<a>", "", UNIQUE)], tokens, [])
    every: Any = bytes([127])
    assert check.has_work(every, CheckState())
    mask, reason = check.filter(every, CheckState())
    assert (mask[0], "uniqueItems" in reason) == (126, True)
