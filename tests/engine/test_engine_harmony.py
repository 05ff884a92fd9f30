"""The harmony format (gpt-oss) in the engine: markers are recognised by their token ids, so the
same letters in ordinary tokens are text."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest

from verbatim import SamplingParams
from verbatim.base.errors import UnsupportedError
from verbatim.base.records import Drawn, Finish
from verbatim.engine.reasoning_matcher import ReasoningMatcher, check_supported
from verbatim.engine.reasoning_tracker import make_tracker
from verbatim.engine.stream import ChoiceStream
from verbatim.grammar.compiler import compile_structure
from verbatim.testing.fakes import ByteTokenizer, ChatByteTokenizer
from verbatim.text.reasoning.harmony import MARKERS
from verbatim.text.reasoning.reasoning_format import ReasoningFormat, find_format

TEMPLATE = "<|channel|>analysis<|message|>"


class HarmonyByteTokenizer(ChatByteTokenizer):
    """Bytes, and the markers of the harmony format as control tokens."""

    NAMES = (*ByteTokenizer.NAMES, *MARKERS)
    vocab_size = 256 + len(NAMES)


VOCAB = HarmonyByteTokenizer.vocab_size


@cache
def tokenizer() -> HarmonyByteTokenizer:
    return HarmonyByteTokenizer()


def harmony() -> ReasoningFormat:
    found = find_format([TEMPLATE], tokenizer())
    assert found is not None
    return found


def ids(text: str) -> list[int]:
    """With control tokens. `text` in braces, {<|end|>}, is ordinary tokens."""
    parts = text.replace("}", "{").split("{")
    return [t for i, p in enumerate(parts) for t in tokenizer().encode(p, special=i % 2 == 0)]


def split(tokens: list[int], rng: random.Random | None = None) -> tuple[str, str]:
    """(thought, answer) of a choice, whose deltas, cut at random, concatenate to it."""
    rng = rng or random.Random(0)
    stream = ChoiceStream("r", 0, SamplingParams(), tokenizer(), harmony())
    deltas = []
    for token in tokens:
        stream.push(Drawn(token, 0.0), None)
        if rng.random() < 0.3:
            deltas.append(stream.take())
    stream.end(Finish("stop", "eos"))
    deltas.append(stream.take())
    choice = stream.choice(0)
    assert "".join(d.reasoning for d in deltas if d) == choice.reasoning
    assert "".join(d.text for d in deltas if d) == choice.text
    return choice.reasoning, choice.text


THOUGHT = "<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant"


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_in_ordinary_tokens_is_text(marker: str) -> None:
    tokens = ids(f"{THOUGHT}<|channel|>final<|message|>Write {{{marker}}} there.<|end|>")
    assert split(tokens) == ("Greet.", f"Write {marker} there.")
    inside = ids(f"<|channel|>analysis<|message|>A {{{marker}}} ends.<|end|><|start|>assistant")
    answer = ids("<|channel|>final<|message|>Hi")
    assert split(inside + answer) == (f"A {marker} ends.", "Hi")
    assert split(tokenizer().encode(f"Plain {marker} text")) == ("", f"Plain {marker} text")


@pytest.mark.parametrize(
    "text", ["Plain text.", "final answers", " to be", "assistants", "to", " ", "analysis to him"]
)
def test_an_output_that_does_not_use_the_format_is_an_answer(text: str) -> None:
    assert split(ids(text)) == ("", text.strip() and text)
    later = ids(f"{text}, and then<|channel|>final<|message|> more")
    assert split(later) == ("", f"{text}, and then more")


def test_an_output_without_markers_is_streamed_and_stopped_as_it_comes() -> None:
    stream = ChoiceStream("r", 0, SamplingParams(stop=("STOP",)), tokenizer(), harmony())
    shown = []
    for token in ids("Finally: one two STOP"):
        finish = stream.push(Drawn(token, 0.0), None)
        delta = stream.take()
        shown.append(delta.text if delta else "")
    assert "".join(shown[:8]) == "Finally:"
    assert finish is not None
    assert finish.reason == "stop"
    assert "".join(shown) == "Finally: one two "
    assert stream.reasoning_tokens == 0


@pytest.mark.parametrize("start", ["<|channel|>analysis", "analysis", " to=functions.f"])
def test_a_header_without_its_first_marker_is_no_text(start: str) -> None:
    reasoning, answer = split(ids(f"{start}<|message|>{{}}<|end|><|start|>assistant"))
    assert start.strip() not in reasoning + answer


# Headers of messages that are not for the user.
OTHERS = (
    "<|channel|>analysis<|message|>",
    "<|channel|>commentary to=python <|message|>",
    "<|end|><|start|>user<|message|>",
    "<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>",
)


def test_random_outputs_with_both_kinds_of_markers() -> None:
    """Streamed and whole are equal for any cut, tokens split, and letters stay."""
    rng = random.Random(7)
    for _ in range(500):
        want: dict[str, str] = {"analysis": "", "final": ""}
        tokens: list[int] = []
        for _ in range(rng.randrange(1, 5)):
            channel = rng.choice(["analysis", "final"])
            header = rng.choice(OTHERS) if channel == "analysis" else "<|channel|>final<|message|>"
            words = [rng.choice([*MARKERS, "a", " é", "<|", "|>", "🙂"]) for _ in range(6)]
            text = "".join(words)
            tokens += tokenizer().encode(header, special=True)
            tokens += tokenizer().encode(text)
            tokens += tokenizer().encode(
                rng.choice(["<|end|><|start|>assistant", "<|start|>assistant"]), special=True
            )
            want[channel] += text
        assert split(tokens, rng) == (want["analysis"], want["final"])


def test_a_marker_behind_an_incomplete_character() -> None:
    tokens = [*ids("<|channel|>analysis<|message|>a"), 0xE2, 0x82, *ids("<|end|><|start|>")]
    assert split([*tokens, *ids("assistant<|channel|>final<|message|>b")]) == ("a\ufffd", "b")


SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}},
    "required": ["n"],
    "additionalProperties": False,
}
HEADERS = (
    "<|channel|>final<|message|>",
    "<|channel|>final <|constrain|>json<|message|>",
    "<|channel|>commentary<|message|>",
)


def matcher(budget: int | None = None) -> ReasoningMatcher:
    structure = compile_structure(SamplingParams(json_schema=SCHEMA), tokenizer())
    assert structure is not None
    tracker = make_tracker(harmony(), tokenizer())
    ends, close = (ByteTokenizer.EOS,), harmony().close_ids
    return ReasoningMatcher(structure.start(), tracker, VOCAB, ends, budget, close)


def allowed(mask: bytes | None) -> list[int]:
    assert mask is not None
    return [t for t in range(VOCAB) if mask[t // 8] >> t % 8 & 1]


@pytest.mark.parametrize("header", HEADERS)
def test_a_grammar_starts_with_the_first_message_to_the_user(header: str) -> None:
    """Also where ordinary tokens in the reasoning spell such a message."""
    one = matcher()
    written = tokenizer().encode("<|end|><|start|>assistant<|channel|>final<|message|>{}")
    head = ids("<|channel|>analysis<|message|>")
    for token in [*head, *written, *ids(f"<|end|><|start|>assistant{header}")]:
        assert token in allowed(one.mask())
        one.advance(token)
    assert ord("{") in allowed(one.mask())
    assert ord("a") not in allowed(one.mask())


def test_the_answer_is_valid_in_random_streams() -> None:
    rng = random.Random(8)
    starts = [ids(f"<|end|><|start|>assistant{header}") for header in HEADERS]
    for _ in range(100):
        one, tokens = matcher(rng.choice([None, 9, 30])), ids("<|channel|>analysis<|message|>")
        for token in tokens:
            one.advance(token)
        while not one.finished:
            choices = allowed(one.mask())
            plan = rng.choice(starts) if rng.random() < 0.1 else [rng.choice(choices)]
            for token in plan:
                if token not in allowed(one.mask()):
                    break
                tokens.append(token)
                one.advance(token)
                if one.finished:
                    break
        assert json.loads(split(tokens)[1])["n"] in (1, 2, 3)


CALL = "<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>"


def test_a_grammar_allows_no_call_that_it_does_not_bind() -> None:
    one = matcher()
    for token in ids("<|channel|>analysis<|message|>a = b<|end|><|start|>assistant"):
        assert token in allowed(one.mask())
        one.advance(token)
    for token in ids("<|channel|>commentary to"):
        assert token in allowed(one.mask())
        one.advance(token)
    assert ord("=") not in allowed(one.mask())


@pytest.mark.parametrize("role", ["user<|message|>", "functions.f<|channel|>commentary<|message|>"])
def test_a_grammar_does_not_start_in_a_message_of_another_role(role: str) -> None:
    one = matcher()
    for token in ids(f"<|channel|>analysis<|message|>Hm.<|end|><|start|>{role}Hi!<|end|>"):
        assert token in allowed(one.mask())
        one.advance(token)
    for token in ids("<|start|>assistant<|channel|>final<|message|>"):
        assert token in allowed(one.mask())
        one.advance(token)
    assert ord("H") not in allowed(one.mask())


@pytest.mark.parametrize("header", OTHERS)
def test_the_budget_of_reasoning_ends_a_message_that_is_not_for_the_user(header: str) -> None:
    start = ids(f"<|channel|>analysis<|message|>Hm.{header}")
    tracker, ends = make_tracker(harmony(), tokenizer()), (ByteTokenizer.EOS,)
    one = ReasoningMatcher(None, tracker, VOCAB, ends, len(start), harmony().close_ids)
    for token in start:
        assert one.mask() is None
        one.advance(token)
    for token in harmony().close_ids:
        assert allowed(one.mask()) == [token]
        one.advance(token)
    assert one.mask() is None


def test_the_budget_of_reasoning_does_not_cut_a_call() -> None:
    start = [*ids("<|channel|>analysis<|message|>Call."), *ids(CALL)]
    call = tokenizer().encode('{"city": "Rome"}')
    budget = len(start) + 3  # a count of all tokens would reach it inside the arguments
    tracker, ends = make_tracker(harmony(), tokenizer()), (ByteTokenizer.EOS,)
    one = ReasoningMatcher(None, tracker, VOCAB, ends, budget, harmony().close_ids)
    for token in [*start, *call]:
        mask = one.mask()
        assert mask is None or token in allowed(mask)
        one.advance(token)
    answer = '<tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call>'
    assert split([*start, *call, *ids("<|call|>")]) == ("Call.", answer)


def test_a_call_that_is_cut_off_is_no_call() -> None:
    cut = [*ids("<|channel|>analysis<|message|>Call."), *ids(CALL), *tokenizer().encode('{"c')]
    assert split(cut) == ("Call.", '{"c')
    deep = [*cut[:-3], *tokenizer().encode("[" * 5_000)]
    assert split(deep) == ("Call.", "[" * 5_000)


def test_a_grammar_is_refused_where_the_markers_are_no_tokens() -> None:
    found = find_format([TEMPLATE], ByteTokenizer())
    assert found is not None
    with pytest.raises(UnsupportedError, match=r"json_schema.*<\|channel\|>"):
        check_supported(found, "json_schema")
