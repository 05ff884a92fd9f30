"""Structured answers behind reasoning whose tags are ordinary text (Granite 3.2): the grammar
starts behind the closing tag, wherever the borders of the tokens are."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from verbatim import LLM, SamplingParams
from verbatim.base.records import Drawn, Finish
from verbatim.engine.reasoning_matcher import ReasoningMatcher
from verbatim.engine.reasoning_tracker import make_tracker
from verbatim.engine.stream import ChoiceStream
from verbatim.grammar.compiler import compile_structure
from verbatim.testing.fakes import ChatByteTokenizer, FakeBackend, fake_parts, fake_spec
from verbatim.text.reasoning.reasoning_format import TAGS, ReasoningFormat, find_format
from verbatim.text.reasoning.tag_splitter import spellings
from verbatim.text.templates.chat_template import ChatTemplate

OPEN, CLOSE = TAGS[-1]
# Pieces of both tags; pieces that cross their ends into the reasoning and into the answer.
PIECES = (
    "Here", " Here", "\n\nHere", " is", " my", " thought", " process", ":", " my thought process:",
    "process: so", "process:\n\n", " response", " respon", "se", "se:", "se:\n", ":\n\n", ": ",
    ":{", ': {"', 'se:{"n"', "se: no", "re: Here is", "my response:", " response: {", '{"n"',
    "Here is my response:", "Here is my response:{", ":Here is my response:1", "response",
    "thought process:x Here is my response:1", "Hmm", ", ", "1}", ":\u2003", "x:", "::",
    "'s", "Here's my", "'s my response:", "'s my response:{", "Here's my response: 1",
)  # fmt: skip


class SpanTokenizer(ChatByteTokenizer):
    """Bytes, control tokens, and tokens of several bytes. Encoding uses bytes only."""

    vocab_size = 260 + len(PIECES)

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token - 260].encode() if token >= 260 else super().token_bytes(token)

    def is_control(self, token: int) -> bool:
        return 256 <= token < 260


VOCAB, ENDS = SpanTokenizer.vocab_size, SpanTokenizer.eos_ids
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    f"Write your reasoning behind '{OPEN}' and the answer behind '{CLOSE}'.<|assistant|>"
)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}},
    "required": ["n"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "hi"}]


@cache
def tokenizer() -> SpanTokenizer:
    return SpanTokenizer()


def text_format(prompt: str = TEMPLATE) -> ReasoningFormat:
    found = find_format([TEMPLATE], tokenizer())
    assert found is not None
    return found.after(prompt)


def start(params: SamplingParams, reasoning: ReasoningFormat) -> ReasoningMatcher:
    structure = compile_structure(params, tokenizer())
    inner = None if structure is None else structure.start()
    tracker, budget = make_tracker(reasoning, tokenizer()), params.thinking_budget
    return ReasoningMatcher(inner, tracker, VOCAB, ENDS, budget, reasoning.close_ids)


def allowed(mask: bytes | None) -> list[int]:
    if mask is None:
        return list(range(VOCAB))
    return [t for t in range(VOCAB) if mask[t // 8 : t // 8 + 1] and mask[t // 8] >> t % 8 & 1]


def split(tokens: Sequence[int], reasoning: ReasoningFormat) -> tuple[str, str]:
    stream = ChoiceStream("r", 0, SamplingParams(), tokenizer(), reasoning)
    for token in tokens:
        stream.push(Drawn(token, 0.0), None)
    stream.end(Finish("stop", "json_schema"))
    return stream.choice(0).reasoning, stream.choice(0).text


def like_a_model(rng: random.Random, output: bytes, choices: list[int]) -> int:
    """A random token; more often one that continues one of the tags at the end of the output."""
    if rng.random() < 0.3:
        return rng.choice(choices)
    tails = []
    for tag in (tag.encode() for tag in (*spellings(OPEN), *spellings(CLOSE))):
        have = next(n for n in range(len(tag), -1, -1) if output.endswith(tag[:n]))
        tails.append(tag[have:] or tag)
    fits = [
        t
        for t in choices
        if any(
            tail.startswith(data) or data.startswith(tail)
            for tail in tails
            if (data := tokenizer().token_bytes(t).lstrip())
        )
    ]
    return rng.choice(fits or choices)


def draw(matcher: ReasoningMatcher, rng: random.Random) -> list[int]:
    tokens: list[int] = []
    while not matcher.finished and len(tokens) < 3_000:
        choices = allowed(matcher.mask())
        assert choices, "the mask forbids everything"
        output = b"".join(map(tokenizer().token_bytes, tokens))
        tokens.append(like_a_model(rng, output, choices))
        matcher.advance(tokens[-1])
    return tokens


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.soak)])
@pytest.mark.parametrize("prompt", [TEMPLATE, f"{TEMPLATE}{OPEN}", f"{TEMPLATE}{OPEN}{CLOSE}", ""])
def test_the_answer_is_valid_in_random_streams(prompt: str, count: int) -> None:
    """Streams of each kind: the model decides, is inside reasoning, behind one, has none."""
    rng, reasoning = random.Random(prompt), text_format(prompt)
    reasoning_count = straddling = 0
    for _ in range(count):
        budget = rng.choice([None, None, 25])
        tokens = draw(
            start(SamplingParams(json_schema=SCHEMA, thinking_budget=budget), reasoning), rng
        )
        text, answer = split(tokens, reasoning)
        assert json.loads(answer)["n"] in (1, 2, 3), (tokens, text, answer)
        output = b"".join(map(tokenizer().token_bytes, tokens)).decode(errors="replace")
        reasoning_count += any(tag in output for tag in spellings(CLOSE))
        straddling += any(
            tokenizer().token_bytes(t).decode() in (":\n\n", "se:\n", ": ", ":\u2003")
            for t in tokens
            if t >= 260
        )
    if reasoning.start == "open":
        assert (reasoning_count, straddling > count // 10) == (count, True)
    elif reasoning.start == "closed" or not prompt:
        assert reasoning_count == 0
    else:
        assert count // 10 < reasoning_count < count, "some streams think, and some do not"


def test_a_token_with_the_end_of_the_tag_and_the_start_of_the_answer_is_forbidden() -> None:
    """Except where white space follows the tag, which belongs to the format."""
    ids = {piece: 260 + i for i, piece in enumerate(PIECES)}
    matcher = start(SamplingParams(json_schema=SCHEMA), text_format(OPEN))
    free = allowed(matcher.mask())
    closes = spellings(CLOSE)
    whole = {piece for piece in PIECES if piece not in closes and any(c in piece for c in closes)}
    assert len(whole) == 4
    assert whole == {piece for piece, token in ids.items() if token not in free}
    assert not set(ENDS) & set(free)
    for piece in ("x:", "Here", " is", " my", " respon"):
        matcher.advance(ids[piece])
    before = matcher.copy()
    assert {'se:{"n"', "se: no"} == {
        piece
        for piece, token in ids.items()
        if piece.startswith("se") and token not in allowed(matcher.mask())
    }
    assert ids[":{"] in allowed(matcher.mask()), "respon:{ is no tag"
    for end in ("se:", "se:\n", "se"):
        each = before.copy()
        each.advance(ids[end])
        if end == "se":
            assert ids[":{"] not in allowed(each.mask())
            each.advance(ids[":\u2003"])
        assert set(allowed(each.mask())) <= {ord("{"), ids['{"n"'], *b" \n\t\r"}
    assert ids["se"] in allowed(before.mask()), "copies do not share a state"


def test_before_reasoning_the_grammar_and_the_opening_tag_are_allowed() -> None:
    ids = {piece: 260 + i for i, piece in enumerate(PIECES)}
    matcher = start(SamplingParams(regex="(Hey|Here) you"), text_format())
    first = {ord("H"), ids["Here"], ids[" Here"], ids["\n\nHere"], ids["Here's my"]}
    assert set(allowed(matcher.mask())) == first
    for token in b"He":
        matcher.advance(token)
    assert set(allowed(matcher.mask())) == set(b"ry"), "the tag, or Hey"
    answer, reasoning = matcher.copy(), matcher
    for token in b"y you":
        answer.advance(token)
    assert answer.finished
    other = matcher.copy()
    for token in (*b"re", ids["'s"], *b" my thought process:Hm. ", ids["Here's my"]):
        other.advance(token)
    for token in b" response:":
        assert token in allowed(other.mask())
        other.advance(token)
    assert set(allowed(other.mask())) == {ord("H"), ids["Here"]}, "the whole grammar"
    for token in b"re i":
        reasoning.advance(token)
    assert allowed(reasoning.mask()) == [ord("s")], "the grammar does not allow the text so far"
    for token in (*b"s", ids[" my thought process:"], *b"Hm. Here is my response:"):
        reasoning.advance(token)
    assert set(allowed(reasoning.mask())) == {ord("H"), ids["Here"]}, "the whole grammar"
    forbidden = ids["thought process:x Here is my response:1"]
    matcher = start(SamplingParams(json_schema=SCHEMA), text_format())
    for token in b"Here is my ":
        matcher.advance(token)
    assert forbidden not in allowed(matcher.mask()), (
        "all of the reasoning and the start of the answer"
    )


def test_drafts_end_before_the_token_that_completes_the_tag() -> None:
    ids = {piece: 260 + i for i, piece in enumerate(PIECES)}
    params = SamplingParams(json_schema=SCHEMA, thinking_budget=40)
    for drafts, kept in (
        ([*b"Hm. ", *CLOSE.encode(), ord("{")], 4 + len(CLOSE) - 1),
        ([*b"Here is my respon", ids["se:\n"], ord("{")], 17),
        ([*b"Here is my respon", ids["se"], ids[":{"]], 18),
        ([*b"x" * 50], 40),
        ([*b"xx", *ENDS], 2),
    ):
        matcher = start(params, text_format(OPEN))
        assert matcher.allowed_drafts(drafts) == tuple(drafts[:kept])
        masks = matcher.masks_along(drafts[:kept])
        for mask, token in zip(masks, drafts[:kept], strict=False):
            assert mask == matcher.mask()
            matcher.advance(token)
        assert masks[kept] == matcher.mask()


def test_the_tracker_follows_the_splitter_for_any_tokens() -> None:
    """Every format of tags, random bytes and pieces: the answer starts at the same token."""
    rng = random.Random(6)
    for open_tag, close in TAGS:
        found = find_format([close], tokenizer())
        assert found is not None
        common = [*open_tag.encode(), *close.encode(), 0xE3, 0x80, 0xE2, 0x80, 0x83, 10]
        for _ in range(400):
            reasoning = replace(found, start=rng.choice(["", "open", "closed"]))
            tracker, splitter = make_tracker(reasoning, tokenizer()), reasoning.splitter()
            stream = ChoiceStream("r", 0, SamplingParams(), tokenizer(), reasoning)
            stream._splitter = splitter
            parts = [list(tag.encode()) for tag in (*spellings(open_tag), *spellings(close))]
            parts += [[rng.choice(common)], [10]]
            parts += [[rng.randrange(VOCAB)], list("\u3000".encode()), [257]]
            for token in [t for _ in range(8) for t in rng.choice(parts)]:
                stream.push(Drawn(token, 0.0), None)
                tracker.push(token)
                assert splitter._state.replace("behind", "answer") == tracker.state  # type: ignore[attr-defined]


def test_no_tag_ends_as_it_begins() -> None:
    """A budget writes the closing tag behind any text: part of a tag must not complete it early."""
    for _, close in TAGS:
        for tag in spellings(close):
            assert not any(close.startswith(tag[i:]) for i in range(1, len(tag)))
            assert not any(tag.startswith(close[i:]) for i in range(1, len(close)))


# ---------------------------------------------------------------------------------- in the engine


def open_llm(source: str, **options: Any) -> LLM:
    backend = FakeBackend(fake_spec(vocab=VOCAB), pipeline=True)
    template = ChatTemplate(source, "<s>", "</s>")
    loaded = replace(fake_parts(backend), tokenizer=SpanTokenizer(), template=template)
    return LLM.from_loaded(loaded, **options)


@pytest.mark.parametrize("source", [TEMPLATE, TEMPLATE + OPEN])
def test_a_schema_follows_reasoning_of_text_tags_with_the_same_tokens_always(source: str) -> None:
    """Alone, in a batch, in small chunks and with drafts: the same tokens, and a valid answer."""
    bias = {260 + PIECES.index(p): 9.0 for p in ("Here", " is", " my", " thought", " response")}
    params = [
        SamplingParams(
            json_schema=SCHEMA, thinking_budget=30, max_tokens=300, seed=seed, logit_bias=bias
        )
        for seed in range(6)
    ]
    with open_llm(source, speculate="off") as llm:
        alone = [llm.chat(ASK, each) for each in params]
    for done in alone:
        assert json.loads(done.text)["n"] in (1, 2, 3)
        assert CLOSE not in done.text + done.reasoning
    assert any(done.reasoning for done in alone)
    with open_llm(source, speculate="off", step_tokens=16, max_running=6) as llm:
        streams = [llm.chat_stream(ASK, each) for each in params]
        for done, stream in zip(alone, streams, strict=True):
            with stream:
                deltas = list(stream)
            assert stream.completion is not None
            assert stream.completion.token_ids == done.token_ids
            assert "".join(delta.text for delta in deltas) == done.text
            assert "".join(delta.reasoning for delta in deltas) == done.reasoning
    for mode in ("ngram", "suffix"):
        with open_llm(source, speculate=mode) as llm:
            llm.core.drafting.adaptive = False
            assert [llm.chat(ASK, each).token_ids for each in params] == [
                done.token_ids for done in alone
            ]


def test_a_budget_writes_the_closing_tag_in_ordinary_tokens() -> None:
    with open_llm(TEMPLATE + OPEN) as llm:
        params = SamplingParams(thinking_budget=5, max_tokens=60, seed=1, ignore_eos=True)
        done = llm.chat(ASK, params)
    assert done.token_ids[5 : 5 + len(CLOSE)] == tuple(CLOSE.encode())
    assert done.usage.reasoning_tokens == 5 + len(CLOSE)
    assert done.text
